"""The measured configurations of the Triton decode baseline, and how a case's came about; needs no
Triton."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from perf.cases import DecodeCase
from perf.rows import BY_HAND, NEAREST, TUNED

CONFIG_FILE = Path(__file__).with_name("triton_decode_configs.json")


def packed_rows(group: int, max_seqlen_q: int) -> int:
    """Rows of the packed query operand: a power of two, at least 16 (the MMA's M)."""
    return max(16, 1 << (group * max_seqlen_q - 1).bit_length())


def tuned_entries() -> list[dict[str, Any]]:
    """What all runs of `perf.baselines.tune` found that is kept."""
    runs = json.loads(CONFIG_FILE.read_text(encoding="utf-8"))["runs"]
    return [entry for run in runs for entry in run["configs"]]


@lru_cache(maxsize=1)
def _tuned() -> tuple[frozenset[str], frozenset[tuple[int, int]]]:
    """Names of tuned cases, and (head size, packed rows) that any of them has."""
    entries = tuned_entries()
    shapes = frozenset((entry["head_size"], entry["rows"]) for entry in entries)
    return frozenset(entry["case"] for entry in entries), shapes


def tuning(case: DecodeCase) -> str:
    """TUNED where the case itself has a measured configuration, NEAREST where another of its head
    size and packed rows gives its own (as to batches of unequal lengths), else BY_HAND."""
    names, shapes = _tuned()
    rows = packed_rows(case.group, case.q_len)
    if replace(case, one_scale=False).name in names:
        return TUNED
    return NEAREST if (case.head_size, rows) in shapes else BY_HAND
