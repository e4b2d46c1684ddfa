"""Attention and store time of whole serving steps, by model, tensor-parallel size and KV dtype.

    python -m perf.bench_serving --json results.json

Steps come from `perf.trace` (decode, verification of draft tokens and prefill chunks in one batch).
A step's time is that of one layer of each kind, times the layers of that kind: attention over the
paged cache, and the store of the step's new keys and values. Times are medians of interleaved
rounds of CUDA-graph replays that rotate over 400 MB of K and V where 32 sets suffice; the mean of
all steps is estimated from sampled ones (`perf.serving_estimate`), with its standard error. A kind
of layer that no kernel serves gives its configuration a reason instead of a time.
Beside the time stands what the dtype is for: how many tokens fit.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from cute_kernels.reference.store import reshape_and_cache as store_reference
from kvcache import can_run
from perf import trace
from perf.command import Keep, begin, finish, keeper
from perf.providers import varlen_arguments
from perf.rows import (
    OK,
    Machine,
    Measurement,
    make_row,
    make_workload,
)
from perf.serving_estimate import Steps, mean_of_all
from perf.serving_inputs import (
    PAGE,
    StepInputs,
    attention_call,
    make_pool,
    make_step,
    pages_of,
    rotated_bytes,
    set_count,
    store_arguments,
    store_call,
)
from perf.serving_sections import SERVING_COLUMNS, serving_lines
from perf.targets import OURS
from perf.timing import Call, Contender, Timing, kernels_of, median_us, time_rotating
from perf.trace import Layers, Step, TraceSpec, Work
from perf.traffic import ceiling_buffer, device_ceilings

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs"
MODELS = ("gemma-4-31b", "llama-3-70b")
DTYPES = ("bf16", "fp8", "nvfp4")
TP_SIZES = (1, 2, 4, 8)
PARTS = ("attention", "store")
# Bounds of ||out - reference|| / ||reference||: a bf16 cache has bf16 probabilities, too.
MAX_ERROR = {"bf16": 6e-3, "fp8": 3e-3, "nvfp4": 3e-3}
CHECK_STEP = (Work(1, 300), Work(4, 517), Work(37, 37), Work(200, 900))


@dataclass(frozen=True)
class ServingCase:
    """A part of the steps of one kind, over all layers of a model on one device."""

    model: str
    tp_size: int
    kv_cache_dtype: str
    kind: str
    part: str
    facts: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.model} TP{self.tp_size} {self.kv_cache_dtype}, {self.kind}, {self.part}"

    def workload(self) -> dict[str, Any]:
        shapes = ("batch", "kv_len", "q_len", "num_q_heads", "num_kv_heads", "head_size", "window")
        return {
            **dict.fromkeys(shapes),
            "op": f"serving_{self.part}",
            "kv_cache_dtype": self.kv_cache_dtype,
            "page_size": PAGE,
            "model": self.model,
            "tp_size": self.tp_size,
            "kind": self.kind,
            **dict(self.facts),
        }


def small_step(layer: Layers, dtype: str, device: str) -> StepInputs:
    """CHECK_STEP in a pool of its own, its output full of NaN."""
    generator = torch.Generator(device).manual_seed(1)
    pages = pages_of(CHECK_STEP)
    pool = make_pool(layer, dtype, pages, generator)
    order = torch.randperm(pages, generator=generator, device=device)
    inputs = make_step(layer, CHECK_STEP, pool, order)
    inputs.attention.poison()
    return inputs


def check_store(layer: Layers, dtype: str, device: str) -> Measurement:
    """Store once in a small step; the share of bytes that are not the definition's."""
    inputs = small_step(layer, dtype, device)
    expected = [side.clone() for side in inputs.pool]
    if dtype == "bf16":
        for cache, new in zip(expected, (inputs.key, inputs.value), strict=True):
            cache.flatten(0, 1)[inputs.slots] = new
    else:
        key, value, _, _, *others = store_arguments(inputs, dtype)
        store_reference(key, value, *expected, *others)
    store_call(inputs, dtype)()
    pairs = zip(inputs.pool, expected, strict=True)
    different = [(a.view(torch.uint8) != b.view(torch.uint8)).double().mean() for a, b in pairs]
    error = float(max(different))
    return Measurement(f"wrong: {error:.1e} of the bytes differ" if error else OK, error)


