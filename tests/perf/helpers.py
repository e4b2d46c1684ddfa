"""Small cases, machines and rows for the tests of perf/."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from perf.cases import DecodeCase
from perf.rows import OK, Machine, Measurement, make_row, make_workload
from perf.timing import Timing

SMALL = DecodeCase(3, 200, 8, 2, 64, q_len=2, seed=5)
CEILING = 4.0
MACHINE = Machine(
    gpu="Test GPU",
    driver="1.2",
    versions={"torch": "2.11.0", "triton": "3.6.0"},
    commit="0123456789abcdef",
    command="python -m perf.bench_decode",
    date="2026-01-02T03:04:05+00:00",
)
METHOD = {"timing": "cuda graph, median", "input_sets": 2, "calls_per_graph": 4, "rounds": 20}


def requires_module(name: str) -> None:
    """Skip the running test where an optional package is missing."""
    if find_spec(name) is None:
        pytest.skip(f"needs the package {name}")


def make_test_row(
    provider: str = "cute_kernels",
    case: DecodeCase = SMALL,
    median: float | None = 100.0,
    status: str = OK,
    machine: Machine = MACHINE,
    method: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A row of a provider; one without a time where `median` is None."""
    timing = None if median is None else Timing(median, 0.9 * median, 1.2 * median)
    host = None if median is None else 50.0
    measurement = Measurement(status, 1.7e-3, timing, timing, host)
    workload = make_workload(case, machine, method or METHOD)
    return make_row(provider, case, measurement, workload, machine, CEILING)
