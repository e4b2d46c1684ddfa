"""Triton device code of the decode baseline: paged FP8-KV attention, split over the keys.

Shapes: q (total_q, Hq, D); K and V pages (num_blocks, block_size, Hkv, D) of e4m3 bytes; partial
outputs (B, Hkv, splits, ROWS, D) float32 and partial LSE (B, Hkv, ROWS, splits) float32, base 2.

All query rows that share a KV head (GQA group x query tokens) are packed into ROWS, a power of two
of at least 16, so each K and V byte is read once. A row is `query token * group + head in group`.

V is read as 16-bit pairs of neighbouring head-dim elements. An 8-bit operand whose contraction
runs along the slow axis cannot come through `ldmatrix.trans` and is then gathered byte by byte
(256 byte loads a thread and tile at D 512, and spills); as 16-bit pairs it can. A pair is split
into an even and an odd accumulator, interleaved once at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Queries(NamedTuple):
    """q and what places its rows; strides in elements, the head dim contiguous."""

    q: Any
    cu_seqlens: Any
    stride_token: Any
    stride_head: Any


class PagedKV(NamedTuple):
    """The cache: k float8 elements, v the same bytes as int16 pairs (strides of v in pairs)."""

    k: Any
    v: Any
    block_table: Any
    seqused: Any
    k_descale: Any
    v_descale: Any


class KVStrides(NamedTuple):
    """Strides of `PagedKV`, in elements of the tensor that each belongs to."""

    k_page: Any
    k_token: Any
    k_head: Any
    v_page: Any
    v_token: Any
    v_head: Any
    table_row: Any
    k_descale_batch: Any
    k_descale_head: Any
    v_descale_batch: Any
    v_descale_head: Any


class Outputs(NamedTuple):
    """out (total_q, Hq, D) and lse (Hq, total_q); sinks (Hq,) float32 or None."""

    out: Any
    lse: Any
    sinks: Any
    stride_token: Any
    stride_head: Any
    lse_stride_head: Any


class Partials(NamedTuple):
    """Workspace of the splits; splits 1 means that the first kernel writes the outputs itself."""

    out: Any
    lse: Any
    splits: Any


@triton.jit
def split_e4m3_pairs(pairs, USE_PTX: tl.constexpr):
    """int16 pairs of e4m3 -> (low bytes, high bytes) as float16, exact."""
    if USE_PTX:
        # One permute and two conversions for four values: pack=2 hands over two pairs at once.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    # The exponent bias of e4m3 is 7, that of float16 is 15: shifted bits are worth 2^-8 of the
    # value, subnormals included. NaN bytes come out as 480; the caller has zeroed dead tokens.
    wide = pairs.to(tl.int32)
    low = ((wide << 8) & 0x8000) | ((wide << 7) & 0x3F80)
    high = (wide & 0x8000) | ((wide >> 1) & 0x3F80)
    low = low.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    high = high.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def tile_range(used, q_len, splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """(first visible tile, end of the tiles, tiles of one split) of a sequence."""
    end = tl.cdiv(used, BLOCK_N)
    first = 0
    if WINDOW >= 0:
        first = tl.maximum(used - q_len - WINDOW, 0) // BLOCK_N
    return first, end, tl.cdiv(end - first, splits)


@triton.jit
def load_queries(queries, start, token, head, live, D: tl.constexpr):
    """Rows of q as float16 in [0.5, 1) * 2^14 and the factor that each row was divided by.

    bf16 reaches 3e38 and float16 65504, so rows are scaled by powers of two, which is exact.
    """
    dim = tl.arange(0, D)
    offset = (start + token).to(tl.int64) * queries.stride_token + head * queries.stride_head
    q = tl.load(queries.q + offset[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    exponent = tl.where(largest > 0.0, tl.ceil(tl.log2(largest)) - 14.0, 0.0)
    exponent = tl.maximum(exponent, -100.0)
    return (q * tl.exp2(-exponent)[:, None]).to(tl.float16), tl.exp2(exponent)


@triton.jit
def add_sink(lse, sinks, head, live):
    """(lse with the sink, factor for an output normalised without it), both of base-2 LSE."""
    sink = tl.load(sinks + head, mask=live, other=float("-inf")) * 1.4426950408889634
    top = tl.maximum(lse, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
    return total, tl.exp2(lse - tl.where(total == float("-inf"), 0.0, total))


@triton.jit
def store_rows(outputs, value, lse, start, token, head, live, dim):
    """Write output rows (ROWS, dims) and their natural-log LSE."""
    row = (start + token).to(tl.int64)
    offset = row * outputs.stride_token + head * outputs.stride_head
    value = value.to(outputs.out.dtype.element_ty)
    tl.store(outputs.out + offset[:, None] + dim[None, :], value, mask=live[:, None])
    natural = lse * 0.6931471805599453
    tl.store(outputs.lse + head * outputs.lse_stride_head + row, natural, mask=live)


@triton.jit
def page_ids(table, tile, last_page, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of a tile: a scalar where tiles lie within pages, one id per token where they do not.

    Callers ask one tile ahead, so that the table's latency is not in front of the K and V loads.
    Entries past `last_page` are garbage and are never used.
    """
    if PAGE % BLOCK_N == 0:
        index = tile // (PAGE // BLOCK_N)
    else:
        index = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) // PAGE
    return tl.load(table + tl.minimum(index, last_page))


