"""What the benchmarks of kernels that only move and convert bytes share.

A provider's results are compared with the torch reference first. Times are medians of interleaved
rounds of CUDA-graph replays (perf/README.md) that rotate over input and output sets of 400 MB in
all where 256 sets suffice; `rotated_bytes` says how many they are, `fits_in_l2` that they are not
enough. The ceiling of a case (`read_ceiling_tb_per_s` in the rows) is the fastest of several copies
of as many bytes, half read and half written, over as many sets, in the same rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import click
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from perf.command import begin, choose, finish, keeper
from perf.inputs import ROTATED_BYTES
from perf.rows import OK, Machine, Measurement, make_row, make_workload
from perf.timing import Contender, calls_per_graph, time_host, time_rotating, time_single

OURS, BASELINE = "cute_kernels", "triton_baseline"
# More than attention calls have: hundreds of small ones are past L2, too.
MAX_WRITER_SETS = 256
# Bytes between two places that a copy writes to.
ELSEWHERE = (1 << 20) + (1 << 12)


class Case(Protocol):
    """name: unique. moved_bytes: that must be read or written."""

    seed: int

    @property
    def name(self) -> str: ...

    @property
    def moved_bytes(self) -> int: ...

    def workload(self) -> dict[str, Any]: ...


class Benchmark(NamedTuple):
    """make_arguments: of one call, from a case and a generator. bind: a provider's call of them.
    check: a provider on a case against the reference; without OK it is not timed. tuning: of the
    baseline's configurations, see `perf.rows`."""

    make_arguments: Callable[[Any, torch.Generator], Any]
    bind: Callable[[str, Any], Callable[[], object]]
    check: Callable[[str, Any], Measurement]
    tuning: str


