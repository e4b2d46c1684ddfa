"""Result files that say what was not measured, or nothing: refused in one line with their name."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace

import pytest
from click.testing import CliRunner

from perf import (
    bench_indexer,
    bench_prefill,
    bench_serving,
    bench_store,
    committed,
    origin,
    render,
    targets,
    trace,
)
from perf.cases import ALL_CASES, DECODE_CASES
from perf.compare import main as compare_main
from perf.reading import BadFile, check_ceilings, check_one_run, read_json, read_rows
from perf.rows import Measurement, fingerprint, make_row, make_workload, write_rows
from perf.serving_estimate import Steps
from perf.timing import Timing
from perf.workloads import check_workload
from tests.perf.helpers import CEILING, MACHINE, METHOD, SMALL, make_test_row, requires_module

LATER = replace(MACHINE, date="2026-01-09T00:00:00+00:00")
DECODE, SERVING = "2026-11-30_decode_h200.json", "2026-11-30_serving_h200.json"
RESULTS = render.ROOT / render.RESULTS


def row_of(case, moved=None, error=0.0):
    """A row of ours as a benchmark makes it."""
    measured = Measurement("ok", error, Timing(100.0, 90.0, 110.0))
    workload = make_workload(case, MACHINE, METHOD)
    return make_row("cute_kernels", case, measured, workload, MACHINE, CEILING, moved)


@pytest.mark.parametrize("case", (*ALL_CASES, *bench_prefill.ALL_CASES), ids=lambda case: case.name)
def test_rows_of_attention_cases_are_accepted(case):
    check_workload(row_of(case, error=1.7e-3))
    check_workload(row_of(replace(case, one_scale=True), error=1.7e-3))


@pytest.mark.parametrize(
    "case", (*bench_store.CASES, *bench_indexer.CASES), ids=lambda case: case.name
)
def test_rows_of_writers_are_accepted(case):
    check_workload(row_of(case, case.moved_bytes))


@pytest.mark.parametrize("part", bench_serving.PARTS)
@pytest.mark.parametrize("dtype", bench_serving.DTYPES)
def test_rows_of_serving_steps_are_accepted(part, dtype):
    """Of new files, whose rates count the bytes of the mean step."""
    spec = trace.TraceSpec(requests=40)
    every = [step for step in trace.simulate(spec) if step.kind == trace.PLAIN]
    steps, sampled = Steps(every), Steps(trace.sample(every, trace.PLAIN, 3))
    config = (bench_serving.CONFIGS / "gemma-4-31b.json").read_text(encoding="utf-8")
    layers = trace.layers_of(json.loads(config), dtype, 2)
    facts = bench_serving.facts_of(spec, steps, sampled, layers, 40.0)
    cell = ("gemma-4-31b", 2, dtype, trace.PLAIN, part)
    case = bench_serving.ServingCase(*cell, tuple(facts.items()))
    row = row_of(case, round(statistics.fmean(steps.moved(layers, part))))
    check_workload(row)
    with pytest.raises(ValueError, match="tb_per_s is"):
        check_workload(row | {"median_us": 90.0})


def edited(**changes):
    row = make_test_row() | changes
    row["fingerprint"] = (
        fingerprint(row["workload"]) if "workload" in changes else row["fingerprint"]
    )
    return row


CONTRADICTIONS = {
    "a time without its rate": (
        {"median_us": 50.0, "min_us": 45.0},
        "tb_per_s is 0.001536; its times make it 0.003072",
    ),
    "a rate": ({"tb_per_s": 0.01536}, "tb_per_s is 0.01536"),
    "a share of the ceiling": ({"pct_of_ceiling": 99.0}, "pct_of_ceiling is 99.0"),
    "a share of the loader": (
        {"loader_us": 90.0, "pct_of_loader": 95.0},
        "pct_of_loader is 95.0; its times make it 90",
    ),
    "a share of no loader": ({"pct_of_loader": 95.0}, "one of loader_us and pct_of_loader without"),
    "a loader without its share": (
        {"loader_us": 95.0},
        "one of loader_us and pct_of_loader without",
    ),
    "nobody known": ({"provider": "cute_kernel"}, "provider is unknown; known: cute_kernels, "),
    "a ceiling": ({"ceilings": {"read_tb_per_s": 9.0}}, "in its ceilings 9.0"),
    "another case's name": (
        {"case": "B64 S8192 32/4 D512"},
        "its workload is 'B3 S200 8/2 D64 q2'",
    ),
    "a wrong result": ({"rel_error": 0.9}, "a time with an error of 0.9"),
    "a name of two lines": ({"case": "B3\n| B4 |"}, "no line of text"),
    "no workload": ({"workload": None}, "workload"),
    "a workload that is none": ({"workload": 3}, "workload"),
    "ceilings that are none": ({"ceilings": None}, "ceilings is None"),
    "kernels that are none": ({"kernels": 3}, "kernels is 3"),
    "clocks that are none": ({"clocks": 3}, "clocks is 3"),
    "a number beyond all": ({"median_us": 10**400}, "median_us is 1000"),
}


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_row_that_contradicts_itself_is_refused(tmp_path, change, message):
    write_rows(tmp_path / "r.json", [make_test_row()])
    assert read_rows(tmp_path / "r.json")
    write_rows(tmp_path / "r.json", [edited(**change)])
    with pytest.raises(BadFile, match=r"^r.json, row 1: [^\n]*$") as refused:
        read_rows(tmp_path / "r.json")
    assert message in str(refused.value)


BROKEN = {
    "null": "null",
    "a number": "3",
    "an object": "{}",
    "nothing": "",
    "no rows": "[]",
    "a row that is none": "[null]",
    "a row that is empty": "[{}]",
    "nested too deep": "[" * 200_000,
    "a key twice": '[{"a": 1, "a": 2}]',
    "half a character": '[{"a": "\\ud800"}]',
}
KIND_FILES = ("decode_x", "store_x", "serving_x", "load_x", "demo_x", "accuracy_x", "perplexity_x")


@pytest.mark.parametrize("label", KIND_FILES)
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_result_file_is_refused_by_every_reader(tmp_path, label, text):
    (tmp_path / f"2026-01-02_{label}.json").write_text(text, encoding="utf-8")
    with pytest.raises(BadFile, match=rf"^2026-01-02_{label}.json[^\n]*$"):
        committed.find(tmp_path)


@pytest.mark.parametrize("text", (b"\xff\xfe\x00abc", *map(str.encode, list(BROKEN.values())[:8])))
def test_compare_says_in_a_line_what_is_no_result_file(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_bytes(text)
    done = CliRunner().invoke(compare_main, [str(path)])
    assert isinstance(done.exception, SystemExit) and done.output.count("\n") == 1
    assert str(path) in done.output


def committed_rows(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def change(name, **changes):
    """The first row of a committed file that has all the fields, changed."""
    content = committed_rows(name)
    rows = content if isinstance(content, list) else content.get("rows", [content])
    row = next(row for row in rows if set(changes) <= set(row))
    row.update(changes)
    return content


FORGED = {
    "a change that is not the perplexities'": (
        "2026-11-30_perplexity_kv_cpu.json",
        {"change": -0.3},
        "the change is -0.3",
    ),
    "no change in the demo": ("2026-11-29_demo_cpu.json", {"change": 0.0}, "the change is 0.0"),
    "an error that meets every target": (
        "2026-11-29_demo_cpu.json",
        {"change_standard_error": 5.0},
        "change_standard_error is 5.0",
    ),
    "a first call": ("2026-11-30_load_h200.json", {"first_call_extra_ms": 0.0}, "extra_ms is 0.0"),
    "a load that takes no time": ("2026-11-30_load_h200.json", {"load_ms": 0}, "load_ms is 0"),
}


@pytest.mark.parametrize(("name", "changes", "message"), FORGED.values(), ids=FORGED)
def test_derived_figures_of_other_kinds_are_their_files_own(tmp_path, name, changes, message):
    write(tmp_path, name, committed_rows(name))
    assert committed.find(tmp_path)
    write(tmp_path, name, change(name, **changes))
    with pytest.raises(BadFile, match=f"^{name}, row 1: .*{message}"):
        committed.find(tmp_path)


def serving(**changes):
    """The committed serving rows, with the nvfp4 ones' workload changed."""
    rows = committed_rows(SERVING)
    for row in rows:
        if row["kv_cache_dtype"] == "nvfp4":
            row["workload"] |= changes
            row["fingerprint"] = fingerprint(row["workload"])
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    (
        (serving(kv_capacity_tokens=999), "kv_capacity_tokens is 999; its workload makes it"),
        (serving(kv_gib=80.0), "kv_capacity_tokens is"),
        (serving(steps_measured=1), "'steps_measured': 1}, of others"),
        (serving(steps_in_trace=7), "steps_in_trace is 7"),
        (
            [row for row in serving() if row["op"] != "serving_store"],
            "has serving_attention alone",
        ),
    ),
)
def test_serving_rows_are_of_one_cache_one_trace_and_whole(tmp_path, rows, message):
    write(tmp_path, SERVING, rows)
    with pytest.raises(BadFile, match=f"^{SERVING}.*{message}"):
        committed.find(tmp_path)


