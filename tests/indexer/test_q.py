"""The indexer's Q, bit for bit against the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels import fused_indexer_q_rope_quant
from tests.indexer.helpers import (
    BF16,
    assert_q_is_the_definition,
    bytes_of,
    q_arguments,
    strided,
)


def queries(tokens: int, heads: int, head_size: int, seed: int = 0) -> torch.Tensor:
    """Random queries whose magnitudes span 20 decades."""
    x = torch.randn(tokens, heads, head_size, generator=torch.Generator().manual_seed(seed))
    scale = torch.logspace(-10, 10, tokens * heads).view(tokens, heads, 1)
    return (x * scale).to(BF16)


def single_amax(amax: torch.Tensor, place: int) -> torch.Tensor:
    """Queries (n, 1, 128) of descending fractions of amax (n,), with amax itself at `place`."""
    fractions = torch.linspace(0.99, -0.99, 128)
    fractions[place] = 1.0
    return (amax.to(BF16).unsqueeze(1) * fractions).to(BF16).unsqueeze(1)


def around(x: torch.Tensor) -> torch.Tensor:
    """x and its two neighbours in bf16 on either side."""
    bits = x.to(BF16).view(torch.int16).unsqueeze(1) + torch.arange(-2, 3, dtype=torch.int16)
    return bits.flatten().view(BF16)


@pytest.mark.parametrize("strides", ("dense", "strided"))
@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_size", "rope_dim"),
    ((9, 64, 128, 64), (17, 3, 64, 32), (5, 1, 96, 96), (8, 5, 32, 2)),
)
def test_sizes_dtypes_and_strides(tokens, heads, head_size, rope_dim, dtype, strides):
    arguments = q_arguments(queries(tokens, heads, head_size), rope_dim)
    for name in ("cos_sin_cache", "index_weights"):
        arguments[name] = arguments[name].to(dtype)
    if strides == "strided":
        arguments = {
            name: strided(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
        }
        assert (
            arguments["index_q"].storage_offset() % 2 and not arguments["index_q"].is_contiguous()
        )
    assert_q_is_the_definition(arguments)


def test_half_a_million_elements():
    assert_q_is_the_definition(q_arguments(queries(64, 64, 128, seed=1)))


@pytest.mark.parametrize("order", ("sorted", "shuffled"))
def test_every_bf16_pattern(order):
    """NaNs and infinities included: 0 * inf of the rotation by 0 is NaN."""
    patterns = torch.arange(1 << 16).int()
    if order == "shuffled":
        patterns = patterns[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(2))]
    x = patterns.to(torch.int16).view(BF16).view(64, 8, 128)
    assert_q_is_the_definition(q_arguments(x, identity=True))
    assert_q_is_the_definition(q_arguments(x))


@pytest.mark.parametrize("place", (5, 127), ids=("not rotated", "rotated"))
@pytest.mark.parametrize("maximum", (6.0, 448.0, 1.0))
def test_amax_next_to_every_power_of_two(maximum, place):
    """maximum * 2^e is the last amax of a scale exponent; all e that bf16 has, subnormals too."""
    amax = around(maximum * torch.logspace(-132, 119, 252, base=2.0, dtype=torch.float64))
    assert_q_is_the_definition(q_arguments(single_amax(amax[amax > 0], place), identity=True))


def test_the_last_amax_of_an_exponent():
    for use_fp4, maximum in ((True, 6.0), (False, 448.0)):
        x = single_amax(torch.tensor([maximum, maximum * (1 + 2**-7)]), 0)
        arguments = q_arguments(x, identity=True)
        arguments |= {"index_weights": torch.ones(2, 1), "softmax_scale": 1.0, "head_scale": 1.0}
        codes, scales, weights = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
        if use_fp4:
            assert scales[:, 0, 0].tolist() == [127, 128]
        else:
            assert weights.flatten().tolist() == [1.0, 2.0]
            assert codes.view(torch.uint8)[:, 0, 0].tolist() == [0x7E, 0x76]


def test_dividing_by_448_or_multiplying_by_its_reciprocal():
    """For every finite amax of bf16 the exponent is the same, as docs/formats.md says."""
    amax = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    amax = np.maximum(amax, np.float32(1e-4))
    a, b = np.frexp(amax / np.float32(448)), np.frexp(amax * (np.float32(1) / np.float32(448)))
    np.testing.assert_array_equal(a[1] - (a[0] == 0.5), b[1] - (b[0] == 0.5))


def test_the_floor_of_the_scales():
    """No mxfp4 scale is below 2^-126 and no fp8 scale below 2^-22; signs of zeros survive."""
    floor = 6.0 * 2.0**-126
    starts = ([0.0], [-0.0], [2.0**-133], [-(2.0**-127)], [floor], [floor * (1 + 2**-7)], [1e-4])
    x = torch.tensor([start + [0.0] * (128 - len(start)) for start in starts]).to(BF16)
    arguments = q_arguments(x.unsqueeze(1), identity=True)
    assert_q_is_the_definition(arguments)
    codes, scales, _ = fused_indexer_q_rope_quant(**arguments, use_fp4=True)
    assert scales[:, 0, 0].tolist()[:6] == [1, 1, 1, 1, 1, 2]
    assert codes[:6, 0, 0].tolist() == [0, 8, 0, 9, 7, 5]
    arguments |= {"index_weights": torch.ones(7, 1), "softmax_scale": 1.0, "head_scale": 1.0}
    codes, _, weights = fused_indexer_q_rope_quant(**arguments)
    assert weights.flatten().tolist() == [2.0**-22] * 7
    assert bytes_of(codes)[:3, 0, 0].tolist() == [0, 0x80, 0]


def test_nan_and_infinity():
    inf, nan = math.inf, math.nan
    starts = ([inf], [-inf, 3.3e38], [nan], [nan, inf, 1.0], [nan] * 64, [nan] * 128, [3.3e38])
    x = torch.tensor([start + [0.5] * (128 - len(start)) for start in starts]).to(BF16)
    arguments = q_arguments(x.unsqueeze(1), identity=True)
    assert_q_is_the_definition(arguments)
    codes, scales, _ = fused_indexer_q_rope_quant(**arguments, use_fp4=True)
    assert scales[:6, 0, 0].tolist() == [254, 254, 124, 254, 1, 1]
    assert codes[5].unique().tolist() == [0x77]
    codes = bytes_of(fused_indexer_q_rope_quant(**arguments)[0])
    assert codes[:3, 0, 0].tolist() == [0x7E, 0xFE, 0x7F]


def test_a_rotation_that_overflows_bf16():
    x = torch.full((1, 1, 128), 3.3e38).to(BF16)
    arguments = q_arguments(x)
    arguments["cos_sin_cache"] = torch.tensor([[2**-0.5] * 32 + [-(2**-0.5)] * 32] * 3)
    assert_q_is_the_definition(arguments)


@pytest.mark.parametrize("use_fp4", (True, False))
def test_no_tokens_and_no_heads(use_fp4):
    for tokens, heads in ((0, 64), (3, 0), (0, 0)):
        arguments = q_arguments(torch.zeros(tokens, heads, 128, dtype=BF16))
        codes, scales, weights = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
        assert codes.shape == (tokens, heads, 64 if use_fp4 else 128)
        assert scales.shape == (tokens, heads, 4) if use_fp4 else scales is None
        assert weights.shape == (tokens, heads)


def test_positions_beyond_32_bits():
    row = torch.cat((torch.ones(32), torch.zeros(32)))
    arguments = q_arguments(queries(2, 3, 128))
    here = fused_indexer_q_rope_quant(**arguments | {"cos_sin_cache": row.expand(9, 64)})
    far = {"cos_sin_cache": row.expand(1 << 40, 64), "positions": torch.tensor([2**33, 2**40 - 1])}
    there = fused_indexer_q_rope_quant(**arguments | far)
    np.testing.assert_array_equal(bytes_of(here[0]), bytes_of(there[0]))
    assert torch.equal(here[2], there[2])


def test_the_order_of_the_weight_factors():
    """A product that overflows in one order and not in the other."""
    arguments = q_arguments(single_amax(torch.tensor([1e-30]), 0), identity=True)
    arguments |= {"index_weights": torch.tensor([[1e35]]), "softmax_scale": 1e8, "head_scale": 1e-9}
    assert fused_indexer_q_rope_quant(**arguments, use_fp4=True)[2].isinf().all()
    assert fused_indexer_q_rope_quant(**arguments)[2].isfinite().all()
    assert_q_is_the_definition(arguments)
