"""Markdown of `perf.bench_serving`'s results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from perf.compare import Row
from perf.rows import OK
from perf.sections import ResultFile, markdown, number
from perf.trace import PLAIN

SERVING_COLUMNS = (
    "model",
    "TP",
    "KV cache",
    "steps",
    "attention us",
    "store us",
    "step us",
    "all such steps, s",
    "of the read ceiling",
    "tokens that fit",
    "status",
)


def serving_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line a model, tensor-parallel size, KV cache dtype and kind of step: SERVING_COLUMNS."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        work = row["workload"]
        key = (work["model"], work["tp_size"], row["kv_cache_dtype"], work["kind"])
        groups.setdefault(key, {})[row["op"].removeprefix("serving_")] = row
    lines = []
    for (model, tp_size, dtype, kind), parts in groups.items():
        attention, work = parts["attention"], parts["attention"]["workload"]
        steps = f"{work['steps_measured']} of {work['steps_in_trace']:,} {kind}"
        both = [parts[part] for part in ("attention", "store")]
        cells = [number(row["median_us"]) for row in both] + [""] * 3
        if all(row["status"] == OK for row in both):
            time = sum(row["median_us"] for row in both)
            share = f"{attention['pct_of_ceiling']:.0f} %"
            cells[2:] = [number(time), number(time * work["steps_in_trace"] / 1e6), share]
        fit = f"{work['kv_capacity_tokens']:,} in {work['kv_gib']:g} GiB"
        # The reason; what else it says about other kernels and dtypes is in the row.
        reasons = [re.split(r"; | \(", r["status"])[0] for r in both if r["status"] != OK]
        status = "; ".join(dict.fromkeys(reasons))
        lines.append([model, str(tp_size), f"`{dtype}`", steps, *cells, fit, status])
    return lines


# Until then the prefill kernel alone read a bf16 cache.
LAST_WITHOUT_16_BIT_DECODE = "6934af4"


def reservations(file: ResultFile) -> str:
    """What holds for the commit that was measured and no longer; "" where nothing does."""
    found = []
    if any(row["commit"].startswith(LAST_WITHOUT_16_BIT_DECODE) for row in file.rows):
        found.append(
            "At this commit a bf16 cache was read by the prefill kernel alone, which does not split"
            " keys: those times are not what the decode kernel takes."
        )
    if any("no kernel" in row["status"] for row in file.rows):
        found.append("`no kernel` holds for the commit that was measured.")
    return " ".join(found)


def serving_summary(file: ResultFile) -> str:
    """A line a model and tensor-parallel size, a column a KV cache dtype: what one step without
    prompts takes, and the tokens that fit."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for model, tp_size, dtype, steps, _, _, step_us, _, _, fit, _ in serving_lines(file.rows):
        if steps.endswith(PLAIN):
            time = f"{step_us} us" if step_us else "no kernel"
            cells.setdefault((model, tp_size), {})[dtype] = f"{time}, {fit.split(' in ')[0]}"
    dtypes = list(dict.fromkeys(dtype for line in cells.values() for dtype in line))
    table = markdown(
        ["model", "TP", *dtypes],
        [[*key, *(line.get(dtype, "") for dtype in dtypes)] for key, line in cells.items()],
    )
    work = file.rows[0]["workload"]
    return (
        f"Cells: a step of `{PLAIN}` (the mean of {work['steps_measured']}), and the tokens that "
        f"fit into {work['kv_gib']:g} GiB. {reservations(file)}".rstrip()
        + f"\n\n{table}"
    )


def serving_table(file: ResultFile) -> str:
    table = markdown(SERVING_COLUMNS, serving_lines(file.rows))
    return f"{reservations(file)}\n\n{table}".lstrip()