MEASURED = {"read_tb_per_s": CEILING, "copy_tb_per_s": 3.0}
OTHERS = {
    "clocks": ({"clocks": "SM up to 1 MHz"}, "rows of two runs, which differ in clocks"),
    "no ceilings": ({"ceilings": {}}, "its ceilings are not those of the other rows"),
    "another copy": ({"ceilings": MEASURED | {"copy_tb_per_s": 4.0}}, "its ceilings are not those"),
    "another read": (
        {
            "read_ceiling_tb_per_s": 2 * CEILING,
            "ceilings": MEASURED | {"read_tb_per_s": 2 * CEILING},
            "pct_of_ceiling": make_test_row()["pct_of_ceiling"] / 2,
        },
        "its ceilings are not those of the other rows",
    ),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS)
def test_a_row_beside_other_clocks_or_ceilings_is_refused(tmp_path, change, message):
    cases = [replace(SMALL, batch=batch) for batch in (1, 2, 3)]
    rows = [make_test_row(case=case) | {"ceilings": MEASURED} for case in cases]
    write_rows(tmp_path / "r.json", rows)
    assert read_rows(tmp_path / "r.json")
    write_rows(tmp_path / "r.json", [*rows[:2], rows[2] | change])
    with pytest.raises(BadFile, match=rf"^r.json: [^\n]*{message}"):
        read_rows(tmp_path / "r.json")


