"""A Triton prefill kernel over a paged FP8 cache: the baseline of `perf.bench_prefill`.

Rows are packed (query token x GQA group member), so that a group shares each load of K and V; keys
are taken 64 at a time, one page of the benchmark; K and V are converted to Q's dtype in registers,
and tiles that the causal mask hides are not visited. Its block sizes are set by hand, not tuned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from perf.inputs import InputSet

LOG2_E = 1.4426950408889634
# head size -> (packed rows, warps, stages)
CONFIGS = {64: (128, 4, 3), 128: (128, 8, 3), 256: (128, 8, 2), 512: (64, 8, 1)}


class Operands(NamedTuple):
    """Tensors: q, out (total_q, Hq, D); k, v (pages, page, Hkv, D); the others as `InputSet`'s."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    out: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    used_k: torch.Tensor
    cu_q: torch.Tensor


class Strides(NamedTuple):
    """In elements; K and V lie alike."""

    q_token: int
    q_head: int
    kv_page: int
    kv_token: int
    kv_head: int
    table_batch: int
    out_token: int
    out_head: int


@triton.jit
def _prefill(
    x, strides, scale, kv_heads,
    group: tl.constexpr, head_size: tl.constexpr, rows: tl.constexpr, page: tl.constexpr,
):  # fmt: skip
    """One chunk of `rows` packed rows of one sequence and KV head, causal (bottom-right)."""
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    b = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    first = tl.load(x.cu_q + b)
    q_len = tl.load(x.cu_q + b + 1) - first
    used = tl.load(x.used_k + b)
    packed = chunk * rows + tl.arange(0, rows)
    token = packed // group
    live = token < q_len
    if chunk * rows >= q_len * group:
        return
    dims = tl.arange(0, head_size)
    lanes = tl.arange(0, page)
    query_head = head * group + packed % group
    row = (first + token).to(tl.int64)
    at = row * strides.q_token + query_head * strides.q_head
    tile_q = tl.load(x.q + at[:, None] + dims[None, :], mask=live[:, None], other=0.0)
    factor = scale * tl.load(x.k_descale + b * kv_heads + head)
    own = used - q_len + token
    end = tl.minimum(used - q_len + (chunk * rows + rows - 1) // group + 1, used)
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, head_size), tl.float32)
    for start in tl.range(0, end, page):
        index = tl.load(x.table + b * strides.table_batch + start // page).to(tl.int64)
        base = index * strides.kv_page + head * strides.kv_head
        base += lanes.to(tl.int64) * strides.kv_token
        tile_k = tl.load(x.k + base[:, None] + dims[None, :]).to(tile_q.dtype)
        scores = tl.dot(tile_q, tl.trans(tile_k)) * factor
        key = start + lanes
        scores = tl.where((key[None, :] <= own[:, None]) & (key < used)[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_top[:, None])
        keep = tl.math.exp2(top - new_top)
        total = total * keep + tl.sum(p, 1)
        tile_v = tl.load(x.v + base[:, None] + dims[None, :]).to(tile_q.dtype)
        acc = tl.dot(p.to(tile_q.dtype), tile_v, acc * keep[:, None])
        top = new_top
    value = acc * (tl.load(x.v_descale + b * kv_heads + head) / total)[:, None]
    at = row * strides.out_token + query_head * strides.out_head
    tl.store(
        x.out + at[:, None] + dims[None, :], value.to(x.out.dtype.element_ty), mask=live[:, None]
    )


def run(inputs: InputSet) -> None:
    """Write `inputs.out`. Pages of a size that Triton can arange over, NHD, causal, no window."""
    head_size, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    group = inputs.q.shape[1] // kv_heads
    rows, warps, stages = CONFIGS[head_size]
    batch = inputs.cu_seqlens_q.shape[0] - 1
    grid = (triton.cdiv(inputs.max_seqlen_q * group, rows), batch * kv_heads)
    x = Operands(
        inputs.q, inputs.k, inputs.v, inputs.block_table, inputs.out, inputs.k_descale,
        inputs.v_descale, inputs.seqused_k, inputs.cu_seqlens_q,
    )  # fmt: skip
    table = inputs.block_table.stride(0)
    strides = Strides(*x.q.stride()[:2], *x.k.stride()[:3], table, *x.out.stride()[:2])
    scale = inputs.softmax_scale * LOG2_E
    _prefill[grid](
        x, strides, scale, kv_heads, group, head_size, rows, x.k.shape[1],
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