def copies(
    size: int, sets: int, device: str = "cuda"
) -> dict[str, tuple[Callable[[], object], ...]]:
    """Ways to read `size` bytes (a multiple of 16) and write as many, by name; a call a set.

    memcpy is torch's `copy_`; elementwise a kernel with 16-byte loads and stores; elsewhere the
    same into other addresses. None is always the fastest: `copy_` alone reached 2.8 TB/s with 705
    MB and 4.3 with 831 (H200, 2026-11-30).
    """
    sources = [torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(sets)]
    room = [torch.empty(size + ELSEWHERE, dtype=torch.uint8, device=device) for _ in sources]
    words = [(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(sources, room, strict=True)]
    shift, count = ELSEWHERE // 4, size // 4
    return {
        "memcpy": tuple(partial(y[:size].copy_, x) for x, y in zip(sources, room, strict=True)),
        "elementwise": tuple(partial(torch.bitwise_not, x, out=y[:count]) for x, y in words),
        "elsewhere": tuple(partial(torch.bitwise_not, x, out=y[shift:]) for x, y in words),
    }


def keeping(call: Callable[[], object]) -> Callable[[], object]:
    """The call, which keeps what it returned: else all calls of a graph would write their results
    to the same memory, which stays in L2."""
    kept: list[object] = []

    def run() -> None:
        kept[:] = [call()]

    return run


def measure(
    benchmark: Benchmark, case: Case, rounds: int
) -> tuple[dict[str, Measurement], dict[str, object], dict[str, float]]:
    """Check, then time, all providers; with the timing part of the workload, and the copies' TB/s
    and size."""
    results = {provider: benchmark.check(provider, case) for provider in (OURS, BASELINE)}
    sets = min(MAX_WRITER_SETS, -(-ROTATED_BYTES // case.moved_bytes))
    generator = torch.Generator("cuda").manual_seed(case.seed)
    arguments = [benchmark.make_arguments(case, generator) for _ in range(sets)]
    right = [name for name, result in results.items() if result.status == OK]
    contenders = [
        Contender(p, tuple(keeping(benchmark.bind(p, one)) for one in arguments)) for p in right
    ]
    size = max(16, case.moved_bytes // 32 * 16)
    of_copies = [Contender(name, calls) for name, calls in copies(size, sets).items()]
    rotating = time_rotating(contenders + of_copies, rounds)
    if contenders:
        single, host = time_single(contenders, rounds), time_host(contenders)
        for i, name in enumerate(right):
            error = results[name].rel_error
            results[name] = Measurement(OK, error, rotating[i], single[i], host[i])
    rates = {
        f"{contender.name}_tb_per_s": 2 * size / timing.median_us / 1e6
        for contender, timing in zip(of_copies, rotating[len(contenders) :], strict=True)
    }
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return results, method_of(case, sets, rounds, l2_bytes), rates | {"copy_gib": 2 * size / 2**30}


def method_of(case: Case, sets: int, rounds: int, l2_bytes: int) -> dict[str, object]:
    """The timing part of a workload."""
    rotated = sets * case.moved_bytes
    method = {
        "timing": "cuda graph, median",
        "input_sets": sets,
        "calls_per_graph": calls_per_graph(sets),
        "rotated_bytes": min(ROTATED_BYTES, rotated),
        "rounds": rounds,
    }
    return method | ({"fits_in_l2": True} if rotated <= l2_bytes else {})


def run(
    benchmark: Benchmark,
    cases: Sequence[Case],
    machine: Machine,
    rounds: int,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Rows of all cases and providers; `keep` gets those so far after each case."""
    rows = []
    for case in tqdm(cases, unit="case", file=sys.stderr, disable=None):
        results, method, ceilings = measure(benchmark, case, rounds)
        workload = make_workload(case, machine, method)
        ceiling = max(rate for name, rate in ceilings.items() if name.endswith("_tb_per_s"))
        for name, result in results.items():
            moved = case.moved_bytes
            row = make_row(name, case, result, workload, machine, ceiling, moved, ceilings)
            rows.append(row | ({"tuning": benchmark.tuning} if name == BASELINE else {}))
        keep(rows)
    return rows


def print_report(rows: list[dict[str, Any]]) -> None:
    """A line a case: our time, its share of the copy's rate, the baseline's time."""
    table = Table(box=None, padding=(0, 1))
    for title in ("case", "us", "min..max", "TB/s", "of copy", "1/graph", "host us", "Triton us"):
        table.add_column(title, justify="left" if title == "case" else "right", no_wrap=True)
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["provider"]] = row
    for case, of in by_case.items():
        ours, theirs = of[OURS], of[BASELINE]
        triton = theirs["status"] if theirs["median_us"] is None else f"{theirs['median_us']:.2f}"
        if ours["median_us"] is None:
            table.add_row(case, ours["status"][:60], *[""] * 5, triton[:20])
            continue
        table.add_row(
            case,
            f"{ours['median_us']:.2f}",
            f"{ours['min_us']:.2f}..{ours['max_us']:.2f}",
            f"{ours['tb_per_s']:.2f}",
            f"{ours['pct_of_ceiling']:.0f}%",
            f"{ours['single_call_us']:.1f}",
            f"{ours['host_us']:.0f}",
            triton[:20],
        )
    Console(width=118, markup=False).print(table)
    first = rows[0]
    click.echo(f"{first['gpu']}, driver {first['driver']}, {first['date']}")


def command(
    module: str,
    about: str,
    cases: Sequence[Case],
    benchmark: Benchmark,
) -> click.Command:
    """The command of a benchmark's module."""

    @click.command(help=about)
    @click.option("--cases", "patterns", multiple=True, metavar="TEXT", help="only these")
    @click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write result rows")
    @click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=1))
    @click.option("--commit", help="what to record where there is no git repository")
    @click.option("--list", "list_only", is_flag=True, help="print the cases and stop")
    def main(
        patterns: tuple[str, ...],
        json_path: str | None,
        rounds: int,
        commit: str | None,
        list_only: bool,
    ) -> None:
        chosen = choose(cases, patterns)
        if list_only:
            for case in chosen:
                click.echo(case.name)
            return
        machine = begin(module, commit)
        rows = run(benchmark, chosen, machine, rounds, keeper(json_path))
        finish(rows, json_path, print_report)

    return main
