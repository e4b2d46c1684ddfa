"""Prefill attention over a paged FP8, NVFP4 or bf16 KV cache: ours and the Triton baseline.

    python -m perf.bench_prefill                    every case, table on the terminal
    python -m perf.bench_prefill --cases D512 --json results.json

Each provider is checked against the float64 reference first; one that is wrong gets no time. Times
are medians of interleaved rounds of CUDA-graph replays, as in perf.bench_decode. TFLOP/s count the
(query, key) pairs inside the causal mask, 4 D operations each. The exit status is 1 when a provider
was wrong or failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from perf.bench_decode import check, collect
from perf.cases import DecodeCase
from perf.command import Keep, begin, choose, finish, keeper
from perf.inputs import InputSet, KVPool, make_input_sets
from perf.providers import PROVIDERS, Provider
from perf.rows import (
    OK,
    Machine,
    Measurement,
)
from perf.timing import (
    Call,
    Contender,
    calls_per_graph,
    median_us,
    time_rotating,
)
from perf.traffic import ceiling_buffer, device_ceilings, flops

# A call computes for milliseconds on what it reads in microseconds: caches hardly matter.
INPUT_SETS = 2


@dataclass(frozen=True)
class PrefillCase(DecodeCase):
    """Paged prefill attention: every sequence has `kv_len` keys, its last `q_len` are queries."""

    def workload(self) -> dict[str, Any]:
        return {**super().workload(), "op": "prefill"}


CASES = (
    PrefillCase(1, 8192, 32, 4, 512, q_len=8192),
    PrefillCase(4, 4096, 32, 4, 512, q_len=4096),
    PrefillCase(1, 8192, 32, 16, 256, q_len=8192),
    PrefillCase(1, 8192, 64, 8, 128, q_len=8192),
    PrefillCase(1, 32768, 64, 8, 128, q_len=512),
    PrefillCase(1, 8192, 64, 8, 64, q_len=8192),
    PrefillCase(1, 8192, 32, 16, 256, q_len=8192, kv_cache_dtype="nvfp4"),
    PrefillCase(1, 8192, 64, 8, 128, q_len=8192, kv_cache_dtype="nvfp4"),
    PrefillCase(1, 32768, 64, 8, 128, q_len=512, kv_cache_dtype="nvfp4"),
)


# From a cache in the queries' dtype: what quantizing costs, or is worth.
BF16_CASES = tuple(
    replace(case, kv_cache_dtype="bf16") for case in CASES if case.kv_cache_dtype == "fp8_e4m3"
)
ALL_CASES = CASES + BF16_CASES


def _bind_triton(inputs: InputSet) -> Call:
    from perf.baselines.triton_prefill import run

    return partial(run, inputs)


FLEX = next(provider for provider in PROVIDERS if provider.name == "torch_flex_attention")
CONTENDERS = (PROVIDERS[0], Provider("triton_baseline", "triton", _bind_triton), FLEX)


def measure(
    case: PrefillCase, contenders: Sequence[Provider], pool: KVPool, rounds: int
) -> tuple[dict[str, Measurement], dict[str, object]]:
    """Check, then time, every contender on one case; with the timing part of the workload."""
    results = check(case, list(contenders), pool)
    sets = make_input_sets(case, pool, count=INPUT_SETS)
    right = [p for p in contenders if results[p.name].status == OK]
    if right:
        contenders = [Contender(p.name, tuple(p.bind(inputs) for inputs in sets)) for p in right]
        for provider, timing in zip(right, time_rotating(contenders, rounds), strict=True):
            results[provider.name] = Measurement(OK, results[provider.name].rel_error, timing)
    method = {
        "timing": "cuda graph, median",
        "input_sets": len(sets),
        "calls_per_graph": calls_per_graph(len(sets)),
        "rounds": rounds,
    }
    return results, method


def run(
    cases: list[PrefillCase],
    contenders: Sequence[Provider],
    machine: Machine,
    rounds: int,
    keep: Keep,
) -> list[dict[str, Any]]:
    """Rows of all cases and contenders."""
    ceilings = device_ceilings(ceiling_buffer(), median_us)
    return collect(
        cases,
        lambda case: KVPool([case], "cuda"),
        lambda case, pool: measure(case, contenders, pool, rounds),
        contenders,
        machine,
        ceilings,
        keep,
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    work = {case.name: flops(case) for case in ALL_CASES}
    table = Table("case", "provider", "us", "TFLOP/s", "error", "status")
    for row in rows:
        median = row["median_us"]
        rate = "" if median is None else f"{work[row['case']] / median / 1e6:.0f}"
        error = "" if row["rel_error"] is None else f"{row['rel_error']:.1e}"
        table.add_row(row["case"], row["provider"], f"{median or ''}", rate, error, row["status"])
    Console(width=118).print(table)


@click.command(
    help="Time prefill attention over a paged FP8, NVFP4 or bf16 KV cache: ours and Triton."
)
@click.option("--cases", multiple=True, metavar="TEXT", help="cases with this in their name")
@click.option(
    "--providers",
    multiple=True,
    type=click.Choice([each.name for each in CONTENDERS]),
    default=[each.name for each in CONTENDERS if not each.on_request],
    help="only these; may be repeated",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write result rows")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--commit", help="what to record where there is no git repository")
@click.option("--list", "list_only", is_flag=True, help="print the cases and stop")
def main(
    cases: tuple[str, ...],
    providers: tuple[str, ...],
    json_path: str | None,
    rounds: int,
    commit: str | None,
    list_only: bool,
) -> None:
    chosen = choose(ALL_CASES, cases)
    if list_only:
        for case in chosen:
            click.echo(case.name)
        return
    machine = begin("perf.bench_prefill", commit)
    contenders = [each for each in CONTENDERS if each.name in providers]
    finish(run(chosen, contenders, machine, rounds, keeper(json_path)), json_path, print_table)


if __name__ == "__main__":
    main()
