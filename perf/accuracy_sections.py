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
ONE_BLOCK = " (one block: no error)"


def figure(estimate: Row | None, scale: float = 1.0, sign: str = "") -> str:
    """A mean and its standard error, to the error's first two digits."""
    if estimate is None:
        return ""
    value, error = scale * estimate["value"], estimate["standard_error"]
    if error is None:
        return f"{value:{sign}.3g}{ONE_BLOCK}"
    digits = max(0, 1 - math.floor(math.log10(scale * error))) if error else 2
    shown = f"{value:{sign}.{digits}f}"
    # Values that are all the same tell no error: none of 80 texts is not never.
    return f"{shown} +- {scale * error:.{digits}f}" if error else shown


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
    """How far apart two runs that read the same tokens find the changes of perplexity.

    Whether that is noise their standard errors do not say: those are over blocks of tokens, which
    both runs share, and no row keeps its blocks.
    """
    found = {}
    for row in one.rows:
        twin = next((each for each in other.rows if _same_work(row, each)), None)
        if twin is not None and row["kv_cache_dtype"] != BASELINE:
            changes = [each["perplexity_change"]["value"] for each in (row, twin)]
            found[f"{row['model']} {row['kv_cache_dtype']}"] = 100 * (changes[0] - changes[1])
    if not found:
        return ""
    name, most = max(found.items(), key=lambda item: abs(item[1]))
    return (
        f"Against {other.label}, {other.date}, on the same tokens: {len(found)} changes of "
        f"perplexity, the furthest apart by {most:+.2f} percentage points ({name}). The standard "
        "errors are over tokens, which both runs share: they do not say whether that is noise."
    )


def _same_work(one: Row, other: Row) -> bool:
    names = ["model", "kv_cache_dtype", "rotate_keys", "per_head", "ids_sha256", "window_tokens"]
    names += ["calibration_tokens"]
    if "calibration_sha256" in one and "calibration_sha256" in other:
        names.append("calibration_sha256")
    # Rows of before there was a choice lack per_head.
    return "perplexity" in one and all(
        (one.get(name) or None) == (other.get(name) or None) for name in names
    )
