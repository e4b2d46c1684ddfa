"""Compile the prefill kernels' variants for sm_90a, without a GPU, and say what came out.

The DSL is loaded by the worker processes only, as in `variants.py`.
"""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any

from cute_kernels.attention.prefill_sm90.config import PrefillConfig, support_table
from cute_kernels.compile.plans import compile_options
from tests.compile import cubin
from tests.compile.variants import REMARKS, TARGET, WORKERS, stderr_to, worker_pool

Report = dict[str, Any]


def compile_all(folder: Path) -> Report:
    """{variant name: what `compile_one` returns}."""
    with worker_pool(WORKERS) as pool:
        futures = {
            config.name: pool.submit(compile_one, config, folder / str(i))
            for i, config in enumerate(support_table())
        }
        return {name: future.result() for name, future in futures.items()}


def compile_one(config: PrefillConfig, folder: Path) -> Report:
    """{"error"} and, where it is "", the fields of `cubin.Launch`, `Usage` and `Code`, and
    "remarks"; runs in a worker process."""
    folder.mkdir(parents=True)
    try:
        return {"error": "", **_compile_and_inspect(config, folder)}
    except Exception:
        return {"error": traceback.format_exc()}


def _compile_and_inspect(config: PrefillConfig, folder: Path) -> Report:
    from cute_kernels.attention.prefill_sm90.build import compile_prefill as compiled

    printed = folder / "stderr"
    options = f"{compile_options(TARGET)} --keep-cubin --dump-dir={folder}"
    with stderr_to(printed):
        function = compiled(config, options + REMARKS)
    (path,) = folder.glob("*.cubin")
    (launch,) = cubin.launches(str(function.ir_module))
    parts = (launch, cubin.usages(path)[launch.symbol], cubin.code(path)[launch.symbol])
    return {
        **{name: value for part in parts for name, value in dataclasses.asdict(part).items()},
        "remarks": printed.read_text(encoding="utf-8", errors="replace"),
    }
