"""Comparable or refused: rows are put side by side only if their workloads agree."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from perf.compare import (
    NotComparable,
    WithoutTime,
    compare,
    differing_fields,
    main,
    pairs,
    unpaired,
)
from perf.rows import write_rows
from tests.perf.helpers import MACHINE, METHOD, SMALL, make_test_row, requires_module

BASELINE = "triton_baseline"
# The same machine and code on another day.
LATER = replace(MACHINE, date="2026-01-09T00:00:00+00:00")


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
        ("kv_cache_dtype", make_test_row(case=replace(SMALL, kv_cache_dtype="bfloat16"))),
        ("scales", make_test_row(case=replace(SMALL, one_scale=True))),
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


ELSEWHERE = replace(LATER, driver="2", versions={"torch": "9", "triton": "3.6.0"}, gpu="Other GPU")


def test_only_what_is_allowed_of_two_machines_may_differ():
    old, new = make_test_row(median=150.0), make_test_row(machine=ELSEWHERE)
    result = compare(old, new, ("gpu", "driver", "versions"))
    assert result.speedup == pytest.approx(1.5)
    assert result.machines == {
        "driver": ("1.2", "2"),
        "gpu": ("Test GPU", "Other GPU"),
        "versions.torch": ("2.11.0", "9"),
    }
    with pytest.raises(NotComparable, match="differ in driver: '1.2' and '2'; versions.torch: "):
        compare(old, new, ("gpu",))


def test_the_work_may_never_differ():
    other = make_test_row(case=replace(SMALL, seed=9), machine=ELSEWHERE)
    with pytest.raises(NotComparable, match=r"differ in seed: 5 and 9$"):
        compare(make_test_row(), other, ("gpu", "driver", "versions"))
    with pytest.raises(
        ValueError, match="'seed' may not differ; what may: gpu, driver, versions, cl"
    ):
        compare(make_test_row(), other, ("seed",))


def test_cases_of_one_run_only():
    ours, elsewhere = make_test_row(), make_test_row(case=replace(SMALL, batch=9))
    newer = make_test_row(case=replace(SMALL, batch=7))
    assert unpaired([[ours, elsewhere], [ours, newer]], "cute_kernels") == [
        elsewhere["case"],
        newer["case"],
    ]


def test_rows_of_before_clocks_were_recorded_are_still_compared():
    old, new = make_test_row(), make_test_row(machine=replace(LATER, clocks="SM up to 1980 MHz"))
    del old["clocks"], old["sources"]
    result = compare(old, new)
    assert result.speedup == 1.0
    assert result.machines == {"clocks": ("unknown", "SM up to 1980 MHz")}


def test_what_ran_and_what_the_device_reached_come_with_the_times(tmp_path):
    ours, theirs = make_test_row(), make_test_row(BASELINE, median=200.0)
    ours["kernels"], theirs["kernels"] = ["ours_kernel", "copy"], ["their_kernel"]
    ours["ceilings"] = theirs["ceilings"] = {"matmul_tflops": 780.0}
    out = tmp_path / "ratios.json"
    done = run_cli(tmp_path, [ours, theirs], options=["--json", str(out)])
    assert done.exit_code == 0
    assert "cute_kernels ran ours_kernel\n" in done.output
    assert f"{BASELINE} ran their_kernel\n" in done.output
    assert "matmul_tflops 780" in done.output
    (found,) = json.loads(out.read_text(encoding="utf-8"))
    assert found["speedup"] == 2.0 and found["case"] == SMALL.name
    assert found["old"]["kernels"] == ["their_kernel"] and found["new"]["gpu"] == MACHINE.gpu


def test_a_mismatched_pair_is_in_no_output(tmp_path):
    other = make_test_row(BASELINE, case=replace(SMALL, seed=99))
    out = tmp_path / "ratios.json"
    done = run_cli(tmp_path, [make_test_row(), other], options=["--json", str(out)])
    assert done.exit_code == 1
    assert f"refused: {SMALL.name}: the workloads differ in seed: 99 and 5" in done.output
    assert json.loads(out.read_text(encoding="utf-8")) == []


def test_the_plot_of_ratios(tmp_path):
    requires_module("matplotlib")
    path = tmp_path / "ratios.png"
    rows = [make_test_row(), make_test_row(BASELINE, median=200.0)]
    assert run_cli(tmp_path, rows, options=["--png", str(path)]).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def run_cli(tmp_path, *files, options=()):
    paths = []
    for i, rows in enumerate(files):
        paths.append(str(tmp_path / f"{i}.json"))
        write_rows(paths[-1], rows)
    return CliRunner().invoke(main, [*paths, *options])


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
    newer = make_test_row(machine=replace(LATER, versions={"torch": "9", "triton": "3.6.0"}))
    done = run_cli(tmp_path, [make_test_row()], [newer])
    assert done.exit_code == 1
    assert "refused" in done.output
    assert "versions.torch: '2.11.0' and '9'" in done.output


def test_cli_says_when_there_is_nothing_to_compare(tmp_path):
    done = run_cli(tmp_path, [make_test_row(BASELINE)])
    assert done.exit_code == 1
    message = " ".join(done.output.split())
    assert "nothing to compare with cute_kernels: no case has another row" in message
    assert "1 rows of decode" in message


def test_cli_names_both_machines_and_what_it_leaves_out(tmp_path):
    gone = make_test_row(case=replace(SMALL, batch=9))
    newer = make_test_row(median=50.0, machine=ELSEWHERE)
    allowed = ("--allow", "gpu", "--allow", "driver", "--allow", "versions")
    done = run_cli(tmp_path, [make_test_row(), gone], [newer], options=allowed)
    assert done.exit_code == 0
    assert (
        "Test GPU, driver 1.2, unknown, commit 0123456789abcdef, sources unknown, 2026-01-02"
        in done.output
    )
    assert (
        "Other GPU, driver 2, unknown, commit 0123456789abcdef, sources unknown, 2026-01-09"
        in done.output
    )
    assert "the machines differ in driver: '1.2' and '2'; gpu: " in done.output
    assert f"in one run only: {gone['case']}" in done.output
    assert "2.00" in done.output


def test_cli_says_what_is_no_result_file(tmp_path):
    path = tmp_path / "load.json"
    path.write_text('{"op": "load", "rows": []}', encoding="utf-8")
    done = CliRunner().invoke(main, [str(path)])
    assert done.exit_code == 1
    assert f"{path}: no list of rows" in done.output


@pytest.mark.parametrize(("within", "status"), (("5.1", 0), ("4.9", 1)))
def test_cli_says_whether_two_runs_agree(tmp_path, within, status):
    old, new = [make_test_row(median=105.0)], [make_test_row(median=100.0, machine=LATER)]
    done = run_cli(tmp_path, old, new, options=("--within", within))
    assert done.exit_code == status
    line = f"not within 4.9 %: {SMALL.name}: 1.050 times as fast"
    assert (line in done.output) == bool(status)


def test_cli_refuses_a_file_with_two_rows_for_one_case(tmp_path):
    done = run_cli(tmp_path, [make_test_row(), make_test_row(median=90.0)])
    assert done.exit_code == 1
    assert f'row 2: two rows for ["cute_kernels","{SMALL.name}"]' in done.output
