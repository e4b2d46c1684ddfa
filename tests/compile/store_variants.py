"""Compile the store kernels for all their architectures, without a GPU, and say what came out.

The DSL is loaded by the worker processes only, as in `variants.py`.
"""

from __future__ import annotations

import dataclasses
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.compile.plans import KERNELS, CompileUnit, all_units, compile_options
from cute_kernels.store.config import TARGETS
from tests.compile import cubin
from tests.compile.variants import WORKERS, worker_pool

Report = dict[str, Any]
REGISTERS_PER_SM = 65536
CONVERSION = "F2FP.SATFINITE.E2M1.F32"


def store_units() -> list[CompileUnit]:
    return [unit for unit in all_units(TARGETS) if unit.kernel.startswith("store_")]


def unit_id(unit: CompileUnit) -> str:
    return f"{unit.config.name}-{unit.target}"


def over(units: list[CompileUnit]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("unit", units, ids=unit_id)


def compiled(report: Report, unit: CompileUnit) -> Report:
    variant = report[unit_id(unit)]
    assert not variant["error"], variant["error"]
    return variant


def compile_all(folder: Path) -> Report:
    """{unit id: what `compile_one` returns}."""
    return compile_units(store_units(), folder)


def compile_units(units: list[CompileUnit], folder: Path) -> Report:
    with worker_pool(WORKERS) as pool:
        futures = {
            unit_id(unit): pool.submit(compile_one, unit, folder / str(i))
            for i, unit in enumerate(units)
        }
        return {name: future.result() for name, future in futures.items()}


def compile_one(unit: CompileUnit, folder: Path) -> Report:
    """{"error"} and, where it is "", the fields of `cubin.Usage` and "opcodes"."""
    folder.mkdir(parents=True)
    try:
        options = f"{compile_options(unit.target)} --keep-cubin --dump-dir={folder}"
        _compile(unit, options)
        (path,) = folder.glob("*.cubin")
        ((symbol, usage),) = cubin.usages(path).items()
        opcodes = cubin.code(path)[symbol].opcodes
        return {"error": "", **dataclasses.asdict(usage), "opcodes": opcodes}
    except Exception:
        return {"error": traceback.format_exc()}


def _compile(unit: CompileUnit, options: str) -> None:
    module, _, function = KERNELS[unit.kernel].compiler.partition(":")
    getattr(import_module(module), function)(unit.config, options)
