"""Comparable or refused: rows are put side by side only if their workloads agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from perf.compare import NotComparable, WithoutTime, compare, differing_fields, main, pairs
from perf.rows import write_rows
from tests.perf.helpers import MACHINE, METHOD, SMALL, make_test_row

BASELINE = "triton_baseline"


def test_speedup_of_equal_workloads():
    result = compare(make_test_row(BASELINE, median=150.0), make_test_row(median=100.0))
    assert result.speedup == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("field", "other"),
    (
        ("batch", make_test_row(case=replace(SMALL, batch=4))),
        ("kv_len", make_test_row(case=replace(SMALL, kv_len=100))),
        ("head_size", make_test_row(case=replace(SMALL, head_size=128))),
        ("q_dtype", make_test_row(case=replace(SMALL, q_dtype="float16"))),
        ("kv_cache_dtype", make_test_row(case=replace(SMALL, kv_cache_dtype="nvfp4"))),
        ("page_size", make_test_row(case=replace(SMALL, page_size=16))),
        ("window", make_test_row(case=replace(SMALL, window=64))),
        ("seed", make_test_row(case=replace(SMALL, seed=99))),
        ("gpu", make_test_row(machine=replace(MACHINE, gpu="Other GPU"))),
        ("driver", make_test_row(machine=replace(MACHINE, driver="2"))),
        ("versions.torch", make_test_row(machine=replace(MACHINE, versions={"triton": "3.6.0"}))),
        ("timing", make_test_row(method={**METHOD, "timing": "eager"})),
        ("rotated_bytes", make_test_row(method={**METHOD, "rotated_bytes": 1})),
    ),
)
def test_a_different_workload_is_refused_and_named(field, other):
    row = make_test_row(BASELINE)
    assert list(differing_fields(row, other)) == [field]
    with pytest.raises(NotComparable, match=rf"differ in {field}: "):
        compare(row, other)


def test_every_differing_field_is_named():
    other = make_test_row(case=replace(SMALL, batch=4, seed=7))
    with pytest.raises(NotComparable, match=r"batch: 3 and 4; seed: 5 and 7"):
        compare(make_test_row(BASELINE), other)


def test_a_row_without_a_time_is_not_compared():
    absent = make_test_row("vllm_fa4", median=None, status="not installed")
    with pytest.raises(WithoutTime, match="vllm_fa4 has no time: not installed"):
        compare(absent, make_test_row())


def test_an_edited_row_is_not_compared():
    edited = make_test_row(BASELINE)
    edited["workload"]["batch"] = edited["batch"] = 4
    with pytest.raises(ValueError, match="fingerprint"):
        compare(edited, make_test_row(case=replace(SMALL, batch=4)))


def test_pairs_within_a_run_and_between_runs():
    ours, theirs = make_test_row(), make_test_row(BASELINE)
    elsewhere = make_test_row(BASELINE, case=replace(SMALL, batch=9))
    assert list(pairs([[ours, theirs, elsewhere]], "cute_kernels")) == [(theirs, ours)]
    newer = make_test_row(median=80.0)
    assert list(pairs([[ours, theirs], [newer, theirs]], "cute_kernels")) == [(ours, newer)]


def run_cli(tmp_path, *files):
    paths = []
    for i, rows in enumerate(files):
        paths.append(str(tmp_path / f"{i}.json"))
        write_rows(paths[-1], rows)
    return CliRunner().invoke(main, paths)


def test_cli_compares_providers_of_one_run(tmp_path):
    done = run_cli(tmp_path, [make_test_row(median=50.0), make_test_row(BASELINE, median=125.0)])
    assert done.exit_code == 0
    assert "2.50" in done.output
    assert BASELINE in done.output


def test_cli_counts_what_it_skips(tmp_path):
    cases = [SMALL, replace(SMALL, batch=9)]
    rows = [make_test_row(case=case) for case in cases]
    rows += [make_test_row("vllm_fa4", case, None, "not installed") for case in cases]
    done = run_cli(tmp_path, rows)
    assert done.exit_code == 0
    assert "skipped: vllm_fa4 has no time: not installed (2 cases)" in done.output


def test_cli_refuses_runs_with_other_libraries(tmp_path):
    newer = make_test_row(machine=replace(MACHINE, versions={"torch": "9", "triton": "3.6.0"}))
    done = run_cli(tmp_path, [make_test_row()], [newer])
    assert done.exit_code == 1
    assert "refused" in done.output
    assert "versions.torch: '2.11.0' and '9'" in done.output


def test_cli_says_when_there_is_nothing_to_compare(tmp_path):
    done = run_cli(tmp_path, [make_test_row(BASELINE)])
    assert done.exit_code == 1
    assert "nothing to compare with cute_kernels" in done.output
