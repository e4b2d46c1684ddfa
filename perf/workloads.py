"""What follows from a row's workload: its case's name, its bytes, and how wrong a timed result is.

A row that says otherwise was edited, or is of another benchmark.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from perf import bench_indexer, bench_store, trace
from perf.bench_prefill import PrefillCase
from perf.cases import UNIFORM, DecodeCase
from perf.providers import MAX_RELATIVE_ERROR, PROVIDERS
from perf.rows import OK, canonical
from perf.targets import OURS
from perf.traffic import traffic

Row = Mapping[str, Any]
MOST_ERROR = {provider.name: provider.max_relative_error for provider in PROVIDERS}
_SERVING = ("model", "kv_cache_dtype", "kind", "tp_size")
# Rates have four digits, times five: half a digit of the last of each.
OF_RATE, OF_TIME = 5e-4, 5e-5
SLACK = 1.01


class Expected(NamedTuple):
    """Of a row. moved_bytes: that its rate counts; None where that is not known. error: the
    largest of a result that is right. facts: fields of the workload that follow from others."""

    name: str
    moved_bytes: float | None
    error: float
    facts: Mapping[str, Any]


def _attention(row: Row) -> Expected:
    work = row["workload"]
    lengths = work.get("kv_len_distribution", UNIFORM)
    names = ("batch", "kv_len", "num_q_heads", "num_kv_heads", "head_size", "q_len", "window")
    names += ("page_size", "q_dtype", "kv_cache_dtype", "seed")
    case = (PrefillCase if work["op"] == "prefill" else DecodeCase)(
        **{name: work[name] for name in names}, lengths=lengths, one_scale=work["scales"] == "one"
    )
    ragged = {} if lengths == UNIFORM else {"kv_lens": list(case.kv_lens)}
    error = MOST_ERROR.get(row["provider"], MAX_RELATIVE_ERROR)
    return Expected(case.name, traffic(case).kv, error, ragged)


def _store(row: Row) -> Expected:
    work = row["workload"]
    names = ("kv_cache_dtype", "num_kv_heads", "head_size", "page_size", "seed")
    case = bench_store.StoreCase(work["batch"], **{name: work[name] for name in names})
    error = 0.0 if row["provider"] == OURS else bench_store.BASELINE_MISMATCHES
    return Expected(case.name, case.moved_bytes, error, {})


def _indexer(row: Row) -> Expected:
    work = row["workload"]
    of_window = {case.window: case.ratio for case in bench_indexer.CASES if case.ratio}
    ratio = of_window[work["window"]] if work["op"] == "indexer_k" else 0
    case = bench_indexer.IndexerCase(work["batch"], work["kv_cache_dtype"], ratio, work["seed"])
    return Expected(case.name, case.moved_bytes, bench_indexer.BASELINE_MISMATCHES, {})


@cache
def _steps(spec: trace.TraceSpec, kind: str) -> list[trace.Step]:
    return [step for step in trace.simulate(spec) if step.kind == kind]


@cache
def _mean_step(spec: trace.TraceSpec, kind: str, window: int | None) -> tuple[float, float]:
    """Keys that a layer of a window reads in a step of a kind, and new tokens; means of all."""
    works = [step.work for step in _steps(spec, kind)]
    keys = statistics.fmean(trace.keys_read(work, window) for work in works)
    return keys, statistics.fmean(sum(query for query, _ in work) for work in works)


@cache
def _layers(model: str, kv_cache_dtype: str, tp_size: int) -> list[trace.Layers]:
    from perf.bench_serving import CONFIGS  # which shows rows, by what reads them with this module

    config = json.loads((CONFIGS / f"{model}.json").read_text(encoding="utf-8"))
    return trace.layers_of(config, kv_cache_dtype, tp_size)


def _serving(row: Row) -> Expected:
    from perf.bench_serving import MAX_ERROR

    work, attention = row["workload"], row["op"] == "serving_attention"
    model, dtype, kind, tp_size = (row["workload"][name] for name in _SERVING)
    spec, layers = trace.TraceSpec(**work["trace"]), _layers(model, dtype, tp_size)
    requests = trace.make_requests(spec)
    length = round(statistics.fmean(r.prompt + r.output for r in requests))
    budget, moved = int(work["kv_gib"] * 2**30), 0.0
    for layer in layers:
        config = layer.config
        keys, tokens = _mean_step(spec, kind, config.sliding_window)
        new = 2 * 2 * config.num_kv_heads * config.head_size + config.bytes_per_token
        moved += layer.count * keys * config.bytes_per_token if attention else 0.0
        moved += 0.0 if attention else layer.cached * tokens * new
    facts = {
        "input_tokens": sum(request.prompt for request in requests),
        "output_tokens": sum(request.output for request in requests),
        "steps_in_trace": len(_steps(spec, kind)),
        "sequence_tokens": length,
        "kv_capacity_tokens": trace.capacity_tokens(layers, budget, length, work["page_size"]),
    }
    name = f"{model} TP{tp_size} {dtype}, {kind}, {row['op'].removeprefix('serving_')}"
    error = MAX_ERROR[dtype] if attention else 0.0
    # Files of before steps were sampled by their work have the bytes of samples.
    return Expected(name, moved if "sampling" in work else None, error, facts)


EXPECTED: Mapping[str, Callable[[Row], Expected]] = {
    "decode": _attention,
    "prefill": _attention,
    "store": _store,
    "indexer_q": _indexer,
    "indexer_k": _indexer,
    "serving_attention": _serving,
    "serving_store": _serving,
}


def _near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value - wanted) <= SLACK * tolerance * abs(wanted)


def check_figures(row: Row, moved: float | None) -> None:
    """Refuse figures that are not what the row's times make them, but for rounding.

    Raises:
        ValueError: a rate, or a share of the ceiling or of the loader.
    """
    median, ceiling = row["median_us"], row["read_ceiling_tb_per_s"]
    rate = row["tb_per_s"] if moved is None else moved / median / 1e6
    wanted = {
        "tb_per_s": (rate, OF_RATE + OF_TIME),
        "pct_of_ceiling": (100 * rate / ceiling, 2 * OF_RATE + OF_TIME),
    }
    if ("loader_us" in row) != ("pct_of_loader" in row):
        raise ValueError("one of loader_us and pct_of_loader without the other")
    if "loader_us" in row:
        wanted["pct_of_loader"] = (100 * row["loader_us"] / median, OF_RATE + 2 * OF_TIME)
    for name, (value, tolerance) in wanted.items():
        if not _near(row[name], value, tolerance):
            raise ValueError(f"{name} is {row[name]}; its times make it {value:.4g}")
    read = row.get("ceilings", {}).get("read_tb_per_s", ceiling)
    if read != ceiling:
        raise ValueError(f"read_ceiling_tb_per_s is {ceiling}, in its ceilings {read}")


def check_workload(row: Row) -> None:
    """Refuse a row that `perf.rows.check_row` accepts and that contradicts its workload.

    Raises:
        ValueError: a case's name, a length, a capacity or a figure that do not follow from it; a
            time of a result that is not right; a provider or an operation that no benchmark has.
    """
    if row["provider"] not in MOST_ERROR:
        raise ValueError(f"provider is unknown; known: {', '.join(MOST_ERROR)}")
    if row["op"] not in EXPECTED:
        raise ValueError(f"op is {row['op']!r}; known: {', '.join(EXPECTED)}")
    expected = EXPECTED[row["op"]](row)
    if row["case"] != expected.name:
        raise ValueError(f"its workload is {expected.name!r}")
    for name, value in expected.facts.items():
        found = row["workload"].get(name)
        if canonical(found) != canonical(value):
            raise ValueError(f"{name} is {found!r}; its workload makes it {value!r}")
    if row["status"] == OK:
        check_figures(row, expected.moved_bytes)
        if row["rel_error"] > SLACK * expected.error:
            raise ValueError(f"a time with an error of {row['rel_error']}")
