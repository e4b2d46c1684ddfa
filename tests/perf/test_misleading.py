"""Attempts to make the comparison say what was not measured: each is refused, or told."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from perf import rows as rows_module
from perf.compare import MACHINE as MAY_DIFFER
from perf.compare import NotComparable, compare, main
from perf.reading import read_rows
from perf.rows import check_row, describe_machine, fingerprint, sources, write_rows
from tests.perf.helpers import MACHINE, METHOD, SMALL, make_test_row, requires_module

BASELINE = "triton_baseline"
LATER = replace(MACHINE, date="2026-01-09T00:00:00+00:00")
CASES = [replace(SMALL, batch=batch) for batch in (1, 2, 3, 4)]


def run_cli(tmp_path, *files, options=()):
    paths = []
    for i, rows in enumerate(files):
        paths.append(str(tmp_path / f"{i}.json"))
        text = rows if isinstance(rows, str) else json.dumps(rows)
        (tmp_path / f"{i}.json").write_text(text, encoding="utf-8")
    return CliRunner().invoke(main, [*paths, *options])


def without(name):
    row = make_test_row()
    del row["workload"][name]
    row["fingerprint"] = fingerprint(row["workload"])
    return row


FORGED = {
    "a time that is no number": ({"median_us": math.nan}, "median_us is nan, no figure"),
    "an endless time": ({"max_us": math.inf}, "max_us is inf, no figure"),
    "a time as text": ({"median_us": "100.0"}, "median_us is '100.0', no figure"),
    "a time that is a truth": ({"median_us": True}, "median_us is True, no figure"),
    "no time at all": ({"median_us": 0}, "median_us is 0, no figure"),
    "a time below zero": ({"min_us": -1.0}, "min_us is -1.0, no figure"),
    "a median below the minimum": ({"median_us": 50.0}, r"are \[90.0, 50.0, 120.0\]"),
    "a time without its spread": ({"min_us": None}, "a time without min_us"),
    "a time nobody checked": ({"rel_error": None}, "a time without rel_error"),
    "a wrong result": ({"rel_error": math.nan}, "rel_error is nan"),
    "a ceiling that is none": ({"ceilings": {"read_tb_per_s": math.nan}}, "read_tb_per_s is nan"),
    "another card above than below": ({"gpu": "Other GPU"}, "gpu is 'Other GPU', not as in its"),
    "another driver": ({"driver": "9"}, "driver is '9', not as in its workload"),
    "other versions": ({"versions": {}}, "versions is {}, not as in its workload"),
    "no commit": ({"commit": ""}, "commit is ''"),
    "no date": ({"date": None}, "date is None"),
}


@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED)
def test_a_forged_row_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_row(make_test_row() | change)


@pytest.mark.parametrize("name", rows_module.WORKLOAD_FIELDS)
def test_what_two_rows_both_leave_out_is_no_agreement(name):
    with pytest.raises(ValueError, match="not say|not as in its"):
        compare(without(name), without(name))


def test_a_file_with_nan_is_no_result_file(tmp_path):
    text = json.dumps([make_test_row()]).replace("100.0", "NaN", 1)
    done = run_cli(tmp_path, text)
    assert done.exit_code == 1 and "NaN is no number" in done.output


def test_the_order_of_rows_says_nothing(tmp_path):
    old = [make_test_row(case=case, median=100.0 * case.batch) for case in CASES]
    new = [make_test_row(case=case, median=50.0 * case.batch, machine=LATER) for case in CASES]
    random.Random(1).shuffle(new)
    done = run_cli(tmp_path, old, new, options=("--json", str(tmp_path / "out.json")))
    assert done.exit_code == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [each["speedup"] for each in found] == [2.0] * len(CASES)


STATE = {
    "fewer bytes between two reads of a page": {"rotated_bytes": 1},
    "one input set, in L2": {"input_sets": 1},
    "launches in the time": {"calls_per_graph": 1},
    "eager": {"timing": "eager"},
}


@pytest.mark.parametrize("change", STATE.values(), ids=STATE)
def test_another_state_of_the_cache_is_another_workload(change):
    warm = make_test_row(method=METHOD | change, machine=LATER)
    with pytest.raises(NotComparable, match=next(iter(change))):
        compare(make_test_row(), warm, MAY_DIFFER)


def test_other_clocks_are_refused_unless_allowed():
    slow, fast = (
        make_test_row(machine=replace(machine, clocks=f"SM up to {mhz} MHz"))
        for machine, mhz in ((MACHINE, 1200), (LATER, 1980))
    )
    with pytest.raises(NotComparable, match="clocks: 'SM up to 1200 MHz' and 'SM up to 1980 MHz'"):
        compare(slow, fast)
    assert set(compare(slow, fast, ("clocks",)).machines) == {"clocks"}


def test_more_rounds_are_told():
    more = make_test_row(method=METHOD | {"rounds": 40}, machine=LATER)
    with pytest.raises(NotComparable, match="rounds: 20 and 40"):
        compare(make_test_row(), more)
    assert compare(make_test_row(), more, ("rounds",)).machines == {"rounds": (20, 40)}


def test_a_card_that_was_slowed_down_is_told(tmp_path):
    old, new = make_test_row(), make_test_row(median=80.0, machine=LATER)
    old["ceilings"], new["ceilings"] = {"copy_tb_per_s": 3.5}, {"copy_tb_per_s": 4.4}
    done = run_cli(tmp_path, [old], [new])
    assert "other ceilings: copy_tb_per_s: 3.5 and 4.4" in done.output
    old["ceilings"] = {"copy_tb_per_s": 4.3}
    assert "other ceilings" not in run_cli(tmp_path, [old], [new]).output


def test_rows_put_into_one_file_are_not_of_one_run(tmp_path):
    ours, theirs = make_test_row(median=50.0), make_test_row(BASELINE, machine=LATER)
    done = run_cli(tmp_path, [ours, theirs])
    assert done.exit_code == 1
    assert "rows of two runs, which differ in date" in " ".join(done.output.split())
    with pytest.raises(NotComparable, match="two runs, which differ in commit"):
        compare(ours, make_test_row(BASELINE, machine=replace(MACHINE, commit="f")), one_run=True)


def test_a_run_does_not_agree_with_itself(tmp_path):
    rows = [make_test_row(case=case) for case in CASES]
    done = run_cli(tmp_path, rows, rows, options=("--within", "5"))
    assert done.exit_code == 1 and "one run, not two" in done.output
    assert "no two times to compare" in done.output


@pytest.mark.parametrize("status", ("no kernel: head size", "not installed"))
def test_a_time_that_is_gone_is_no_agreement(tmp_path, status):
    old = [make_test_row(case=case) for case in CASES]
    new = [make_test_row(case=case, machine=LATER) for case in CASES[1:]]
    new.append(make_test_row(case=CASES[0], median=None, status=status, machine=LATER))
    done = run_cli(tmp_path, old, new, options=("--within", "5"))
    assert done.exit_code == 1
    assert f"had a time, has none: {CASES[0].name}: {status}" in done.output
    assert run_cli(tmp_path, old, new).exit_code == 0


def test_nothing_compared_is_no_agreement(tmp_path):
    files = [
        [make_test_row(median=None, status="no kernel: x", machine=machine)]
        for machine in (MACHINE, LATER)
    ]
    done = run_cli(tmp_path, *files, options=("--within", "5"))
    assert done.exit_code == 1 and "no two times to compare" in done.output


def test_a_dirty_tree_is_told(tmp_path):
    dirty = replace(MACHINE, commit="0123456789abcdef-dirty")
    rows = [make_test_row(machine=dirty), make_test_row(BASELINE, machine=dirty)]
    assert "-dirty (not its code: there were changes)" in run_cli(tmp_path, rows).output


def test_a_commit_that_was_typed_in_does_not_name_the_code(tmp_path):
    """The sources do; they are those of the files that ran."""
    machine = describe_machine("a command", commit="what I like")
    assert machine.commit == "what I like" and machine.sources == sources()
    typed = [replace(m, sources=s) for m, s in ((MACHINE, "cute_kernels 1"), (LATER, "perf 2"))]
    files = [[make_test_row(machine=machine)] for machine in typed]
    output = run_cli(tmp_path, *files).output
    assert "sources cute_kernels 1" in output and "sources perf 2" in output


def test_errors_stand_beside_the_times(tmp_path):
    rough = make_test_row("flashinfer_xqa", median=50.0)
    rough["rel_error"] = 0.032
    assert "3.2e-02, 1.7e-03" in run_cli(tmp_path, [make_test_row(), rough]).output


def test_rows_come_back_as_they_were_written(tmp_path):
    machine = replace(MACHINE, sources=sources())
    rows = [make_test_row(name, machine=machine) for name in ("cute_kernels", BASELINE)]
    write_rows(tmp_path / "r.json", rows)
    assert read_rows(tmp_path / "r.json") == rows


TYPES = (("seed", False), ("page_size", 64.0), ("sinks", 0), ("extra", {}), ("versions.torch", "9"))


@pytest.mark.parametrize(("name", "value"), TYPES, ids=str)
def test_values_of_other_types_and_names_with_dots_are_other_work(tmp_path, name, value):
    old = make_test_row(case=replace(SMALL, seed=0))
    new = make_test_row(case=replace(SMALL, seed=0), machine=LATER)
    new["workload"][name] = value
    if name in new:
        new[name] = value
    new["fingerprint"] = fingerprint(new["workload"])
    write_rows(tmp_path / "0.json", [old])
    write_rows(tmp_path / "1.json", [new])
    done = CliRunner().invoke(main, [str(tmp_path / f"{i}.json") for i in (0, 1)])
    assert done.exit_code == 1 and name in done.output


def compared(tmp_path, *options, cases=(SMALL,), lost=0):
    for i, (machine, own) in enumerate(((MACHINE, cases), (LATER, cases[: len(cases) - lost]))):
        rows = [make_test_row(case=case, machine=machine) for case in own]
        write_rows(tmp_path / f"{i}.json", rows)
    paths = [str(tmp_path / f"{i}.json") for i in (0, 1)]
    return CliRunner().invoke(main, [*paths, *map(str, options)])


def test_a_case_that_is_not_there_is_no_agreement(tmp_path):
    cases = [replace(SMALL, batch=batch) for batch in (1, 2, 3)]
    assert compared(tmp_path, "--within", "5", cases=cases).exit_code == 0
    done = compared(tmp_path, "--within", "5", cases=cases, lost=2)
    assert done.exit_code == 1
    for case in cases[1:]:
        assert f"had a time, has none: {case.name}: not in the new run" in done.output


@pytest.mark.parametrize("within", ("inf", "nan", "-1"))
def test_a_tolerance_is_one(tmp_path, within):
    done = compared(tmp_path, "--within", within)
    assert done.exit_code == 2 and "is no number of percent" in done.output


def test_what_is_read_is_not_written_and_what_cannot_be_is_told(tmp_path):
    requires_module("matplotlib")
    before = compared(tmp_path) and (tmp_path / "0.json").read_bytes()
    for options, message in (
        (("--json", tmp_path / "0.json"), "is a result that is read"),
        (("--json", tmp_path / "nowhere" / "r.json"), "no such folder"),
        (("--png", tmp_path / "x.abc"), "x.abc: "),
    ):
        done = compared(tmp_path, *options)
        assert isinstance(done.exception, SystemExit) and message in done.output
    assert (tmp_path / "0.json").read_bytes() == before


def test_brackets_are_no_markup(tmp_path):
    failed = make_test_row(BASELINE, median=None, status="[/b]")
    write_rows(tmp_path / "r.json", [make_test_row(), failed])
    assert "[/b]" in CliRunner().invoke(main, [str(tmp_path / "r.json")]).output
