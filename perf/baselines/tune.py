"""Measure the Triton baseline's configurations on this GPU.

    python -m perf.baselines.tune --out perf/baselines/triton_decode_configs.json
    python -m perf.baselines.tune --out perf/baselines/triton_decode_configs.json --cases q8

For every decode case: each (tile, warps, stages) at one split target, then all split targets for
the best few. The fastest is stored under the case's head size, packed rows and work bucket, with
its time, so that the baseline meets our kernel at its best on exactly these cases.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import triton
from tqdm import tqdm

from perf.baselines.compile_report import search_space
from perf.baselines.triton_decode import (
    BUCKET_TILE,
    DecodeConfig,
    decode_attention,
    miscompiled,
    visible_tokens,
    work_bucket,
)
from perf.baselines.tuning import packed_rows
from perf.cases import DECODE_CASES, VERIFY_CASES, DecodeCase
from perf.command import choose
from perf.inputs import InputSet, KVPool, make_input_sets
from perf.providers import MAX_RELATIVE_ERROR, triton_batch
from perf.rows import describe_machine
from perf.timing import Contender, time_rotating
from perf.verify import checked_sequences, reference_output, relative_error

# Batches of unequal lengths take what was measured for equal ones of their size.
TUNED_CASES = (*DECODE_CASES, *VERIFY_CASES)
FIRST_TARGET = 4
CTAS_PER_SM = (1, 2, 3, 4, 6, 8, 12, 16)
KEPT = 4
ROUNDS = 5


class Checked(NamedTuple):
    """Input sets of a case and what the first of them must give for some of its sequences."""

    sets: list[InputSet]
    indices: list[int]
    reference: torch.Tensor


def time_config(checked: Checked, config: DecodeConfig) -> float:
    """Microseconds per call; infinity where the configuration does not fit or is wrong."""
    calls = tuple(
        partial(decode_attention, triton_batch(inputs), inputs.out, inputs.lse, config)
        for inputs in checked.sets
    )
    first = checked.sets[0]
    first.poison()
    try:
        calls[0]()
    except triton.runtime.errors.OutOfResources:
        return math.inf
    error = relative_error(first, checked.indices, checked.reference)
    if not error <= MAX_RELATIVE_ERROR:
        click.echo(f"{config} is wrong: relative error {error:.1e}")
        return math.inf
    return time_rotating([Contender(repr(config), calls)], ROUNDS)[0].median_us


def tune_case(case: DecodeCase, pool: KVPool) -> list[tuple[float, DecodeConfig]]:
    """All measured configurations of a case, the fastest first."""
    sets = make_input_sets(case, pool)
    indices = checked_sequences(sets[0])
    checked = Checked(sets, indices, reference_output(sets[0], indices))
    rows = packed_rows(case.group, case.q_len)
    tiles = [
        replace(config, ctas_per_sm=FIRST_TARGET)
        for config in search_space()
        if not miscompiled(case.head_size, rows, config.num_warps)
    ]
    found = sorted(((time_config(checked, config), config) for config in tiles), key=_time)
    targets = [target for target in CTAS_PER_SM if target != FIRST_TARGET]
    for (_, config), target in itertools.product(found[:KEPT], targets):
        other = replace(config, ctas_per_sm=target)
        found.append((time_config(checked, other), other))
    return sorted(found, key=_time)


def _time(measured: tuple[float, DecodeConfig]) -> float:
    return measured[0]


def table_entry(
    case: DecodeCase, sm_count: int, best: tuple[float, DecodeConfig]
) -> dict[str, Any]:
    """What `triton_decode_configs.json` keeps of a case."""
    bound = visible_tokens(case.kv_len, case.q_len, case.window_left, BUCKET_TILE)
    return {
        "case": case.name,
        "head_size": case.head_size,
        "rows": packed_rows(case.group, case.q_len),
        "work_bucket": work_bucket(case.batch * case.num_kv_heads, bound, sm_count),
        "config": asdict(best[1]),
        "median_us": round(best[0], 2),
    }


def key_of(entry: dict[str, Any]) -> tuple[int, int, int]:
    return entry["head_size"], entry["rows"], entry["work_bucket"]


def merge(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a key: where two cases share one, that of the case that takes longer."""
    merged = {key_of(entry): entry for entry in sorted(entries, key=lambda e: e["median_us"])}
    return [merged[key] for key in sorted(merged)]


def with_run(runs: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of which each has the entries that no later one measured again; none is empty."""
    again = {key_of(entry) for entry in new["configs"]}
    kept = [
        {**run, "configs": [entry for entry in run["configs"] if key_of(entry) not in again]}
        for run in runs
    ]
    return [run for run in (*kept, new) if run["configs"]]


@click.command(help="Measure the Triton baseline's configurations on this GPU.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON to write; entries of other shapes that are there stay",
)
@click.option("--cases", multiple=True, metavar="TEXT", help="cases with this in their name")
@click.option("--commit", help="what to record where there is no git repository")
def main(out: Path, cases: tuple[str, ...], commit: str | None) -> None:
    start = time.perf_counter()
    chosen = choose(TUNED_CASES, cases)
    pool = KVPool(chosen, "cuda")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    command = shlex.join(["python", "-m", "perf.baselines.tune", *sys.argv[1:]])
    machine = asdict(describe_machine(command, commit))
    before = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    entries: list[dict[str, Any]] = []
    without = []
    for case in tqdm(chosen, unit="case"):
        ranked = tune_case(case, pool)
        click.echo(f"{case.name}: {len(ranked)} measured")
        for us, config in ranked[:3]:
            click.echo(f"  {us:8.1f} us  {config}")
        if math.isinf(ranked[0][0]):
            without.append(case.name)
            continue
        entries.append(table_entry(case, sm_count, ranked[0]))
        seconds = round(time.perf_counter() - start)
        run = {"machine": machine, "tuning_seconds": seconds, "configs": merge(entries)}
        text = json.dumps({"runs": with_run(before, run)}, indent=1)
        out.write_text(text + "\n", encoding="utf-8")
    if without:
        raise click.ClickException(f"no configuration fits and is right: {', '.join(without)}")


if __name__ == "__main__":
    main()
