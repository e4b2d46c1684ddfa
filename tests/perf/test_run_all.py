"""One command for all measurements: its commands are ones, failures stay apart and are told."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perf import committed, render, run_all
from perf.bench_store import StoreCase
from perf.providers import select_providers
from perf.rows import Measurement, make_row, make_workload
from perf.timing import Timing
from tests.perf.helpers import MACHINE, METHOD
from tests.requires import requires_module


def write_like_committed(file, rows=None):
    """A whole file of the kind, as far as it is read: a copy of a committed one."""
    kind = file.stem.split("_")[1]
    found = committed.find(run_all.ROOT / committed.RESULTS)[kind]
    like = next((each for each, *_ in found if each.label == file.stem[11:]), found[0][0])
    text = like.path.read_text(encoding="utf-8")
    if rows is not None:
        text = json.dumps(json.loads(text)[:rows])
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def calls(monkeypatch):
    """What would be run, and its exit status by module (0 unless set). Files are written."""
    found, statuses, limits = [], {}, {}

    def fake(command, limit=None, bundle=None):
        found.append((command, bundle))
        limits[command[2]] = limit
        if command[2] not in ("perf.bundle", "perf.compare"):
            write_like_committed(Path(next(word for word in command if word.endswith(".json"))))
        return statuses.get(command[2], "")

    monkeypatch.delenv(run_all.BUNDLE_VARIABLE, raising=False)

    monkeypatch.setattr(run_all, "run", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return found, statuses, limits


def invoke(*arguments):
    return CliRunner().invoke(run_all.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("what", run_all.MEASUREMENTS, ids=lambda what: what.name)
def test_every_command_is_one(what, tmp_path):
    if what.models:
        requires_module("transformers")
    text = tmp_path / "text"
    text.touch()
    command = what.command(tmp_path / "r.json", run_all.Given("abc", tmp_path, text, text))
    main = importlib.import_module("demo.cli" if what.module == "demo" else what.module).main
    with main.make_context(what.module, command[3:]) as context:
        select_providers(tuple(context.params.get("providers", ())))
        assert (context.params.get("commit") == "abc") == what.commit
        assert (context.params.get("model_dir") == tmp_path) == what.models
        assert (context.params.get("text_path") == text) == what.text
        assert (context.params.get("ids_path") == text) == what.text
    assert what.kind in {kind.name for kind in render.KINDS}


@pytest.mark.parametrize("what", run_all.MEASUREMENTS, ids=lambda what: what.name)
def test_every_case_that_is_asked_for_is_one(what, tmp_path):
    command = what.command(tmp_path / "r.json", run_all.Given())
    if any(word.startswith("--cases") for word in command):
        main = importlib.import_module(what.module).main
        listed = CliRunner().invoke(main, [*command[3:], "--list"])
        asked = sum(word.startswith("--cases") for word in command)
        assert listed.exit_code == 0 and len(listed.output.splitlines()) >= asked


def test_each_part_fits_into_a_session():
    """Of four minutes; the names of parts and their files are theirs alone, or one of a kind's."""
    assert all(what.limit <= 240 for what in run_all.MEASUREMENTS)
    names = [what.name for what in run_all.MEASUREMENTS]
    assert len(set(names)) == len(names)
    labels = [what.label for what in run_all.MEASUREMENTS if not what.part]
    assert len(set(labels)) == len(labels)
    assert {what.kind for what in run_all.MEASUREMENTS if what.part} == {"accuracy"}
    done = invoke("--list")
    assert [line.split()[0] for line in done.output.splitlines()] == names


def test_all_is_run_into_dated_files_and_times_are_compared(calls, tmp_path):
    done = invoke("--out", tmp_path, "--commit", "abc")
    assert done.exit_code == 0, done.output
    modules = [command[2] for command, _ in calls[0]]
    others = ("perf.compare", "perf.bundle")
    assert [m for m in modules if m not in others] == [what.module for what in run_all.MEASUREMENTS]
    compared = [command for command, _ in calls[0] if command[2] == "perf.compare"]
    assert {Path(command[3]).parent for command in compared} == {run_all.ROOT / render.RESULTS}
    for command in compared:
        old, new = (Path(name).stem.partition("_")[2] for name in command[3:5])
        assert old == new and "gpu" not in command
    build = calls[0][0][0]
    assert build[2:] == ["perf.bundle", "--out", str(tmp_path / run_all.BUNDLE)]
    ours = [bundle for command, bundle in calls[0] if command[2] not in others]
    assert set(ours) == {tmp_path / run_all.BUNDLE}
    label = next(command[-3] for command, _ in calls[0] if command[2] == "perf.bench_store")
    assert label.endswith("_store_h200.json") and label.startswith(str(tmp_path))


