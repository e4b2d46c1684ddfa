"""The loader beside the decode benchmark: where it is missing, and the bundle that has it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cute_kernels.compile.errors import CompilerUnavailableError, UnplannedCompileError
from cute_kernels.compile.plans import all_units
from perf import bundle, report
from perf.baselines import loader
from perf.cases import ALL_CASES
from perf.inputs import KVPool, make_input_sets
from perf.rows import OK, Measurement, make_row, make_workload
from perf.timing import Timing
from tests.perf.helpers import MACHINE, METHOD, SMALL


@pytest.mark.parametrize("error", (CompilerUnavailableError, UnplannedCompileError))
def test_a_loader_that_is_in_no_bundle_is_told(monkeypatch, error):
    """The case is timed without it, and its rows and the table say why."""

    def missing(problem, inputs):
        raise error("the loader is in no bundle")

    monkeypatch.setattr(loader.op, "can_run", lambda problem: None)
    monkeypatch.setattr(loader, "_call", missing)
    inputs = make_input_sets(SMALL, KVPool([SMALL], "cpu"), count=2)
    reason = loader.loader_calls(inputs)
    assert reason == "the loader is in no bundle; `python -m perf.bundle` makes it"
    timing = Timing(100.0, 90.0, 120.0)
    measurement = Measurement(OK, 1e-3, timing, timing, 5.0, loader=reason)
    workload = make_workload(SMALL, MACHINE, METHOD)
    row = make_row("cute_kernels", SMALL, measurement, workload, MACHINE, 4.0)
    assert row["no_loader"] == reason and "loader_us" not in row
    out = Console(width=200, file=StringIO())
    report.print_report([row], out)
    assert f"no loader, as at {SMALL.name}: {reason}" in out.file.getvalue()


def test_what_the_loader_cannot_load_has_none():
    """On a CPU: the kernel says so itself."""
    reason = loader.loader_calls(make_input_sets(SMALL, KVPool([SMALL], "cpu"), count=1))
    assert reason == "tensors are on cpu, the kernel runs on cuda"


def test_the_bundle_of_the_measurements_has_every_loader():
    units = bundle.loader_units()
    assert len(units) == len(set(units)) == 12
    assert not set(units) & set(all_units(["sm_90a"])) and set(units) <= set(bundle.units())
    for case in ALL_CASES:
        (inputs,) = make_input_sets(
            small := replace(case, batch=1, kv_len=64, lengths="uniform"),
            KVPool([small], "cpu"),
            count=1,
        )
        problem = loader.problem_of(inputs)
        assert loader.config_of(problem) in {unit.config for unit in units}
