"""Whom our times are held against, and how the configurations of a baseline were found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from perf.report import OURS, absent_providers
from perf.rows import BY_HAND, NEAREST, OK

Row = Mapping[str, Any]
BASELINE = "triton_baseline"
# Behind the ratio to a baseline, of which not all cases have a configuration measured for them.
MARKS = {NEAREST: " (nearest)", BY_HAND: " (by hand)"}


def tunings(name: str, rows: Sequence[Row]) -> Counter[str]:
    """How a rival's configurations were found, and of how many cases; empty where none says."""
    of_rival = [row for row in rows if row["provider"] == name]
    return Counter(row["tuning"] for row in of_rival if "tuning" in row)


def tuning_in_words(name: str, rows: Sequence[Row]) -> str:
    """Of all cases of a rival; "" of one that chooses for itself."""
    found = tunings(name, rows)
    if not found:
        return ", whose rows do not say how it was tuned" if name == BASELINE else ""
    if len(found) == 1:
        return f", {next(iter(found))} in all cases"
    return ", " + ", ".join(f"{words} in {count} cases" for words, count in found.items())


def ratio_title(name: str, rows: Sequence[Row]) -> str:
    """The title of a column of ratios, with what holds for all of them."""
    found = tunings(name, rows)
    return "ratio" + (MARKS.get(next(iter(found)), "") if len(found) == 1 else "")


def rivals(rows: Sequence[Row]) -> list[str]:
    """Other providers that took part, in order of appearance."""
    absent = absent_providers(rows)
    timed = {r["provider"] for r in rows if r["status"] == OK}
    names = dict.fromkeys(row["provider"] for row in rows)
    return [name for name in names if name != OURS and (name in timed or name not in absent)]
