"""An FP8 (e4m3) or NVFP4 KV cache as fp16, for the 16-bit prefill kernel, made while it reads.

The warps beside that kernel's producer have nothing else to do. They copy the batch's keys and
values in *units*, 32 tokens of one head of K or V or both, in the order in which attention walks
through them: sequence by sequence, a block of 64 tokens after the other, all heads of a block.
Units are dealt by ticket, so a copy waits for no CTA that has not started: any set of running CTAs
completes it. A unit counts in its block's counter, and the producer waits for all of a block's
before it has TMA bring them (prefill_sm90/kernel_copying.py).

Exact: formats.py says why; global scales are left to the attention kernel. Copied are sequences
with more packed rows than ``skip_rows``, the others are another kernel's. The n-th of them has room
for ``capacity`` tokens, its token t lies at n * capacity + t; K and V are each (kv_heads, copies *
capacity, D). Tokens that no query sees are not read, nor written but within a block of 64 that
holds others, where they are copies of the nearest seen token.

Memory order. The lanes of a warp write with generic stores; each then fences proxies, as TMA reads
through the async proxy; the warp meets, and one lane adds to the counter with release semantics at
GPU scope. The producer's lanes load counters with acquire semantics, fence proxies and meet, before
one of them issues the TMA. The last warp of the grid to leave clears the counters for the next
launch on the stream: leaving is an acquire and a release, so no other looks at them any more.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store, dsl_together
from cute_kernels.attention.common.line import inclusive_scan
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource
from cute_kernels.attention.widen_sm90.config import (
    BLOCK_TOKENS,
    COUNTERS_HEAD,
    UNIT_TOKENS,
    VECTOR,
    unit_sides,
    units_per_block,
)
from cute_kernels.attention.widen_sm90.formats import ROWS

# Words of the counters' head: the next unit; warps that have left. Each on a line of its own.
_NEXT, _LEFT = 0, 32


class Plane(NamedTuple):
    """Codes or block scales of K or V: address and strides in bytes."""

    base: Int64
    page: Int64
    token: Int64
    head: Int64


class Target(NamedTuple):
    """Addresses of the copies of K and V (fp16) and of the counters (config.counters_of).

    capacity: tokens a sequence, a multiple of 64. copies: at least as many as sequences that are
    copied.
    """

    k: Int64
    v: Int64
    counters: Int64
    capacity: Int32
    copies: Int32


class Copying(NamedTuple):
    """The cache's planes (codes, block scales if it has any), and where the copies go."""

    k: tuple[Plane, ...]
    v: tuple[Plane, ...]
    target: Target


class Sequence(NamedTuple):
    """Number ``copy`` of those that are copied: its number in the batch, where its keys start in an
    unpaged cache, the first key that any row sees, keys, blocks."""

    copy: Int32
    b: Int32
    start: Int32
    low: Int32
    used: Int32
    blocks: Int32


@cute.jit
def _copied(lengths: Lengths, shape, b: Int32, end: Int32) -> Int32:
    """1 for a sequence before ``end`` that is copied, else 0."""
    copied = Int32(0)
    if b < end:
        if (lengths.mCuQ[b + 1] - lengths.mCuQ[b]) * shape.group > shape.skip_rows:
            copied = Int32(1)
    return copied


@cute.jit
def copied_before(lengths: Lengths, shape, b: Int32) -> Int32:
    """How many of the sequences before ``b`` are copied; for one whole warp."""
    lane = cute.arch.lane_idx()
    count = Int32(0)
    for base in cutlass.range(0, b, 32, unroll=1):
        count = count + dsl.warp_sum_b32(_copied(lengths, shape, base + lane, b))
    return count


