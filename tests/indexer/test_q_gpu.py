"""The Q kernels on the GPU: every byte of the definition, whatever the input.

Every test runs for the SM90 kernels and for the SM100 kernels retargeted to this device.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from cute_kernels import fused_indexer_q_rope_quant
from cute_kernels.indexer.arguments import check_q
from cute_kernels.reference.indexer import indexer_q
from tests.indexer.gpu_helpers import kernel, on_gpu
from tests.indexer.helpers import BF16, q_arguments, strided
from tests.indexer.test_q import around, queries, single_amax
from tests.requires import requires

pytestmark = pytest.mark.gpu
__all__ = ["kernel"]  # a fixture

FORMATS = (True, False)
# Tokens that make 64 rows an SM and more: threads then take several heads.
MANY_ROWS = 64 * 132


def words(x: torch.Tensor | None) -> torch.Tensor:
    """Bits that can be compared; NaN weights are the same NaN."""
    if x is None:
        return torch.empty(0)
    if x.dtype is torch.float32:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().view(torch.uint8)


def check(arguments: dict) -> None:
    """Run the kernel in both formats, then the definition, and compare every byte."""
    for use_fp4 in FORMATS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
        expected = indexer_q(check_q(**arguments, use_fp4=use_fp4))
        for name, a, b in zip(("codes", "scales", "weights"), got, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            different = int((words(a) != words(b)).sum())
            assert different == 0, f"{name}: {different} bytes differ"


def test_ten_million_elements(kernel):
    for seed, dtype in enumerate((torch.float32, BF16)):
        arguments = q_arguments(queries(2048, 64, 128, seed=seed))
        arguments["cos_sin_cache"] = arguments["cos_sin_cache"].to(dtype)
        arguments["index_weights"] = arguments["index_weights"].to(dtype)
        assert arguments["index_q"].numel() >= 1e7
        check(on_gpu(arguments))


@pytest.mark.parametrize("strides", ("dense", "strided"))
@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_size", "rope_dim"),
    (
        (9, 64, 128, 64),
        (17, 3, 64, 32),
        (5, 1, 96, 96),
        (8, 5, 32, 2),
        (8, 70, 160, 10),
        (3, 9, 512, 64),
        (3, 33, 288, 286),
        (4, 64, 128, 128),
    ),
)
def test_sizes_dtypes_and_strides(kernel, tokens, heads, head_size, rope_dim, dtype, strides):
    for count in (tokens, MANY_ROWS // heads + 1):
        arguments = q_arguments(queries(count, heads, head_size), rope_dim)
        for name in ("cos_sin_cache", "index_weights"):
            arguments[name] = arguments[name].to(dtype)
        if strides == "strided":
            arguments = {
                name: strided(x) if isinstance(x, torch.Tensor) else x
                for name, x in arguments.items()
            }
        check(on_gpu(arguments))


@pytest.mark.parametrize("order", ("sorted", "shuffled"))
def test_every_bf16_pattern(kernel, order):
    patterns = torch.arange(1 << 16).int()
    if order == "shuffled":
        patterns = patterns[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(2))]
    x = patterns.to(torch.int16).view(BF16).view(64, 8, 128)
    for rows in (x, x.repeat(20, 1, 1)):
        check(on_gpu(q_arguments(rows, identity=True)))
        check(on_gpu(q_arguments(rows)))


@pytest.mark.parametrize("place", (5, 127), ids=("not rotated", "rotated"))
@pytest.mark.parametrize("maximum", (6.0, 448.0, 1.0))
def test_amax_next_to_every_power_of_two(kernel, maximum, place):
    """Also in the range of 2^-126, where the scales end, and below."""
    amax = around(maximum * torch.logspace(-140, 119, 260, base=2.0, dtype=torch.float64))
    x = single_amax(amax[amax > 0], place)
    for rows in (x, x.repeat(10, 1, 1)):
        check(on_gpu(q_arguments(rows, identity=True)))


def test_storage_offsets(kernel):
    """Views that begin and end inside of an allocation, aligned and not."""
    wide = queries(40, 6, 160, seed=3).cuda()
    for offset in (8, 1, 24):
        part = wide[3:, 1:, offset : offset + 128]
        arguments = on_gpu(q_arguments(queries(37, 5, 128)))
        table = torch.cat((torch.full_like(arguments["cos_sin_cache"][:5], torch.nan),) * 2, 1)
        table = torch.cat((table, arguments["cos_sin_cache"].repeat(1, 2)))[5:, 64:]
        assert part.storage_offset() and table.storage_offset()
        check(arguments | {"index_q": part, "cos_sin_cache": table})


def test_a_prepared_call_is_looked_at_again_where_addresses_are_not_aligned(kernel):
    wide = queries(9, 4, 136).cuda()
    arguments = on_gpu(q_arguments(queries(9, 4, 128)))
    for offset in (0, 1, 8, 3):
        check(arguments | {"index_q": wide[..., offset : offset + 128]})


def test_rows_beyond_2_to_the_31_bytes(kernel):
    requires(gpu_gib=12)
    memory = torch.zeros(2 * (2**30 + 64) + 64 * 128, dtype=BF16, device="cuda")
    far = memory.as_strided((3, 64, 128), (2**30 + 64, 128, 1))
    far.copy_(queries(3, 64, 128))
    check(on_gpu(q_arguments(queries(3, 64, 128))) | {"index_q": far})


def test_positions_beyond_32_bits(kernel):
    row = torch.cat((torch.ones(32), torch.zeros(32))).cuda()
    positions = torch.tensor([2**33, 2**40 - 1, 0], device="cuda")
    arguments = on_gpu(q_arguments(queries(3, 3, 128)))
    check(arguments | {"cos_sin_cache": row.expand(1 << 41, 64), "positions": positions})


def test_positions_outside_the_table_do_no_harm(kernel):
    """The definition refuses them; on a GPU, padding may have any."""
    arguments = on_gpu(q_arguments(queries(6, 64, 128)))
    last = arguments["cos_sin_cache"].shape[0] - 1
    bad = torch.tensor([5, -1, 2**62, -(2**63), last + 1, 3], device="cuda")
    near = torch.tensor([5, 0, last, 0, last, 3], device="cuda")
    for use_fp4 in FORMATS:
        got, expected = (
            fused_indexer_q_rope_quant(**arguments | {"positions": x}, use_fp4=use_fp4)
            for x in (bad, near)
        )
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(words(a), words(b))


@pytest.mark.parametrize("use_fp4", FORMATS)
def test_no_tokens_and_no_heads(use_fp4):
    for tokens, heads in ((0, 64), (3, 0), (0, 0)):
        arguments = on_gpu(q_arguments(torch.zeros(tokens, heads, 128, dtype=BF16)))
        codes, scales, weights = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
        assert codes.shape == (tokens, heads, 64 if use_fp4 else 128) and codes.is_cuda
        assert scales.shape == (tokens, heads, 4) if use_fp4 else scales is None
        assert weights.shape == (tokens, heads)


@pytest.mark.parametrize("tokens", (5, 300))
@pytest.mark.parametrize("use_fp4", FORMATS)
def test_graph_replay_reads_what_changed(kernel, tokens, use_fp4):
    arguments = on_gpu(q_arguments(queries(tokens, 64, 128)))
    fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
    for seed in range(3):
        arguments["index_q"].copy_(queries(tokens, 64, 128, seed=seed + 1))
        arguments["positions"].copy_(torch.randperm(2 * tokens)[:tokens])
        arguments["index_weights"].normal_()
        graph.replay()
        expected = indexer_q(check_q(**arguments, use_fp4=use_fp4))
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(words(a), words(b))


def test_head_sizes_that_no_kernel_has():
    arguments = on_gpu(q_arguments(queries(2, 2, 544)))
    with pytest.warns(UserWarning, match="slow torch definition: head size 544"):
        got = fused_indexer_q_rope_quant(**arguments, use_fp4=True)
    assert torch.equal(got[0], indexer_q(check_q(**arguments, use_fp4=True))[0])


def test_a_traced_call(kernel):
    arguments = on_gpu(q_arguments(queries(5, 64, 128)))
    compiled = torch.compile(fused_indexer_q_rope_quant, backend="eager", fullgraph=True)
    for use_fp4 in FORMATS:
        expected = indexer_q(check_q(**arguments, use_fp4=use_fp4))
        for a, b in zip(compiled(**arguments, use_fp4=use_fp4), expected, strict=True):
            assert torch.equal(words(a), words(b))