def check_attention(layer: Layers, dtype: str, device: str) -> Measurement:
    """Store and attend once in a small step; the output against the float64 reference."""
    reason = can_run(replace(layer.config, page_size=PAGE))
    if reason is not None:
        return Measurement(f"no kernel: {reason}")
    inputs = small_step(layer, dtype, device)
    with warnings.catch_warnings():
        # On a GPU the torch reference would serve, slowly, what no kernel does.
        warnings.filterwarnings("error", message=".*torch reference")
        store_call(inputs, dtype)()
        attention_call(inputs)()
    expected = attention_reference(validate(**varlen_arguments(inputs.attention)), torch.float64)[0]
    difference = inputs.attention.out.double() - expected
    error = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected))
    right = error <= MAX_ERROR[dtype]
    return Measurement(OK if right else f"wrong: relative error {error:.1e}", error)


CHECKS = {"attention": check_attention, "store": check_store}


def check(layer: Layers, dtype: str, device: str, part: str) -> Measurement:
    """Whether a part of a small step is right."""
    try:
        return CHECKS[part](layer, dtype, device)
    except Exception as error:  # what one configuration refuses must not stop the others
        return Measurement(f"failed: {type(error).__name__}: {error}".splitlines()[0])


def inputs_of(layer: Layers, dtype: str, step: tuple[Work, ...], sets: int) -> list[StepInputs]:
    """A step over so many sets of pages, in one pool."""
    own = pages_of(step)
    generator = torch.Generator("cuda").manual_seed(0)
    pool = make_pool(layer, dtype, sets * own, generator)
    order = torch.randperm(sets * own, generator=generator, device="cuda")
    return [make_step(layer, step, pool, pages) for pages in order.split(own)]


def call_of(part: str, inputs: StepInputs, dtype: str) -> Call:
    return attention_call(inputs) if part == "attention" else store_call(inputs, dtype)


def time_layer(
    layer: Layers, dtype: str, step: tuple[Work, ...], rounds: int, parts: Sequence[str]
) -> dict[str, Timing]:
    """One layer of a kind in one step, by part."""
    inputs = inputs_of(layer, dtype, step, set_count(layer, step))
    contenders = [
        Contender(part, tuple(call_of(part, one, dtype) for one in inputs)) for part in parts
    ]
    return dict(zip(parts, time_rotating(contenders, rounds), strict=True))


def kernels_in(layers: list[Layers], dtype: str, step: Step, part: str) -> list[str]:
    """Names of what a part of a step launches, the longest running of each kind of layer first."""
    found: dict[str, None] = {}
    for layer in layers:
        (inputs,) = inputs_of(layer, dtype, step.work, 1)
        found |= dict.fromkeys(kernels_of(call_of(part, inputs, dtype)) or ())
    return list(found)


def over_layers(layers: list[Layers], part: str, step: dict[str, Timing]) -> Timing:
    """Microseconds of a step: each kind's timing times its calls."""
    names = ("median_us", "min_us", "max_us")
    return Timing(
        *(
            sum(trace.calls_of(kind, part) * getattr(step[kind.name], name) for kind in layers)
            for name in names
        )
    )


def verdict(layers: list[Layers], dtype: str, part: str) -> Measurement:
    """The worst that a part of a small step is, over the kinds of layers, which it then names."""
    errors = []
    for kind in layers:
        result = check(kind, dtype, "cuda", part)
        if result.status != OK:
            return Measurement(f"{kind.name}: {result.status}", result.rel_error)
        errors.append(result.rel_error)
    return Measurement(OK, max(errors))


def measure(
    layers: list[Layers],
    dtype: str,
    all_steps: Steps,
    sampled: Steps,
    rounds: int,
    verdicts: dict[str, Measurement],
) -> tuple[dict[str, Measurement], dict[str, dict[str, float]]]:
    """Parts of the steps of one kind, over all layers, of those whose verdict is OK; and what their
    rows say about the standard errors of these means."""
    right = [part for part in PARTS if verdicts[part].status == OK]
    timings: list[dict[str, dict[str, Timing]]] = []
    for step in sampled.steps if right else ():
        timings.append(
            {kind.name: time_layer(kind, dtype, step.work, rounds, right) for kind in layers}
        )
    found, errors = dict(verdicts), {part: {} for part in PARTS}
    for part in right:
        of_part = [
            over_layers(layers, part, {name: of[part] for name, of in step.items()})
            for step in timings
        ]
        everywhere = statistics.fmean(all_steps.work(layers, part))
        mean = mean_of_all(of_part, sampled.work(layers, part), everywhere)
        found[part] = Measurement(OK, verdicts[part].rel_error, mean.timing)
        if mean.standard_error is not None:
            errors[part] = {"standard_error_us": float(f"{mean.standard_error:.3g}")}
    return found, errors