@cute.jit
def _sequence_of(lengths: Lengths, shape, copy: Int32) -> Int32:
    """Which sequence is number ``copy`` of those that are copied, ``batch`` if there are fewer;
    every warp finds it for itself."""
    lane = cute.arch.lane_idx()
    b = shape.batch
    base = Int32(0)
    line = Int32(0)
    while (base < shape.batch) & (line <= copy):
        end = line + inclusive_scan(_copied(lengths, shape, base + lane, shape.batch), lane)
        owner = dsl.count_le(end, copy)
        if owner < 32:
            b = base + owner
        line = dsl.shuffle_from_lane(end, Int32(31))
        base = base + 32
    return b


@cute.jit
def sequence_to_copy(lengths: Lengths, shape, paged: Int32, copy: Int32) -> Sequence:
    """Number ``copy``; one of no blocks where there are fewer."""
    b = _sequence_of(lengths, shape, copy)
    q_len = Int32(0)
    start = Int32(0)
    used = Int32(0)
    if b < shape.batch:
        q_len = lengths.mCuQ[b + 1] - lengths.mCuQ[b]
        if paged == 0:
            start = lengths.mCuK[b]
        if lengths.has_used != 0:
            used = lengths.mUsedK[b]
        else:
            used = lengths.mCuK[b + 1] - lengths.mCuK[b]
    used = cutlass.min(cutlass.max(used, Int32(0)), shape.most_keys)
    low = cutlass.max(used - q_len - shape.window_left, Int32(0))
    end = (used + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    blocks = cutlass.max(end - low // BLOCK_TOKENS, Int32(0))
    return Sequence(copy, b, start, low, used, blocks)


@cute.jit
def place_of(sequence: Sequence, kv_heads: Int32, unit: Int32, units: cutlass.Constexpr):
    """(block, head, first token, number of K's or V's) of one of a block's ``units`` of each head:
    head by head, K's two before V's two where they are apart."""
    place = unit // units
    block = place // kv_heads
    head = place - block * kv_heads
    block = sequence.low // BLOCK_TOKENS + block
    begin = block * BLOCK_TOKENS + unit % 2 * UNIT_TOKENS
    return block, head, begin, unit // 2 % (units // 2)


@cute.jit
def leave(target: Target, kv_heads: Int32, warps: cutlass.Constexpr):
    """For each of ``warps`` warps of every CTA, when it is done with the counters; the last one
    clears them."""
    lane = cute.arch.lane_idx()
    ctas, _, _ = cute.arch.grid_dim()
    before = Int32(0)
    cute.arch.sync_warp()
    if lane == 0:
        before = dsl_store.atomic_add_acq_rel_gpu(target.counters + 4 * _LEFT, Int32(1))
    before = dsl.shuffle_from_lane(before, Int32(0))
    if before == warps * ctas - 1:
        cute.arch.sync_warp()
        words = COUNTERS_HEAD + target.copies * kv_heads * (target.capacity // BLOCK_TOKENS)
        for i in cutlass.range(lane, words, 32, unroll=1):
            dsl.st_global_b32(target.counters + 4 * i, Int32(0))


class Copier:
    """A warp that copies. shape: as the prefill kernel's, with batch, kv_heads, group, skip_rows,
    window_left and most_keys. loads: of a lane in flight."""

    def __init__(
        self,
        kv_format: str,
        head_size: int,
        loads: int,
        lengths: Lengths,
        shape,
        source: PagedSource,
        copying: Copying,
    ):
        self.head_size, self.rows = head_size, ROWS[kv_format]()
        self.lengths, self.shape, self.source, self.copying = lengths, shape, source, copying
        # Of a row; a unit of one side is as many loads of the warp.
        self.vectors = head_size // VECTOR
        self.loads = min(loads, self.vectors)
        self.sides, self.units = unit_sides(head_size), units_per_block(head_size)

    @cute.jit
    def run(self):
        lengths, shape, target = self.lengths, self.shape, self.copying.target
        unit = dsl.shuffle_from_lane(self._draw(), Int32(0))
        first = Int32(0)
        for copy in cutlass.range(0, target.copies, unroll=1):
            sequence = sequence_to_copy(lengths, shape, self.source.paged, copy)
            units = sequence.blocks * shape.kv_heads * self.units
            while unit - first < units:
                # Its answer is not waited for before the copy.
                following = self._draw()
                self._copy(sequence, unit - first)
                unit = dsl.shuffle_from_lane(following, Int32(0))
            first = first + units

    @cute.jit
    def _draw(self) -> Int32:
        """The number of the next unit, for lane 0."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = dsl_store.atomic_add_gpu(self.copying.target.counters + 4 * _NEXT, Int32(1))
        return number

    @cute.jit
    def _copy(self, sequence: Sequence, unit: Int32):
        source, copying = self.source, self.copying
        kv_heads, target = self.shape.kv_heads, copying.target
        block, head, begin, side = place_of(sequence, kv_heads, unit, self.units)
        lane = cute.arch.lane_idx()
        token = cutlass.min(cutlass.max(begin + lane, sequence.low), sequence.used - 1)
        page = Int32(0)
        in_page = token + sequence.start
        if source.paged != 0:
            index = token // source.page_size
            in_page = token - index * source.page_size
            page = source.mTable[sequence.b, cutlass.min(index, source.table_width - 1)]
        first = Int64(head * target.copies + sequence.copy) * target.capacity + begin
        offset = first * (2 * self.head_size)
        for part in cutlass.range(0, self.sides * self.vectors, self.loads, unroll=1):
            of_v = side + part // self.vectors
            to = target.k
            if of_v != 0:
                to = target.v
            rows = self._rows(of_v, page, in_page, head)
            self._convert(rows, part % self.vectors, to + offset)
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        if lane == 0:
            counter = counter_of(target, kv_heads, sequence.copy, head, block)
            dsl_together.red_add_release_gpu(counter, Int32(1))

    @cute.jit
    def _rows(self, of_v: Int32, page: Int32, in_page: Int32, head: Int32) -> tuple[Int64, ...]:
        """Addresses of a token's row of K or V in the cache's planes."""
        rows = []
        for k, v in zip(self.copying.k, self.copying.v, strict=True):
            base, by_page, by_token, by_head = k
            if of_v != 0:
                base, by_page, by_token, by_head = v
            rows.append(base + page * by_page + in_page * by_token + head * by_head)
        return tuple(rows)

    @cute.jit
    def _convert(self, rows: tuple[Int64, ...], begin: Int32, to: Int64):
        """Loads from ``begin`` on of 32 rows, whose addresses the lanes have, to where they lie end
        to end."""
        loaded = []
        for i in cutlass.range_constexpr(self.loads):
            row, vector = self._place(begin, i)
            at = tuple(dsl_store.shuffle_b64(plane, row) for plane in rows)
            loaded.append(self.rows.load(at, vector))
        for i in cutlass.range_constexpr(self.loads):
            place = to + ((begin + i) * 32 + cute.arch.lane_idx()) * (2 * VECTOR)
            dsl_store.st_global_b32x4(place, *self.rows.convert(loaded[i]))

    def _place(self, begin: Int32, i: int) -> tuple[Int32, Int32]:
        """Row and vector of it that a lane takes with load ``begin + i``; begin: a multiple of
        ``loads``."""
        lane = cute.arch.lane_idx()
        if self.vectors <= 32:
            rows_a_load = 32 // self.vectors
            row = (begin + i) * rows_a_load + lane // self.vectors
            return row, lane % self.vectors
        loads_a_row = self.vectors // 32
        return begin // loads_a_row + i // loads_a_row, i % loads_a_row * 32 + lane


def counter_of(target: Target, kv_heads: Int32, copy: Int32, head: Int32, block: Int32) -> Int64:
    """Address of a block's counter; those of a head's blocks lie side by side."""
    line = (copy * kv_heads + head) * (target.capacity // BLOCK_TOKENS)
    return target.counters + 4 * Int64(COUNTERS_HEAD + line + block)
