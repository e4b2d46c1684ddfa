"""Laws of the indexer's Q and K on arbitrary data."""

from __future__ import annotations

import numpy as np
import torch

from cute_kernels import compress_norm_rope_insert, dequantize_mxfp4, fused_indexer_q_rope_quant
from cute_kernels.reference.indexer import gather_indexer_k
from tests.indexer.helpers import BF16, bytes_of, q_arguments
from tests.requires import requires_module

hypothesis = requires_module("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

PATTERNS = st.lists(st.integers(0, 0xFFFF), min_size=128, max_size=128)
# Finite, and away from the ends of the range: 2^-60 to 2^60, or a zero.
TAME = st.lists(
    st.builds(lambda sign, rest: sign << 15 | rest, st.integers(0, 1),
              st.one_of(st.just(0), st.integers((127 - 60) << 7, (127 + 60) << 7))),
    min_size=128, max_size=128,
)  # fmt: skip
EXAMPLES = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
FEWER = hypothesis.settings(EXAMPLES, max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)


def head(patterns: list[int]) -> torch.Tensor:
    """One head (1, 1, 128) of bf16 bit patterns."""
    return torch.tensor(patterns).int().to(torch.int16).view(BF16).view(1, 1, 128)


def quantized(x: torch.Tensor, use_fp4: bool):
    """Codes, scales and weights without a rotation and with factors of 1."""
    arguments = q_arguments(x, identity=True) | {"softmax_scale": 1.0, "head_scale": 1.0}
    arguments["index_weights"] = torch.ones(x.shape[:2])
    return fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)


