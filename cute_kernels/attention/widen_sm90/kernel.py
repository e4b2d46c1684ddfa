"""An FP8 (e4m3) or NVFP4 KV cache's tokens of a batch as fp16, gathered: what the 16-bit kernel
then reads.

Exact: formats.py says why; global scales are left to the attention kernel. Copied are sequences
with more packed rows than ``skip_rows``, the others are another kernel's. The copy is ragged: the
n-th of them has room for ``capacity`` tokens, its token t lies at n * capacity + t; K and V are
each (kv_heads, copies * capacity, D). Tokens that no query sees are not read, nor written but
within a block of 64 that holds others, where they are copies of the nearest seen token. Beside
them, for the attention kernel: where each copied sequence starts, and its number of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels import dsl, dsl_store
from cute_kernels.attention.common import launch
from cute_kernels.attention.common.launch import ScaledStrides, Sizes, Strides
from cute_kernels.attention.common.tile_schedule import Lengths, inclusive_scan
from cute_kernels.attention.decode_sm90.producer import PagedSource
from cute_kernels.attention.prefill_sm90.kernel import Addresses
from cute_kernels.attention.widen_sm90.config import (
    BLOCK_TOKENS,
    THREADS,
    VECTOR,
    WidenConfig,
)
from cute_kernels.attention.widen_sm90.formats import ROWS

# Loads of a thread in flight.
_BATCH = 8

# Of a cache with block scales.
ScaledAddresses = NamedTuple(
    "ScaledAddresses",
    [
        *((name, cute.Pointer) for name in Addresses._fields),
        ("k_scale", cute.Pointer),
        ("v_scale", cute.Pointer),
    ],
)


def operand_types(config: WidenConfig):
    """(addresses, strides) that a variant takes."""
    if ROWS[config.kv_format].planes == 2:
        return ScaledAddresses, ScaledStrides
    return Addresses, Strides


class Target(NamedTuple):
    """Addresses of the copies of K and V (fp16) and of (batch,) int32 starts and lengths.

    capacity: tokens a sequence, a multiple of 64. window_left: keys visible to the left of a row's
    own position. skip_rows: sequences of at most so many packed rows are left out. copies: at
    least as many as there are others.
    """

    k: Int64
    v: Int64
    starts: Int64
    lengths: Int64
    capacity: Int32
    window_left: Int32
    skip_rows: Int32
    copies: Int32


class Plane(NamedTuple):
    """Codes or block scales of K or V: address and strides in bytes."""

    base: Int64
    page: Int64
    token: Int64
    head: Int64


class Side(NamedTuple):
    """K or V: the cache's planes, address of the copy."""

    planes: tuple[Plane, ...]
    copy: Int64


@cute.jit
def _sequence_of(lengths: Lengths, sizes: Sizes, skip_rows: Int32, copy: Int32) -> Int32:
    """Which sequence is number ``copy`` of those that are copied, ``batch`` if there are fewer;
    every warp finds it for itself."""
    lane = cute.arch.lane_idx()
    b = sizes.batch
    base = Int32(0)
    line = Int32(0)
    while (base < sizes.batch) & (line <= copy):
        wanted = Int32(0)
        if base + lane < sizes.batch:
            q_len = lengths.mCuQ[base + lane + 1] - lengths.mCuQ[base + lane]
            if q_len * sizes.group > skip_rows:
                wanted = Int32(1)
        end = line + inclusive_scan(wanted, lane)
        owner = dsl.count_le(end, copy)
        if owner < 32:
            b = base + owner
        line = dsl.shuffle_from_lane(end, Int32(31))
        base = base + 32
    return b


