"""The prefill kernel's host side and plan, without a GPU: budgets, routing, who works on what.

The plan is the kernel's own code, run as Python by tests/lanes.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import arch
from cute_kernels.arch import DeviceArch
from cute_kernels.attention import route_sm90
from cute_kernels.attention.arguments import validate
from cute_kernels.attention.common import launches
from cute_kernels.attention.decode_sm90.config import HEAD_SIZES, SMEM_BYTES_PER_CTA, row_buckets
from cute_kernels.attention.prefill_sm90 import op
from cute_kernels.attention.prefill_sm90.config import (
    HALF_TOKENS,
    LAUNCH_REGISTERS,
    TILE_TOKENS,
    decode_rows,
    rows_of,
    smem_bytes,
    support_table,
)
from cute_kernels.attention.prepared import find_launch
from cute_kernels.attention.route_sm90 import Bounds, route
from cute_kernels.attention.widen_sm90 import config as widen_sm90
from cute_kernels.compile.plans import AttentionWorkload, units_for
from tests.cases import AttentionCase, make_inputs
from tests.lanes import Memory, device_functions
from tests.requires import requires_module

hypothesis = requires_module("hypothesis")
st = requires_module("hypothesis.strategies")

line = device_functions("cute_kernels/attention/common/line.py")
common = device_functions("cute_kernels/attention/common/tile_schedule.py", TILE_TOKENS=HALF_TOKENS)
plan = device_functions(
    "cute_kernels/attention/prefill_sm90/schedule.py",
    inclusive_scan=line.inclusive_scan,
    query_token=common.query_token,
    HALF_TOKENS=HALF_TOKENS,
    TILE_TOKENS=TILE_TOKENS,
)
SM_COUNT = 132
BF16_CACHE = {"kv_dtype": torch.bfloat16, "scale_kind": "none"}


@pytest.mark.parametrize("config", support_table(), ids=lambda config: config.name)
def test_budgets(config):
    assert smem_bytes(config) <= SMEM_BYTES_PER_CTA
    registers = 2 * config.consumer_registers + config.producer_registers
    assert registers == 3 * LAUNCH_REGISTERS
    assert config.producer_registers >= 24 and config.producer_registers % 8 == 0
    if config.converts:
        # wgmma takes N in steps of 8, stmatrix stores 16 rows, a warp scales 32 rows at a time
        assert config.rows % 32 == 0 and config.value_rows % 16 == 0
        assert config.rows <= 256, "a thread closes a row"
        accumulators = config.value_blocks * config.value_rows // 2
        softmax = config.rows // 2 + config.rows // 4
        assert config.v_slots % 2 == 0
        assert config.score_steps in (1, 2, 4) and config.value_steps in (2, 4)
    else:
        assert config.rows in (64, 128) and config.tile_tokens % config.box_tokens == 0
        accumulators = config.value_columns // 2
        softmax = config.tile_tokens // 2 + config.tile_tokens // 4
    assert accumulators + softmax < config.consumer_registers


def test_the_support_table_has_every_variant_once():
    names = [config.name for config in support_table()]
    assert len(set(names)) == len(names) == (4 + 4) * 2 * 3 + (3 + 4) * 2
    assert {config.head_size for config in support_table()} == set(HEAD_SIZES)


# ---- routing -----------------------------------------------------------------------------------


def bounds_of(**fields: Any) -> Bounds:
    base = {
        "batch": 4,
        "total_q": 4096,
        "max_seqlen_q": 1024,
        "group": 8,
        "kv_heads": 4,
        "head_size": 128,
        "deterministic": False,
        "kv_format": "fp8_e4m3",
        "keys": 8192,
    }
    return Bounds(**{**base, **fields})


def test_decode_batches_take_one_kernel():
    for head_size in HEAD_SIZES:
        most = row_buckets(head_size)[-1]
        bounds = bounds_of(batch=64, total_q=64, max_seqlen_q=most // 8, head_size=head_size)
        assert route(bounds, SM_COUNT)[:2] == (True, False)


def test_long_queries_of_equal_length_take_one_kernel():
    assert route(bounds_of(), SM_COUNT)[:3] == (False, True, 0)
    assert route(bounds_of(batch=1, total_q=8192, max_seqlen_q=8192), SM_COUNT).prefill


def test_a_batch_that_may_mix_takes_both_and_they_share_it_out():
    chosen = route(bounds_of(batch=5), SM_COUNT)
    assert chosen[:3] == (True, True, decode_rows(128))


def test_long_queries_over_an_fp8_cache_read_widened_keys():
    assert route(bounds_of(keys=8100), SM_COUNT).capacity == 8128, "whole blocks of 64"
    assert route(bounds_of(batch=5), SM_COUNT).capacity == 8192
    for fields in (
        {"deterministic": True},
        {"kv_format": "bf16"},
        {"head_size": 512},
        {"max_seqlen_q": 127, "total_q": 508},
        {"keys": 1 << 17},  # too much memory
    ):
        assert route(bounds_of(**fields), SM_COUNT).capacity == 0


@pytest.mark.parametrize(
    ("q", "k", "keys"), ((127, 4000, 0), (128, 1, 2048), (300, 2048, 2048), (300, 2049, 4096))
)
def test_what_the_choice_may_know_of_the_key_lengths(q, k, keys):
    assert widen_sm90.rounded_keys(q, k) == keys
    assert find_launch((torch.empty(1),), (q, k), ())[0][-1] == keys


def test_the_room_for_keys_is_what_the_caller_and_the_cache_allow(monkeypatch):
    monkeypatch.setattr(route_sm90, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 132))
    case = AttentionCase(id="keys", kv_lens=(4000,), q_lens=(2000,), num_q_heads=32, num_kv_heads=4)
    inputs = make_inputs(case)
    width = 64 * inputs["block_table"].shape[1]
    for bound, keys in ((4000, min(4096, width)), (2000, 2048), (None, width), (10**6, width)):
        problem = validate(**{**inputs, "max_seqlen_k": bound})
        assert route_sm90._route_of(problem).capacity == keys


def test_few_items_are_left_to_the_kernel_that_splits_keys():
    bounds = bounds_of(batch=1, total_q=128, max_seqlen_q=128, kv_heads=1)
    assert route(bounds, SM_COUNT)[:2] == (True, False)


def test_16_bit_caches_take_the_kernels_that_fp8_takes():
    for fields in ({}, {"batch": 5}, {"max_seqlen_q": 1, "total_q": 4}, {"total_q": 130}):
        chosen = [route(bounds_of(kv_format=x, **fields), SM_COUNT) for x in ("fp8_e4m3", "fp16")]
        assert chosen[0][:3] == chosen[1][:3]


def problem_of(**fields: Any) -> Any:
    case = AttentionCase(id="route", kv_lens=(70, 300), q_lens=(3, 200), **fields)
    return validate(**make_inputs(case))


def on_a_gpu(monkeypatch, problem: Any, capability=(9, 0)) -> Any:
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch(capability, "sm_90a", 132))

    class OnGpu:
        device, dtype, shape = torch.device("cuda:0"), problem.q.dtype, problem.q.shape

    return problem._replace(q=OnGpu)


@pytest.mark.parametrize(
    ("fields", "reason"),
    (
        ({}, None),
        ({"page_size": 16, "layout": "HND", "q_dtype": torch.float16}, None),
        ({"page_size": None}, None),
        ({"window": (100, 3), "causal": False, "softcap": 20.0, "sinks": True}, None),
        ({"page_size": 24}, "block size 24"),
        ({"head_size": 96}, "head size 96"),
        ({"kv_dtype": torch.bfloat16, "scale_kind": "none"}, None),
        ({"kv_dtype": torch.bfloat16, "scale_kind": "none", "head_size": 512}, None),
        (
            {"kv_dtype": torch.bfloat16, "scale_kind": "none", "head_size": 96},
            "head size 96, for",
        ),
    ),
)
def test_can_run(monkeypatch, fields, reason):
    found = op.can_run(on_a_gpu(monkeypatch, problem_of(**fields)))
    assert found is None if reason is None else found.startswith(reason)


def test_an_expanded_cache_is_for_no_kernel(monkeypatch):
    problem = problem_of()
    for name in ("k", "v"):
        expanded = getattr(problem, name)[:, :, :1].expand_as(problem.k)
        found = op.can_run(on_a_gpu(monkeypatch, problem._replace(**{name: expanded})))
        assert found.startswith(f"{name} expanded, with strides (")


def test_can_run_names_the_device(monkeypatch):
    assert op.can_run(problem_of()).startswith("tensors are on cpu")
    found = op.can_run(on_a_gpu(monkeypatch, problem_of(), capability=(10, 0)))
    assert found.startswith("compute capability 10.0")


def launched(monkeypatch, inputs: dict, skip_rows: int, capacity: int = 0) -> list[Any]:
    """What the launch functions get for a call, whose tensors may stay on the CPU for this: name of
    the variant, offsets, addresses, the groups of numbers."""
    calls = []
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 132))
    monkeypatch.setattr(
        op, "launcher", lambda unit: lambda *args: calls.append((unit.config.name, *args))
    )
    monkeypatch.setattr(arch, "current_device", lambda: None)  # a CPU tensor's index
    monkeypatch.setattr(launches, "current_stream", lambda index: 0)
    monkeypatch.setattr(launches, "counters_for", lambda _, __, n: torch.zeros(n).to(torch.int32))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    problem = validate(**inputs)
    op.run(problem, torch.empty_like(problem.q), None, skip_rows, capacity)
    return [
        (name, offsets, addresses, *map(tuple, groups))
        for name, offsets, addresses, *groups in calls
    ]


def test_launch_arguments_of_a_paged_call(monkeypatch):
    case = AttentionCase(
        id="paged", kv_lens=(70, 300), q_lens=(3, 200), layout="HND", num_q_heads=6
    )
    inputs = make_inputs(case)
    k, v, table = inputs["k"], inputs["v"], inputs["block_table"]
    ((_, offsets, addresses, strides, sizes, scalars),) = launched(monkeypatch, inputs, 64)
    assert offsets is inputs["cu_seqlens_q"]
    assert addresses[:3] == (inputs["q"].data_ptr(), k.data_ptr(), v.data_ptr())
    assert addresses[4] == 0 and addresses[8] == inputs["seqused_k"].data_ptr()
    assert strides[2:5] == k.stride()[:3] and strides[-1] == table.stride(0)
    assert sizes == (2, 203, 2, 3, -(-(2**32) // 3), k.shape[0], 64, table.shape[1], 1, 1)
    assert scalars[2:] == (2**30, 0, 64, min(op.item_bound(validate(**inputs)), SM_COUNT))


def test_launch_arguments_of_a_call_with_widened_keys(monkeypatch):
    case = AttentionCase(
        id="wide", kv_lens=(70, 300), q_lens=(3, 200), layout="HND", num_q_heads=6, window=(50, 0)
    )
    inputs = make_inputs(case)
    k = inputs["k"]
    ((name, offsets, *operands, scalars, target),) = launched(monkeypatch, inputs, 64, 320)
    addresses, strides, sizes = operands
    assert name == "prefill_sm90_fp16_d128_r128_bf16_box64_from_fp8_e4m3"
    assert offsets is inputs["cu_seqlens_q"] and addresses[0] == inputs["q"].data_ptr()
    assert addresses[1] == k.data_ptr() and strides[2:5] == k.stride()[:3]
    assert addresses[10] == inputs["block_table"].data_ptr()
    assert sizes[:4] == (2, 203, 2, 3)
    assert sizes[5:] == (k.shape[0], 64, inputs["block_table"].shape[1], 1, 1)
    assert scalars[2:5] == (50, 0, 64)
    size = 2 * 2 * 320 * 128 * 2  # batch, heads, tokens, elements, bytes
    at, counters = target[0], target[2]
    assert target == (at, at + size, counters, 320, 2)


def test_counters_of_copies():
    """One a block of 64 tokens, head and copy, behind the head; few different sizes."""
    for copies, heads, capacity in ((1, 1, 64), (2, 2, 320), (1, 16, 1 << 15), (7, 3, 2048)):
        needed = widen_sm90.COUNTERS_HEAD + copies * heads * capacity // 64
        count = widen_sm90.counters_of(copies, heads, capacity)
        assert needed <= count < 2 * needed and count & (count - 1) == 0


def test_launch_arguments_of_ragged_and_16_bit_calls(monkeypatch):
    case = AttentionCase(
        id="ragged", kv_lens=(70, 30), q_lens=(3, 20), page_size=None, window=(7, 2), causal=False,
        **BF16_CACHE,
    )  # fmt: skip
    inputs = make_inputs(case)
    ((_, _, addresses, strides, sizes, scalars),) = launched(monkeypatch, inputs, 0)
    assert addresses[9] == inputs["cu_seqlens_k"].data_ptr() and addresses[10] == 0
    assert strides[2:5] == (16, 2 * 2 * 128, 2 * 128), "bytes"
    assert sizes == (2, 23, 2, 4, 2**30, 1, 100, 1, 0, 0)
    assert scalars[2:5] == (7, 2, 0)


def test_a_cache_without_tokens(monkeypatch):
    case = AttentionCase(id="none", kv_lens=(0, 0), q_lens=(3, 2), page_size=None)
    ((_, _, addresses, strides, sizes, _),) = launched(monkeypatch, make_inputs(case), 0)
    assert addresses[1] != 0 and sizes[6] == HALF_TOKENS


def test_what_a_model_with_long_queries_needs_compiled():
    workload = AttentionWorkload(128, 32, 4, "bf16", "fp8_e4m3", (64, 16), 1024)
    names = {unit.config.name for unit in units_for(workload, "sm_90a")}
    prefill = {name for name in names if name.startswith("prefill")}
    direct = {f"prefill_sm90_fp8_e4m3_d128_r128_bf16_box{box}" for box in (16, 64)}
    assert prefill == direct | {"prefill_sm90_fp16_d128_r128_bf16_box64_from_fp8_e4m3"}
    middle = units_for(replace(workload, max_query_tokens=127), "sm_90a")
    assert {each.config.name for each in middle if each.kernel == "prefill_sm90"} == direct
    wide = AttentionWorkload(128, 32, 4, "bf16", "bf16", (64,), 9)
    kinds = {(unit.kernel, unit.config.kv_format) for unit in units_for(wide, "sm_90a")}
    assert kinds == {("prefill_sm90", "bf16"), ("decode_sm90", "bf16")}
    alone = units_for(replace(wide, max_query_tokens=8), "sm_90a")
    assert {unit.kernel for unit in alone} == {"decode_sm90"}
    short = AttentionWorkload(128, 32, 4, "bf16", "fp8_e4m3", (64,), 8)
    assert not any(unit.kernel == "prefill_sm90" for unit in units_for(short, "sm_90a"))
    same_bits = replace(short, deterministic=True)
    assert units_for(same_bits, "sm_90a") == units_for(short, "sm_90a")
    long = replace(workload, deterministic=True)
    assert {unit.kernel for unit in units_for(long, "sm_90a")} >= {"prefill_sm90", "decode_sm90"}
    units = units_for(long, "sm_90a")
    assert not any(unit.kernel == "prefill_sm90" and unit.config.reads_copies for unit in units)


# ---- who works on what -------------------------------------------------------------------------


@pytest.mark.parametrize("ctas", (1, 2, 132))
def test_every_item_is_one_ctas_turn(ctas):
    numbers = [plan.item_number(cta, ctas, turn) for turn in range(5) for cta in range(ctas)]
    assert sorted(numbers) == list(range(5 * ctas))
    assert sorted(numbers[:ctas]) == list(range(ctas)), "the first turns are the first items"
    shares = {sum(numbers[cta : 4 * ctas : ctas]) for cta in range(ctas)}
    assert len(shares) == 1, "of items that shrink evenly all get the same"


def items_of(q_lens, kv_lens, group, kv_heads, rows, left, right, skip_rows) -> list[Any]:
    """All items that the host's bound allows."""
    starts = [sum(q_lens[:b]) for b in range(len(q_lens) + 1)]
    lengths = common.Lengths(Memory(starts), Memory(kv_lens), None, 1)
    magic = -(-(1 << 32) // group)
    shape = plan.Shape(
        len(q_lens), kv_heads, group, magic, left, right, skip_rows, common.UNLIMITED
    )
    packed = sum(q_lens) * group
    ctas = min(packed, packed // rows + len(q_lens)) * kv_heads
    found = [plan.find_item(lengths, shape, cta, rows) for cta in range(ctas)]
    return [plan.Item(*map(int, item)) for item in found]


def visible(q_len, kv_len, token, left, right) -> tuple[int, int]:
    own = kv_len - q_len + token
    return max(own - left, 0), min(own + right + 1, kv_len)


LENGTHS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 900)), min_size=1, max_size=40)
WINDOWS = st.sampled_from((common.UNLIMITED, 0, 5, 130))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    LENGTHS, st.sampled_from((1, 3, 8)), st.integers(1, 3), WINDOWS, WINDOWS,
    st.sampled_from((0, 8, 64)), st.sampled_from((32, 96)),
)  # fmt: skip
def test_every_row_is_one_items_and_its_keys_are_in_the_tiles(
    lengths, group, kv_heads, left, right, skip_rows, rows
):
    q_lens, kv_lens = (tuple(side) for side in zip(*lengths, strict=True))
    seen = set()
    for item in items_of(q_lens, kv_lens, group, kv_heads, rows, left, right, skip_rows):
        if not item.live:
            continue
        q_len, kv_len = q_lens[item.b], kv_lens[item.b]
        assert (item.used, item.own) == (kv_len, kv_len - q_len)
        assert item.q_start == sum(q_lens[: item.b])
        assert 0 < item.rows_end - item.first_row <= rows
        end = item.start + TILE_TOKENS * item.tiles
        keys = []
        for row in range(item.first_row, item.rows_end):
            assert (item.b, item.head, row) not in seen
            seen.add((item.b, item.head, row))
            low, high = visible(q_len, kv_len, row // group, left, right)
            if low < high:
                keys += [low, high]
                assert item.start <= low and high <= end and item.low <= low
        # nothing loaded but the tiles that hold these keys, and no tile where there are none
        assert item.tiles == 0 if not keys else item.start > min(keys) - HALF_TOKENS
        assert not keys or end - TILE_TOKENS < max(keys)
        assert item.start % HALF_TOKENS == 0
    wanted = {
        (b, head, row)
        for b, q_len in enumerate(q_lens)
        if q_len * group > skip_rows
        for head in range(kv_heads)
        for row in range(q_len * group)
    }
    assert seen == wanted


def test_long_chunks_come_first():
    items = items_of((640,), (640,), 1, 2, 64, common.UNLIMITED, 0, 0)
    live = [item for item in items if item.live]
    assert [item.head for item in live[:2]] == [0, 1]
    assert [item.tiles for item in live] == sorted((i.tiles for i in live), reverse=True)
    assert rows_of(128) >= 64