def mxfp4_scale(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


@EXAMPLES
@given(PATTERNS)
def test_mxfp4_scales_are_the_least_that_do_not_saturate(patterns):
    x = head(patterns).masked_fill(~head(patterns).isfinite(), 0.5)
    codes, scales, weights = quantized(x, True)
    groups, scale = x.double().view(4, 32), torch.exp2(scales.double().flatten() - 127)
    amax = groups.abs().amax(-1)
    assert (amax <= 6 * scale).all()
    assert ((amax > 3 * scale) | (scales.flatten() == 1)).all()
    error = abs(dequantize_mxfp4(codes, scales, torch.float64) - x.double())
    assert (error <= mxfp4_scale(scales)).all(), "half of the widest step"
    assert (weights == 1).all()


@EXAMPLES
@given(PATTERNS)
def test_fp8_scales_are_the_least_that_do_not_saturate(patterns):
    x = head(patterns).masked_fill(~head(patterns).isfinite(), 0.5)
    codes, _, weights = quantized(x, False)
    scale, amax = weights.double().item(), x.double().abs().max().item()
    assert amax <= 448 * scale
    assert amax > 224 * scale or scale == 2.0**-22
    error = abs(codes.double() * scale - x.double())
    bound = (x.double().abs() * 2.0**-4).clamp(min=scale * 2.0**-10)
    assert (error <= bound).all(), "half a step: relative, or that of the subnormals"


@EXAMPLES
@given(PATTERNS, st.booleans())
def test_negation_flips_signs_alone(patterns, use_fp4):
    """Of what is not rotated: the sums of a rotation by 0 lose the sign of a zero."""
    x = head(patterns)
    a, b = quantized(x, use_fp4), quantized(-x, use_fp4)
    sign = torch.where(x.isnan(), 0, 8 if use_fp4 else 0x80)[..., :64]
    if use_fp4:
        sign = sign[..., 0::2] | sign[..., 1::2] << 4
        assert torch.equal(a[1], b[1])
    first = sign.shape[-1]
    flipped = bytes_of(a[0][..., :first]) ^ sign.byte().numpy()
    np.testing.assert_array_equal(flipped, bytes_of(b[0][..., :first]))
    assert torch.equal(a[2], b[2])


@EXAMPLES
@given(TAME, st.integers(-30, 30))
def test_a_power_of_two_moves_scales_alone(patterns, k):
    x = head(patterns)
    a, b = quantized(x, True), quantized(x * 2.0**k, True)
    assert torch.equal(a[0], b[0])
    moved = torch.where(x.view(1, 1, 4, 32).abs().amax(-1) > 0, k, 0)
    assert torch.equal(a[1].int() + moved, b[1].int())


@FEWER
@given(SEEDS, st.booleans())
def test_tokens_and_heads_do_not_see_each_other(seed, use_fp4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 4, 128, generator=generator).to(BF16)
    arguments = q_arguments(x)
    together = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
    tokens = torch.randperm(6, generator=generator)[:3]
    heads = torch.randperm(4, generator=generator)[:3]
    alone = fused_indexer_q_rope_quant(
        **arguments
        | {
            "positions": arguments["positions"][tokens],
            "index_q": x[tokens][:, heads],
            "index_weights": arguments["index_weights"][tokens][:, heads],
        },
        use_fp4=use_fp4,
    )
    for a, b in zip(together, alone, strict=True):
        if b is not None:
            assert np.array_equal(bytes_of(a[tokens][:, heads]), bytes_of(b))


# ---- K -------------------------------------------------------------------------------------------


def k_bytes(state: torch.Tensor, cache_format: str, ratio: int = 4) -> torch.Tensor:
    """The cache after one sequence whose state (tokens, 512) lies in one block."""
    tokens = len(state)
    angles = torch.linspace(0.0, 3.0, tokens * 32).view(tokens, 32)
    k_cache = torch.zeros(1, tokens, {"mxfp4": 68, "fp8_e4m3": 132}[cache_format]).byte()
    compress_norm_rope_insert(
        state.unsqueeze(0),
        torch.zeros(tokens).int(),
        torch.arange(tokens),
        torch.arange(tokens) // ratio,
        torch.zeros(1, 1).int(),
        torch.linspace(0.5, 1.5, 128),
        1e-6,
        torch.cat((angles.cos(), angles.sin()), 1),
        k_cache,
        compress_ratio=ratio,
        cache_format=cache_format,
    )
    return k_cache


@FEWER
@given(SEEDS, st.sampled_from(("mxfp4", "fp8_e4m3")))
def test_a_dominant_score_chooses_its_entry(seed, cache_format):
    """Per channel; then the other entries, and all scores, do not show in a single byte."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(8, 512, generator=generator)
    entries, scores = state.view(8, 2, 2, 128).unbind(1)  # (token, column set, channel)
    winner = torch.randint(8, (128,), generator=generator)
    channel = torch.arange(128)
    scores[winner, winner // 4, channel] += 300.0
    chosen = entries[winner, winner // 4, channel]
    alone = torch.zeros(8, 512)
    alone[7, 128:256], alone[7, 384:] = chosen, 300.0
    x, y = k_bytes(state, cache_format), k_bytes(alone, cache_format)
    slot_1 = torch.tensor([1])
    x, y = (gather_indexer_k(cache, slot_1, cache_format, 128) for cache in (x, y))
    assert torch.equal(x, y) and y.any()


@FEWER
@given(SEEDS, st.integers(-8, 8), st.sampled_from(("mxfp4", "fp8_e4m3")))
def test_scores_count_by_their_differences(seed, shift, cache_format):
    """Scores are multiples of 1/8 here, so that the shift is exact, and so is every byte."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(12, 512, generator=generator)
    state[:, 256:] = (state[:, 256:] * 8).round() / 8
    moved = state.clone()
    moved[:, 256:] += shift
    assert torch.equal(k_bytes(state, cache_format), k_bytes(moved, cache_format))


@FEWER
@given(SEEDS, st.sampled_from(("mxfp4", "fp8_e4m3")))
def test_a_row_depends_on_its_window_alone(seed, cache_format):
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(16, 512, generator=generator)
    changed = state.clone()
    changed[:4] = float("nan")
    changed[12:] = float("nan")
    slot_2 = torch.tensor([2])
    x, y = (
        gather_indexer_k(k_bytes(s, cache_format), slot_2, cache_format, 128)
        for s in (state, changed)
    )
    assert torch.equal(x, y) and x.isfinite().all()
