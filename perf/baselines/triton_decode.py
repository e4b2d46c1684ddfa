"""Triton baseline: decode attention over a paged fp8_e4m3 KV cache on Hopper.

The strongest plain Triton formulation we know, so that a win over it means something: query heads
and query tokens of a KV head packed into one operand, every K and V byte read once, keys split
over CTAs, a second kernel that combines the splits, no host synchronisation, V through
`ldmatrix.trans`. Configurations are measured by `perf.baselines.tune` and kept in
`triton_decode_configs.json`.

Not built: softcap, a right window, ragged K/V, packed rows above 128; TMA loads and programmatic
dependent launch of the second kernel, which plain Triton attention kernels do not use either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from perf.baselines.triton_decode_kernels import (
    KVStrides,
    Outputs,
    PagedKV,
    Partials,
    Queries,
    combine_kernel,
    decode_split_kernel,
)
from perf.baselines.tuning import packed_rows, tuned_entries

LOG2_E = 1.4426950408889634
MAX_ROWS = 128
MAX_SPLITS = 256
# Work buckets count tokens in tiles of this size, whatever tile is chosen afterwards.
BUCKET_TILE = 64


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time choices of one launch.

    block_n: tokens of one tile. num_warps, num_stages: Triton's. ctas_per_sm: split target, how
    many CTAs an SM gets in all (not only at a time).
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    ctas_per_sm: int = 4


class DecodeBatch(NamedTuple):
    """One decode call.

    q (total_q, Hq, D) bf16 or fp16; k, v (num_blocks, block_size, Hkv, D) float8_e4m3fn, last dim
    contiguous, other strides of v even; block_table (B, max_blocks) int32; seqused_k (B,) int32;
    cu_seqlens_q (B + 1,) int32; descales (B, Hkv) float32, any strides, or None; window_left -1
    for no window; s_aux (Hq,) sinks.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seqused_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    causal: bool = True
    window_left: int = -1
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    s_aux: torch.Tensor | None = None


def visible_tokens(max_tokens: int, max_seqlen_q: int, window_left: int, block_n: int) -> int:
    """Upper bound of the tokens that a sequence's tiles cover: what the host knows of its work."""
    if window_left < 0:
        return max_tokens
    # The window of the first query token to the last key, and a partial tile at the front.
    return min(max_tokens, window_left + max_seqlen_q + block_n)


