"""The store benchmark without a GPU: its cases, their bytes, its arguments and its rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cute_kernels.reference.store import gather_kv
from perf import bench_store, writers
from perf.bench_store import DTYPES, OURS, StoreCase
from perf.compare import pairs
from perf.reading import read_rows
from perf.rows import (
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
        return {OURS: Measurement(OK, 0.0, timing, timing, 9.0)}, METHOD, timing

    monkeypatch.setattr(writers, "measure", measure)
    path = tmp_path / "rows.json"
    keep = partial(write_rows, path)
    with pytest.raises(KeyboardInterrupt):
        writers.run(None, [first, second], MACHINE, 20, keep)
    assert [row["case"] for row in read_rows(path)] == [first.name]
    assert list(tmp_path.iterdir()) == [path]


def test_a_baseline_that_lacks_a_dtype_says_so(monkeypatch):
    monkeypatch.setattr(bench_store, "find_spec", lambda name: None)
    assert bench_store.why_not(BASELINE, StoreCase(1, "fp8")) == "not installed"
    assert bench_store.why_not(OURS, StoreCase(1, "nvfp4_mse")) is None
