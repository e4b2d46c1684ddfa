"""Result rows: one JSON object per provider and case, and the fingerprint of its workload.

`workload` holds everything that must agree before two times may be put side by side; `fingerprint`
is the SHA-256 of its canonical JSON. The other fields are results and provenance.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from perf.cases import DecodeCase
from perf.timing import Timing
from perf.traffic import traffic

OK = "ok"
# Copied from the workload to the top of a row, where readers look for them.
SHAPE_FIELDS = (
    "op",
    "batch",
    "kv_len",
    "q_len",
    "num_q_heads",
    "num_kv_heads",
    "head_size",
    "kv_cache_dtype",
    "page_size",
    "window",
)
MEASURED_FIELDS = (
    "median_us",
    "min_us",
    "max_us",
    "tb_per_s",
    "pct_of_ceiling",
    "rel_error",
    "single_call_us",
    "host_us",
)
MACHINE_FIELDS = ("gpu", "driver", "versions", "commit", "command", "date")
ROW_FIELDS = (
    "provider",
    "case",
    *SHAPE_FIELDS,
    "status",
    *MEASURED_FIELDS,
    "read_ceiling_tb_per_s",
    *MACHINE_FIELDS,
    "workload",
    "fingerprint",
)
# Rows of before it was recorded lack it.
OPTIONAL_FIELDS = ("clocks", "kernels", "ceilings", "loader_us", "pct_of_loader")
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python", "vllm")


@dataclass(frozen=True)
class Machine:
    """Where and from what a result comes. clocks: the highest that the card may take."""

    gpu: str
    driver: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    clocks: str = "unknown"


@dataclass(frozen=True)
class Measurement:
    """What one provider did on one case. status: OK, or why there is no time. kernels: what really
    ran on the device, the longest first; None where nobody looked. loader: loading the same keys
    and values alone, see `perf.baselines.loader`; None where it was not timed."""

    status: str
    rel_error: float | None = None
    rotating: Timing | None = None
    single: Timing | None = None
    host_us: float | None = None
    kernels: list[str] | None = None
    loader: Timing | None = None


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str:
    commit = _output_of("git", "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("-dirty" if _output_of("git", "status", "--porcelain") else "")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _clocks() -> str:
    query = "clocks.max.sm,clocks.max.memory,power.limit"
    found = _output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    values = [value.strip() for value in (found or "").split("\n")[0].split(",")]
    if len(values) != 3:
        return "unknown"
    return f"SM up to {values[0]} MHz, memory {values[1]} MHz, {values[2]} W"


def describe_machine(command: str, commit: str | None = None) -> Machine:
    """This process's machine; what cannot be found out is "unknown", "none" without a GPU."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = (_output_of(*query) or "unknown").splitlines()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return Machine(
        gpu=gpu,
        driver=drivers[0],
        versions=_versions(),
        commit=commit or _commit(),
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        clocks=_clocks(),
    )


