"""How much of what its device can do a row reaches, where what was measured beside it may be wrong.

A copy of as many bytes is the ceiling of a row of a store or of the indexer. One that happened to
be slow makes a share look good, so a row is held against the fastest copy of a similar size in its
file. A share far above 100 % says that the ceiling is too low, and nothing about the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.rows import OK

Row = Mapping[str, Any]
SIMILAR = 1.5  # times as many bytes, or as few
ABOVE = 105.0  # percent: what noise does not explain
H200_L2_BYTES = 60_000_000


def moved_bytes(row: Row) -> float:
    """That the row's rate counts."""
    return row["tb_per_s"] * row["median_us"] * 1e6


def beside_copies(row: Row) -> bool:
    """Whether a row's ceiling is a copy of as many bytes, not the device's."""
    return row["op"] == "store" or row["op"].startswith("indexer")


def _of_best(row: Row, copies: Sequence[Row]) -> float:
    rates = [other["read_ceiling_tb_per_s"] for other in copies]
    return min([row["pct_of_ceiling"], *(100 * row["tb_per_s"] / rate for rate in rates)])


def share(row: Row, rows: Sequence[Row]) -> float:
    """Percent of the ceiling that a row with a time reaches: of its own, or where it is a copy of
    the fastest of a similar size among `rows`, those of the file."""
    if not beside_copies(row):
        return row["pct_of_ceiling"]
    own = moved_bytes(row)
    timed = [other for other in rows if other["status"] == OK]
    return _of_best(row, [x for x in timed if own / SIMILAR <= moved_bytes(x) <= own * SIMILAR])


def reaches(row: Row, rows: Sequence[Row], percent: float) -> bool:
    """Whether a row reaches a share of its copy. Where `share` is above what noise explains, the
    copy says nothing: then only if it reaches that share of the file's fastest copy of any size."""
    found = share(row, rows)
    if found > ABOVE and beside_copies(row):
        found = _of_best(row, [other for other in rows if other["status"] == OK])
        return percent <= found <= ABOVE
    return found >= percent


def in_words(row: Row, rows: Sequence[Row]) -> str:
    """`share`, and whether a ceiling is too low."""
    found, own = share(row, rows), row["pct_of_ceiling"]
    text = f"{found:.0f} %"
    if found > ABOVE:
        return f"{text} (above its ceiling: the ceiling is too low)"
    return f"{text} ({own:.0f} % of its own copy: too low a ceiling)" if own > ABOVE else text


def rotated(row: Row) -> str:
    """Megabytes over which the calls of a row rotate, and whether they fit in L2."""
    work = row["workload"]
    total = work["input_sets"] * moved_bytes(row)
    return f"{total / 1e6:.3g}{', L2' if fits_in_l2(row) else ''}"


def fits_in_l2(row: Row) -> bool:
    """Whether all that a row's calls read and write does; of rows that do not say, on an H200."""
    work = row["workload"]
    return bool(work.get("fits_in_l2")) or work["input_sets"] * moved_bytes(row) < H200_L2_BYTES
