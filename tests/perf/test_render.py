"""Pages and plots from result files: current, whole, honest about losses, refused when mixed."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from perf import bench_prefill, ceilings, committed, plots, render, sections, targets
from perf.cases import ALL_CASES, DECODE_CASES
from perf.rows import fingerprint, write_rows
from perf.sections import ResultFile
from tests.perf.helpers import MACHINE, SMALL, make_test_row, requires_module

BASELINE = "triton_baseline"
LATER = replace(MACHINE, driver="2", commit="fedcba987654321-dirty", date="2026-01-03T00:00:00")


@pytest.fixture
def copy(tmp_path):
    """A copy of what the renderer reads and writes."""
    for folder in (render.RESULTS, render.PLOTS):
        shutil.copytree(render.ROOT / folder, tmp_path / folder)
    for name in (render.DOCUMENT, render.README):
        shutil.copy(render.ROOT / name, tmp_path / name)
    return tmp_path


def run(root, *arguments):
    return CliRunner().invoke(render.main, ["--root", str(root), *arguments])


def newest(root, kind):
    return committed.find(root / render.RESULTS)[kind][0][0]


def decode_file(rows, date="2026-01-02"):
    return ResultFile(render.ROOT / f"{date}_decode_x.json", "decode", "decode_x", date, rows)


def cells(table, first):
    """Cells of the line of a table that begins with `first`."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_what_is_committed_is_what_the_results_give(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the check works without it
    done = run(render.ROOT, "--check")
    assert done.exit_code == 0, done.output


def test_a_remark_stands_beside_the_table_of_its_file(copy):
    path = newest(copy, "prefill").path
    (copy / render.RESULTS / "remarks.json").write_text(json.dumps({path.name: "Said of it."}))
    assert run(copy, "--check").exit_code == 1
    found = committed.read_results(copy)
    assert render.document(found).count("Remark: Said of it.") == 1
    assert render.readme_region(found).count("Remark: Said of it.") == 1


def test_another_number_in_a_result_makes_the_pages_and_a_plot_stale(copy):
    file = newest(copy, "prefill")
    row = file.rows[0]
    for name, factor in (("min_us", 2), ("median_us", 2), ("max_us", 2)):
        row[name] *= factor
    for name in ("tb_per_s", "pct_of_ceiling"):
        row[name] /= 2
    write_rows(file.path, file.rows)
    done = run(copy, "--check")
    assert done.exit_code == 1
    plot = f"{render.PLOTS}/{file.label}.svg"
    assert f"{render.DOCUMENT}, {render.README}, {plot}" in done.output


@pytest.mark.parametrize("name", (render.DOCUMENT, render.README))
def test_a_number_typed_by_hand_is_found_and_taken_back(copy, name):
    text = (copy / name).read_text(encoding="utf-8")
    case = newest(copy, "decode").rows[0]["case"]
    (copy / name).write_text(text.replace(f"| {case} | ", f"| {case} | 1", 1), encoding="utf-8")
    done = run(copy, "--check")
    assert done.exit_code == 1 and name in done.output
    done = run(copy)
    assert done.output == f"wrote {name}\n"
    assert (copy / name).read_text(encoding="utf-8") == text


def test_a_plot_that_no_result_asks_for_is_found_and_removed(copy):
    (copy / render.PLOTS / "old.svg").write_text("<svg/>", encoding="utf-8")
    assert "old.svg" in run(copy, "--check").output
    assert run(copy).output == f"removed {render.PLOTS}/old.svg\n"


def test_rows_that_may_not_be_compared_stop_everything(copy):
    file = newest(copy, "decode")
    group = [row for row in file.rows if row["case"] == file.rows[0]["case"]]
    (theirs,) = [row for row in group if row["provider"] == BASELINE]
    theirs["workload"]["page_order"] = "ascending"
    theirs["fingerprint"] = fingerprint(theirs["workload"])
    write_rows(file.path, file.rows)
    before = (copy / render.DOCUMENT).read_bytes()
    done = run(copy)
    assert done.exit_code == 1
    assert "the workloads differ in page_order: 'ascending' and 'random'" in done.output
    assert (copy / render.DOCUMENT).read_bytes() == before