def fingerprint(workload: Mapping[str, Any]) -> str:
    """SHA-256 of a workload's canonical JSON."""
    text = json.dumps(workload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_workload(case: DecodeCase, machine: Machine, method: Mapping[str, Any]) -> dict[str, Any]:
    """Case, timing method and machine: all that must agree between comparable rows."""
    return {
        **case.workload(),
        **method,
        "gpu": machine.gpu,
        "driver": machine.driver,
        "versions": machine.versions,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    """None for what JSON cannot say: NaN of a wrong output."""
    return None if value is None or value != value else float(f"{value:.{digits}g}")


def make_row(
    provider: str,
    case: DecodeCase,
    measurement: Measurement,
    workload: Mapping[str, Any],
    machine: Machine,
    ceiling: float,
    moved_bytes: int | None = None,
    ceilings: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A result row; unmeasured figures are None. `ceiling` is the read ceiling in TB/s.

    `moved_bytes` are those that rates count; None for the K and V that an attention call reads.
    `ceilings` are all that this process measured, see `perf.traffic.device_ceilings`.
    """
    timing, single = measurement.rotating, measurement.single
    moved = traffic(case).kv if moved_bytes is None else moved_bytes
    rate = None if timing is None else moved / timing.median_us / 1e6
    row = {
        "provider": provider,
        "case": case.name,
        **{name: workload[name] for name in SHAPE_FIELDS},
        "status": measurement.status,
        "median_us": _rounded(timing and timing.median_us, 5),
        "min_us": _rounded(timing and timing.min_us, 5),
        "max_us": _rounded(timing and timing.max_us, 5),
        "tb_per_s": _rounded(rate, 4),
        "pct_of_ceiling": _rounded(rate and 100.0 * rate / ceiling, 4),
        "rel_error": _rounded(measurement.rel_error, 3),
        "single_call_us": _rounded(single and single.median_us, 5),
        "host_us": _rounded(measurement.host_us, 4),
        "read_ceiling_tb_per_s": _rounded(ceiling, 4),
        **{name: getattr(machine, name) for name in (*MACHINE_FIELDS, "clocks")},
        "kernels": measurement.kernels,
        "ceilings": {name: _rounded(value, 4) for name, value in (ceilings or {}).items()},
        **_of_the_loader(measurement),
        "workload": dict(workload),
        "fingerprint": fingerprint(workload),
    }
    check_row(row)
    return row


def _of_the_loader(measurement: Measurement) -> dict[str, float | None]:
    """What loading alone takes, and how much of its rate the provider has."""
    loader, timing = measurement.loader, measurement.rotating
    if loader is None or timing is None:
        return {}
    return {
        "loader_us": _rounded(loader.median_us, 5),
        "pct_of_loader": _rounded(100.0 * loader.median_us / timing.median_us, 4),
    }


def make_rows(
    case: DecodeCase,
    results: Mapping[str, Measurement],
    workload: Mapping[str, Any],
    machine: Machine,
    ceilings: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Rows of all providers of an attention case; the read ceiling is what shares are of."""
    read = ceilings["read_tb_per_s"]
    return [
        make_row(name, case, measurement, workload, machine, read, ceilings=ceilings)
        for name, measurement in results.items()
    ]


def check_row(row: Mapping[str, Any]) -> None:
    """Refuse a row that no comparison could trust.

    Raises:
        ValueError: missing or unknown fields, a fingerprint or shape fields that are not those of
            the row's workload, a status and times that contradict each other.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"result row: {row!r} is no JSON object")
    difference = (set(row) ^ set(ROW_FIELDS)) - set(OPTIONAL_FIELDS)
    if difference:
        raise ValueError(f"result row: missing or unknown fields {sorted(difference)}")
    where = f"result row {row['provider']!r}, {row['case']!r}"
    if row["fingerprint"] != fingerprint(row["workload"]):
        raise ValueError(f"{where}: the fingerprint is not that of its workload")
    for name in SHAPE_FIELDS:
        if row[name] != row["workload"].get(name):
            raise ValueError(f"{where}: {name} is {row[name]!r}, not as in its workload")
    if (row["status"] == OK) != (row["median_us"] is not None):
        raise ValueError(f"{where}: status {row['status']!r}, median_us {row['median_us']}")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a result file.

    Raises:
        ValueError: no JSON, a row that `check_row` refuses, two rows of one provider and case.
    """
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    seen = set()
    for row in rows:
        check_row(row)
        key = (row["provider"], row["case"])
        if key in seen:
            raise ValueError(f"two rows of {key[0]!r} for {key[1]!r}; a file holds one run")
        seen.add(key)
    return rows


def write_rows(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """A JSON list, one row a line, so that a diff of two results is readable.

    A file that is there is replaced at once: a run that is cut off leaves what it wrote before.
    """
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    partial = Path(f"{path}.partial")
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    partial.replace(path)
