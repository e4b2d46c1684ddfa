"""Markdown of `perf.accuracy`'s results, and whether two runs of it agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perf.accuracy_reading import blocks
from perf.sections import BASELINE, ResultFile, markdown

Row = Mapping[str, Any]
COLUMNS = (
    "model",
    "tokens",
    "keys",
    "KV cache",
    "bytes/token",
    "perplexity",
    "change, %",
    "KL, nats",
    "top-1 as bf16, %",
    "greedy tokens as bf16",
    "1 - cosine",
    "nearest text as bf16, %",
    "error behind the last layer",
)
# Two runs on one text are told apart by more than this many of their common standard errors.
AGREE_WITHIN = 2.0


def figure(estimate: Row | None, scale: float = 1.0, sign: str = "") -> str:
    """A mean and its standard error, to the error's first two digits."""
    if estimate is None:
        return ""
    value, error = (scale * (estimate[name] or 0.0) for name in ("value", "standard_error"))
    digits = max(0, 1 - math.floor(math.log10(error))) if error else 2
    shown = f"{value:{sign}.{digits}f}"
    # One block tells no error, nor do values that are all the same: none of 80 texts is not never.
    return f"{shown} +- {error:.{digits}f}" if error else shown


def accuracy_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line a model and KV cache dtype: COLUMNS."""
    lines = []
    for row in rows:
        perplexity, errors = row.get("perplexity"), row.get("layer_errors")
        greedy = figure(row.get("greedy"))
        keys = (("rotate_keys", "rotated"), ("per_head", "scales per head"))
        lines.append(
            [
                row["model"],
                f"{row['tokens']:,}",
                ", ".join(words for name, words in keys if row.get(name)),
                f"`{row['kv_cache_dtype']}`",
                str(row["bytes_per_token_and_layer"]),
                "" if perplexity is None else f"{perplexity:.3f}",
                figure(row.get("perplexity_change"), 100, "+"),
                figure(row.get("kl")),
                figure(row.get("top1_agreement"), 100),
                f"{greedy} of {row['new_tokens']}" if greedy else "",
                figure(row.get("cosine_distance")),
                figure(row.get("nearest_agreement"), 100),
                f"{errors[-1]:.2g}" if errors else "",
            ]
        )
    return lines


def accuracy_table(file: ResultFile) -> str:
    return f"{blocks(file.rows)}\n\n{markdown(COLUMNS, accuracy_lines(file.rows))}".lstrip()


def accuracy_summary(file: ResultFile) -> str:
    """The decoders' columns of the README."""
    shown = ("model", "KV cache", "perplexity", "change, %", "KL, nats", "top-1 as bf16, %")
    columns = [COLUMNS.index(title) for title in shown]
    lines = accuracy_lines([row for row in file.rows if "perplexity" in row])
    table = markdown(shown, [[line[column] for column in columns] for line in lines])
    return f"{blocks(file.rows)}\n\n{table}".lstrip()


def agreement(one: ResultFile, other: ResultFile) -> str:
    """Whether two runs that read the same tokens find the same changes of perplexity."""
    found, apart = 0, []
    for row in one.rows:
        twin = next((each for each in other.rows if _same_work(row, each)), None)
        if twin is None or row["kv_cache_dtype"] == BASELINE:
            continue
        found += 1
        changes = [each["perplexity_change"] for each in (row, twin)]
        noise = math.hypot(*(change["standard_error"] or 0.0 for change in changes))
        difference = changes[0]["value"] - changes[1]["value"]
        if abs(difference) > AGREE_WITHIN * noise:
            apart.append(f"{row['model']} {row['kv_cache_dtype']} by {100 * difference:+.2f} %")
    if not found:
        return ""
    agree = f"{found - len(apart)} of {found} changes of perplexity agree within {AGREE_WITHIN:g}"
    text = f"Against {other.label}, {other.date}, on the same tokens: {agree} standard errors"
    return f"{text}; apart: {', '.join(apart)}." if apart else f"{text}."


def _same_work(one: Row, other: Row) -> bool:
    names = ["model", "kv_cache_dtype", "rotate_keys", "per_head", "ids_sha256", "window_tokens"]
    names += ["calibration_tokens"]
    if "calibration_sha256" in one and "calibration_sha256" in other:
        names.append("calibration_sha256")
    # Rows of before there was a choice lack per_head.
    return "perplexity" in one and all(
        (one.get(name) or None) == (other.get(name) or None) for name in names
    )
