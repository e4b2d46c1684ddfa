"""Attention and store time of whole serving steps, by model, tensor-parallel size and KV dtype.

    python -m perf.bench_serving --json results.json

Steps come from `perf.trace` (decode, verification of draft tokens and prefill chunks in one batch).
A step's time is that of one layer of each kind, times the layers of that kind: attention over the
paged cache, and the store of the step's new keys and values. Times are medians of interleaved
rounds of CUDA-graph replays that rotate over more than 400 MB of K and V, averaged over sampled
steps. A kind of layer that no kernel serves gives its configuration a reason instead of a time.
Beside the time stands what the dtype is for: how many tokens fit.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from cute_kernels import flash_attn_varlen_func, reshape_and_cache, split_nvfp4
from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from perf import trace
from perf.command import begin, finish
from perf.inputs import CODE_RMS, MAX_SETS, NVFP4_RMS, ROTATED_BYTES, InputSet, random_codes
from perf.providers import varlen_arguments
from perf.rows import (
    OK,
    Machine,
    Measurement,
    make_row,
    make_workload,
)
from perf.sections import SERVING_COLUMNS, serving_lines
from perf.timing import Call, Contender, Timing, median_us, time_rotating
from perf.trace import Layers, Step, TraceSpec, Work
from perf.traffic import ReductionProbe, read_ceilings

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs"
MODELS = ("gemma-4-31b", "llama-3-70b")
DTYPES = ("bf16", "fp8", "nvfp4")
TP_SIZES = (1, 2, 4, 8)
PARTS = ("attention", "store")
PAGE = 64
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


class Pool(NamedTuple):
    """K and V pages of one layer kind as the store takes them: (pages, PAGE, Hkv, D) in the cache's
    dtype, or the 9 D / 16 bytes of nvfp4."""

    k: torch.Tensor
    v: torch.Tensor


class StepInputs(NamedTuple):
    """attention: arguments of the call. key, value: (total_q, Hkv, D) bf16; slots: (total_q,)."""

    pool: Pool
    attention: InputSet
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def pages_of(step: tuple[Work, ...]) -> int:
    return sum(-(-keys // PAGE) for _, keys in step)


def moved_bytes(layer: Layers, step: tuple[Work, ...], part: str) -> int:
    """K and V that attention reads, or new keys and values read and written by the store."""
    per_token = layer.config.bytes_per_token
    if part == "attention":
        return trace.keys_read(step, layer.config.sliding_window) * per_token
    elements = 2 * layer.config.num_kv_heads * layer.config.head_size
    return sum(query for query, _ in step) * (2 * elements + per_token)


def set_count(layer: Layers, step: tuple[Work, ...]) -> int:
    return min(MAX_SETS, -(-ROTATED_BYTES // moved_bytes(layer, step, "attention")))


def make_pool(layer: Layers, dtype: str, pages: int, generator: torch.Generator) -> Pool:
    shape = (pages, PAGE, layer.config.num_kv_heads, layer.config.head_size)
    count = pages * PAGE * shape[2] * shape[3]
    if dtype == "nvfp4":
        heads_first = (pages, shape[2], PAGE, shape[3] // 16 * 9)
        sides = (random_codes(math.prod(heads_first), generator) for _ in "kv")
        return Pool(*(side.view(heads_first).transpose(1, 2) for side in sides))
    if dtype == "fp8":
        sides = (random_codes(count, generator).view(torch.float8_e4m3fn) for _ in "kv")
    else:
        empty = partial(torch.empty, count, dtype=torch.bfloat16, device=generator.device)
        sides = (empty().normal_(generator=generator) for _ in "kv")
    return Pool(*(side.view(shape) for side in sides))


def make_step(layer: Layers, step: tuple[Work, ...], pool: Pool, pages: torch.Tensor) -> StepInputs:
    """The calls of one layer in one step; `pages` (pages_of(step),) are the sequences' own."""
    config, device = layer.config, pool.k.device
    counts = [-(-keys // PAGE) for _, keys in step]
    table = torch.full((len(step), max(counts)), -1, dtype=torch.int32)
    slots, cpu_pages = [], pages.cpu().long()
    for row, own, (query, keys) in zip(table, cpu_pages.split(counts), step, strict=True):
        row[: len(own)] = own
        at = torch.arange(keys - query, keys)
        slots.append(own[at // PAGE] * PAGE + at % PAGE)
    queries = torch.tensor([0, *(query for query, _ in step)], dtype=torch.int32)
    total = int(queries.sum())
    generator = torch.Generator(device).manual_seed(total)
    normal = partial(torch.randn, generator=generator, device=device)
    q = normal((total, config.num_q_heads, config.head_size)).bfloat16()
    key, value = (normal((total, config.num_kv_heads, config.head_size)).bfloat16() for _ in "kv")
    scale = None
    kv = {"k": pool.k, "v": pool.v}
    if pool.k.dtype is torch.float8_e4m3fn:
        scale = torch.full((1,), 1 / CODE_RMS, device=device)
    elif pool.k.dtype is torch.uint8:
        scale = torch.full((1,), 1 / NVFP4_RMS, device=device)
        for name, side in (("k", pool.k), ("v", pool.v)):
            kv[name], kv[f"{name}_block_scale"] = split_nvfp4(side)
    attention = InputSet(
        **kv,
        q=q,
        block_table=table.to(device),
        seqused_k=torch.tensor([keys for _, keys in step], dtype=torch.int32, device=device),
        cu_seqlens_q=queries.cumsum(0, dtype=torch.int32).to(device),
        k_descale=scale,
        v_descale=scale,
        out=torch.empty_like(q),
        lse=torch.empty((config.num_q_heads, total), device=device),
        max_seqlen_q=max(query for query, _ in step),
        max_seqlen_k=max(keys for _, keys in step),
        softmax_scale=config.head_size**-0.5,
        window_left=-1 if config.sliding_window is None else config.sliding_window - 1,
    )
    return StepInputs(pool, attention, key, value, torch.cat(slots).to(device))


def attention_call(inputs: StepInputs) -> Call:
    arguments = varlen_arguments(inputs.attention)
    return partial(flash_attn_varlen_func, **arguments, out=inputs.attention.out)


def store_call(inputs: StepInputs) -> Call:
    """Our store of a quantized cache; torch's index_copy_ into one that holds what it is given."""
    k, v = inputs.pool
    scale = inputs.attention.k_descale
    if scale is not None:
        new = (inputs.key, inputs.value, k, v, inputs.slots)
        dtype = "nvfp4" if k.dtype is torch.uint8 else "fp8"
        return partial(reshape_and_cache, *new, dtype, scale, scale)

    def copy() -> None:
        for cache, new in ((k, inputs.key), (v, inputs.value)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, inputs.slots, new)

    return copy


def check(layer: Layers, dtype: str, device: str) -> Measurement:
    """Store and attend once in a small step; the output against the float64 reference."""
    generator = torch.Generator(device).manual_seed(1)
    pages = pages_of(CHECK_STEP)
    pool = make_pool(layer, dtype, pages, generator)
    order = torch.randperm(pages, generator=generator, device=device)
    inputs = make_step(layer, CHECK_STEP, pool, order)
    inputs.attention.poison()
    try:
        with warnings.catch_warnings():
            # On a GPU the torch reference would serve, slowly, what no kernel does.
            warnings.filterwarnings("error", message=".*torch reference")
            store_call(inputs)()
            attention_call(inputs)()
    except Exception as error:  # what one configuration refuses must not stop the others
        return Measurement(f"failed: {type(error).__name__}: {error}".splitlines()[0])
    problem = validate(**varlen_arguments(inputs.attention))
    expected = attention_reference(problem, torch.float64)[0]
    difference = inputs.attention.out.double() - expected
    error = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected))
    right = error <= MAX_ERROR[dtype]
    return Measurement(OK if right else f"wrong: relative error {error:.1e}", error)


def time_layer(layer: Layers, dtype: str, step: tuple[Work, ...], rounds: int) -> dict[str, Timing]:
    """One layer of a kind in one step, by part."""
    sets, own = set_count(layer, step), pages_of(step)
    generator = torch.Generator("cuda").manual_seed(0)
    pool = make_pool(layer, dtype, sets * own, generator)
    order = torch.randperm(sets * own, generator=generator, device="cuda")
    inputs = [make_step(layer, step, pool, pages) for pages in order.split(own)]
    contenders = [
        Contender("attention", tuple(attention_call(one) for one in inputs)),
        Contender("store", tuple(store_call(one) for one in inputs)),
    ]
    return dict(zip(PARTS, time_rotating(contenders, rounds), strict=True))


def calls_of(layer: Layers, part: str) -> int:
    """How often a step runs this part for this kind; layers that share a cache store nothing."""
    return layer.cached if part == "store" else layer.count


def over_layers(layers: list[Layers], part: str, steps: list[dict[str, Timing]]) -> Timing:
    """Microseconds of a step: each kind's timing times its calls, averaged over sampled steps."""
    sums = [
        [
            sum(calls_of(kind, part) * getattr(step[kind.name], name) for kind in layers)
            for step in steps
        ]
        for name in ("median_us", "min_us", "max_us")
    ]
    return Timing(*(statistics.fmean(values) for values in sums))


def measure(
    layers: list[Layers], dtype: str, steps: list[Step], rounds: int
) -> dict[str, Measurement]:
    """Parts of the sampled steps of one kind, over all layers."""
    for kind in layers:
        result = check(kind, dtype, "cuda")
        if result.status != OK:
            status = f"{kind.name}: {result.status}"
            return {part: Measurement(status, result.rel_error) for part in PARTS}
    timings: dict[str, list[dict[str, Timing]]] = {part: [] for part in PARTS}
    for step in steps:
        found = {kind.name: time_layer(kind, dtype, step.work, rounds) for kind in layers}
        for part in PARTS:
            timings[part].append({name: of[part] for name, of in found.items()})
    return {part: Measurement(OK, None, over_layers(layers, part, timings[part])) for part in PARTS}


def facts_of(
    spec: TraceSpec, steps: list[Step], sampled: list[Step], layers: list[Layers], kv_gib: float
) -> dict[str, Any]:
    """The trace and the cache's capacity: a part of the workload."""
    requests = trace.make_requests(spec)
    length = round(statistics.fmean(r.prompt + r.output for r in requests))
    capacity = trace.capacity_tokens(layers, int(kv_gib * 2**30), length, PAGE)
    return {
        "trace": asdict(spec),
        "input_tokens": sum(request.prompt for request in requests),
        "output_tokens": sum(request.output for request in requests),
        "steps_in_trace": sum(step.kind == sampled[0].kind for step in steps),
        "steps_measured": len(sampled),
        "kv_gib": kv_gib,
        "sequence_tokens": length,
        "kv_capacity_tokens": capacity,
    }


@dataclass(frozen=True)
class Options:
    spec: TraceSpec
    most_steps: int
    kv_gib: float
    rounds: int


def run(
    cells: list[tuple[str, int, str]], machine: Machine, options: Options
) -> list[dict[str, Any]]:
    """Rows of all (model, tensor-parallel size, KV cache dtype), kinds of steps, and parts."""
    steps, rows = trace.simulate(options.spec), []
    buffer = torch.zeros(1 << 31, dtype=torch.uint8, device="cuda")
    ceiling = max(read_ceilings([ReductionProbe(buffer)], median_us).values())
    del buffer
    for model, tp_size, dtype in tqdm(cells, file=sys.stderr, disable=None):
        config = json.loads((CONFIGS / f"{model}.json").read_text(encoding="utf-8"))
        layers = trace.layers_of(config, dtype, tp_size)
        for kind in (trace.PLAIN, trace.CHUNKED):
            sampled = trace.sample(steps, kind, options.most_steps)
            if not sampled:
                continue
            facts = facts_of(options.spec, steps, sampled, layers, options.kv_gib)
            method = {"timing": "cuda graph, median", "rotated_bytes": ROTATED_BYTES}
            method["rounds"] = options.rounds
            results = measure(layers, dtype, sampled, options.rounds)
            torch.cuda.empty_cache()
            for part, result in results.items():
                case = ServingCase(model, tp_size, dtype, kind, part, tuple(facts.items()))
                moved = sum(
                    calls_of(layer, part) * moved_bytes(layer, step.work, part)
                    for layer in layers
                    for step in sampled
                )
                workload = make_workload(case, machine, method)
                size = moved // len(sampled)
                rows.append(
                    make_row("cute_kernels", case, result, workload, machine, ceiling, size)
                )
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
def main(
    models: tuple[str, ...],
    tp_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    steps: int,
    kv_gib: float,
    rounds: int,
    json_path: str | None,
    commit: str | None,
) -> None:
    machine = begin("perf.bench_serving", commit)
    cells = [(m, tp, dtype) for m in models for tp in tp_sizes for dtype in dtypes]
    options = Options(TraceSpec(), steps, kv_gib, rounds)
    finish(run(cells, machine, options), json_path, print_report)


if __name__ == "__main__":
    main()
