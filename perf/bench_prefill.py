"""Prefill attention over a paged FP8, NVFP4 or bf16 KV cache: ours and the Triton baseline.

    python -m perf.bench_prefill                    every case, table on the terminal
    python -m perf.bench_prefill --cases D512 --json results.json

Each provider is checked against the float64 reference first; one that is wrong gets no time. Times
are medians of interleaved rounds of CUDA-graph replays, as in perf.bench_decode, of all providers
and cache dtypes of a shape in turn (`in_turn` in the workload). TFLOP/s count the
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
from perf.rows import BY_HAND, OK, Machine, Measurement
from perf.timing import Call, Contender, calls_per_graph, median_us, time_rotating
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
TRITON = Provider("triton_baseline", "triton", _bind_triton, tuning=lambda case: BY_HAND)
CONTENDERS = (PROVIDERS[0], TRITON, FLEX)


def shape_of(case: PrefillCase) -> PrefillCase:
    """The same call from an FP8 cache."""
    return replace(case, kv_cache_dtype="fp8_e4m3")


def measure_shape(
    cases: Sequence[PrefillCase], providers: Sequence[Provider], rounds: int
) -> dict[PrefillCase, tuple[dict[str, Measurement], dict[str, object]]]:
    """Check all providers on cases that differ in the cache's dtype alone, then time all of them in
    turn: the clocks of a call depend on what runs before it. With the timing parts of workloads."""
    checked, contenders, owners, pools = {}, [], [], []
    for case in cases:
        pools.append(KVPool([case], "cuda"))
        checked[case] = check(case, list(providers), pools[-1])
        sets = make_input_sets(case, pools[-1], count=INPUT_SETS)
        for provider in providers:
            if checked[case][provider.name].status == OK:
                name = f"{provider.name}, {case.kv_cache_dtype}"
                calls = tuple(provider.bind(inputs) for inputs in sets)
                contenders.append(Contender(name, calls))
                owners.append((case, provider.name))
    timings = time_rotating(contenders, rounds) if contenders else []
    for (case, name), timing in zip(owners, timings, strict=True):
        checked[case][name] = replace(checked[case][name], rotating=timing)
    method = {
        "timing": "cuda graph, median",
        "input_sets": INPUT_SETS,
        "calls_per_graph": calls_per_graph(INPUT_SETS),
        "rounds": rounds,
        "in_turn": [contender.name for contender in contenders],
    }
    return {case: (results, method) for case, results in checked.items()}


def run(
    cases: list[PrefillCase],
    contenders: Sequence[Provider],
    machine: Machine,
    rounds: int,
    keep: Keep,
) -> list[dict[str, Any]]:
    """Rows of all cases and contenders, shape by shape."""
    ceilings = device_ceilings(ceiling_buffer(), median_us)
    shapes: dict[PrefillCase, list[PrefillCase]] = {}
    for case in cases:
        shapes.setdefault(shape_of(case), []).append(case)
    measured: dict[PrefillCase, tuple[dict[str, Measurement], dict[str, object]]] = {}

    def measure(case: PrefillCase) -> tuple[dict[str, Measurement], dict[str, object]]:
        if case not in measured:
            measured.update(measure_shape(shapes[shape_of(case)], contenders, rounds))
        return measured[case]

    return collect(
        [case for alike in shapes.values() for case in alike],
        lambda case: KVPool([case], "cuda"),
        lambda case, pool: measure(case),
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