@pytest.mark.parametrize("change", ({"ceilings": {}}, {"read_ceiling_tb_per_s": 2 * CEILING}))
def test_rows_beside_copies_have_the_ceilings_of_their_case(change):
    case, other = bench_store.CASES[:2]
    rows = [
        row_of(each, each.moved_bytes) | {"ceilings": {"memcpy": 1.0}} for each in (case, other)
    ]
    rows[1] |= {"ceilings": {"memcpy": 2.0}, "read_ceiling_tb_per_s": 2.0}
    check_ceilings("r.json", rows)
    with pytest.raises(BadFile, match="^r.json: .*its ceilings are not those"):
        check_ceilings("r.json", [*rows, rows[0] | {"provider": "triton_baseline"} | change])


def test_rows_of_two_runs_make_no_file_and_meet_no_target():
    rows = [row_of(case, case.moved_bytes) for case in bench_store.CASES]
    ours = {row["case"]: row for row in rows}
    search = ours["nvfp4_4over6 T1024 8x128"]
    assert len(targets.verdicts(search, rows)) == 1
    ours["nvfp4 T1024 8x128"]["date"] = LATER.date
    assert targets.verdicts(search, rows) == []
    with pytest.raises(BadFile, match="r.json: rows of two runs, which differ in date"):
        check_one_run("r.json", rows)


def test_a_newer_file_with_fewer_cases_is_refused_or_told(tmp_path):
    old = [make_test_row(case=replace(SMALL, batch=batch)) for batch in (1, 2, 3)]
    later = replace(MACHINE, date="2026-01-03T00:00:00+00:00")
    folder = tmp_path / render.RESULTS
    folder.mkdir(parents=True)
    new = "2026-01-03_decode_x.json"
    write_rows(folder / "2026-01-02_decode_x.json", old)
    write_rows(folder / new, [make_test_row(machine=later)])
    lacks = "1 cases or rows, 2026-01-02_decode_x.json has 3"
    with pytest.raises(BadFile, match=f"{new}: {lacks}"):
        committed.find(folder)
    (folder / new).rename(folder / "2026-01-03_decode_part_x.json")
    assert len(committed.find(folder)["decode"]) == 2
    (folder / "2026-01-03_decode_part_x.json").rename(folder / new)
    write(folder, "remarks.json", {new: "The others were dropped."})
    results = committed.read_results(tmp_path)
    for page in (render.document(results), render.readme_region(results)):
        assert f"**This file has {lacks}.** Remark: The others were dropped." in page