def facts_of(
    spec: TraceSpec, all_steps: Steps, sampled: Steps, layers: list[Layers], kv_gib: float
) -> dict[str, Any]:
    """The trace and the cache's capacity: a part of the workload. most_keys: that a step holds,
    whether they fit or not."""
    requests = trace.make_requests(spec)
    length = round(statistics.fmean(r.prompt + r.output for r in requests))
    capacity = trace.capacity_tokens(layers, int(kv_gib * 2**30), length, PAGE)
    return {
        "trace": asdict(spec),
        "input_tokens": sum(request.prompt for request in requests),
        "output_tokens": sum(request.output for request in requests),
        "steps_in_trace": len(all_steps.steps),
        "steps_measured": len(sampled.steps),
        "sampling": "the middle ones of equal shares by work",
        "most_keys": all_steps.most_keys,
        "kv_gib": kv_gib,
        "sequence_tokens": length,
        "kv_capacity_tokens": capacity,
    }


def method_of(layers: list[Layers], sampled: Steps, rounds: int) -> dict[str, Any]:
    """The timing part of a workload; the bytes of the layer and step that rotate over the
    fewest."""
    fewest = min(rotated_bytes(layer, step.work) for layer in layers for step in sampled.steps)
    return {"timing": "cuda graph, median", "rotated_bytes": fewest, "rounds": rounds}


@dataclass(frozen=True)
class Options:
    spec: TraceSpec
    most_steps: int
    kv_gib: float
    rounds: int


def run(
    cells: list[tuple[str, int, str]],
    machine: Machine,
    options: Options,
    keep: Keep,
) -> list[dict[str, Any]]:
    """Rows of all (model, tensor-parallel size, KV cache dtype), kinds of steps, and parts.

    `keep` gets those so far after each cell.
    """
    steps, rows = trace.simulate(options.spec), []
    kinds = {
        kind: (
            Steps([step for step in steps if step.kind == kind]),
            Steps(trace.sample(steps, kind, options.most_steps)),
        )
        for kind in (trace.PLAIN, trace.CHUNKED)
        if any(step.kind == kind for step in steps)
    }
    timed: list[tuple[dict[str, Any], list[Layers], Step, str]] = []
    ceilings = device_ceilings(ceiling_buffer(), median_us)
    for model, tp_size, dtype in tqdm(cells, file=sys.stderr, disable=None):
        config = json.loads((CONFIGS / f"{model}.json").read_text(encoding="utf-8"))
        layers = trace.layers_of(config, dtype, tp_size)
        verdicts = {part: verdict(layers, dtype, part) for part in PARTS}
        for kind, (all_steps, sampled) in kinds.items():
            facts = facts_of(options.spec, all_steps, sampled, layers, options.kv_gib)
            method = method_of(layers, sampled, options.rounds)
            results, errors = measure(layers, dtype, all_steps, sampled, options.rounds, verdicts)
            torch.cuda.empty_cache()
            for part, result in results.items():
                case = ServingCase(model, tp_size, dtype, kind, part, tuple(facts.items()))
                workload = make_workload(case, machine, method)
                size = round(statistics.fmean(all_steps.moved(layers, part)))
                ceiling = ceilings["read_tb_per_s"]
                row = make_row(OURS, case, result, workload, machine, ceiling, size, ceilings)
                rows.append(row | errors[part])
                if result.status == OK:
                    timed.append((rows[-1], layers, sampled.steps[0], part))
        keep(rows)
    # At the end: a profiler that was used may stay in the way of later launches.
    for row, layers, step, part in timed:
        row["kernels"] = kernels_in(layers, row["kv_cache_dtype"], step, part) or None
    return rows


def print_report(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 1))
    for title in SERVING_COLUMNS:
        table.add_column(title, no_wrap=title != "status")
    for line in serving_lines(rows):
        table.add_row(*line)
    Console(width=150).print(table)


@click.command(help="Time attention and stores of whole serving steps.")
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), default=MODELS)
@click.option("--tp", "tp_sizes", multiple=True, type=int, default=TP_SIZES, show_default=True)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=DTYPES)
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(min=1), help="sampled of each kind"
)
@click.option("--kv-gib", default=40.0, show_default=True, help="cache of a device, for capacity")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write result rows")
@click.option("--commit", help="what to record where there is no git repository")
@click.option("--list", "list_only", is_flag=True, help="print what is measured and stop")
def main(
    models: tuple[str, ...],
    tp_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    steps: int,
    kv_gib: float,
    rounds: int,
    json_path: str | None,
    commit: str | None,
    list_only: bool,
) -> None:
    cells = [(m, tp, dtype) for tp in tp_sizes for m in models for dtype in dtypes]
    if list_only:
        for model, tp_size, dtype in cells:
            click.echo(f"{model} TP{tp_size} {dtype}")
        return
    machine = begin("perf.bench_serving", commit)
    options = Options(TraceSpec(), steps, kv_gib, rounds)
    finish(run(cells, machine, options, keeper(json_path)), json_path, print_report)


if __name__ == "__main__":
    main()