def test_one_failure_stops_nothing_and_is_told(calls, tmp_path):
    found, statuses, _ = calls
    statuses |= {"perf.bench_decode": "exit status 1", "perf.compare": "exit status 1"}
    done = invoke("--out", tmp_path)
    assert done.exit_code == 1
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert "failed: exit status 1; 216 rows are in unchecked/" in lines["decode"]
    assert lines["accuracy_smollm2"].endswith("ok")
    assert "not as 2026-" in lines["store"]
    written = {path.name.split("_", 1)[1] for path in tmp_path.glob("*.json")}
    assert "store_h200.json" in written and "decode_h200.json" not in written
    assert [c[2] for c, _ in found].count("perf.bench_serving") == 1


def test_a_bundle_that_cannot_be_built_is_told(calls, tmp_path):
    calls[1]["perf.bundle"] = "exit status 1"
    done = invoke("--out", tmp_path, "--only", "load")
    assert done.exit_code == 1 and "the bundle could not be built" in done.output
    assert len(calls[0]) == 1


def test_a_bundle_that_is_there_is_taken(calls, tmp_path, monkeypatch):
    def bundles(*arguments):
        calls[0].clear()
        assert invoke("--out", tmp_path / "new", "--only", "load", *arguments).exit_code == 0
        return [(command[2], bundle) for command, bundle in calls[0]]

    assert bundles("--bundle", tmp_path) == [("perf.bench_load", tmp_path)]
    monkeypatch.setenv(run_all.BUNDLE_VARIABLE, "one:other")  # passed on as it is
    assert bundles() == [("perf.bench_load", None)]
    assert bundles("--bundle", tmp_path) == [("perf.bench_load", tmp_path)]


def test_what_does_not_fit_into_the_time_is_told(calls, tmp_path, monkeypatch):
    now = [1000.0]

    def slow(command, limit=None, bundle=None):
        if command[2] == "perf.compare":
            return ""
        calls[0].append((command, bundle))
        calls[2][command[2]] = limit
        write_like_committed(Path(command[-1]))
        now[0] += 100 if command[2] == "perf.bench_decode" else 15
        return ""

    monkeypatch.setattr(run_all, "run", slow)
    monkeypatch.setattr(run_all.time, "monotonic", lambda: now[0])
    done = invoke("--out", tmp_path, "--bundle", tmp_path, "--total", 120)
    assert done.exit_code == 1
    assert [command[2] for command, _ in calls[0]] == ["perf.bench_decode", "perf.bench_serving"]
    assert calls[2] == {"perf.bench_decode": 120, "perf.bench_serving": 20}
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert lines["prefill"].endswith("not run: no time left")
    assert lines["serving"].endswith("ok")


def results_in(folder, monkeypatch):
    """perf/results of a tree, with a store file of today, which is returned."""
    results = folder / committed.RESULTS
    results.mkdir(parents=True)
    monkeypatch.setattr(run_all, "ROOT", folder)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    file = results / f"{today}_store_h200.json"
    file.write_text(json.dumps([store_row("fp8"), store_row("nvfp4")]), encoding="utf-8")
    return file


def store_row(dtype, factor=1.0):
    case = StoreCase(4096, dtype)
    timing = Timing(*(factor * us for us in (100.0, 90.0, 110.0)))
    measured, workload = Measurement("ok", 0.0, timing), make_workload(case, MACHINE, METHOD)
    return make_row("cute_kernels", case, measured, workload, MACHINE, 4.0, case.moved_bytes)


WHOLE = [store_row("fp8", 2.0), store_row("nvfp4", 2.0)]


@pytest.mark.parametrize(
    ("rows", "status", "agrees", "problem"),
    (
        (WHOLE, "", True, ""),
        (WHOLE, "", False, "not as {name}, which stays; 2 rows are in unchecked/{name}"),
        (WHOLE[:1], "", True, "not whole: 1 cases or rows, {name} has 2; 1 rows are in unchecked/"),
        (WHOLE, "exit status 1", True, "failed: exit status 1; 2 rows are in unchecked/{name}"),
        ([], "", True, "not whole: {name}: no list of rows; 0 rows are in unchecked/{name}"),
    ),
)
def test_a_committed_file_stays_until_a_whole_one_agrees(
    calls, tmp_path, monkeypatch, rows, status, agrees, problem
):
    """Also one of the same day: it alone is what the new one can be compared with."""
    file = results_in(tmp_path, monkeypatch)
    before, compared = file.read_bytes(), []

    def run(command, limit=None, bundle=None):
        if command[2] == "perf.compare":
            compared.append(command[3:5])
            assert file.read_bytes() == before
            return "" if agrees else "exit status 1"
        Path(command[-1]).write_text(json.dumps(rows), encoding="utf-8")
        return status

    monkeypatch.setattr(run_all, "run", run)
    done = invoke("--out", file.parent, "--bundle", tmp_path, "--only", "store")
    unchecked = file.parent / run_all.UNCHECKED / file.name
    assert done.exit_code == bool(problem) and problem.format(name=file.name) in done.output
    assert (file.read_bytes() == before) == unchecked.exists() == bool(problem)
    assert all(pair == [str(file), str(unchecked)] for pair in compared)
    assert bool(compared) == (rows == WHOLE and not status)


