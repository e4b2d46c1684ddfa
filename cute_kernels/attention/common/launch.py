"""From what the host passes to what a kernel takes: addresses, strides and sizes become tensors.

Both SM90 kernels are launched with the same operands; ``at`` is the kernel's own tuple of
addresses, with these names at least: q, k, v, out, lse, sinks, k_descale, v_descale, used_k, cu_k,
table. An address is 0 where an optional operand is absent.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.attention.common.output import Output
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.layout import swizzle_bits
from cute_kernels.attention.decode_sm90.producer import BlockScales, PagedSource, TmaOperand


class Strides(NamedTuple):
    """In elements; K and V in bytes."""

    q_token: Int64
    q_head: Int64
    k_page: Int64
    k_token: Int64
    k_head: Int64
    v_page: Int64
    v_token: Int64
    v_head: Int64
    out_token: Int64
    out_head: Int64
    k_descale_batch: Int64
    k_descale_head: Int64
    v_descale_batch: Int64
    v_descale_head: Int64
    table_batch: Int64


# Of a block-scaled cache; the scales' strides are in bytes too. Those between tokens have 32 bits:
# the producer multiplies by them for every tile.
_SCALE_STRIDES = {"page": Int64, "token": Int32, "head": Int64}
ScaledStrides = NamedTuple(
    "ScaledStrides",
    [
        *((name, Int64) for name in Strides._fields),
        *((f"{side}_scale_{step}", kind) for side in "kv" for step, kind in _SCALE_STRIDES.items()),
    ],
)


class Sizes(NamedTuple):
    """batch sequences, total_q tokens, kv_heads, group; the cache's pages and page_size.

    paged and has_used say which length and page operands are present.
    """

    batch: Int32
    total_q: Int32
    kv_heads: Int32
    group: Int32
    group_magic: Int64
    pages: Int32
    page_size: Int32
    table_width: Int32
    paged: Int32
    has_used: Int32


class Scales(NamedTuple):
    """mK, mV (batch, kv_heads) float32 descales, address 0 for 1; the softmax scale; softcap."""

    mK: cute.Tensor
    mV: cute.Tensor
    softmax_scale: Float32
    softcap: Float32


def queries(at, strides: Strides, sizes: Sizes, head_size: int) -> cute.Tensor:
    shape = (sizes.total_q, sizes.kv_heads * sizes.group, head_size)
    return cute.make_tensor(
        at.q, cute.make_layout(shape, stride=(strides.q_token, strides.q_head, 1))
    )


def outputs(at, strides: Strides, sizes: Sizes, head_size: int) -> Output:
    heads = sizes.kv_heads * sizes.group
    shape = (sizes.total_q, heads, head_size)
    out = cute.make_layout(shape, stride=(strides.out_token, strides.out_head, 1))
    lse = cute.make_layout((heads, sizes.total_q), stride=(Int64(sizes.total_q), 1))
    return Output(
        cute.make_tensor(at.out, out),
        cute.make_tensor(at.lse, lse),
        cute.make_tensor(at.sinks, cute.make_layout(heads)),
    )


def scales(at, strides: Strides, sizes: Sizes, softmax_scale: Float32, softcap: Float32) -> Scales:
    per_head = (sizes.batch, sizes.kv_heads)
    k = (strides.k_descale_batch, strides.k_descale_head)
    v = (strides.v_descale_batch, strides.v_descale_head)
    return Scales(
        cute.make_tensor(at.k_descale, cute.make_layout(per_head, stride=k)),
        cute.make_tensor(at.v_descale, cute.make_layout(per_head, stride=v)),
        softmax_scale,
        softcap,
    )


@cute.jit
def descales_of(scales: Scales, b: Int32, head: Int32):
    """(K's, V's) of a sequence and KV head, 1 where there are none."""
    k = Float32(1.0)
    v = Float32(1.0)
    if scales.mK.iterator.toint() != 0:
        k = scales.mK[b, head]
    if scales.mV.iterator.toint() != 0:
        v = scales.mV[b, head]
    return k, v


def lengths(at, mCuQ: cute.Tensor, sizes: Sizes) -> Lengths:
    return Lengths(
        mCuQ,
        cute.make_tensor(at.used_k, cute.make_layout(sizes.batch)),
        cute.make_tensor(at.cu_k, cute.make_layout(sizes.batch + 1)),
        sizes.has_used,
    )


def pages(at, strides: Strides, sizes: Sizes) -> PagedSource:
    layout = cute.make_layout((sizes.batch, sizes.table_width), stride=(strides.table_batch, 1))
    return PagedSource(
        cute.make_tensor(at.table, layout), sizes.table_width, sizes.page_size, sizes.paged
    )


def cache_operands(at, strides: Strides, sizes: Sizes, layout, head_bytes: int):
    """K and V as ``TmaOperand``; layout: how a box lies in shared memory (layout.py)."""
    k = (strides.k_page, strides.k_token, strides.k_head)
    v = (strides.v_page, strides.v_token, strides.v_head)
    return _tma(at.k, k, sizes, layout, head_bytes), _tma(at.v, v, sizes, layout, head_bytes)


def block_scales(at, strides: ScaledStrides) -> tuple[BlockScales, BlockScales]:
    """K's and V's scales of a block-scaled cache."""
    k = (strides.k_scale_page, strides.k_scale_token, strides.k_scale_head)
    v = (strides.v_scale_page, strides.v_scale_token, strides.v_scale_head)
    return BlockScales(at.k_scale.toint(), *k), BlockScales(at.v_scale.toint(), *v)


def _tma(pointer, strides, sizes: Sizes, layout, head_bytes: int) -> TmaOperand:
    """The cache as (bytes of a column block, tokens of a page, column blocks, heads, pages)."""
    page, token, head = strides
    blocks = head_bytes // layout.row_bytes
    shape = (layout.row_bytes, sizes.page_size, blocks, sizes.kv_heads, sizes.pages)
    cache = cute.make_tensor(
        pointer, cute.make_layout(shape, stride=(1, token, layout.row_bytes, head, page))
    )
    box = (layout.row_bytes, layout.box_tokens, layout.blocks)
    smem = cute.make_composed_layout(
        cute.make_swizzle(swizzle_bits(layout.row_bytes), 4, 3),
        0,
        cute.make_layout(box, stride=(1, layout.row_bytes, layout.block_bytes)),
    )
    return TmaOperand(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cache, smem, box)
    )
