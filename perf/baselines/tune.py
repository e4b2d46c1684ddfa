"""Measure the Triton baseline's configurations on this GPU.

    python -m perf.baselines.tune --out perf/baselines/triton_decode_configs.json

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
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import click
import torch
import triton
from tqdm import tqdm

from perf.baselines.compile_report import search_space
from perf.baselines.triton_decode import (
    BUCKET_TILE,
    DecodeConfig,
    decode_attention,
    packed_rows,
    visible_tokens,
    work_bucket,
)
from perf.cases import ALL_CASES, DecodeCase
from perf.command import choose
from perf.inputs import InputSet, KVPool, make_input_sets
from perf.providers import MAX_RELATIVE_ERROR, triton_batch
from perf.rows import describe_machine
from perf.timing import Contender, time_rotating
from perf.verify import checked_sequences, reference_output, relative_error

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
    tiles = [replace(config, ctas_per_sm=FIRST_TARGET) for config in search_space()]
    found = sorted(((time_config(checked, config), config) for config in tiles), key=_time)
    targets = [target for target in CTAS_PER_SM if target != FIRST_TARGET]
    for (_, config), target in itertools.product(found[:KEPT], targets):
        other = replace(config, ctas_per_sm=target)
        found.append((time_config(checked, other), other))
    return sorted(found, key=_time)


def _time(measured: tuple[float, DecodeConfig]) -> float:
    return measured[0]


def table_entry(case: DecodeCase, sm_count: int, best: tuple[float, DecodeConfig]) -> dict:
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


def merge(entries: list[dict]) -> list[dict]:
    """One entry a key: where two cases share one, that of the case that takes longer."""
    merged: dict[tuple[int, int, int], dict] = {}
    for entry in sorted(entries, key=lambda e: e["median_us"]):
        merged[entry["head_size"], entry["rows"], entry["work_bucket"]] = entry
    return [merged[key] for key in sorted(merged)]


@click.command(help="Measure the Triton baseline's configurations on this GPU.")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON to write")
@click.option("--cases", multiple=True, metavar="TEXT", help="cases with this in their name")
@click.option("--commit", help="what to record where there is no git repository")
def main(out: str, cases: tuple[str, ...], commit: str | None) -> None:
    start = time.perf_counter()
    chosen = choose(ALL_CASES, cases)
    pool = KVPool(chosen, "cuda")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    entries, report = [], []
    for case in tqdm(chosen, unit="case"):
        ranked = tune_case(case, pool)
        if math.isinf(ranked[0][0]):
            raise click.ClickException(f"{case.name}: no configuration fits and is right")
        entries.append(table_entry(case, sm_count, ranked[0]))
        report.append(f"{case.name}: {len(ranked)} measured")
        report += [f"  {us:8.1f} us  {config}" for us, config in ranked[:3]]
    seconds = time.perf_counter() - start
    machine = describe_machine(
        shlex.join(["python", "-m", "perf.baselines.tune", *sys.argv[1:]]), commit
    )
    document = {
        "machine": asdict(machine),
        "tuning_seconds": round(seconds),
        "configs": merge(entries),
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    click.echo("\n".join(report))
    click.echo(f"{seconds:.0f} s, written to {out}")


if __name__ == "__main__":
    main()
