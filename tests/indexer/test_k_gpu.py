"""The K kernels on the GPU against the definition on the CPU.

Whole allocations are compared. Of the bytes that are written one of a thousand may differ, and
elements by one step of the larger of the two scales: sums before the rounding to bf16 have no
order. Every test runs for the SM90 kernels and for the SM100 kernels retargeted to this device.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_kernels import compress_norm_rope_insert
from cute_kernels.indexer import interface, op
from cute_kernels.indexer.config import k_config
from cute_kernels.prepared import PreparedCalls
from tests.indexer.gpu_helpers import GpuCall, kernel, on_gpu, strided_copy
from tests.indexer.helpers import (
    BF16,
    DEGENERATE,
    K_CASES,
    SENTINEL,
    KCall,
    KCase,
    degenerate_k_call,
    strided,
)
from tests.indexer.test_k import DEFAULT, FORMATS, step_and_differences
from tests.requires import requires

pytestmark = pytest.mark.gpu
__all__ = ["kernel"]  # a fixture

_MORE = (
    KCase("wide", "mxfp4", 4, 1, head_size=512, rope_dim=64, table_dtype=BF16),
    KCase("odd", "mxfp4", 5, 0, head_size=160, rope_dim=30),
    KCase("wide-long", "mxfp4", 37, 1, head_size=480, rope_dim=480, lengths=(300, 37)),
    KCase("long-overlap", "mxfp4", 40, 1, lengths=(400, 39), state_block_size=7),
)
CASES = (*K_CASES, *(replace(c, id=f"{c.id}-{f}", cache_format=f) for c in _MORE for f in
                     ("mxfp4", "fp8_e4m3")))  # fmt: skip


def run(gpu: GpuCall, **changes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compress_norm_rope_insert(**{**gpu.arguments, **changes}) is None
    return gpu.memory.cpu().numpy()


def check(call: KCall, memory: np.ndarray, allowed: int | None = None) -> None:
    """Compare the memory with what the definition makes of the call; `allowed` bytes may differ."""
    expected = call.run()
    different, written = step_and_differences(call, memory, expected)
    limit = max(2, written // 1000) if allowed is None else allowed
    assert different <= limit, f"{different} of {written} bytes differ"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bytes_and_nothing_but_them(kernel, case):
    call = KCall(case)
    check(call, run(GpuCall(call)))


@pytest.mark.parametrize("ratio", (4, 128))
@pytest.mark.parametrize("long", (False, True), ids=("short", "long"))
@FORMATS
def test_prefills(kernel, ratio, long, cache_format):
    lengths = {4: (20_003, 517, 1), 128: (38_400, 127, 900)}[ratio] if long else (6000, 127, 900)
    case = KCase("long", cache_format, ratio, int(ratio == 4), lengths=lengths, block_size=64)
    call = KCall(case, seed=ratio)
    check(call, run(GpuCall(call)))


@pytest.mark.parametrize("ratio", (4, 128))
@FORMATS
def test_decode_batches(kernel, ratio, cache_format):
    """One token of each of many sequences; some complete a row."""
    case = KCase("decode", cache_format, ratio, int(ratio == 4), lengths=(130,) * 40)
    call = KCall(case, seed=1)
    keep = torch.cat([torch.tensor([i * 130 + 127 - i % 3 * (i % 2)]) for i in range(40)])
    for name in ("token_to_seq", "positions", "slot_mapping"):
        call.arguments[name] = call.arguments[name][keep]
    complete = {
        int(s) for s, p in zip(call.arguments["slot_mapping"], call.arguments["positions"],
                               strict=True) if (int(p) + 1) % ratio == 0
    }  # fmt: skip
    call.rows = [row for row in call.rows if row[0] in complete and row[2] == 127]
    assert len(call.rows) >= 20
    check(call, run(GpuCall(call)))


@FORMATS
def test_strided_inputs(kernel, cache_format):
    for ratio, overlap in ((4, 1), (128, 0)):
        case = replace(DEFAULT, cache_format=cache_format, ratio=ratio, overlap=overlap)
        call = KCall(replace(case, lengths=(300, 129)))
        gpu = GpuCall(call)
        changes = {
            name: strided_copy(strided(x))
            for name, x in call.arguments.items()
            if isinstance(x, torch.Tensor) and name != "k_cache"
        }
        assert changes["state_cache"].stride(2) == 2
        check(call, run(gpu, **changes))


@FORMATS
def test_aligned_rows(kernel, cache_format):
    """Blocks at addresses that allow words; the other tests have odd ones."""
    call = KCall(replace(DEFAULT, cache_format=cache_format))
    cache, size = call.arguments["k_cache"], call.case.block_size
    row = sum(call.case.row_bytes)
    call.block_stride, call.offset = row * size + 16, 16
    call.memory = torch.full((16 + cache.shape[0] * call.block_stride,), SENTINEL).byte()
    call.arguments["k_cache"] = call.memory.as_strided(cache.shape, (call.block_stride, row, 1), 16)
    check(call, run(GpuCall(call)))


@FORMATS
def test_slots(kernel, cache_format):
    """Skipped, beyond the capacity, tokens past the mapping."""
    call = KCall(replace(DEFAULT, cache_format=cache_format, lengths=(32,)))
    capacity = call.arguments["k_cache"].shape[0] * 8
    slots = call.arguments["slot_mapping"]
    slots[3::4] = torch.tensor([-1, capacity, 2**62, -(2**63), 5, 9, 6, 0])
    call.rows = [(5, 0, 19), (9, 0, 23), (6, 0, 27)]
    call.arguments["slot_mapping"] = slots[:-2]
    check(call, run(GpuCall(call)))


# Calls without claims and with them, with windows of up to 8 rows and longer ones.
REPEATS = (
    (4, 200),
    (12, 240),
    (16, 400),
    (16, 700),
    (1, 700),
    (4, 900),
    (4, 8000),
    (4, 12_000),
    (128, 8064),
)


@pytest.mark.parametrize("ratio, length", REPEATS)
@FORMATS
def test_repeated_slots(kernel, cache_format, ratio, length):
    """One row of each slot is stored whole. Tokens that complete nothing have slots too."""
    check_repeats(cache_format, ratio, length)


@pytest.mark.parametrize("ratio, length", ((4, 8000), (128, 8064)))
def test_spans_of_more_tokens_than_threads(kernel, monkeypatch, ratio, length):
    """As on a GPU of three SMs: a CTA lists its rows piece by piece."""
    device_arch = op.device_arch
    monkeypatch.setattr(op, "device_arch", lambda index: device_arch(index)._replace(sm_count=3))
    monkeypatch.setattr(interface, "_PREPARED_K", PreparedCalls())
    check_repeats("mxfp4", ratio, length)


def check_repeats(cache_format: str, ratio: int, length: int) -> None:
    case = KCase("case", cache_format, ratio, int(ratio == 4), lengths=(length,), block_size=64)
    call = KCall(case)
    own = run(GpuCall(call)).copy()
    complete = (call.arguments["positions"][:-1] + 1) % ratio == 0
    modulus = max(9, length // ratio // 3)
    slots = call.arguments["slot_mapping"].clone()
    slots[:-1][complete] = torch.arange(int(complete.sum())) % modulus
    by_slot: dict[int, list[bytes]] = {}
    for i, (slot, _, _) in enumerate(call.rows):
        row = b"".join(own[at].tobytes() for at in call.ranges(slot))
        by_slot.setdefault(i % modulus, []).append(row)
    assert len(by_slot) == modulus and len(call.rows) >= 2 * modulus
    memory = run(GpuCall(call), slot_mapping=slots.cuda())
    for slot, rows in by_slot.items():
        assert b"".join(memory[at].tobytes() for at in call.ranges(slot)) in rows, slot
        memory[np.r_[call.ranges(slot)]] = SENTINEL
    assert (memory == SENTINEL).all()


def test_slots_of_one_bucket(kernel):
    """Slots that are all a multiple of the call's buckets apart: each has its row."""
    case = KCase("case", "mxfp4", 4, 1, lengths=(260,), block_size=64)
    call = KCall(case)
    slots = torch.arange(65) * k_config("mxfp4", 128, 8, "sm_90a").buckets(261) + 7
    shape = (int(slots[-1]) // 64 + 1, 64, sum(case.row_bytes))
    call.memory = torch.full((call.offset + shape[0] * call.block_stride,), SENTINEL).byte()
    strides = (call.block_stride, shape[2], 1)
    call.arguments["k_cache"] = call.memory.as_strided(shape, strides, call.offset)
    complete = (call.arguments["positions"][:-1] + 1) % 4 == 0
    call.arguments["slot_mapping"][:-1][complete] = slots
    call.rows = [(slot, *row[1:]) for slot, row in zip(slots.tolist(), call.rows, strict=True)]
    check(call, run(GpuCall(call)))


def test_calls_after_one_another(kernel):
    """Each finds no claims of those before, which had its slots and memory for claims, nor of
    another stream's, however many CTAs they have."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for count in (301, 260, 280, 301, 301, 270):
        calls = [KCall(replace(DEFAULT, lengths=(300,))) for _ in streams]
        for call in calls:
            call.arguments["slot_mapping"] = call.arguments["slot_mapping"][:count]
            call.rows = [row for row in call.rows if row[2] < count]
        on_device = [GpuCall(call) for call in calls]
        torch.cuda.synchronize()
        for stream, gpu in zip(streams, on_device, strict=True):
            with torch.cuda.stream(stream):
                compress_norm_rope_insert(**gpu.arguments)
        torch.cuda.synchronize()
        for call, gpu in zip(calls, on_device, strict=True):
            check(call, gpu.memory.cpu().numpy())


@pytest.mark.parametrize("ratio", (4, 128))
@FORMATS
def test_padding_writes_nothing(kernel, cache_format, ratio):
    """A captured batch in which all lengths are 0: no slot, and garbage in all else."""
    call = KCall(replace(DEFAULT, cache_format=cache_format, ratio=ratio, overlap=0))
    gpu = GpuCall(call)
    count = len(call.arguments["positions"])
    for positions in (0, 3, -1, 2**40 - 1, -(2**63)):
        changes = {
            "positions": torch.full((count,), positions),
            "slot_mapping": torch.full((count,), -1),
            "token_to_seq": torch.full((count,), -7).int(),
            "state_block_table": torch.full((2, 5), 2**31 - 1).int(),
        }
        assert (run(gpu, **on_gpu(changes)) == SENTINEL).all()
    assert (run(gpu, slot_mapping=gpu.arguments["slot_mapping"][:0]) == SENTINEL).all()
    assert (run(gpu, k_cache=gpu.arguments["k_cache"][:0]) == SENTINEL).all()


@FORMATS
def test_what_is_outside_the_tables_does_no_harm(kernel, cache_format):
    """The definition refuses such calls; on a GPU the other rows are as they should be."""
    call = KCall(replace(DEFAULT, cache_format=cache_format, lengths=(16,)))
    gpu = GpuCall(call)
    bad = {name: gpu.arguments[name].clone() for name in ("token_to_seq", "positions")}
    bad["token_to_seq"][3], bad["token_to_seq"][7] = -(2**31), 2**31 - 1
    bad["positions"][11] = 2**62 - 1
    memory = run(gpu, **bad)
    call.rows = [row for row in call.rows if row[2] == 15]
    expected = call.run()
    for slot, _, _ in call.rows:
        for at in call.ranges(slot):
            np.testing.assert_array_equal(memory[at], expected[at])


@FORMATS
def test_rows_beyond_2_to_the_31_bytes(kernel, cache_format):
    """Of the cache and of the states."""
    requires(gpu_gib=16)
    call = KCall(replace(DEFAULT, cache_format=cache_format, lengths=(16,)))
    gpu = GpuCall(call)
    expected = run(gpu).copy()
    values, scales = call.case.row_bytes
    row = values + scales
    blocks = gpu.arguments["k_cache"].shape[0]
    stride = 2**31 + 16
    memory = torch.full((blocks * stride,), SENTINEL, dtype=torch.uint8, device="cuda")
    far = memory.as_strided((blocks, 8, row), (stride, row, 1), 4)
    state = gpu.arguments["state_cache"]
    wide = torch.full((2**29 + 64 + state[0].numel(),), torch.nan, device="cuda")
    far_state = wide.as_strided(state.shape, (2**29 + 64, *state.stride()[1:]))
    far_state.copy_(state)
    compress_norm_rope_insert(**gpu.arguments | {"k_cache": far, "state_cache": far_state})
    for block in range(blocks):
        start = call.offset + block * call.block_stride
        found = memory[4 + block * stride :][: 8 * row].cpu().numpy()
        np.testing.assert_array_equal(found, expected[start : start + 8 * row])
    assert int((memory != SENTINEL).sum()) == int((expected != SENTINEL).sum())


@FORMATS
@pytest.mark.parametrize("what", DEGENERATE)
def test_degenerate_windows(kernel, cache_format, what):
    """The formula decides, to the last byte."""
    for ratio, overlap in ((4, 1), (128, 0)):
        case = replace(DEFAULT, cache_format=cache_format, ratio=ratio, overlap=overlap)
        call = degenerate_k_call(case, what)
        check(call, run(GpuCall(call)), allowed=0)


@pytest.mark.parametrize("lengths", ((12, 60), (17_000,)), ids=("short", "long"))
@pytest.mark.parametrize("ratio", (4, 128))
def test_graph_replay_reads_what_changed(kernel, ratio, lengths):
    case = replace(DEFAULT, ratio=ratio, overlap=int(ratio == 4), lengths=(260, *lengths))
    call = KCall(case)
    gpu = GpuCall(call)
    run(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress_norm_rope_insert(**gpu.arguments)
    for seed in (1, 2, 2):
        other = KCall(case, seed=seed)
        fresh = on_gpu({k: v for k, v in other.arguments.items() if k != "k_cache"})
        for name, x in fresh.items():
            if isinstance(x, torch.Tensor):
                gpu.arguments[name].copy_(x)
        gpu.memory.fill_(SENTINEL)
        graph.replay()
        check(other, gpu.memory.cpu().numpy())


def test_a_traced_call(kernel):
    call = KCall(replace(DEFAULT, cache_format="fp8_e4m3"))
    gpu = GpuCall(call)
    compiled = torch.compile(compress_norm_rope_insert, backend="eager", fullgraph=True)
    assert compiled(**gpu.arguments) is None
    check(call, gpu.memory.cpu().numpy())
