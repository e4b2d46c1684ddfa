"""The GPU path: every case of the grid, CUDA graphs and pools beyond 2^32 bytes."""

from __future__ import annotations

import random
import resource
import threading
from dataclasses import replace

import pytest
import torch

from cute_kernels import flash_attn_varlen_func
from tests.attention.helpers import Inputs, check, exact
from tests.cases import CACHES, AttentionCase, make_inputs, with_cache
from tests.compare import assert_bit_equal, assert_lse_close, assert_output_close
from tests.requires import requires

pytestmark = pytest.mark.gpu


def test_grid(grid_case):
    check(make_inputs(grid_case, "cuda"))


@pytest.mark.parametrize("cache", ("bf16", "fp16"))
def test_grid_of_16_bit_caches(grid_case, cache):
    check(make_inputs(with_cache(grid_case, cache), "cuda"))


def capture(inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """Record one call, after one that compiles; return the graph and its output and LSE."""
    out = torch.full_like(inputs["q"], torch.nan)
    flash_attn_varlen_func(**inputs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = flash_attn_varlen_func(**inputs, out=out)
    return graph, out, lse


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("zero_length_queries", (False, True))
@pytest.mark.parametrize(
    ("q_len", "fields"),
    (
        (1, {}),
        (4, {}),
        (1, {"head_size": 512, "num_kv_heads": 1}),
        (1, {"head_size": 256, "window": (1023, 0), "sinks": True}),
        (1, {"head_size": 64, "softcap": 20.0, "num_q_heads": 16}),
    ),
)
def test_graph_replayed_with_other_lengths(q_len, fields, zero_length_queries, cache):
    """Captured with 64 rows at 16 keys, replayed with 0 to 64 live rows at 1 to 49152 keys.

    Padding rows have no keys and, as engines differ, no queries or one dummy query each.
    """
    rows, longest, page_size = 64, 49152, 64
    case = AttentionCase(id="graph", kv_lens=(16,) * rows, q_lens=(q_len,) * rows, **fields)
    inputs = make_inputs(with_cache(case, cache), "cuda", fill="zero")
    pool = with_cache(AttentionCase(id="pool", kv_lens=(64_000,), q_lens=(1,), **fields), cache)
    pool_inputs = make_inputs(pool, "cuda", fill="zero")
    inputs["k"], inputs["v"] = pool_inputs["k"], pool_inputs["v"]
    # Sequences share pages, which the kernel cannot know; 49152 keys for each would need 1.6 GB.
    rng = random.Random(0)
    width = longest // page_size
    # Spare pages are left out: among their zeros a row's output may be as small as p of one key,
    # which fp16 holds with few bits (seen: 10 % of a row of norm 1e-6).
    written = pool_inputs["block_table"][0, : 64_000 // page_size]
    choice = torch.randint(0, len(written), (rows, width), device="cuda")
    inputs["block_table"] = written[choice]
    inputs["max_seqlen_k"] = longest
    graph, out, lse = capture(inputs)
    for live in (64, 1, 0, 7, 63, 64):
        kv_lens = [rng.choice((1, 64, 65, rng.randint(1, 2000), rng.randint(1, longest)))
                   for _ in range(live)]  # fmt: skip
        if live:
            kv_lens[-1] = longest
        used = torch.tensor(kv_lens + [0] * (rows - live), dtype=torch.int32)
        q_lens = torch.full((rows,), q_len)
        if zero_length_queries:
            q_lens[live:] = 0
        offsets = torch.cat([torch.zeros(1), q_lens.cumsum(0)]).int()
        inputs["seqused_k"].copy_(used)
        inputs["cu_seqlens_q"].copy_(offsets)
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        written = int(offsets[-1])
        reference, reference_lse = exact(inputs)
        assert_output_close(out[:written], reference[:written])
        assert_lse_close(lse[:, :written], reference_lse[:, :written])
        assert out[written:].isnan().all(), "rows beyond cu_seqlens_q[-1] were written"
        first, first_lse = out.clone(), lse.clone()
        graph.replay()
        assert_bit_equal(out, first, "out of a second replay")
        assert_bit_equal(lse[:, :written], first_lse[:, :written], "LSE of a second replay")


@pytest.mark.parametrize("cache", ("fp8", "bf16"))
@pytest.mark.parametrize("head_size", (128, 512))
def test_dense_pool_beyond_2_to_the_32_bytes(head_size, cache):
    """A contiguous pool; all is NaN but the pages in use, which lie on both sides of 2^31, 2^32."""
    requires(gpu_gib=16)
    small = AttentionCase(id="pool", kv_lens=(700, 64, 129), q_lens=(1,) * 3, head_size=head_size)
    inputs = make_inputs(with_cache(small, cache), "cuda")
    expected = check(inputs)
    page_bytes = inputs["k"][0].nbytes
    num_pages = (4 << 30) // page_bytes + 4096
    used = sorted({int(page) for page in inputs["block_table"].flatten() if 0 <= page < 20})
    borders = [0, (1 << 31) // page_bytes, (1 << 32) // page_bytes, num_pages - 8]
    moved = [borders[i % 4] + i // 4 for i in range(len(used))]
    table = inputs["block_table"].clone()
    for old, new in zip(used, moved, strict=True):
        table[inputs["block_table"] == old] = new
    for name in "kv":
        codes = inputs[name].view(torch.uint8)
        pool = torch.full((num_pages, *codes.shape[1:]), 0xFF, dtype=torch.uint8, device="cuda")
        pool[torch.tensor(moved, device="cuda")] = codes[used]
        inputs[name] = pool.view(inputs[name].dtype)
    out, lse = check({**inputs, "block_table": table})
    assert_bit_equal(out, expected[0], "out from a large pool")
    assert_bit_equal(lse, expected[1], "LSE from a large pool")


@pytest.mark.parametrize("cache", ("fp8", "bf16"))
@pytest.mark.parametrize("layout", ("NHD", "HND", "interleaved"))
def test_page_strides_beyond_2_to_the_31(layout, cache):
    """Few pages, 640 MiB apart: page id * stride passes 2^32 bytes at the seventh page."""
    requires(gpu_gib=14)
    case = AttentionCase(id="far", kv_lens=(300, 64, 129), q_lens=(2,) * 3, layout=layout)
    inputs = make_inputs(with_cache(case, cache), "cuda")
    expected = check(inputs)
    dtype, (pages, _, _, dim) = inputs["k"].dtype, inputs["k"].view(torch.uint8).shape
    stride, offset = 640 << 20, 1 << 20
    pool = torch.full((pages * stride,), 0xFF, dtype=torch.uint8, device="cuda")
    assert pages * stride > 2**33
    for side, name in enumerate("kv"):
        source = inputs[name].view(torch.uint8)
        start = dim if layout == "interleaved" else (64 << 20)
        strides = (stride, *source.stride()[1:])
        view = pool.as_strided(source.shape, strides, offset + side * start)
        view.copy_(source)
        inputs[name] = view.view(dtype)
    out, lse = check(inputs)
    assert_bit_equal(out, expected[0], "out from far pages")
    assert_bit_equal(lse, expected[1], "LSE from far pages")


def test_a_stream_other_than_the_default():
    inputs = make_inputs(AttentionCase(id="stream", kv_lens=(5000, 70), q_lens=(1, 1)), "cuda")
    out, lse = check(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        q = inputs["q"].clone()
        torch.cuda._sleep(20_000_000)  # work of another stream would read q before it is there
        late = torch.zeros_like(q).copy_(q)
        got, got_lse = flash_attn_varlen_func(**{**inputs, "q": late})
        kept, kept_lse = got.clone(), got_lse.clone()
    stream.synchronize()
    assert_bit_equal(kept, out, "out on a side stream")
    assert_bit_equal(kept_lse, lse, "LSE on a side stream")


def test_no_host_synchronisation():
    inputs = make_inputs(AttentionCase(id="sync", kv_lens=(5000, 70), q_lens=(1, 1)), "cuda")
    flash_attn_varlen_func(**inputs)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_varlen_func(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_calls_alike_but_for_their_addresses():
    """The second call of a kind launches without being looked at: with its own operands, on its own
    stream."""
    case = AttentionCase(id="again", kv_lens=(900, 64, 5000), q_lens=(1,) * 3, sinks=True)
    first = make_inputs(case, "cuda")
    others = [make_inputs(replace(case, seed=seed), "cuda") for seed in (1, 2)]
    check(first)
    for inputs in (*others, first, others[0]):
        check(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check(others[1])
    stream.synchronize()


def test_many_calls_leave_memory_and_threads_as_they_are():
    inputs = make_inputs(AttentionCase(id="many", kv_lens=(900, 64), q_lens=(1, 1)), "cuda")
    inputs["out"] = torch.empty_like(inputs["q"])
    for _ in range(100):
        flash_attn_varlen_func(**inputs)
    torch.cuda.synchronize()
    threads, device = threading.active_count(), torch.cuda.memory_allocated()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100_000):
        flash_attn_varlen_func(**inputs)
    torch.cuda.synchronize()
    assert threading.active_count() == threads
    assert torch.cuda.memory_allocated() == device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 4096, "KiB"
