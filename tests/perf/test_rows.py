"""The schema of result rows and the fingerprint of their workloads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from perf.reading import read_rows
from perf.rows import check_row, describe_machine, fingerprint, write_rows
from tests.perf.helpers import MACHINE, METHOD, SMALL, make_test_row

# What other tools of the project read.
NAMES = """provider op case batch kv_len q_len num_q_heads num_kv_heads head_size kv_cache_dtype
page_size window median_us min_us max_us tb_per_s pct_of_ceiling rel_error host_us gpu driver
versions commit command date""".split()


def test_row_has_every_agreed_field():
    row = make_test_row()
    assert set(NAMES) <= set(row)
    assert row["case"] == "B3 S200 8/2 D64 q2"
    assert (row["op"], row["batch"], row["kv_len"], row["q_len"]) == ("decode", 3, 200, 2)


def test_rates_follow_from_time_and_traffic():
    row = make_test_row(median=100.0)
    # 2 * 3 * 200 * 2 * 64 bytes in 100 us, under a ceiling of 4 TB/s.
    assert row["tb_per_s"] == pytest.approx(153_600 / 100 / 1e6, rel=1e-3)
    assert row["pct_of_ceiling"] == pytest.approx(100 * 153_600 / 1e8 / 4.0, rel=1e-3)
    assert (row["min_us"], row["median_us"], row["max_us"]) == (90.0, 100.0, 120.0)


def test_row_without_a_time():
    row = make_test_row(median=None, status="not installed")
    assert row["status"] == "not installed"
    assert row["median_us"] is row["tb_per_s"] is row["pct_of_ceiling"] is row["host_us"] is None


def test_wrong_output_has_no_number_for_its_error():
    row = make_test_row(median=None, status="wrong: 3 of 6 rows not finite or not written")
    json.dumps(row, allow_nan=False)


def test_rows_survive_a_file(tmp_path):
    rows = [make_test_row(), make_test_row("vllm_fa4", median=None, status="not installed")]
    path = tmp_path / "rows.json"
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert len(path.read_text().splitlines()) == len(rows) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"extra": 1}, "extra"),
        ({"fingerprint": "0" * 64}, "fingerprint is not that of its workload"),
        ({"kv_len": 4096}, "kv_len is 4096, not as in its workload"),
        ({"median_us": None}, "status 'ok', median_us None"),
        ({"status": "not installed"}, "status 'not installed', median_us 100.0"),
    ),
)
def test_bad_rows_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_row({**make_test_row(), **change})


def test_a_missing_field_is_refused():
    row = make_test_row()
    del row["rel_error"]
    with pytest.raises(ValueError, match="rel_error"):
        check_row(row)


def test_fingerprint_ignores_order_and_sees_every_value():
    workload = make_test_row()["workload"]
    assert fingerprint(dict(reversed(workload.items()))) == fingerprint(workload)
    prints = {fingerprint({**workload, name: "other"}) for name in workload}
    assert len(prints | {fingerprint(workload)}) == len(workload) + 1


def test_workload_covers_what_changes_a_time():
    prints = {
        make_test_row(case=case, machine=machine, method=method)["fingerprint"]
        for case, machine, method in (
            (SMALL, MACHINE, METHOD),
            (replace(SMALL, batch=4), MACHINE, METHOD),
            (replace(SMALL, kv_len=201), MACHINE, METHOD),
            (replace(SMALL, q_dtype="float16"), MACHINE, METHOD),
            (replace(SMALL, page_size=16), MACHINE, METHOD),
            (replace(SMALL, window=9), MACHINE, METHOD),
            (replace(SMALL, seed=6), MACHINE, METHOD),
            (SMALL, replace(MACHINE, gpu="Other GPU"), METHOD),
            (SMALL, replace(MACHINE, versions={"torch": "2.12.0"}), METHOD),
            (SMALL, MACHINE, {**METHOD, "timing": "eager"}),
        )
    }
    assert len(prints) == 10


def test_provenance_is_not_part_of_the_workload():
    other = replace(MACHINE, commit="f" * 16, command="other", date="2027-01-01T00:00:00+00:00")
    assert make_test_row(machine=other)["fingerprint"] == make_test_row()["fingerprint"]


def test_this_machine_can_be_described():
    machine = describe_machine("a command", commit="abc")
    assert machine.commit == "abc"
    assert machine.versions["torch"]
    assert machine.date.endswith("+00:00")