def test_an_edited_workload_stops_everything(copy):
    file = newest(copy, "decode")
    file.rows[0]["workload"]["seed"] = 1
    write_rows(file.path, file.rows)
    assert "the fingerprint is not that of its workload" in run(copy).output


def test_every_case_of_every_shown_file_has_its_line():
    found, page = (
        committed.find(render.ROOT / render.RESULTS),
        render.texts(render.ROOT, committed.read_results(render.ROOT)),
    )
    for kind in ("decode", "prefill", "store"):
        for file, *_ in found[kind]:
            lines = page[render.DOCUMENT].split(f"### {file.label}, {file.date}")[1]
            table = next(part for part in lines.split("\n\n") if part.startswith("| "))
            cases = list(dict.fromkeys(row["case"] for row in file.rows))
            assert [line.split(" | ")[0][2:] for line in table.splitlines()[2:]] == cases
    for kind in ("decode", "prefill"):
        for row in found[kind][0][0].rows:
            assert f"| {row['case']} | " in page[render.README]


def test_a_loss_is_bold_a_tie_is_not_and_a_failure_is_named():
    cases = [replace(SMALL, batch=batch) for batch in (1, 2, 3, 4)]
    rows = [make_test_row(case=case) for case in cases]
    for case, median in zip(cases, (80.0, 99.5, 150.0), strict=False):
        rows.append(make_test_row(BASELINE, case, median))
    rows.append(make_test_row(BASELINE, cases[3], None, "wrong: NaN"))
    rows.append(make_test_row("vllm_fa4", cases[0], None, "not installed"))
    table = sections.timed_table(decode_file(rows), details=False)
    ratios = [cells(table, case.name)[-2:] for case in cases]
    assert ratios == [["80.0", "**0.80**"], ["99.5", "0.99"], ["150.0", "1.50"], ["wrong", ""]]
    assert sections.standing(decode_file(rows)) == (
        f"Against `{BASELINE}`, whose rows do not say how it was tuned: faster in 1 of 3 cases, "
        "within 1 % in 1, slower in 1."
        f" `vllm_fa4`: not installed. `{BASELINE}` at {cases[3].name}: wrong: NaN."
    )


def test_a_bar_in_a_reason_does_not_end_a_cell():
    assert sections.markdown(["a", "b"], [["x|y", ""]]) == "| a |\n| --- |\n| x\\|y |"


def test_a_case_where_we_failed_keeps_its_line():
    rows = [make_test_row(median=None, status="failed: out of memory"), make_test_row(BASELINE)]
    table = sections.timed_table(decode_file(rows), details=False)
    assert cells(table, SMALL.name) == [SMALL.name, "failed", "100.0"]


def test_the_newest_file_is_shown_beside_the_one_before(copy):
    results = copy / render.RESULTS
    for path in results.iterdir():
        path.unlink()
    other, gone, new_one = (
        replace(SMALL, **change) for change in ({"seed": 99}, {"batch": 9}, {"q_len": 3})
    )
    old = [make_test_row(median=120.0), make_test_row(case=gone)]
    new = [make_test_row(machine=LATER), make_test_row(case=new_one, machine=LATER)]
    write_rows(results / "2026-01-02_decode_x.json", old)
    write_rows(results / "2026-01-03_decode_x.json", new)
    page = render.document(committed.read_results(copy))
    assert "### decode_x, 2026-01-03" in page and "### decode_x, 2026-01-02" not in page
    between = page.split("and now, us:")[1]
    assert "| case | 0123456789ab, us | fedcba987654-dirty, us | times faster |" in between
    assert cells(between, SMALL.name) == [SMALL.name, "120.0", "100.0", "1.20"]
    assert "The machines differ in: driver: '1.2' and '2'." in between
    assert f"In one run only: {gone.name}, {new_one.name}." in between
    assert "driver 2; unknown; torch 2.11.0, triton 3.6.0; commit fedcba987654321-dirty" in page
    write_rows(results / "2026-01-02_decode_x.json", [make_test_row(median=120.0)])
    write_rows(results / "2026-01-03_decode_x.json", [make_test_row(case=other, machine=LATER)])
    page = render.document(committed.read_results(copy))
    assert f"Refused: {SMALL.name}: the workloads differ in seed: 5 and 99." in page


