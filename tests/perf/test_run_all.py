"""One command for all measurements: its commands are ones, failures stay apart and are told."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perf import render, run_all
from perf.providers import select_providers
from tests.perf.helpers import make_test_row
from tests.requires import requires_module


@pytest.fixture
def calls(monkeypatch):
    """What would be run, and its exit status by module (0 unless set). Files are written."""
    found, statuses, limits = [], {}, {}

    def fake(command, limit=None, bundle=None):
        found.append((command, bundle))
        limits[command[2]] = limit
        if command[2] not in ("perf.bundle", "perf.compare"):
            Path(next(word for word in command if word.endswith(".json"))).touch()
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
    assert "failed: exit status 1; no rows" in lines["decode"]
    assert lines["accuracy_smollm2"].endswith("ok")
    assert "not as 2026-" in lines["store"] and "not as 2026-" in lines["decode"]
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
        calls[0].append((command, bundle))
        calls[2][command[2]] = limit
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


def test_a_file_is_not_compared_with_itself(tmp_path, monkeypatch):
    folder = tmp_path / render.RESULTS
    folder.mkdir(parents=True)
    for date in ("2026-01-01", "2026-01-02"):
        (folder / f"{date}_decode_x.json").write_text(json.dumps([make_test_row()]), "utf-8")
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    new = folder / "2026-01-02_decode_x.json"
    assert run_all.committed("decode", "decode_x", new).name == "2026-01-01_decode_x.json"
    assert run_all.committed("decode", "decode_y", new) is None
    shutil.rmtree(folder)
    folder.mkdir()
    assert run_all.committed("decode", "decode_x", new) is None


def test_a_dry_run_runs_nothing(calls, tmp_path):
    done = invoke("--out", tmp_path / "new", "--dry-run", "--only", "store")
    assert done.exit_code == 0 and not calls[0] and not (tmp_path / "new").exists()
    assert done.output.count("perf.bench_store") == done.output.count("\n") == 1


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
    assert run_all.rows_in(rows) == "2 rows are there"
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
    assert run_all.rows_in(file) == "its file is there"
