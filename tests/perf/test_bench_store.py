"""The store benchmark without a GPU: its cases, their bytes, its arguments and its rows."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from cute_kernels.reference.store import gather_kv
from perf import bench_store, writers
from perf.bench_store import DTYPES, OURS, StoreCase
from perf.compare import pairs
from perf.inputs import ROTATED_BYTES
from perf.reading import read_rows
from perf.rows import (
    BY_HAND,
    OK,
    Measurement,
    check_row,
    make_row,
    make_workload,
    write_rows,
)
from perf.timing import Timing
from perf.writers import BASELINE, print_report
from tests.perf.helpers import MACHINE, METHOD


def test_cases():
    cases = bench_store.CASES
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kv_cache_dtype for case in cases} == set(DTYPES)
    decode = {case.tokens for case in cases if case.tokens <= 256}
    assert min(decode) == 1 and max(decode) == 256
    assert {1024, 65536} <= {case.tokens for case in cases}


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_bytes_are_those_of_the_arguments(dtype):
    case = StoreCase(64, dtype, 2, 64)
    key, value, key_cache, value_cache, slots, *_ = make_arguments(case)
    row = key_cache.shape[3] * key_cache.shape[2] * case.tokens
    assert key_cache.shape == value_cache.shape
    elements = (key.numel() + value.numel()) * key.element_size()
    assert case.moved_bytes == elements + 2 * row + slots.numel() * slots.element_size()


def make_arguments(case: StoreCase) -> tuple:
    return bench_store.make_arguments(case, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("tokens", (5, 700))
@pytest.mark.parametrize("dtype", ("fp8", "nvfp4"))
def test_arguments_are_a_store(dtype, tokens):
    case = StoreCase(tokens, dtype, 2, 64)
    key, value, key_cache, value_cache, slots, name, *scales = make_arguments(case)
    assert name == dtype and len(slots.unique()) == len(slots) == tokens
    bench_store.bind(OURS, (key, value, key_cache, value_cache, slots, name, *scales))()
    storage = "fp8_e4m3" if dtype == "fp8" else "nvfp4"
    for x, cache, scale in ((key, key_cache, scales[0]), (value, value_cache, scales[1])):
        y = gather_kv(cache, slots, storage, scale)
        assert (y - x.float()).norm() / x.float().norm() < 0.2


def make_test_row(provider: str, case: StoreCase, us: float) -> dict:
    timing = Timing(us, us, us)
    workload = make_workload(case, MACHINE, METHOD)
    measurement = Measurement(OK, 0.0, timing, timing, 50.0)
    return make_row(provider, case, measurement, workload, MACHINE, 4.0, case.moved_bytes)


def test_rows_count_the_bytes_of_a_store_and_compare():
    case = StoreCase(4096, "nvfp4")
    ours, theirs = make_test_row(OURS, case, 10.0), make_test_row(BASELINE, case, 20.0)
    check_row(ours)
    assert ours["op"] == "store" and ours["batch"] == 4096 and ours["kv_len"] is None
    rate = case.moved_bytes / 10.0 / 1e6
    assert ours["tb_per_s"] == pytest.approx(rate, rel=1e-3)
    assert ours["pct_of_ceiling"] == pytest.approx(100 * rate / 4.0, rel=1e-3)
    assert list(pairs([[theirs, ours]], OURS)) == [(theirs, ours)]
    assert ours["fingerprint"] != make_test_row(OURS, StoreCase(4096, "fp8"), 1.0)["fingerprint"]


def test_the_report_shows_ours_and_the_baseline(capsys):
    case = StoreCase(256, "nvfp4")
    print_report([make_test_row(OURS, case, 3.25), make_test_row(BASELINE, case, 4.5)])
    text = capsys.readouterr().out
    assert case.name in text and "3.25" in text and "4.50" in text and MACHINE.gpu in text


def test_a_run_that_is_cut_off_leaves_what_it_measured(monkeypatch, tmp_path):
    first, second = StoreCase(1, "fp8"), StoreCase(1, "nvfp4")

    def measure(benchmark, case, rounds):
        if case is second:
            raise KeyboardInterrupt
        timing = Timing(3.0, 3.0, 3.0)
        results = {OURS: Measurement(OK, 0.0, timing, timing, 9.0), BASELINE: Measurement("absent")}
        return results, METHOD, {"memcpy_tb_per_s": 3.0, "elementwise_tb_per_s": 4.0, "copy_gib": 9}

    monkeypatch.setattr(writers, "measure", measure)
    path = tmp_path / "rows.json"
    keep = partial(write_rows, path)
    with pytest.raises(KeyboardInterrupt):
        writers.run(bench_store.BENCHMARK, [first, second], MACHINE, 20, keep)
    ours, theirs = read_rows(path)
    assert ours["case"] == theirs["case"] == first.name
    assert ours["read_ceiling_tb_per_s"] == 4.0 and ours["ceilings"]["memcpy_tb_per_s"] == 3.0
    assert theirs["tuning"] == BY_HAND and "tuning" not in ours
    assert list(tmp_path.iterdir()) == [path]


def test_a_baseline_that_lacks_a_dtype_says_so(monkeypatch):
    monkeypatch.setattr(bench_store, "find_spec", lambda name: None)
    assert bench_store.why_not(BASELINE, StoreCase(1, "fp8")) == "not installed"
    assert bench_store.why_not(OURS, StoreCase(1, "nvfp4_mse")) is None


@pytest.mark.parametrize("size", (16, 4096 + 16))
def test_copies_read_and_write_all_of_their_own_bytes(size):
    for name, calls in writers.copies(size, 3, "cpu").items():
        assert len({id(call) for call in calls}) == 3, name
        outputs = [call() for call in calls]
        assert {out.numel() * out.element_size() for out in outputs} == {size}
        assert len({out.data_ptr() for out in outputs}) == 3


def test_copies_copy():
    (memcpy,), (first,), (second,) = writers.copies(64, 1, "cpu").values()
    assert torch.equal(memcpy(), memcpy.args[0])
    for call in (first, second):
        assert torch.equal(call(), ~call.args[0])
    assert second().data_ptr() - first().data_ptr() == writers.ELSEWHERE


def test_a_case_that_fits_in_l2_says_so():
    small, large = StoreCase(1, "fp8"), StoreCase(4096, "fp8")
    warm = writers.method_of(small, 256, 20, 60_000_000)
    assert warm["rotated_bytes"] == 256 * small.moved_bytes and warm["fits_in_l2"]
    cold = writers.method_of(large, 20, 20, 60_000_000)
    assert cold["rotated_bytes"] == ROTATED_BYTES and "fits_in_l2" not in cold


def test_results_are_kept_until_the_next_ones():
    made = []
    call = writers.keeping(lambda: made.append(torch.zeros(3)) or made[-1])
    call()
    assert sys.getrefcount(made[0]) > sys.getrefcount(torch.zeros(3)) + 1