@pytest.mark.parametrize("day", ("2025-12-31", "2026-01-03", "2099-01-02"))
def test_a_file_is_not_newer_or_older_than_its_rows(copy, day):
    """The newest file is shown: one whose name is of another day would hide those to come."""
    write_rows(copy / render.RESULTS / f"{day}_decode_x.json", [make_test_row()])
    done = run(copy, "--check")
    assert done.exit_code == 1
    assert f"{day}_decode_x.json: a row of 2026-01-02" in done.output


def test_the_main_file_of_a_kind_goes_to_the_readme(copy):
    row = make_test_row(case=replace(SMALL, batch=77))
    write_rows(copy / render.RESULTS / "2026-01-02_decode_partial_h200.json", [row])
    assert newest(copy, "decode").label == "decode_h200"
    pages = render.texts(copy, committed.read_results(copy))
    assert row["case"] in pages[render.DOCUMENT] and row["case"] not in pages[render.README]


@pytest.mark.parametrize("text", ("none", render.BEGIN, render.END + render.BEGIN))
def test_a_readme_without_the_region_is_refused(text):
    with pytest.raises(ValueError, match="the README needs one"):
        render.with_region(text, "new")


def test_the_region_alone_is_replaced():
    text = f"a\n{render.BEGIN}\nold\n{render.END}\nb"
    assert render.with_region(text, "new") == f"a\n{render.BEGIN}\nnew\n{render.END}\nb"


def test_plots_carry_their_data_and_are_the_same_twice(tmp_path):
    requires_module("matplotlib")
    wanted = render.all_plots(committed.read_results(render.ROOT))
    for plot in wanted:
        plot.write(tmp_path)
        first = (tmp_path / plot.name).read_bytes()
        plot.write(tmp_path)
        assert (tmp_path / plot.name).read_bytes() == first
        assert plot.is_current(tmp_path)
        assert not plots.Plot(plot.name, {"other": 1}, plot.draw).is_current(tmp_path)
    assert {plot.name for plot in wanted} == {path.name for path in tmp_path.iterdir()}


def test_targets_name_cases_that_exist():
    names = {case.name for case in DECODE_CASES}
    assert names < set(targets.DECODE_US) < {case.name for case in ALL_CASES}
    assert set(targets.PREFILL_TFLOPS) <= {case.name for case in bench_prefill.CASES}


def h200_row(median, provider="cute_kernels", gpu=targets.GPU):
    return make_test_row(provider, DECODE_CASES[0], median, machine=replace(MACHINE, gpu=gpu))


def test_a_target_is_met_up_to_its_bound_on_its_card_by_us():
    assert targets.verdicts(h200_row(480.0), []) == [targets.Verdict("<= 480 us", True)]
    assert targets.verdicts(h200_row(480.1), []) == [targets.Verdict("<= 480 us", False)]
    assert targets.verdicts(h200_row(480.0, BASELINE), []) == []
    assert targets.verdicts(h200_row(480.0, gpu="Other GPU"), []) == []


def test_store_targets():
    rows = json.loads(newest(render.ROOT, "store").path.read_text(encoding="utf-8"))
    ours = {row["case"]: row for row in rows if row["provider"] == targets.OURS}
    decode, prefill = ours["fp8 T256 8x128"], ours["fp8 T4096 8x128"]
    assert [v.met for v in targets.verdicts({**decode, "median_us": 4.01}, rows)] == [False]
    best = 100 * prefill["tb_per_s"] / ceilings.share(prefill, rows)
    for share, met in ((80.1, True), (79.9, False)):
        row = {**prefill, "tb_per_s": best * share / 100, "pct_of_ceiling": share}
        assert [v.met for v in targets.verdicts(row, [row])] == [met]
    search, plain = ours["nvfp4_4over6 T1024 8x128"], ours["nvfp4 T1024 8x128"]
    for factor, met in ((1.04, True), (1.06, False)):
        row = {**search, "median_us": factor * plain["median_us"]}
        assert targets.verdicts(row, rows) == [targets.Verdict("<= 1.05 x nvfp4", met)]


def test_tflops_count_the_causal_pairs():
    row = make_test_row(case=replace(SMALL, batch=1, kv_len=4, q_len=4), median=1.0)
    assert targets.tflops(row) == pytest.approx(4 * 10 * 8 * 64 / 1e6)
