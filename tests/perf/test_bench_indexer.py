"""The indexer benchmark without a GPU: its cases, their bytes, its arguments and its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_kernels.indexer.arguments import check_k, check_q
from cute_kernels.reference.indexer import gather_indexer_k
from perf import bench_indexer
from perf.bench_indexer import FORMATS, IndexerCase
from perf.rows import OK, Measurement, check_row, make_row, make_workload
from perf.sections import ResultFile, indexer_summary
from perf.targets import verdicts
from perf.timing import Timing
from perf.writers import BASELINE, OURS
from tests.perf.helpers import MACHINE, METHOD

RATIO = pytest.mark.parametrize("ratio", (0, 4, 128))
FORMAT = pytest.mark.parametrize("cache_format", FORMATS)


def arguments_of(case: IndexerCase) -> dict:
    return bench_indexer.make_arguments(case, torch.Generator().manual_seed(3))


def test_cases():
    cases = bench_indexer.CASES
    assert len({case.name for case in cases}) == len(cases) == 3 * 2 * 9


@FORMAT
def test_moved_bytes_of_q_are_those_of_the_arguments(cache_format):
    case = IndexerCase(16, cache_format)
    arguments = arguments_of(case)
    codes, scales, weights = bench_indexer.written(OURS, arguments)
    tensors = [arguments[name] for name in ("positions", "index_q", "index_weights")]
    tensors += [x for x in (codes, scales, weights) if x is not None]
    table = 16 * arguments["cos_sin_cache"][0].nbytes
    assert case.moved_bytes == sum(x.nbytes for x in tensors) + table


@FORMAT
@pytest.mark.parametrize(("tokens", "ratio"), ((5, 4), (5, 128), (1024, 4), (1024, 128)))
def test_arguments_of_k_complete_the_rows_that_are_counted(tokens, ratio, cache_format):
    case = IndexerCase(tokens, cache_format, ratio)
    arguments = arguments_of(case)
    call = check_k(**arguments)
    assert case.window == (1 + call.overlap) * ratio
    (cache,) = bench_indexer.written(OURS, arguments)
    complete = (arguments["positions"] + 1) % ratio == 0
    assert int(complete.sum()) == case.rows
    rows = gather_indexer_k(cache, arguments["slot_mapping"], cache_format, 128)
    assert torch.equal(rows.abs().amax(1) > 0, complete)
    state = case.rows * case.window * 2 * 128 * 4
    rest = case.rows * (sum(call.cache_format.row_parts(128)) + 256) + tokens * 20
    assert case.moved_bytes == state + rest


def test_arguments_of_q_are_a_call():
    for tokens in (3, 700):
        call = check_q(**arguments_of(IndexerCase(tokens, "mxfp4")))
        assert call.index_q.shape == (tokens, 64, 128) and call.use_fp4


def make_test_row(provider: str, case: IndexerCase, us: float) -> dict:
    timing = Timing(us, us, us)
    workload = make_workload(case, MACHINE, METHOD)
    measurement = Measurement(OK, 0.0, timing, timing, 50.0)
    return make_row(provider, case, measurement, workload, MACHINE, 4.0, case.moved_bytes)


@RATIO
def test_rows_targets_and_the_summary(ratio):
    case = IndexerCase(8192, "mxfp4", ratio)
    at_ceiling = case.moved_bytes / 4.0 / 1e6
    rows = [make_test_row(OURS, case, 1.1 * at_ceiling)]
    rows.append(make_test_row(BASELINE, case, 2.2 * at_ceiling))
    check_row(rows[0])
    (verdict,) = verdicts(rows[0], rows)
    assert verdict.met and verdict.wanted == ">= 80 % of the copy"
    assert not verdicts(make_test_row(OURS, case, 1.3 * at_ceiling), rows)[0].met
    assert verdicts(make_test_row(OURS, IndexerCase(64, "mxfp4", ratio), 1.0), rows) == []
    file = ResultFile(Path("x.json"), "indexer", "indexer_h200", "2026-01-01", rows)
    table = indexer_summary(file)
    assert "91 %, 2.00" in table and "8,192" in table
    assert ("K, " in table) == (ratio > 0)


def test_without_triton_the_baseline_is_named_as_not_installed(monkeypatch):
    monkeypatch.setattr(bench_indexer, "find_spec", lambda name: None)
    result = bench_indexer.check(BASELINE, IndexerCase(1, "mxfp4"))
    assert result.status == "not installed"
