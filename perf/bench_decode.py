"""Decode attention over a paged FP8 or NVFP4 KV cache: ours, the Triton baseline, and peers.

    python -m perf.bench_decode                     every case, table on the terminal
    python -m perf.bench_decode --cases D512 --json results.json --png results.png
    python -m perf.bench_decode --cases nvfp4

Each provider is checked against the float64 reference on random inputs first; one that is wrong
gets no time. Times are medians of interleaved rounds of CUDA-graph replays (perf/README.md). The
exit status is 1 when a provider was wrong or failed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import click
from tqdm import tqdm

from perf.baselines.loader import loader_calls
from perf.cases import GROUPS, QUICK_CASES, DecodeCase
from perf.command import Keep, begin, choose, finish, keeper
from perf.inputs import ROTATED_BYTES, WIDE_DTYPES, InputSet, KVPool, make_input_sets
from perf.peers import Refusal
from perf.providers import NOT_INSTALLED, Provider, select_providers
from perf.report import print_report
from perf.rows import (
    OK,
    Machine,
    Measurement,
    make_rows,
    make_workload,
)
from perf.timing import (
    Contender,
    calls_per_graph,
    kernels_of,
    median_us,
    time_host,
    time_rotating,
    time_single,
)
from perf.traffic import ceiling_buffer, device_ceilings, traffic
from perf.verify import verify

FALLBACK = "the slow torch reference: "  # what our function warns with
# The check draws other queries, scales and page orders than the timed calls.
CHECK_SEED_OFFSET = 1_000_003
MAX_REASON = 300


def in_short(error: Exception) -> str:
    """Type and first line, and the last one, where compilers say what was wrong."""
    first, *rest = f"{type(error).__name__}: {error}".strip().splitlines()
    return f"{first} ... {rest[-1].strip()}"[:MAX_REASON] if rest else first[:MAX_REASON]


def check(case: DecodeCase, providers: list[Provider], pool: KVPool) -> dict[str, Measurement]:
    """Status and error of every provider on fresh inputs."""
    inputs = make_input_sets(case, pool, seed=case.seed + CHECK_SEED_OFFSET, count=1)[0]
    results = {}
    for provider in providers:
        reason = provider.why_not(case.kv_cache_dtype)
        if reason is not None:
            results[provider.name] = Measurement(reason)
            continue
        try:
            with warnings.catch_warnings():
                # On a GPU the torch reference would serve, slowly, what no kernel does.
                warnings.filterwarnings("error", message=f".*{FALLBACK}")
                verdict = verify(provider, inputs)
        except UserWarning as fallback:
            results[provider.name] = Measurement(f"no kernel: {str(fallback).split(FALLBACK)[1]}")
            continue
        except ImportError as error:  # a part of it is not there
            results[provider.name] = Measurement(f"{NOT_INSTALLED}: {error}".splitlines()[0])
            continue
        except Refusal as error:
            results[provider.name] = Measurement(f"refuses: {error}")
            continue
        except Exception as error:  # whatever a provider throws, the others still get their turn
            results[provider.name] = Measurement(f"failed: {in_short(error)}")
            continue
        status = OK if verdict.problem is None else f"wrong: {verdict.problem}"
        results[provider.name] = Measurement(status, verdict.relative_error)
    return results


def measure(
    case: DecodeCase, providers: list[Provider], pool: KVPool, rounds: int
) -> tuple[dict[str, Measurement], dict[str, object]]:
    """Check, then time, every provider on one case; with the timing part of the workload."""
    results = check(case, providers, pool)
    right = [provider for provider in providers if results[provider.name].status == OK]
    sets = make_input_sets(case, pool)
    method = {
        "timing": "cuda graph, median",
        "input_sets": len(sets),
        "calls_per_graph": calls_per_graph(len(sets)),
        "rotated_bytes": min(ROTATED_BYTES, len(sets) * traffic(case).kv),
        "rounds": rounds,
    }
    contenders = [Contender(p.name, tuple(p.bind(inputs) for inputs in sets)) for p in right]
    if contenders:
        load = loader_calls(sets)
        alone = [] if isinstance(load, str) else [Contender("loader", load)]
        rotating = time_rotating(contenders + alone, rounds)
        single = time_single(contenders, rounds)
        host = time_host(contenders)
        for i, contender in enumerate(contenders):
            error = results[contender.name].rel_error
            results[contender.name] = Measurement(
                OK, error, rotating[i], single[i], host[i], loader=rotating[-1] if alone else load
            )
    return results, method


def with_kernels(
    results: dict[str, Measurement], providers: Sequence[Provider], inputs: InputSet
) -> dict[str, Measurement]:
    """The same results with what ran. For after all times have been taken: a profiler that was used
    may stay in the way of later launches."""
    found = dict(results)
    for provider in providers:
        result = results[provider.name]
        if result.status == OK:
            found[provider.name] = replace(result, kernels=kernels_of(provider.bind(inputs)))
    return found


def collect(
    cases: Sequence[DecodeCase],
    pool_of: Callable[[DecodeCase], KVPool],
    measure_case: Callable[[DecodeCase, KVPool], tuple[dict[str, Measurement], dict[str, object]]],
    providers: Sequence[Provider],
    machine: Machine,
    ceilings: dict[str, float],
    keep: Keep,
) -> list[dict[str, object]]:
    """Rows of all cases and providers; `keep` gets those so far, without kernels, after each."""
    measured, rows = [], []
    for case in tqdm(cases, unit="case", file=sys.stderr, disable=None):
        results, method = measure_case(case, pool_of(case))
        measured.append((case, results, make_workload(case, machine, method)))
        rows += rows_of(*measured[-1], machine, ceilings, providers)
        keep(rows)
    rows = []
    for case, results, workload in measured:
        inputs = make_input_sets(case, pool_of(case), count=1)[0]
        results = with_kernels(results, providers, inputs)
        rows += rows_of(case, results, workload, machine, ceilings, providers)
    return rows


def rows_of(
    case: DecodeCase,
    results: dict[str, Measurement],
    workload: dict[str, object],
    machine: Machine,
    ceilings: dict[str, float],
    providers: Sequence[Provider],
) -> list[dict[str, object]]:
    """Rows of one case; those of a baseline say how its configuration was found."""
    found = {p.name: p.tuning(case) for p in providers if p.tuning and results[p.name].rotating}
    return [
        row | ({"tuning": found[row["provider"]]} if row["provider"] in found else {})
        for row in make_rows(case, results, workload, machine, ceilings)
    ]


def run(
    cases: list[DecodeCase],
    providers: list[Provider],
    machine: Machine,
    rounds: int,
    keep: Keep,
) -> list[dict[str, object]]:
    """Rows of all cases and providers."""
    # Of one size, whatever the cases are: a smaller pool would read slower and look better.
    ceilings = device_ceilings(ceiling_buffer(), median_us)
    pool = KVPool(cases, "cuda")
    return collect(
        cases,
        lambda case: pool,
        lambda case, pool: measure(case, providers, pool, rounds),
        providers,
        machine,
        ceilings,
        keep,
    )


@click.command(help="Time decode attention over a paged KV cache: ours, Triton, peers.")
@click.option("--all", "all_cases", is_flag=True, help="every case (the default)")
@click.option(
    "--group", "groups", multiple=True, type=click.Choice(list(GROUPS)), help="cases of these only"
)
@click.option("--cases", multiple=True, metavar="TEXT", help="cases with this in their name")
@click.option("--providers", multiple=True, metavar="NAME", help="only these; may be repeated")
@click.option("--one-scale", is_flag=True, help="one scale for K and V, which some peers need")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write result rows")
@click.option("--png", "png_path", type=click.Path(dir_okay=False), help="write a plot")
@click.option("--quick", is_flag=True, help="a case a head size, few rounds: a smoke test")
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--commit", help="what to record where there is no git repository")
@click.option("--list", "list_only", is_flag=True, help="print the cases and stop")
def main(
    all_cases: bool,
    groups: tuple[str, ...],
    cases: tuple[str, ...],
    providers: tuple[str, ...],
    one_scale: bool,
    json_path: str | None,
    png_path: str | None,
    quick: bool,
    rounds: int,
    commit: str | None,
    list_only: bool,
) -> None:
    if sum((all_cases, bool(cases or groups), quick)) > 1:
        raise click.UsageError("--all, --cases (or --group) and --quick exclude each other")
    offered = [case for group in groups or GROUPS for case in GROUPS[group]]
    chosen = list(QUICK_CASES) if quick else choose(offered, cases)
    try:
        contenders = select_providers(providers)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    # A cache in the queries' dtype has no scales.
    chosen = [
        replace(c, one_scale=one_scale and c.kv_cache_dtype not in WIDE_DTYPES) for c in chosen
    ]
    if list_only:
        for case in chosen:
            click.echo(case.name)
        return
    machine = begin("perf.bench_decode", commit)
    rounds = min(rounds, 5) if quick else rounds
    rows = run(chosen, contenders, machine, rounds, keeper(json_path))
    if png_path:
        from perf.report import plot_bandwidth

        plot_bandwidth(rows, png_path)
    finish(rows, json_path, print_report)


if __name__ == "__main__":
    main()
