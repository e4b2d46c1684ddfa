"""Compile the indexer's kernels for all their architectures, without a GPU; see store_variants.py.

    python -m tests.compile.indexer_variants

records the resource usage in perf/results/resources_indexer.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from cute_kernels.compile.plans import CompileUnit, all_units
from cute_kernels.indexer.config import TARGETS
from tests.compile.store_variants import Report, compile_units, unit_id

RECORD = Path(__file__).resolve().parents[2] / "perf" / "results" / "resources_indexer.json"
COLUMNS = ("registers", "stack_bytes", "local_bytes")


def indexer_units() -> list[CompileUnit]:
    return [unit for unit in all_units(TARGETS) if unit.kernel.startswith("indexer_")]


def compile_all(folder: Path) -> Report:
    """As `store_variants.compile_all`, of the indexer's units."""
    return compile_units(indexer_units(), folder)


def record_of(report: Report) -> Report:
    """What the committed record keeps of a report: one row of `COLUMNS` a unit."""
    units = {name: [unit[column] for column in COLUMNS] for name, unit in report.items()}
    return {"dsl": version("nvidia-cutlass-dsl"), "columns": list(COLUMNS), "units": units}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = compile_all(Path(folder))
    errors = [f"{name}: {unit['error']}" for name, unit in report.items() if unit["error"]]
    if errors:
        sys.exit("\n".join(errors))
    assert set(report) == {unit_id(unit) for unit in indexer_units()}
    RECORD.write_text(json.dumps(record_of(report), indent=1) + "\n", encoding="utf-8")
    print(f"{len(report)} units: {RECORD}")


if __name__ == "__main__":
    main()