def choose_num_splits(items: int, max_tiles: int, sm_count: int, ctas_per_sm: int) -> int:
    """Splits of every (sequence, KV head) item, so that all items make about
    `ctas_per_sm * sm_count` CTAs; from sizes that the host knows, at least 1.

    No split gets fewer than two tiles at full length: its prologue and partial result would cost
    as much as its work.
    """
    wanted = round(ctas_per_sm * sm_count / max(items, 1))
    splits = max(1, min(wanted, max_tiles // 2, MAX_SPLITS))
    # Equal splits: 24 tiles over 10 splits of 3 tiles leaves two without work.
    return triton.cdiv(max(max_tiles, 1), triton.cdiv(max(max_tiles, 1), splits))


def work_bucket(items: int, visible: int, sm_count: int) -> int:
    """log2 of the key tokens that an SM gets: B1 and B64 want different splits and tiles."""
    return int(math.log2(max(1.0, items * visible / sm_count)))


@lru_cache(maxsize=1)
def tuned_configs() -> dict[tuple[int, int], dict[int, DecodeConfig]]:
    """(head size, rows) -> work bucket -> configuration, from `triton_decode_configs.json`."""
    tuned: dict[tuple[int, int], dict[int, DecodeConfig]] = {}
    for entry in tuned_entries():
        of_shape = tuned.setdefault((entry["head_size"], entry["rows"]), {})
        of_shape[entry["work_bucket"]] = DecodeConfig(**entry["config"])
    return tuned


def miscompiled(head_size: int, rows: int, num_warps: int) -> bool:
    """Whether Triton 3.6's code leaves its memory, or gives no finite output (H200, 2026-11-30).

    The interpreter's results are right there, and those of 8 warps.
    """
    return (head_size, rows, num_warps) == (64, 64, 4)


def untuned_config(head_size: int, rows: int) -> DecodeConfig:
    """For shapes that nobody has measured: the largest tile and deepest ring that fit without
    spills. 64 and more rows of head size 512 spill with every configuration."""
    accumulators = rows * head_size
    if accumulators <= 16 * 256 and not miscompiled(head_size, rows, 4):
        return DecodeConfig(num_warps=4, num_stages=4 if head_size <= 128 else 3)
    if accumulators <= 16 * 512:
        return DecodeConfig(num_warps=8, num_stages=3)
    return DecodeConfig(block_n=64 if accumulators <= 32 * 512 else 32, num_warps=8, num_stages=2)


def choose_config(head_size: int, rows: int, bucket: int) -> DecodeConfig:
    """The configuration measured for the nearest amount of work, or an untuned one."""
    of_shape = tuned_configs().get((head_size, rows))
    if not of_shape:
        return untuned_config(head_size, rows)
    return of_shape[min(of_shape, key=lambda known: abs(known - bucket))]


@lru_cache(maxsize=8)
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter: enough CTAs to have several splits
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=8)
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _check(batch: DecodeBatch) -> None:
    head_size, (_, page_size, kv_heads, _) = batch.q.shape[-1], batch.k.shape
    if batch.k.dtype is not torch.float8_e4m3fn or batch.v.dtype is not torch.float8_e4m3fn:
        raise NotImplementedError(f"K/V of {batch.k.dtype}, {batch.v.dtype}: only float8_e4m3fn")
    if head_size not in (64, 128, 256, 512):
        raise NotImplementedError(f"head size {head_size}: only 64, 128, 256, 512")
    if page_size % 16:
        raise NotImplementedError(f"pages of {page_size} tokens: only multiples of 16")
    if batch.q.shape[1] % kv_heads:
        raise ValueError(f"{batch.q.shape[1]} query heads are no multiple of {kv_heads} KV heads")
    if packed_rows(batch.q.shape[1] // kv_heads, batch.max_seqlen_q) > MAX_ROWS:
        raise NotImplementedError(f"more than {MAX_ROWS} packed rows")


def _operands(batch: DecodeBatch) -> tuple[Queries, PagedKV, KVStrides]:
    shape = (batch.seqused_k.shape[0], batch.k.shape[2])
    scales = [
        (_one(batch.q.device) if scale is None else scale).expand(shape)
        for scale in (batch.k_descale, batch.v_descale)
    ]
    pairs = batch.v.view(torch.int16)
    kv = PagedKV(batch.k, pairs, batch.block_table, batch.seqused_k, *scales)
    strides = KVStrides(
        *batch.k.stride()[:3],
        *pairs.stride()[:3],
        batch.block_table.stride(0),
        *scales[0].stride(),
        *scales[1].stride(),
    )
    q = batch.q
    return Queries(q, batch.cu_seqlens_q, q.stride(0), q.stride(1)), kv, strides


def decode_attention(
    batch: DecodeBatch,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> None:
    """Attend into `out` (total_q, Hq, D) and `lse` (Hq, total_q) float32, natural log.

    Capturable in a CUDA graph; nothing is read back to the host. Sequences without keys give 0
    and -inf (the sink's value with sinks). `interpret`: Triton's CPU interpreter, no inline PTX.

    Raises:
        NotImplementedError: what the module docstring lists as not built.
        ValueError: query heads that are no multiple of the KV heads.
    """
    _check(batch)
    num_heads, head_size = batch.q.shape[1:]
    (sequences, width), (_, page_size, kv_heads, _) = batch.block_table.shape, batch.k.shape
    group = num_heads // kv_heads
    rows = packed_rows(group, batch.max_seqlen_q)
    items, sm_count = sequences * kv_heads, _sm_count(batch.q.device)
    if items == 0 or batch.max_seqlen_q == 0:
        return
    bounds = (width * page_size, batch.max_seqlen_q, batch.window_left)
    if config is None:
        bucket = work_bucket(items, visible_tokens(*bounds, BUCKET_TILE), sm_count)
        config = choose_config(head_size, rows, bucket)
    block_n = config.block_n
    tiles = triton.cdiv(visible_tokens(*bounds, block_n), block_n)
    splits = choose_num_splits(items, tiles, sm_count, config.ctas_per_sm)

    queries, kv, strides = _operands(batch)
    outputs = Outputs(out, lse, batch.s_aux, out.stride(0), out.stride(1), lse.stride(0))
    partials = Partials(out, lse, splits)
    if splits > 1:
        workspace = (sequences, kv_heads, splits * rows * (head_size + 1))
        memory = torch.empty(workspace, dtype=torch.float32, device=out.device).view(-1)
        values = items * splits * rows * head_size
        partials = Partials(memory[:values], memory[values:], splits)
    decode_split_kernel[(kv_heads, splits, sequences)](
        queries,
        kv,
        strides,
        outputs,
        partials,
        batch.softmax_scale * LOG2_E,
        GROUP=group,
        ROWS=rows,
        D=head_size,
        PAGE=page_size,
        BLOCK_N=block_n,
        FLAGS=(batch.causal, batch.window_left, splits > 1, not interpret),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits == 1:
        return
    live_rows = group * batch.max_seqlen_q
    block_d = head_size
    while block_d > 32 and items * live_rows * (head_size // block_d) < 2 * sm_count:
        block_d //= 2
    combine_kernel[(live_rows * (head_size // block_d), kv_heads, sequences)](
        queries,
        batch.seqused_k,
        outputs,
        partials,
        GROUP=group,
        ROWS=rows,
        D=head_size,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        SPLITS=triton.next_power_of_2(splits),
        WINDOW=batch.window_left,
        num_warps=4,
    )
