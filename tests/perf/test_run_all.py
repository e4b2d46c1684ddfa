"""One command for all measurements: its commands are ones, failures stay apart and are told."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perf import render, run_all
from tests.perf.helpers import make_test_row
from tests.requires import requires_module


@pytest.fixture
def calls(monkeypatch):
    """What would be run, and its exit status by module (0 unless set)."""
    found, statuses = [], {}

    def fake(command, bundle=None):
        found.append((command, bundle))
        return statuses.get(command[2], 0)

    monkeypatch.setattr(run_all, "run", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return found, statuses


def invoke(*arguments):
    return CliRunner().invoke(run_all.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("what", run_all.MEASUREMENTS, ids=lambda what: what.kind)
def test_every_command_is_one(what, tmp_path):
    if what.models:
        requires_module("transformers")
    command = what.command(tmp_path / "r.json", "abc", tmp_path)
    main = importlib.import_module(what.module).main
    main.make_context(what.module, command[3:]).close()
    assert what.kind in {kind.name for kind in render.KINDS}


def test_all_is_run_into_dated_files_and_times_are_compared(calls, tmp_path):
    done = invoke("--out", tmp_path, "--commit", "abc")
    assert done.exit_code == 0, done.output
    modules = [command[2] for command, _ in calls[0]]
    assert [m for m in modules if m.startswith("perf.") and m != "perf.compare"] == [
        what.module for what in run_all.MEASUREMENTS
    ]
    compared = [command for command, _ in calls[0] if command[2] == "perf.compare"]
    assert {Path(command[3]).parent for command in compared} == {run_all.ROOT / render.RESULTS}
    for command in compared:
        old, new = (Path(name).stem.partition("_")[2] for name in command[3:5])
        assert old == new and "gpu" not in command
    (build,) = [command for command, _ in calls[0] if "cute_kernels.compile.build" in command]
    (load,) = [bundle for command, bundle in calls[0] if command[2] == "perf.bench_load"]
    assert str(load) == build[-1] == str(tmp_path / run_all.BUNDLE)
    label = next(command[-3] for command, _ in calls[0] if command[2] == "perf.bench_store")
    assert label.endswith("_store_h200.json") and label.startswith(str(tmp_path))


def test_one_failure_stops_nothing_and_is_told(calls, tmp_path):
    found, statuses = calls
    statuses |= {"perf.bench_decode": 1, "perf.compare": 1}
    done = invoke("--out", tmp_path)
    assert done.exit_code == 1
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert lines["decode"].endswith("failed") and lines["accuracy"].endswith("ok")
    assert "not as 2026-" in lines["store"]
    assert [c[2] for c, _ in found].count("perf.bench_serving") == 1


def test_a_bundle_that_cannot_be_built_is_told(calls, tmp_path):
    calls[1]["cute_kernels.compile.build"] = 1
    done = invoke("--out", tmp_path, "--only", "load")
    assert done.exit_code == 1 and "the bundle could not be built" in done.output


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
