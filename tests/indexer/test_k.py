"""The indexer's K: the quantized bytes exactly, the whole within a bf16 rounding of the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_kernels import compress_norm_rope_insert
from cute_kernels.indexer.arguments import check_k
from cute_kernels.reference.indexer import gather_indexer_k, k_rows, split_k_cache
from tests.indexer import oracle
from tests.indexer.helpers import (
    DEGENERATE,
    K_CASES,
    SENTINEL,
    KCall,
    KCase,
    degenerate_k_call,
    strided,
    wide,
)

FORMATS = pytest.mark.parametrize("cache_format", ("mxfp4", "fp8_e4m3"))
CASES = pytest.mark.parametrize("case", K_CASES, ids=lambda case: case.id)
DEFAULT = KCase("default", "mxfp4", 4, 1)


def rows_by_slot(call: KCall) -> dict[int, np.ndarray]:
    """The rows that the definition quantizes, for completing tokens in the order of the call."""
    checked = check_k(**call.arguments)
    positions = checked.positions[:-1]
    tokens = ((positions + 1) % call.case.ratio == 0).nonzero().squeeze(1)
    rows = wide(k_rows(checked, tokens))
    return {slot: row for (slot, _, _), row in zip(call.rows, rows, strict=True)}


def close(call: KCall, memory: np.ndarray) -> tuple[int, int]:
    """`step_and_differences` from the oracle."""
    return step_and_differences(call, memory, call.expected())


def step_and_differences(call: KCall, memory: np.ndarray, expected: np.ndarray) -> tuple[int, int]:
    """Bytes that differ, and bytes written.

    Dequantized elements are within one quantum: the widest step between two codes, 2 of mxfp4 and
    32 of fp8_e4m3, times the larger of the two scales. NaN is beside NaN.
    """
    step = 2.0 if call.case.cache_format == "mxfp4" else 32.0
    for slot, _, _ in call.rows:
        (a, scale_a), (b, scale_b) = (
            oracle.read_row(*(m[at].tobytes() for at in call.ranges(slot)), call.case.cache_format)
            for m in (memory, expected)
        )
        near = abs(a - b) <= step * np.maximum(scale_a, scale_b)
        assert (near | np.isnan(a) & np.isnan(b)).all(), slot
    return int((memory != expected).sum()), len(call.rows) * sum(call.case.row_bytes)


@CASES
def test_bytes_and_nothing_but_them(case: KCase):
    """Values and scales are where the byte map says, and no other byte of the memory changes."""
    call = KCall(case)
    memory = call.run()
    np.testing.assert_array_equal(memory, call.expected(rows_by_slot(call)))
    different, _ = close(call, memory)
    assert different <= 8


@pytest.mark.parametrize("ratio", (4, 128))
@FORMATS
def test_the_whole_against_the_oracle(ratio, cache_format):
    lengths = (2003, 517) if ratio == 4 else (12_800, 5000)
    case = KCase("long", cache_format, ratio, int(ratio == 4), lengths=lengths, block_size=64)
    call = KCall(case, seed=ratio)
    different, written = close(call, call.run())
    assert written >= 8000
    assert different <= written / 1000


@FORMATS
def test_strided_inputs(cache_format):
    call, same = (KCall(replace(DEFAULT, cache_format=cache_format)) for _ in range(2))
    changes = {
        name: strided(x)
        for name, x in call.arguments.items()
        if isinstance(x, torch.Tensor) and name != "k_cache"
    }
    assert changes["state_cache"].stride(2) == 2
    np.testing.assert_array_equal(call.run(**changes), same.run())


def test_windows_before_position_0():
    """A first window has the second half of its rows, and so reads the second columns alone."""
    case = replace(DEFAULT, lengths=(4, 7, 8), state_block_size=64, cache_format="fp8_e4m3")
    call = KCall(case)
    assert sorted(position for _, _, position in call.rows) == [3, 3, 3, 7]
    blocks = call.arguments["state_block_table"][:2, 0].long()
    first_columns = torch.arange(512) % 256 < 128
    call.arguments["state_cache"][blocks[:, None], :, first_columns] = float("nan")
    memory = call.run()
    np.testing.assert_array_equal(memory, call.expected(rows_by_slot(call)))
    assert all(np.isfinite(row).all() for row in rows_by_slot(call).values())


def test_which_columns_a_window_takes():
    """A score that leaves no other row a weight shows which row and columns a channel is from."""
    call = KCall(replace(DEFAULT, lengths=(8,), state_block_size=8, cache_format="fp8_e4m3"))
    state = call.arguments["state_cache"]
    block = int(call.arguments["state_block_table"][0, 0])
    entries, scores = state[block].chunk(2, -1)
    checked = check_k(**call.arguments)
    for winner in range(8):
        scores.zero_()
        scores[winner] = 200.0
        row = k_rows(checked, torch.tensor([7]))
        first = 0 if winner < 4 else 128
        kept = entries[winner, first : first + 128].double()
        normed = kept / (kept.square().mean() + 1e-6).sqrt() * checked.norm_weight
        np.testing.assert_allclose(wide(row)[0, :64], normed[:64], rtol=2**-8)
        np.testing.assert_allclose(wide(row)[0, 64:].std(), normed[64:].std(), rtol=2**-3)


def test_the_rope_position_is_the_first_of_the_row():
    """cos = 1 at multiples of 4 and NaN elsewhere: only the former is read."""
    call = KCall(replace(DEFAULT, table_dtype=torch.bfloat16))
    table = call.arguments["cos_sin_cache"]
    table[torch.arange(len(table)) % 4 != 0] = float("nan")
    memory = call.run()
    for slot, _, _ in call.rows:
        values, scales = (memory[at].tobytes() for at in call.ranges(slot))
        assert 0xFF not in scales and values.count(0x77) < 32
    np.testing.assert_array_equal(memory, call.expected(rows_by_slot(call)))


@FORMATS
def test_slots(cache_format):
    """Skipped, beyond the capacity, repeated, and tokens past the slot mapping."""
    call = KCall(replace(DEFAULT, cache_format=cache_format, lengths=(32,)))
    capacity = call.arguments["k_cache"].shape[0] * 8
    slots = call.arguments["slot_mapping"]
    slots[3::4] = torch.tensor([-1, capacity, 2**62, -(2**63), 5, 9, 5, 0])
    rows = rows_by_slot(call)
    by_position = {position: rows[slot] for slot, _, position in call.rows}
    call.rows = [(5, 0, 27), (9, 0, 23)]
    expected = call.expected({5: by_position[27], 9: by_position[23]})
    np.testing.assert_array_equal(call.run(slot_mapping=slots[:-2]), expected)


@FORMATS
def test_padding_writes_nothing(cache_format):
    """A captured batch in which all lengths are 0: no slot, and garbage in all else."""
    call = KCall(replace(DEFAULT, cache_format=cache_format))
    count = len(call.arguments["positions"])
    for positions in (0, 3, -1, 2**40 - 1, -(2**63)):
        changes = {
            "positions": torch.full((count,), positions),
            "slot_mapping": torch.full((count,), -1),
            "token_to_seq": torch.full((count,), -7).int(),
            "state_block_table": torch.full((2, 5), 2**31 - 1).int(),
        }
        assert (call.run(**changes) == SENTINEL).all()
    minus_one = {"positions": torch.full((count,), -1), "slot_mapping": torch.zeros(count).long()}
    assert (call.run(**minus_one) == SENTINEL).all(), "position -1 completes nothing"


def test_nothing_to_do():
    call = KCall(DEFAULT)
    assert (call.run(slot_mapping=torch.zeros(0).long()) == SENTINEL).all()
    none = {name: call.arguments[name][:0] for name in ("positions", "token_to_seq")}
    none |= {"slot_mapping": torch.zeros(0).long(), "state_block_table": torch.zeros(0, 0).int()}
    assert (call.run(**none) == SENTINEL).all()
    assert (call.run(k_cache=call.arguments["k_cache"][:0]) == SENTINEL).all()


@FORMATS
def test_rows_beyond_2_to_the_31_bytes(cache_format):
    call = KCall(replace(DEFAULT, cache_format=cache_format, lengths=(8,)))
    row = sum(call.case.row_bytes)
    # Never touched but for two rows, so it takes no memory.
    memory = torch.empty(2**31 + 8192, dtype=torch.uint8)
    far = memory.as_strided((2, 8, row), (2**31 + 11, row, 1), 1)
    slots = torch.full((9,), -1)
    slots[torch.tensor([3, 7])] = torch.tensor([15, 8])
    call.run(k_cache=far, slot_mapping=slots)
    values, scales = call.case.row_bytes
    rows = {
        position: row for row, position in zip(rows_by_slot(call).values(), (3, 7), strict=True)
    }
    for token, position in ((7, 3), (0, 7)):
        parts = oracle.cache_row(rows[position], cache_format)
        first = 2**31 + 12
        starts = (first + token * values, first + 8 * values + token * scales)
        for start, part in zip(starts, parts, strict=True):
            assert memory[start : start + len(part)].numpy().tobytes() == part


@FORMATS
@pytest.mark.parametrize("what", DEGENERATE)
def test_degenerate_windows(cache_format, what):
    """The formula decides; a row that is NaN has the smallest scale."""
    call = degenerate_k_call(replace(DEFAULT, cache_format=cache_format), what)
    memory = call.run()
    np.testing.assert_array_equal(memory, call.expected(rows_by_slot(call)))
    values, scales = (memory[at] for at in call.ranges(call.rows[0][0]))
    smallest = b"\x01" * 4 if cache_format == "mxfp4" else np.array(2.0**-22, "<f4").tobytes()
    nan_code = 0x77 if cache_format == "mxfp4" else 0x7F
    if what in ("zero", "nan", "no score"):
        assert scales.tobytes() == smallest
    if what == "zero":
        assert not (values & 0x77).any()
    elif what in ("nan", "no score"):
        assert (values == nan_code).all()


# ---- reading -----------------------------------------------------------------------------------


@CASES
def test_reading_what_was_written(case: KCase):
    call = KCall(case)
    memory = call.run()
    slots = torch.tensor([slot for slot, _, _ in call.rows] + [-1, -(2**40)])
    expected = [
        oracle.read_row(*(memory[at].tobytes() for at in call.ranges(slot)), case.cache_format)[0]
        for slot, _, _ in call.rows
    ]
    expected = np.array([*expected, *np.zeros((2, case.head_size))])
    cache = call.arguments["k_cache"]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got = gather_indexer_k(cache, slots, case.cache_format, case.head_size, dtype)
        assert got.dtype is dtype
        assert torch.equal(got, torch.from_numpy(expected).to(dtype))


def test_every_byte_reads_as_its_value():
    codes = torch.arange(256).byte()
    for cache_format, row in (("mxfp4", 272), ("fp8_e4m3", 516)):
        k_cache = torch.zeros(1, 1, row, dtype=torch.uint8)
        values, scales = split_k_cache(k_cache, cache_format, 512)
        values[..., :256] = codes
        scales[:] = torch.arange(1, 17) * 15 if cache_format == "mxfp4" else 0
        if cache_format == "fp8_e4m3":
            scales[..., 3] = 0x3F  # 0.5
        got = gather_indexer_k(k_cache, torch.tensor([0]), cache_format, 512, torch.float64)
        parts = (x.numpy().tobytes() for x in (values, scales))
        np.testing.assert_array_equal(wide(got)[0], oracle.read_row(*parts, cache_format)[0])


def test_a_wrong_format_is_refused():
    """The bytes of a row differ between all formats, for every head size."""
    for head_size in (32, 64, 128, 256, 512):
        for written, row in (
            ("mxfp4", head_size // 2 + head_size // 32),
            ("fp8_e4m3", head_size + 4),
        ):
            k_cache = torch.zeros(2, 8, row, dtype=torch.uint8)
            split_k_cache(k_cache, written, head_size)
            other = "fp8_e4m3" if written == "mxfp4" else "mxfp4"
            for name, size in ((other, head_size), (written, head_size + 32)):
                with pytest.raises(ValueError, match=r"k_cache: got .* rows of head size"):
                    gather_indexer_k(k_cache, torch.tensor([0]), name, size)


def test_refusals_of_the_reader():
    k_cache = torch.zeros(2, 8, 68, dtype=torch.uint8)
    for slots, name, size, message in (
        (torch.tensor([16]), "mxfp4", 128, r"slots: got entries from 16 to 16; .*less than 16"),
        (torch.tensor([0]).int(), "mxfp4", 128, "slots: got torch.int32"),
        (torch.tensor([[0]]), "mxfp4", 128, "slots: got"),
        (torch.tensor([0]), "fp4", 128, "cache_format: got 'fp4'; nearest: 'mxfp4'"),
        (torch.tensor([0]), "mxfp4", 120, "head_size: got head size 120; accepted: positive mult"),
    ):
        with pytest.raises(ValueError, match=message):
            gather_indexer_k(k_cache, slots, name, size)


# ---- refusals that need the contents -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    (
        ("token_to_seq", 2, r"token_to_seq: got entries from 0 to 2; accepted: .*less than 2"),
        ("token_to_seq", -1, "token_to_seq: got entries from -1"),
        (
            "positions",
            2**33 - 1,
            r"positions \(rounded down to multiples of 4, .*\): got entries from 0 to 8589934588; ",
        ),
        ("state_block_table", 9, "state_block_table: got entries from .* to 9"),
        ("state_block_table", -1, "state_block_table: got entries from -1"),
    ),
)
def test_a_window_outside_the_tables_writes_nothing(name, bad, message):
    call = KCall(DEFAULT)
    x = call.arguments[name]
    index = (0, 1) if x.dim() == 2 else 7
    x[index] = bad
    with pytest.raises(ValueError, match=message):
        compress_norm_rope_insert(**call.arguments)
    assert (call.memory == SENTINEL).all()


def test_a_position_past_the_block_table_writes_nothing():
    call = KCall(DEFAULT)
    call.arguments["state_block_table"] = call.arguments["state_block_table"][:, :4]
    with pytest.raises(ValueError, match=r"positions // state_block_size: .* to 4; .*less than 4"):
        compress_norm_rope_insert(**call.arguments)
    assert (call.memory == SENTINEL).all()
