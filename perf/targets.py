"""What the project wants to reach, and whether a result row reaches it.

Decode and prefill targets are for an H200, by the names of the cases in `perf.cases` and
`perf.bench_prefill`; those of stores and of the indexer hold for any card, since they are shares of
copies measured beside them (`perf.ceilings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.cases import DecodeCase
from perf.ceilings import reaches
from perf.rows import same_run
from perf.traffic import flops

Row = Mapping[str, Any]
OURS = "cute_kernels"
GPU = "NVIDIA H200"
DECODE_US = {
    "B64 S8192 32/4 D512": 480,
    "B8 S8192 32/4 D512": 66,
    "B1 S32768 32/4 D512": 40,
    "B128 S8192 8/1 D512": 244,
    "B32 S8192 8/1 D512": 65,
    "B1 S32768 8/1 D512": 14,
    "B32 S8192 8/1 D512 q4": 70,
    "B32 S8192 64/8 D128": 126,
    "B1 S32768 64/8 D128": 21,
    "B64 S8192 16/1 D128": 36,
    "B64 S8192 32/16 D256 w1024": 128,
    "B32 S8192 64/8 D64": 66,
    "B64 S8192 32/4 D512 nvfp4": 300,
    "B32 S8192 64/8 D128 nvfp4": 88,
}
PREFILL_TFLOPS = {
    "B1 S8192 32/4 D512 q8192": 650,
    "B4 S4096 32/4 D512 q4096": 580,
    "B1 S8192 32/16 D256 q8192": 700,
    "B1 S8192 64/8 D128 q8192": 610,
    "B1 S32768 64/8 D128 q512": 500,
}
# Ragged batches: of the rate of loading alone. Draft tokens: of the time of one query token, up to
# so many packed rows; beyond, of loading alone or of computing as fast as prefill did when the
# target was set (TFLOP/s by head size, 64/8 heads; perf/NOTES.md): targets do not move with rows.
BALANCE_SHARE_OF_LOADER = 90.0
VERIFY_ROWS, VERIFY_FACTOR, MANY_ROWS_FACTOR = 32, 1.15, 1.2
PREFILL_RATE = {64: 409, 128: 689}
STORE_DECODE_TOKENS, STORE_DECODE_US = 256, 4.0
STORE_PREFILL_TOKENS, STORE_SHARE_OF_COPY = 4096, 80.0
INDEXER_TOKENS, INDEXER_SHARE_OF_COPY = 8192, 80.0
# What searching two scales a block may cost over one.
SEARCH_DTYPE, PLAIN_DTYPE, SEARCH_FACTOR = "nvfp4_4over6", "nvfp4", 1.05


@dataclass(frozen=True)
class Verdict:
    """A target in words, and whether a row meets it."""

    wanted: str
    met: bool


def tflops(row: Row) -> float:
    """TFLOP/s of a timed attention row: the (query, key) pairs that the mask shows, 4 D each."""
    shape = ("batch", "kv_len", "num_q_heads", "num_kv_heads", "head_size", "q_len", "window")
    return flops(DecodeCase(**{name: row[name] for name in shape})) / row["median_us"] / 1e6


def _decode_verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    found = []
    if row["case"] in DECODE_US:
        bound = DECODE_US[row["case"]]
        found.append(Verdict(f"<= {bound} us", row["median_us"] <= bound))
    loader = row.get("loader_us")
    if "kv_lens" in row["workload"]:
        bound = BALANCE_SHARE_OF_LOADER
        if loader is not None:
            found.append(Verdict(f">= {bound:g} % of the loader", row["pct_of_loader"] >= bound))
    elif row["q_len"] > 1 and row["kv_cache_dtype"] == "fp8_e4m3":
        packed = row["q_len"] * row["num_q_heads"] // row["num_kv_heads"]
        if packed > VERIFY_ROWS and loader is not None and row["head_size"] in PREFILL_RATE:
            computing = tflops(row) * row["median_us"] / PREFILL_RATE[row["head_size"]]
            bound = MANY_ROWS_FACTOR * max(loader, computing)
            found.append(Verdict(f"<= {bound:.0f} us", row["median_us"] <= bound))
        one = [other for other in rows if _one_token_of(row, other)]
        if packed <= VERIFY_ROWS and one:
            met = row["median_us"] <= VERIFY_FACTOR * one[0]["median_us"]
            found.append(Verdict(f"<= {VERIFY_FACTOR:g} x q_len 1", met))
    return found


def _one_token_of(row: Row, other: Row) -> bool:
    """Whether another row of ours is the same call with one query token a sequence."""
    shape = ("provider", "op", "batch", "kv_len", "num_q_heads", "num_kv_heads", "head_size")
    same = all(row[name] == other[name] for name in (*shape, "kv_cache_dtype", "window"))
    timed = other["median_us"] is not None and "kv_lens" not in other["workload"]
    return same and timed and other["q_len"] == 1


def _store_verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    found = []
    if row["batch"] <= STORE_DECODE_TOKENS:
        found.append(Verdict(f"<= {STORE_DECODE_US:g} us", row["median_us"] <= STORE_DECODE_US))
    if row["batch"] >= STORE_PREFILL_TOKENS:
        wanted = f">= {STORE_SHARE_OF_COPY:g} % of the copy"
        found.append(Verdict(wanted, reaches(row, rows, STORE_SHARE_OF_COPY)))
    if row["kv_cache_dtype"] == SEARCH_DTYPE:
        shape = ("provider", "batch", "num_kv_heads", "head_size")
        for plain in rows:
            same = all(plain[name] == row[name] for name in shape)
            if same and plain["kv_cache_dtype"] == PLAIN_DTYPE and plain["median_us"]:
                met = row["median_us"] <= SEARCH_FACTOR * plain["median_us"]
                found.append(Verdict(f"<= {SEARCH_FACTOR:g} x {PLAIN_DTYPE}", met))
    return found


def _indexer_verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    if row["batch"] < INDEXER_TOKENS:
        return []
    wanted = f">= {INDEXER_SHARE_OF_COPY:g} % of the copy"
    return [Verdict(wanted, reaches(row, rows, INDEXER_SHARE_OF_COPY))]


def verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    """The targets of one of our rows; none for other providers' rows and rows without a time.

    `rows` are those of a file: some targets are relative to another row, of the same run.
    """
    if row["provider"] != OURS or row["median_us"] is None:
        return []
    rows = [other for other in rows if same_run(row, other)]
    if row["op"] == "store":
        return _store_verdicts(row, rows)
    if row["op"].startswith("indexer"):
        return _indexer_verdicts(row, rows)
    if row["gpu"] != GPU:
        return []
    if row["op"] == "decode":
        return _decode_verdicts(row, rows)
    fp8 = row["kv_cache_dtype"] == "fp8_e4m3"
    if row["op"] == "prefill" and fp8 and row["case"] in PREFILL_TFLOPS:
        bound = PREFILL_TFLOPS[row["case"]]
        return [Verdict(f">= {bound} TFLOP/s", tflops(row) >= bound)]
    return []
