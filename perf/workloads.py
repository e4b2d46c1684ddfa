"""What follows from a row's workload: the name of its case, the bytes that it moves, and how wrong a
result that has a time may be. A row that says otherwise was edited, or is of another benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from perf import bench_indexer, bench_store, trace
from perf.bench_prefill import PrefillCase
from perf.cases import UNIFORM, DecodeCase
from perf.providers import MAX_RELATIVE_ERROR, PROVIDERS
from perf.rows import OK, canonical
from perf.serving_inputs import moved_bytes
from perf.targets import OURS
from perf.traffic import traffic

Row = Mapping[str, Any]
MOST_ERROR = {provider.name: provider.max_relative_error for provider in PROVIDERS}
# Rates have four digits, times five: half a digit of the last of each.
OF_RATE, OF_TIME = 5e-4, 5e-5
SLACK = 1.01


class Expected(NamedTuple):
    """Of a row. moved_bytes: that its rate counts. error: the largest of a result that is right.
    facts: fields of the workload that follow from others."""

    name: str
    moved_bytes: int
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


_steps = cache(trace.simulate)


@cache
def _of_trace(
    model: str, tp_size: int, dtype: str, kind: str, spec: trace.TraceSpec, count: int, gib: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """What a step's workload says besides, and the bytes that each part of it moves."""
    from perf import bench_serving  # which shows rows, by what reads them with this module

    config = json.loads((bench_serving.CONFIGS / f"{model}.json").read_text(encoding="utf-8"))
    layers = trace.layers_of(config, dtype, tp_size)
    sampled = trace.sample(_steps(spec), kind, count)
    moved = {
        part: sum(
            bench_serving.calls_of(layer, part) * moved_bytes(layer, step.work, part)
            for layer in layers
            for step in sampled
        )
        // len(sampled)
        for part in bench_serving.PARTS
    }
    return bench_serving.facts_of(spec, _steps(spec), sampled, layers, gib), moved


def _serving(row: Row) -> Expected:
    from perf import bench_serving

    work, part = row["workload"], row["op"].removeprefix("serving_")
    names = ("model", "tp_size", "kv_cache_dtype", "kind")
    cell = [work[name] for name in names]
    spec = trace.TraceSpec(**work["trace"])
    facts, moved = _of_trace(*cell, spec, work["steps_measured"], work["kv_gib"])
    name = bench_serving.ServingCase(*cell, part, ()).name
    error = bench_serving.MAX_ERROR[work["kv_cache_dtype"]] if part == "attention" else 0.0
    return Expected(name, moved[part], error, facts)


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


def check_figures(row: Row, moved: int) -> None:
    """Refuse figures that are not what the row's times make them, but for rounding.

    Raises:
        ValueError: a rate, or a share of the ceiling or of the loader.
    """
    median, ceiling = row["median_us"], row["read_ceiling_tb_per_s"]
    rate = moved / median / 1e6
    wanted = {
        "tb_per_s": (rate, OF_RATE + OF_TIME),
        "pct_of_ceiling": (100 * rate / ceiling, 2 * OF_RATE + OF_TIME),
    }
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
            time of a result that is not right; an operation that no benchmark has.
    """
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