@triton.jit
def decode_split_kernel(
    queries,
    kv,
    strides,
    outputs,
    partials,
    qk_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One (KV head, split, sequence). FLAGS = (causal, window left or -1, split, use PTX).

    qk_scale is softmax_scale * log2(e). Splits without tiles write nothing; the second kernel
    finds out from the lengths which ones did.
    """
    CAUSAL: tl.constexpr = FLAGS[0]
    WINDOW: tl.constexpr = FLAGS[1]
    SPLIT: tl.constexpr = FLAGS[2]
    USE_PTX: tl.constexpr = FLAGS[3]
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    kv_heads = tl.num_programs(0)

    q_start = tl.load(queries.cu_seqlens + seq)
    q_len = tl.load(queries.cu_seqlens + seq + 1) - q_start
    used = tl.load(kv.seqused + seq)
    first, end, per_split = tile_range(used, q_len, partials.splits, BLOCK_N, WINDOW)
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, end)
    if q_len <= 0:
        return
    if SPLIT:
        if begin >= end:
            return

    rows = tl.arange(0, ROWS)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = token < q_len
    q, row_scale = load_queries(queries, q_start, token, head, live, D)
    k_descale = kv.k_descale + seq * strides.k_descale_batch + kv_head * strides.k_descale_head
    row_scale = row_scale * (qk_scale * tl.load(k_descale))
    own = used - q_len + token
    last = tl.minimum(own, used - 1) if CAUSAL else tl.zeros_like(own) + (used - 1)

    table = kv.block_table + seq.to(tl.int64) * strides.table_row
    k_head = kv.k + kv_head * strides.k_head
    v_head = kv.v + kv_head * strides.v_head
    in_tile = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    even = tl.zeros([ROWS, D // 2], tl.float32)
    odd = tl.zeros([ROWS, D // 2], tl.float32)
    last_page = tl.maximum(used - 1, 0) // PAGE
    next_pages = page_ids(table, begin, last_page, PAGE, BLOCK_N)
    for tile in range(begin, end):
        pages = next_pages.to(tl.int64)
        next_pages = page_ids(table, tile + 1, last_page, PAGE, BLOCK_N)
        position = tile * BLOCK_N + in_tile
        in_page = position % PAGE
        in_use = position[:, None] < used
        k_rows = k_head + pages * strides.k_page + in_page * strides.k_token
        v_rows = v_head + pages * strides.v_page + in_page * strides.v_token
        # Scores of dead tokens are masked; K needs a mask only where dead tokens have no page.
        if PAGE % BLOCK_N == 0:
            k = tl.load(k_rows[:, None] + dim[None, :]).to(tl.float16)
        else:
            k = tl.load(k_rows[:, None] + dim[None, :], mask=in_use, other=0.0).to(tl.float16)
        v_pairs = tl.load(v_rows[:, None] + pair[None, :], mask=in_use, other=0)

        scores = tl.dot(q, tl.trans(k)) * row_scale[:, None]
        visible = position[None, :] <= last[:, None]
        if WINDOW >= 0:
            visible &= position[None, :] >= (own - WINDOW)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has top -inf, and -inf - -inf is NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(tl.float16)
        v_even, v_odd = split_e4m3_pairs(v_pairs, USE_PTX)
        even = tl.dot(weights, v_even, even * decay[:, None])
        odd = tl.dot(weights, v_odd, odd * decay[:, None])
        top = new_top

    v_descale = kv.v_descale + seq * strides.v_descale_batch + kv_head * strides.v_descale_head
    norm = tl.where(total > 0.0, tl.load(v_descale) / total, 0.0)
    lse = tl.where(total > 0.0, top + tl.log2(total), float("-inf"))
    value = tl.reshape(tl.join(even, odd), [ROWS, D]) * norm[:, None]
    if SPLIT:
        item = seq.to(tl.int64) * kv_heads + kv_head
        row = (item * partials.splits + split) * ROWS + rows
        tl.store(partials.out + row[:, None] * D + dim[None, :], value, mask=live[:, None])
        tl.store(partials.lse + (item * ROWS + rows) * partials.splits + split, lse, mask=live)
    else:
        if outputs.sinks is not None:
            lse, factor = add_sink(lse, outputs.sinks, head, live)
            value = value * factor[:, None]
        store_rows(outputs, value, lse, q_start, token, head, live, dim)


@triton.jit
def combine_kernel(
    queries,
    seqused,
    outputs,
    partials,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One (packed row and slice of the head dim, KV head, sequence): the LSE-weighted mean of its
    splits. SPLITS is the power of two that holds all of them."""
    SLICES: tl.constexpr = D // BLOCK_D
    row = tl.program_id(0) // SLICES
    dim = (tl.program_id(0) % SLICES) * BLOCK_D + tl.arange(0, BLOCK_D)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    q_start = tl.load(queries.cu_seqlens + seq)
    q_len = tl.load(queries.cu_seqlens + seq + 1) - q_start
    if row // GROUP >= q_len:
        return
    used = tl.load(seqused + seq)
    first, end, per_split = tile_range(used, q_len, partials.splits, BLOCK_N, WINDOW)
    split = tl.arange(0, SPLITS)
    written = (split < partials.splits) & (first + split * per_split < end)

    item = seq.to(tl.int64) * kv_heads + kv_head
    lses = partials.lse + (item * ROWS + row) * partials.splits + split
    lse = tl.load(lses, mask=written, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - top)
    total = tl.sum(weight, 0)
    rows = (item * partials.splits + split) * ROWS + row
    value = tl.load(
        partials.out + rows[:, None] * D + dim[None, :], mask=written[:, None], other=0.0
    )
    value = tl.sum(value * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    lse = tl.where(total > 0.0, top + tl.log2(total), float("-inf"))

    # One row, in the shapes that the packed-row helpers expect.
    one = tl.zeros([1], tl.int32)
    token = one + row // GROUP
    head = one + kv_head * GROUP + row % GROUP
    live = one == 0
    lse = lse + tl.zeros([1], tl.float32)
    if outputs.sinks is not None:
        lse, factor = add_sink(lse, outputs.sinks, head, live)
        value = value * tl.sum(factor, 0)
    store_rows(outputs, value[None, :], lse, q_start, token, head, live, dim)