class WidenSm90:
    def __init__(self, config: WidenConfig):
        self.config = config
        self.rows = ROWS[config.kv_format]()

    @cute.jit
    def __call__(
        self,
        mCuQ: cute.Tensor,
        at: Addresses | ScaledAddresses,
        strides: Strides | ScaledStrides,
        sizes: Sizes,
        target: Target,
        stream,
    ):
        k = [Plane(at.k.toint(), strides.k_page, strides.k_token, strides.k_head)]
        v = [Plane(at.v.toint(), strides.v_page, strides.v_token, strides.v_head)]
        if const_expr(self.rows.planes == 2):
            scales = launch.block_scales(at, strides)
            for planes, scale in zip((k, v), scales, strict=True):
                planes.append(Plane(scale.base, scale.page, Int64(scale.token), scale.head))
        lengths, source = launch.lengths(at, mCuQ, sizes), launch.pages(at, strides, sizes)
        sides = Side(tuple(k), target.k), Side(tuple(v), target.v)
        self.kernel(*sides, lengths, source, sizes, target).launch(
            grid=(target.capacity // BLOCK_TOKENS, sizes.kv_heads, target.copies),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, k: Side, v: Side, lengths: Lengths, source: PagedSource, sizes: Sizes, target: Target
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, head, copy = cute.arch.block_idx()
        b = _sequence_of(lengths, sizes, target.skip_rows, copy)
        planes = self.rows.planes
        rows = cutlass.memory.SmemAllocator().allocate_array(
            Int64, 2 * planes * BLOCK_TOKENS, byte_alignment=16
        )
        q_len = Int32(0)
        start = Int32(0)
        used = Int32(0)
        if b < sizes.batch:
            q_len = lengths.mCuQ[b + 1] - lengths.mCuQ[b]
            if source.paged == 0:
                start = lengths.mCuK[b]
            if lengths.has_used != 0:
                used = lengths.mUsedK[b]
            else:
                used = lengths.mCuK[b + 1] - lengths.mCuK[b]
        # More would not fit: the caller's max_seqlen_k was too small.
        used = cutlass.min(cutlass.max(used, Int32(0)), target.capacity)
        if (block == 0) & (head == 0) & (tid == 0) & (b < sizes.batch):
            dsl.st_global_b32(target.starts + 4 * Int64(b), copy * target.capacity)
            dsl.st_global_b32(target.lengths + 4 * Int64(b), used)
        low = cutlass.max(used - q_len - target.window_left, Int32(0))
        begin = block * BLOCK_TOKENS
        if (begin < used) & (begin + BLOCK_TOKENS > low):
            if tid < BLOCK_TOKENS:
                token = cutlass.min(cutlass.max(begin + tid, low), used - 1)
                page = Int32(0)
                in_page = token + start
                if source.paged != 0:
                    index = token // source.page_size
                    in_page = token - index * source.page_size
                    page = source.mTable[b, cutlass.min(index, source.table_width - 1)]
                for i in cutlass.range_constexpr(2):
                    side = k if const_expr(i == 0) else v
                    for p in cutlass.range_constexpr(planes):
                        at = side.planes[p]
                        row = at.base + page * at.page + in_page * at.token + head * at.head
                        table = (planes * i + p) * (8 * BLOCK_TOKENS)
                        dsl.st_shared_b64(rows.toint() + table + 8 * tid, row)
            cute.arch.sync_threads()
            first = Int64(head * target.copies + copy) * target.capacity + begin
            for i in cutlass.range_constexpr(2):
                side = k if const_expr(i == 0) else v
                table = rows.toint() + i * (8 * planes * BLOCK_TOKENS)
                self._widen(table, side.copy + first * (2 * self.config.head_size), tid)

    def _widen(self, table: Int32, copy: Int64, tid: Int32):
        """A block of K or V to ``copy``; ``table``: its rows' addresses, plane by plane."""
        vectors = self.config.vectors
        column, row = tid % vectors, tid // vectors
        rounds, rows_a_round = BLOCK_TOKENS * vectors // THREADS, THREADS // vectors
        for begin in range(0, rounds, _BATCH):
            batch = range(begin, min(begin + _BATCH, rounds))
            loaded = []
            for i in batch:
                entry = table + 8 * (row + rows_a_round * i)
                addresses = tuple(
                    dsl_store.ld_shared_b64(entry + p * (8 * BLOCK_TOKENS))
                    for p in range(self.rows.planes)
                )
                loaded.append(self.rows.load(addresses, column))
            for i, codes in zip(batch, loaded, strict=True):
                offset = ((row + rows_a_round * i) * vectors + column) * (2 * VECTOR)
                dsl_store.st_global_b32x4(copy + offset, *self.rows.convert(codes))