@pytest.mark.parametrize(
    "remarks", ({"2026-01-02_decode.json": "of no file"}, {DECODE: 3}, {DECODE: "a\nb"}, 3, None)
)
def test_a_remark_is_a_line_about_a_file(tmp_path, remarks):
    write(tmp_path, DECODE, [])
    write(tmp_path, "remarks.json", remarks)
    with pytest.raises(BadFile, match=r"^remarks.json: [^\n]*$"):
        committed.read_remarks(tmp_path)


def test_keys_are_read_once_and_text_can_be_written(tmp_path):
    (tmp_path / "r.json").write_text('{"a": {"b": 1, "b": 2}}', encoding="utf-8")
    with pytest.raises(BadFile, match="r.json: given twice: b"):
        read_json(tmp_path / "r.json")


def test_every_committed_file_is_read_and_every_kind_shown():
    found = committed.find(RESULTS)
    assert set(found) == set(committed.READERS) == {kind.name for kind in render.KINDS}
    assert all(found[kind] for kind in ("decode", "prefill", "store", "serving", "accuracy"))


RUN = {"commit": "a" * 40, "sources": "cute_kernels 1, perf 2"}


@pytest.mark.parametrize(
    ("row", "text"),
    (
        (RUN, ""),
        ({"commit": "b" * 40}, ""),
        (RUN | {"sources": "cute_kernels 1, perf 3"}, "perf 3, the commit's perf 2"),
        (RUN | {"commit": "b" * 40}, "It is not known whether"),
        (RUN | {"commit": f"{'a' * 40}-dirty"}, "There were changes that commit aaaaaaaaaaaa does"),
    ),
)
def test_rows_of_other_sources_than_their_commits_say_so(row, text):
    told = origin.told([row, row], {RUN["commit"]: RUN["sources"]})
    assert text in told and bool(text) == bool(told) and told.count("commit") <= 2


def test_the_sources_of_a_commit_are_those_of_its_tree(tmp_path):
    """As in a repository of two files; what it does not know is kept as it was recorded."""
    import subprocess

    from perf.rows import sources

    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("cute_kernels/a.py", "perf/b.py", "perf/results/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "x")):
        subprocess.run(("git", "-C", tmp_path, *words), check=True)
    head = ("git", "-C", str(tmp_path), "rev-parse", "HEAD")
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "perf/results/c.py").unlink()
    ran = sources(tmp_path)
    assert origin.sources_of(tmp_path, commit) == ran
    assert origin.sources_of(tmp_path, "f" * 40) is None
    assert origin.sources_of(tmp_path, "--output=x") is None
    rows = [{"commit": name, "sources": ran} for name in (commit, "f" * 40, "e" * 40)]
    write(tmp_path, origin.FILE, {"e" * 40: "kept", commit: "old"})
    known = origin.commits_of(tmp_path, tmp_path, rows)
    assert known == {commit: ran, "e" * 40: "kept"}
    (tmp_path / "perf/b.py").write_text("changed", encoding="utf-8")
    assert sources(tmp_path) != ran


def test_a_drawing_that_was_changed_is_found(tmp_path):
    requires_module("matplotlib")
    rows = [make_test_row(case=DECODE_CASES[0])]
    file = committed.ResultFile(tmp_path / "x.json", "decode", "decode_x", "2026-01-02", rows)
    plot = render.plots.decode(file)
    plot.write(tmp_path)
    path = tmp_path / plot.name
    text = path.read_text(encoding="utf-8")
    assert plot.is_current(tmp_path) and "100.0 us" in text
    for other in (text.replace("100.0 us", "10.0 us"), f"<svg><!--{plot.digest}--></svg>"):
        path.write_text(other, encoding="utf-8")
        assert not plot.is_current(tmp_path)
    # Another matplotlib draws otherwise; what it drew is told by the digest of its data.
    path.write_text(text.replace(">Matplotlib ", ">Matplotlib 0."), encoding="utf-8")
    assert plot.is_current(tmp_path)


def test_render_says_in_a_line_what_is_in_its_way(tmp_path):
    for name in (render.DOCUMENT, render.README, f"{render.RESULTS}/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(RESULTS / "2026-11-30_decode_sdpa_h200.json", tmp_path / render.RESULTS)

    def run():
        done = CliRunner().invoke(render.main, ["--root", str(tmp_path), "--check"])
        assert isinstance(done.exception, SystemExit) and done.output.count("\n") == 1
        return done.output

    assert "README.md: " in run()
    shutil.copy(render.ROOT / render.README, tmp_path)
    (tmp_path / render.PLOTS / "sub").mkdir(parents=True)
    assert "sub is a folder, no plot" in run()
