"""Inputs of the serving benchmark: pools of one kind of layer, and the calls of a step in them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels import flash_attn_varlen_func, reshape_and_cache, split_nvfp4
from perf import trace
from perf.inputs import CODE_RMS, MAX_SETS, NVFP4_RMS, ROTATED_BYTES, InputSet, random_codes
from perf.providers import varlen_arguments
from perf.timing import Call
from perf.trace import Layers, Work

PAGE = 64


class Pool(NamedTuple):
    """K and V pages of one layer kind, as the store takes them: (pages, PAGE, Hkv, D) in the dtype
    of the cache; nvfp4 has uint8 and 9 D / 16 bytes in the place of D."""

    k: torch.Tensor
    v: torch.Tensor


class StepInputs(NamedTuple):
    """attention: arguments of the call, over the pages of pool. key, value: (total_q, Hkv, D) bf16;
    slots: (total_q,)."""

    pool: Pool
    attention: InputSet
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def pages_of(step: tuple[Work, ...]) -> int:
    return sum(-(-keys // PAGE) for _, keys in step)


def bytes_moved(layer: Layers, part: str, keys: int, queries: int) -> int:
    """K and V that attention reads, or new keys and values read and written by the store."""
    per_token = layer.config.bytes_per_token
    if part == "attention":
        return keys * per_token
    elements = 2 * layer.config.num_kv_heads * layer.config.head_size
    return queries * (2 * elements + per_token)


def moved_bytes(layer: Layers, step: tuple[Work, ...], part: str) -> int:
    """As `bytes_moved`, of one layer in a step."""
    keys = trace.keys_read(step, layer.config.sliding_window)
    return bytes_moved(layer, part, keys, sum(query for query, _ in step))


def set_count(layer: Layers, step: tuple[Work, ...]) -> int:
    return min(MAX_SETS, -(-ROTATED_BYTES // moved_bytes(layer, step, "attention")))


def rotated_bytes(layer: Layers, step: tuple[Work, ...]) -> int:
    """K and V over which a timer rotates, up to ROTATED_BYTES."""
    read = set_count(layer, step) * moved_bytes(layer, step, "attention")
    return min(ROTATED_BYTES, read)


def make_pool(layer: Layers, dtype: str, pages: int, generator: torch.Generator) -> Pool:
    shape = (pages, PAGE, layer.config.num_kv_heads, layer.config.head_size)
    count = math.prod(shape)
    if dtype == "nvfp4":
        heads_first = (pages, shape[2], PAGE, shape[3] * 9 // 16)
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
    scale, kv = None, pool._asdict()
    if pool.k.dtype is torch.float8_e4m3fn:
        scale = torch.full((1,), 1 / CODE_RMS, device=device)
    elif pool.k.dtype is torch.uint8:
        scale = torch.full((1,), 1 / NVFP4_RMS, device=device)
        for name, side in pool._asdict().items():
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
    of = inputs.attention
    return partial(flash_attn_varlen_func, **varlen_arguments(of), out=of.out)


def store_arguments(inputs: StepInputs, dtype: str) -> tuple[Any, ...]:
    """Arguments of `reshape_and_cache` into a quantized cache."""
    new = (inputs.key, inputs.value, *inputs.pool, inputs.slots)
    return (*new, dtype, inputs.attention.k_descale, inputs.attention.v_descale)


def store_call(inputs: StepInputs, dtype: str) -> Call:
    """Our store of a quantized cache; torch's index_copy_ into one that holds what it is given."""
    if dtype != "bf16":
        return partial(reshape_and_cache, *store_arguments(inputs, dtype))

    def copy() -> None:
        for cache, new in zip(inputs.pool, (inputs.key, inputs.value), strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, inputs.slots, new)

    return copy