def test_a_part_adds_to_what_is_there_and_takes_nothing_from_it(calls, tmp_path, monkeypatch):
    """Of a model that failed the rows of before stay, and those of the others."""
    found = committed.find(run_all.ROOT / committed.RESULTS)["accuracy"]
    rows = next(file.rows for file, *_ in found if file.label == "accuracy_h200")

    def run(command, limit=None, bundle=None):
        path, model = Path(command[-1]), command[command.index("--model") + 1]
        there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        there += [row for row in rows if row["model"] == model]
        path.write_text(json.dumps(there), encoding="utf-8")
        return "exit status 1" if model == "gemma3-270m" else ""

    monkeypatch.setattr(run_all, "run", run)
    names = [f"--only=accuracy_{name}" for name in ("smollm2", "gemma3")]
    done = invoke("--out", tmp_path, "--bundle", tmp_path, *names)
    assert done.exit_code == 1 and "failed: exit status 1" in done.output
    (file,) = tmp_path.glob("*.json")
    assert {row["model"] for row in json.loads(file.read_text(encoding="utf-8"))} == {"smollm2"}
    assert [p.name.split("_")[2] for p in (tmp_path / run_all.UNCHECKED).iterdir()] == ["gemma3"]


def test_a_dry_run_runs_nothing(calls, tmp_path):
    done = invoke("--out", tmp_path / "new", "--dry-run", "--only", "store")
    assert done.exit_code == 0 and not calls[0] and not (tmp_path / "new").exists()
    assert done.output.count("perf.bench_store") == done.output.count("\n") == 1


def test_a_dry_run_says_what_may_not_begin(calls, tmp_path):
    done = invoke("--out", tmp_path, "--dry-run", "--total", 200)
    lines = done.output.splitlines()
    assert ["if those before leave time" in line for line in lines[:3]] == [False, False, True]


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "need a CUDA device" in invoke("--out", tmp_path).output


def test_time_is_bounded(calls, tmp_path):
    limits = calls[2]
    invoke("--out", tmp_path, "--only", "store", "--only", "load")
    own = {what.module: what.limit for what in run_all.MEASUREMENTS}
    assert limits["perf.bench_store"] == own["perf.bench_store"]
    assert limits["perf.bundle"] == run_all.BUNDLE_LIMIT
    invoke("--out", tmp_path, "--only", "store", "--limit", 7)
    assert limits["perf.bench_store"] == 7
    invoke("--out", tmp_path, "--only", "store", "--limit", 7000)
    assert limits["perf.bench_store"] == own["perf.bench_store"]


def test_a_process_and_its_children_are_ended_in_time(tmp_path):
    """It starts one that would write a file later, and writes rows until it is ended."""
    late, rows = tmp_path / "late", tmp_path / "rows.json"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(late)!r}).touch()"
    code = (
        "import json, pathlib, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(rows)!r}).write_text(json.dumps([1, 2]))\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    assert run_all.run([sys.executable, "-c", code], 2) == "not done after 2 s"
    assert time.monotonic() - start < 20
    assert run_all.rows_in(rows) == f"2 rows are in {tmp_path.name}/rows.json"
    time.sleep(4)
    assert not late.exists()


@pytest.mark.parametrize(
    ("code", "problem"),
    (
        ("", ""),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    ),
)
def test_how_a_process_ended_is_told(code, problem):
    assert run_all.run([sys.executable, "-c", code], 60) == problem


def test_what_a_failure_left_is_told(tmp_path):
    file = tmp_path / "r.json"
    assert run_all.rows_in(file) == "no rows"
    file.write_text("{", encoding="utf-8")
    assert run_all.rows_in(file) == "no rows"
    file.write_text("{}", encoding="utf-8")
    assert run_all.rows_in(file) == f"its file is in {tmp_path.name}/r.json"
