"""Markdown of `perf.bench_serving`'s results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from perf.compare import Row
from perf.rows import OK
from perf.sections import TIE, ResultFile, markdown, number
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


class Cell(NamedTuple):
    """Attention and store of one model, tensor-parallel size, KV cache dtype and kind of step."""

    attention: Row
    store: Row

    @property
    def timed(self) -> bool:
        return self.attention["status"] == self.store["status"] == OK

    @property
    def work(self) -> Mapping[str, Any]:
        return self.attention["workload"]

    @property
    def step_us(self) -> float:
        return self.attention["median_us"] + self.store["median_us"]

    @property
    def error_us(self) -> float | None:
        """Of both parts, whose errors have one sign: the same steps were sampled."""
        errors = [row.get("standard_error_us") for row in self]
        return None if None in errors else sum(errors)

    @property
    def all_steps_s(self) -> float:
        return self.step_us * self.work["steps_in_trace"] / 1e6


def cells_of(rows: Sequence[Row]) -> dict[tuple[str, int, str, str], Cell]:
    """By model, tensor-parallel size, KV cache dtype and kind of step."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        work = row["workload"]
        key = (work["model"], work["tp_size"], row["kv_cache_dtype"], work["kind"])
        groups.setdefault(key, {})[row["op"].removeprefix("serving_")] = row
    return {key: Cell(**parts) for key, parts in groups.items()}


def with_error(value: float, error: float | None) -> str:
    return number(value) + ("" if error is None else f" +- {number(error)}")


def serving_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line a model, tensor-parallel size, KV cache dtype and kind of step: SERVING_COLUMNS."""
    lines = []
    for (model, tp_size, dtype, kind), cell in cells_of(rows).items():
        work = cell.work
        steps = f"{work['steps_measured']} of {work['steps_in_trace']:,} {kind}"
        times = [number(row["median_us"]) for row in cell] + [""] * 3
        if cell.timed:
            share = f"{cell.attention['pct_of_ceiling']:.0f} %"
            step = with_error(cell.step_us, cell.error_us)
            times[2:] = [step, number(cell.all_steps_s), share]
        fit = f"{work['kv_capacity_tokens']:,} in {work['kv_gib']:g} GiB"
        # The reason; what else it says about other kernels and dtypes is in the row.
        reasons = [re.split(r"; | \(", r["status"])[0] for r in cell if r["status"] != OK]
        status = "; ".join(dict.fromkeys(reasons))
        lines.append([model, str(tp_size), f"`{dtype}`", steps, *times, fit, status])
    return lines


NVFP4_PROMPTS = (
    "chunks of prompts read an nvfp4 cache by fp16 copies of the keys, or by the decode kernel in "
    "passes of 32 or 64 rows"
)
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


def whole_trace_s(
    cells: Mapping[tuple[str, int, str, str], Cell],
) -> dict[tuple[str, int], dict[str, float]]:
    """Seconds of all steps by model and tensor-parallel size, then dtype; of those alone of which
    every kind of step has a time."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    kinds = {kind for *_, kind in cells}
    for model, tp_size, dtype in dict.fromkeys(key[:3] for key in cells):
        parts = [cells.get((model, tp_size, dtype, kind)) for kind in kinds]
        if all(part is not None and part.timed for part in parts):
            seconds = sum(part.all_steps_s for part in parts)
            found.setdefault((model, tp_size), {})[dtype] = seconds
    return found


def losses(totals: Mapping[tuple[str, int], Mapping[str, float]]) -> str:
    """In which whole traces a dtype of fewer bytes takes longer than one of more; "" if in none."""
    sentences = []
    for small, large in (("fp8", "bf16"), ("nvfp4", "fp8"), ("nvfp4", "bf16")):
        both = [of[small] / of[large] for of in totals.values() if small in of and large in of]
        slower = [ratio for ratio in both if ratio > 1 + TIE]
        if slower:
            sentences.append(
                f"Over the whole trace `{small}` takes longer than `{large}` in {len(slower)} of "
                f"{len(both)} lines (up to {max(slower):.2f} times)."
            )
    if any("nvfp4" in sentence for sentence in sentences):
        sentences.append(f"What makes `nvfp4` slow is steps with prompts: {NVFP4_PROMPTS}.")
    return " ".join(sentences)


def serving_summary(file: ResultFile) -> str:
    """A line a model and tensor-parallel size, a column a KV cache dtype: one step without prompts,
    and the whole trace. Then the tokens that fit."""
    cells = cells_of(file.rows)
    totals = whole_trace_s(cells)
    times: dict[tuple[str, int], dict[str, str]] = {}
    fits: dict[tuple[str, int], dict[str, str]] = {}
    for (model, tp_size, dtype, kind), cell in cells.items():
        line = (model, tp_size)
        fits.setdefault(line, {})[dtype] = f"{cell.work['kv_capacity_tokens']:,}"
        if kind == PLAIN:
            total = totals.get(line, {}).get(dtype)
            step = f"{with_error(cell.step_us, cell.error_us)} us" if cell.timed else "no kernel"
            both = [step, "" if total is None else f"{total:.1f} s"]
            times.setdefault(line, {})[dtype] = ", ".join(part for part in both if part)
    work = file.rows[0]["workload"]
    sampled = f"the mean of all, from {work['steps_measured']} sampled ones"
    error = "+- one standard error" if "sampling" in work else "how uncertain was not recorded"
    kinds = " and ".join(f"`{kind}`" for kind in dict.fromkeys(key[3] for key in cells))
    about = [
        f"Cells: a step of `{PLAIN}` ({sampled}, {error}), and the whole trace, steps of {kinds}.",
        losses(totals),
        reservations(file),
    ]
    held = f" (up to {work['most_keys']:,} keys a step)" if "most_keys" in work else ""
    capacity = (
        f"Tokens that fit into {work['kv_gib']:g} GiB of cache on each device, in whole sequences "
        f"of {work['sequence_tokens']:,} tokens, the trace's mean. Steps are timed whether their "
        f"keys would fit or not{held}:"
    )
    tables = [_table(times), _table(fits)]
    return "\n\n".join((" ".join(filter(None, about)), tables[0], capacity, tables[1]))


def _table(cells: Mapping[tuple[str, int], Mapping[str, str]]) -> str:
    """A line a model and tensor-parallel size, a column a KV cache dtype."""
    dtypes = list(dict.fromkeys(dtype for line in cells.values() for dtype in line))
    return markdown(
        ["model", "TP", *(f"`{dtype}`" for dtype in dtypes)],
        (
            [model, str(tp_size), *(line.get(dtype, "") for dtype in dtypes)]
            for (model, tp_size), line in cells.items()
        ),
    )


def serving_table(file: ResultFile) -> str:
    table = markdown(SERVING_COLUMNS, serving_lines(file.rows))
    return f"{reservations(file)}\n\n{table}".lstrip()
