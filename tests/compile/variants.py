"""Compile every variant of the decode kernel for sm_90a, without a GPU, and say what came out.

    python -m tests.compile.variants

records the resource usage in perf/results/resources_sm90a.json. The DSL is loaded by the worker
processes only: it is heavy, and a crash of the compiler must not take the tests with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cute_kernels.attention.decode_sm90.config import (
    TILE_TOKENS,
    DecodeConfig,
    make_config,
    support_table,
)
from tests.compile import cubin

RECORD = Path(__file__).resolve().parents[2] / "perf" / "results" / "resources_sm90a.json"
TARGET = "sm_90a"
WORKERS = 2
# Asks ptxas for its remarks ("setmaxnreg ignored", "wgmma serialized"); twice as slow or worse.
REMARKS = " --remark-filter=ptxas --ptxas-options '-v'"
COLUMNS = ("registers", "stack_bytes", "local_memory_instructions", "shared_bytes", "threads")

Report = dict[str, Any]


def wants_remarks(config: DecodeConfig) -> bool:
    """Wherever there is wgmma or setmaxnreg to complain about; the box only changes the loads."""
    return config.uses_wgmma and config.box_tokens == TILE_TOKENS


def setmaxnreg_ignored() -> DecodeConfig:
    """A variant whose remark we know: without CTAs per SM, ptxas cannot honour setmaxnreg."""
    return dataclasses.replace(make_config(128, 64, "bf16", 64), ctas_per_sm=0)


def compile_all(folder: Path) -> Report:
    """Compile the support table; {"dsl", "ptxas", "ignored": a variant, "variants": {name: ...}}.

    A variant is what `compile_one` returns; "ignored" is that of `setmaxnreg_ignored`.
    """
    jobs = [(config, wants_remarks(config)) for config in support_table()]
    jobs.append((setmaxnreg_ignored(), True))
    # The long ones first, so that both workers end at the same time.
    jobs.sort(key=lambda job: -job[0].head_size * job[0].rows)
    with worker_pool(WORKERS) as pool:
        futures = [
            (config, pool.submit(compile_one, config, remarks, folder / str(i)))
            for i, (config, remarks) in enumerate(jobs)
        ]
        done = {config: future.result() for config, future in futures}
    ignored = done.pop(setmaxnreg_ignored())
    return {
        "dsl": version("nvidia-cutlass-dsl"),
        "ptxas": " and ".join(sorted({v["ptxas"] for v in done.values() if not v["error"]})),
        "ignored": ignored,
        "variants": {config.name: done[config] for config in support_table()},
    }


def worker_pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def compile_one(config: DecodeConfig, remarks: bool, folder: Path) -> Report:
    """Compile a variant and inspect it; runs in a worker process.

    Returns {"error", "seconds"} and, where "error" is "", the fields of `cubin.Launch`, `Usage` and
    `Code`, "local_memory_instructions", "ptxas" and, where asked for, "remarks".
    """
    start = time.monotonic()
    folder.mkdir(parents=True)
    try:
        report = {"error": "", **_compile_and_inspect(config, remarks, folder)}
    except Exception:
        report = {"error": traceback.format_exc()}
    return {**report, "seconds": round(time.monotonic() - start, 2)}


def _compile_and_inspect(config: DecodeConfig, remarks: bool, folder: Path) -> Report:
    from cute_kernels.attention.decode_sm90.build import compile_decode
    from cute_kernels.compile.plans import compile_options

    # A folder each: builds of one name overwrite each other's files.
    options = f"{compile_options(TARGET)} --keep-cubin --dump-dir={folder}"
    printed = folder / "stderr"
    with stderr_to(printed):
        function = compile_decode(config, options + (REMARKS if remarks else ""))
    (path,) = folder.glob("*.cubin")
    (launch,) = cubin.launches(str(function.ir_module))
    code = cubin.code(path)[launch.symbol]
    parts = (launch, cubin.usages(path)[launch.symbol], code)
    return {
        **{name: value for part in parts for name, value in dataclasses.asdict(part).items()},
        # What a spill becomes, and an array that is indexed with a register.
        "local_memory_instructions": code.count("LDL") + code.count("STL"),
        "ptxas": cubin.ptxas_release(path),
        "remarks": printed.read_text(encoding="utf-8", errors="replace"),
    }


@contextlib.contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Send what this process and its libraries write to stderr into a file."""
    sys.stderr.flush()
    saved = os.dup(2)
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(file, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(file)


def record_of(report: Report) -> Report:
    """What the committed record keeps of a report: one row of `COLUMNS` a variant."""
    return {
        "dsl": report["dsl"],
        "ptxas": report["ptxas"],
        "target": TARGET,
        "columns": list(COLUMNS),
        "variants": {
            name: [variant[column] for column in COLUMNS]
            for name, variant in report["variants"].items()
        },
    }


def write_record(record: Report, path: Path) -> None:
    """As JSON, a variant a line, so that a change of one variant is a change of one line."""
    variants = record["variants"].items()
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in variants)
    head = {key: value for key, value in record.items() if key != "variants"}
    lines = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path.write_text(f'{{\n{lines}  "variants": {{\n{rows}\n  }}\n}}\n', encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = compile_all(Path(folder))
    errors = {name: v["error"] for name, v in report["variants"].items() if v["error"]}
    if errors:
        sys.exit("\n".join(f"{name}: {error}" for name, error in errors.items()))
    write_record(record_of(report), RECORD)
    print(f"{len(report['variants'])} variants: {RECORD}")


if __name__ == "__main__":
    main()
