"""What a kernel from a bundle costs until it runs: loading it, its first call, later calls.

    CUTE_KERNELS_BUNDLE=bundle python -m perf.bench_load --out rows.json

Each decode kernel is loaded and called in this process, in the support table's order. Times are the
host's, with a synchronisation after each call; the first kernel, which also pays for what a process
does once (importing TVM-FFI, finding the CUDA runtime), is given apart.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from cute_kernels import compile_cache, flash_attn_varlen_func
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit
from perf.cases import DecodeCase
from perf.command import begin, folder_of
from perf.inputs import KVPool, make_input_sets
from perf.providers import varlen_arguments

CALLS = 20
Q_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# What an operator may expect of each kernel, milliseconds.
LOAD_TARGET_MS, FIRST_CALL_TARGET_MS = 50.0, 5.0


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def case_for(config: DecodeConfig) -> DecodeCase:
    """A small call that this variant serves: eight query heads of one KV head."""
    return DecodeCase(
        batch=2,
        kv_len=300,
        num_q_heads=8,
        num_kv_heads=1,
        head_size=config.head_size,
        q_len=config.rows // 8,
        page_size=config.box_tokens,
        q_dtype=Q_DTYPES[config.q_dtype],
        kv_cache_dtype=config.kv_format,
    )


def measure(unit: CompileUnit, pool: KVPool) -> dict[str, Any]:
    """The row of one kernel.

    Raises:
        RuntimeError: the call did not ask for this kernel, or for another one too.
    """
    (inputs,) = make_input_sets(case_for(unit.config), pool, count=1)
    torch.cuda.synchronize()
    load = milliseconds(lambda: launcher(unit))
    before = compile_cache.loaded()

    def call() -> None:
        flash_attn_varlen_func(**varlen_arguments(inputs), out=inputs.out)
        torch.cuda.synchronize()

    first = milliseconds(call)
    if compile_cache.loaded() != before:
        raise RuntimeError(f"the call for {unit.name} asked for another kernel")
    later = statistics.median(milliseconds(call) for _ in range(CALLS))
    return {
        "kernel": unit.config.name,
        "target": unit.target,
        "load_ms": round(load, 3),
        "first_call_ms": round(first, 3),
        "later_call_ms": round(later, 3),
        "first_call_extra_ms": round(first - later, 3),
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Kernels that took longer than the targets."""
    return [
        row["kernel"]
        for row in rows
        if row["load_ms"] > LOAD_TARGET_MS or row["first_call_extra_ms"] > FIRST_CALL_TARGET_MS
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [f"{len(rows)} kernels", "milliseconds          median     max   target"]
    for column, target in (
        ("load_ms", LOAD_TARGET_MS),
        ("first_call_extra_ms", FIRST_CALL_TARGET_MS),
        ("later_call_ms", None),
    ):
        values = [row[column] for row in rows]
        bound = "" if target is None else f"{target:8.1f}"
        lines.append(f"{column:20}{statistics.median(values):8.3f}{max(values):8.3f} {bound}")
    return "\n".join(lines)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Rows as JSON.")
def main(out: Path | None) -> None:
    """Measure every decode kernel; exit status 1 where a target is missed."""
    machine = begin("perf.bench_load", None)
    if out is not None:
        folder_of(out)
    units = [unit for unit in compile_cache.all_units(["sm_90a"]) if unit.kernel == "decode_sm90"]
    compile_cache.freeze()
    pool = KVPool([case_for(unit.config) for unit in units], "cuda")
    first, *rows = [measure(unit, pool) for unit in units]
    print(f"first kernel of the process: {first}")
    print(summary(rows))
    if out is not None:
        about = dataclasses.asdict(machine)
        text = {"op": "load", **about, "first_of_process": first, "rows": rows}
        out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    if missed(rows):
        raise click.ClickException(f"slower than the targets: {', '.join(missed(rows))}")


if __name__ == "__main__":
    main()
