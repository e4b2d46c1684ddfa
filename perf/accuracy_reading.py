"""Reading `perf.accuracy`'s result files, and refusing rows that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.reading import (
    LEAST_STANDARD_ERROR,
    Rows,
    check_change,
    check_one_run,
    check_rows,
    is_count,
    is_error,
    is_positive,
    naming,
    read_json,
)
from perf.rows import is_line, is_number

Row = Mapping[str, Any]
BASELINE = "bf16"
IDENTITY = ("model", "kv_cache_dtype", "rotate_keys", "per_head")
LINES = ("model", "kv_cache_dtype", "device", "commit", "date", "ids_sha256")
# What rows of one model have in common: what was read, and how its errors were taken.
READ = ("tokens", "calibration_tokens", "ids_sha256", "calibration_sha256", "device")
READ += ("windows", "window_tokens", "prompts", "prompt_tokens", "new_tokens", "block")
SIZES = ("windows", "window_tokens", "prompts", "prompt_tokens", "new_tokens", "block")
# Bounds of means; a divergence and a distance may round to less than nothing.
BOUNDS = {
    "kl": (-1e-6, math.inf),
    "cosine_distance": (-1e-6, 2.0),
    "top1_agreement": (0.0, 1.0),
    "nearest_agreement": (0.0, 1.0),
}


def check_estimate(row: Row, name: str) -> None:
    """Refuse a mean that is none, or that cannot be.

    Raises:
        ValueError: it, or its standard error, is no number, or out of its bounds.
    """
    estimate, (low, high) = row[name], BOUNDS.get(name, (-math.inf, math.inf))
    numbers = isinstance(estimate, dict) and set(estimate) == {"value", "standard_error"}
    if not numbers or not is_number(estimate["value"]) or not low <= estimate["value"] <= high:
        raise ValueError(f"{name} is {estimate!r}, no estimate")
    error = estimate["standard_error"]
    if error not in (None, 0) and not (is_number(error) and error > LEAST_STANDARD_ERROR):
        raise ValueError(f"{name} is {estimate!r}, no estimate")


def check_accuracy_row(row: Row) -> None:
    """Refuse a row that says less than it seems to.

    Raises:
        ValueError: what is missing or cannot be.
    """
    missing = [name for name in (*LINES, "tokens") if not row.get(name)]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    for name in LINES:
        if not is_line(row[name]):
            raise ValueError(f"{name} is {row[name]!r}")
    for name in ("tokens", "bytes_per_token_and_layer", *(size for size in SIZES if size in row)):
        if not is_count(row[name]):
            raise ValueError(f"{name} is {row[name]!r}")
    for name, value in row.items():
        if name in BOUNDS or (isinstance(value, dict) and "standard_error" in value):
            check_estimate(row, name)
    if "perplexity" in row and not is_positive(row["perplexity"]):
        raise ValueError(f"perplexity is {row['perplexity']!r}")
    errors = row.get("layer_errors", [])
    if not isinstance(errors, list) or not all(is_number(each) and each >= 0 for each in errors):
        raise ValueError(f"layer_errors are {errors!r}")
    equal = row.get("greedy_equal_tokens")
    if equal is not None:
        if not all(0 <= count <= row["new_tokens"] for count in equal):
            raise ValueError(f"greedy_equal_tokens are {equal!r} of {row['new_tokens']}")
        if abs(row["greedy"]["value"] - sum(equal) / len(equal)) > 1e-6:
            raise ValueError(f"greedy is {row['greedy']}, not the mean of {equal}")


def check_against(base: Row, row: Row) -> None:
    """Refuse a row that did not read what the bf16 cache's row did, or whose change is another.

    Raises:
        ValueError: how they differ.
    """
    for name in READ:
        if row.get(name) != base.get(name):
            both = f"{row.get(name)!r}, with a {BASELINE} cache {base.get(name)!r}"
            raise ValueError(f"{name} is {both}")
    if "perplexity" in row and row is not base:
        change = row["perplexity_change"]
        if change["standard_error"] is not None and not is_error(change["standard_error"]):
            raise ValueError(f"perplexity_change is {change}, no estimate")
        check_change(change["value"], row["perplexity"], base["perplexity"])


def read_accuracy(path: Path) -> Rows:
    """Rows of a result file.

    Raises:
        BadFile: no JSON, NaN in it, two rows for the same, a row that `check_accuracy_row` refuses,
            a model without a bf16 cache's row, or whose rows are of two runs or other tokens.
    """
    rows = check_rows(path, read_json(path), check_accuracy_row, IDENTITY)
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    for model, own in models.items():
        check_one_run(path, own)
        base = next((row for row in own if row["kv_cache_dtype"] == BASELINE), None)
        for row in own:
            with naming(f"{path.name}, {model}, {row['kv_cache_dtype']}"):
                if base is None:
                    raise ValueError(f"no row of the {BASELINE} cache")
                check_against(base, row)
    return rows


def blocks(rows: Sequence[Row]) -> str:
    """How many tokens the blocks of some rows have, which their errors are taken over."""
    sizes = sorted({row["block"] for row in rows if "block" in row})
    return f"Blocks of {' and '.join(map(str, sizes))} tokens." if sizes else ""
