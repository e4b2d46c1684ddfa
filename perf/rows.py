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

from cute_kernels.compile.key import fingerprint as package_fingerprint
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
OPTIONAL_FIELDS = (
    "clocks",
    "sources",
    "kernels",
    "ceilings",
    "loader_us",
    "pct_of_loader",
    "no_loader",
    "tuning",
    "standard_error_us",
)
MORE_FIGURES = ("loader_us", "pct_of_loader", "standard_error_us")
# How the configuration of a baseline came about.
TUNED, BY_HAND = "tuned for this shape", "set by hand"
NEAREST = "of the nearest tuned shape"
# Those that are text, and those that hold others.
LINES = ("provider", "case", "status", "commit", "command", "date")
LINES += ("clocks", "sources", "no_loader", "tuning")
NESTED = {"workload": dict, "versions": dict, "ceilings": dict, "kernels": (list, type(None))}
# What every workload says, whatever else describes it.
WORKLOAD_FIELDS = (*SHAPE_FIELDS, "timing", "rounds", "gpu", "driver", "versions")
# What rows of one process have in common.
RUN_FIELDS = ("date", "commit", "command", "sources")
UNKNOWN = "unknown"
DIRTY = "-dirty"
SOURCE_FOLDERS = ("cute_kernels", "perf")
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python", "vllm")


@dataclass(frozen=True)
class Machine:
    """Where and from what a result comes. clocks: the highest that the card may take. sources: of
    the code that ran, whatever the commit is said to be."""

    gpu: str
    driver: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    clocks: str = UNKNOWN
    sources: str = UNKNOWN


@dataclass(frozen=True)
class Measurement:
    """What one provider did on one case. status: OK, or why there is no time. kernels: what really
    ran on the device, the longest first; None where nobody looked. loader: loading the same keys
    and values alone, see `perf.baselines.loader`, or why there is no such time; None where nobody
    asked."""

    status: str
    rel_error: float | None = None
    rotating: Timing | None = None
    single: Timing | None = None
    host_us: float | None = None
    kernels: list[str] | None = None
    loader: Timing | str | None = None


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
        return UNKNOWN
    # Results are no part of what runs; those of the run itself would make all after it dirty.
    paths = (":(top)", ":(top,exclude)perf/results")
    return commit + (DIRTY if _output_of("git", "status", "--porcelain", "--", *paths) else "")


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
        return UNKNOWN
    return f"SM up to {values[0]} MHz, memory {values[1]} MHz, {values[2]} W"


def sources(root: Path | None = None) -> str:
    """SHA-256 of the kernels' and the measurements' source files, shortened: a checkout of the
    commit that a row names has them, or the row is of other code (`perf.origin`).

    Args:
        root: of a tree with both; the one that this runs from by default.
    """
    root = root or Path(__file__).parents[1]
    found = {name: package_fingerprint(root / name) for name in SOURCE_FOLDERS}
    return ", ".join(f"{name} {digest[:16]}" for name, digest in found.items())


def describe_machine(command: str, commit: str | None = None) -> Machine:
    """This process's machine; what cannot be found out is "unknown", "none" without a GPU."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = (_output_of(*query) or UNKNOWN).splitlines()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return Machine(
        gpu=gpu,
        driver=drivers[0],
        versions=_versions(),
        commit=commit or _commit(),
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        clocks=_clocks(),
        sources=sources(),
    )


def canonical(value: Any) -> str:
    """JSON that tells 64 from 64.0 and 0 from false, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(workload: Mapping[str, Any]) -> str:
    """SHA-256 of a workload's canonical JSON."""
    return hashlib.sha256(canonical(workload).encode()).hexdigest()


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one process made both rows."""
    return all(one.get(name, UNKNOWN) == other.get(name, UNKNOWN) for name in RUN_FIELDS)


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
        **{name: getattr(machine, name) for name in (*MACHINE_FIELDS, "clocks", "sources")},
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
    if isinstance(loader, str):
        return {"no_loader": loader}
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


def is_number(value: object) -> bool:
    """Whether it is a finite number, which true, "1" and NaN are not."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -1e300 < value < 1e300


def is_line(value: object) -> bool:
    """Whether it is text that fits into a line of a table."""
    return isinstance(value, str) and bool(value) and value.isprintable()


def check_row(row: Mapping[str, Any]) -> None:
    """Refuse a row that no comparison could trust.

    Raises:
        ValueError: missing or unknown fields, a workload that does not say enough, a fingerprint,
            shape or machine that is not that of the row's workload, a status and times that
            contradict each other, figures that are none, an unknown origin.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"result row: {row!r} is no JSON object")
    difference = (set(row) ^ set(ROW_FIELDS)) - set(OPTIONAL_FIELDS)
    if difference:
        raise ValueError(f"result row: missing or unknown fields {sorted(difference)}")
    where = f"result row {row['provider']!r}, {row['case']!r}"
    for name in LINES:
        if not is_line(row.get(name, UNKNOWN)):
            raise ValueError(f"{where}: {name} is {row[name]!r}, no line of text")
    for name, kinds in NESTED.items():
        if name in row and not isinstance(row[name], kinds):
            raise ValueError(f"{where}: {name} is {row[name]!r}")
    if not all(map(is_line, row.get("kernels") or ())):
        raise ValueError(f"{where}: kernels are {row['kernels']!r}")
    missing = [name for name in WORKLOAD_FIELDS if name not in row["workload"]]
    if missing:
        raise ValueError(f"{where}: its workload does not say {', '.join(missing)}")
    if row["fingerprint"] != fingerprint(row["workload"]):
        raise ValueError(f"{where}: the fingerprint is not that of its workload")
    for name in (*SHAPE_FIELDS, "gpu", "driver", "versions"):
        if canonical(row[name]) != canonical(row["workload"][name]):
            raise ValueError(f"{where}: {name} is {row[name]!r}, not as in its workload")
    _check_figures(row, where)


def _check_figures(row: Mapping[str, Any], where: str) -> None:
    """Times that are times, and only where the result was right."""
    if (row["status"] == OK) != (row["median_us"] is not None):
        raise ValueError(f"{where}: status {row['status']!r}, median_us {row['median_us']}")
    figures = {name: row.get(name) for name in (*MEASURED_FIELDS, *MORE_FIGURES)}
    figures |= {"read_ceiling_tb_per_s": row["read_ceiling_tb_per_s"], **row.get("ceilings", {})}
    for name, value in figures.items():
        # An error may be 0: then all bytes are those of the reference.
        if value is not None and not (is_number(value) and value >= 0 and (value or "err" in name)):
            raise ValueError(f"{where}: {name} is {value!r}, no figure")
    if row["status"] != OK:
        return
    absent = [name for name in ("median_us", "min_us", "max_us", "rel_error") if row[name] is None]
    if absent:
        raise ValueError(f"{where}: a time without {', '.join(absent)}")
    if not row["min_us"] <= row["median_us"] <= row["max_us"]:
        times = [row[name] for name in ("min_us", "median_us", "max_us")]
        raise ValueError(f"{where}: minimum, median and maximum are {times}")


def write_rows(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """A JSON list, one row a line, so that a diff of two results is readable.

    A file that is there is replaced at once: a run that is cut off leaves what it wrote before.
    """
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    partial = Path(f"{path}.partial")
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    partial.replace(path)
