"""The fp16 copies of an FP8 cache that the 16-bit kernel reads, made while it reads them.

The producer's warpgroup has three warps to spare. They copy the batch's keys and values in *units*
of 32 tokens of one head of K or V, in the order in which attention walks through them: sequence by
sequence, block of 64 tokens by block, all heads of a block side by side. Units are dealt by ticket,
so the copy depends on no CTA that has not started: any set of running CTAs completes it. Each unit
counts in its block's counter; the producer waits for a block's four before it asks TMA for them.

Exact, so bits are those of any other copy. The layout is that of widen_sm90: the n-th copied
sequence has room for ``capacity`` tokens, K and V are each (kv_heads, copies * capacity, D) fp16.

Memory order: a warp's lanes write with generic stores, each follows them with a proxy fence (they
will be read through the async proxy), the warp meets, and one lane adds to the counter with release
semantics at GPU scope. A producer's lanes load the counters with acquire semantics, fence proxies
and meet before one of them issues the TMA. The last of the grid's warps to leave clears all
counters, for the next launch on the stream: leaving is an acquire and a release, so no other can
still look at them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.attention.common.tile_schedule import Lengths, inclusive_scan
from cute_kernels.attention.decode_sm90.producer import PagedSource
from cute_kernels.attention.prefill_sm90.config import (
    COPY_BLOCK,
    COPY_HEADER,
    PRODUCER_WARPS,
    PrefillConfig,
)
from cute_kernels.attention.prefill_sm90.producer import PrefillProducer
from cute_kernels.attention.prefill_sm90.schedule import Item, Shape
from cute_kernels.attention.widen_sm90.formats import ROWS

# Tokens of a unit; each lane looks up one of its rows.
_UNIT = 32
_UNITS_A_BLOCK = 2 * COPY_BLOCK // _UNIT
# Loads of a lane in flight.
_BATCH = 8
# Words of the counters' head that are used; COPY_HEADER keeps them off the blocks' lines.
_TICKETS, _LEFT = 0, 4


class Plane(NamedTuple):
    """Codes or block scales of K or V: address, strides in bytes."""

    base: Int64
    page: Int64
    token: Int64
    head: Int64


class Target(NamedTuple):
    """Addresses of the copies of K and V and of the counters; tokens a sequence (a multiple of 64);
    how many sequences there is room for."""

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


@cute.jit
def copied_before(lengths: Lengths, shape: Shape, b: Int32) -> Int32:
    """How many of the sequences before ``b`` are copied: those that this kernel serves."""
    lane = cute.arch.lane_idx()
    count = Int32(0)
    base = Int32(0)
    while base < b:
        wanted = Int32(0)
        if base + lane < b:
            q_len = lengths.mCuQ[base + lane + 1] - lengths.mCuQ[base + lane]
            if q_len * shape.group > shape.skip_rows:
                wanted = Int32(1)
        count = count + dsl.warp_sum_b32(wanted)
        base = base + 32
    return count


@cute.jit
def _sequence_of(lengths: Lengths, shape: Shape, copy: Int32) -> Int32:
    """Which sequence is number ``copy`` of those that are copied, ``batch`` if there are fewer."""
    lane = cute.arch.lane_idx()
    b = shape.batch
    base = Int32(0)
    line = Int32(0)
    while (base < shape.batch) & (line <= copy):
        wanted = Int32(0)
        if base + lane < shape.batch:
            q_len = lengths.mCuQ[base + lane + 1] - lengths.mCuQ[base + lane]
            if q_len * shape.group > shape.skip_rows:
                wanted = Int32(1)
        end = line + inclusive_scan(wanted, lane)
        owner = dsl.count_le(end, copy)
        if owner < 32:
            b = base + owner
        line = dsl.shuffle_from_lane(end, Int32(31))
        base = base + 32
    return b


@cute.jit
def leave(target: Target, kv_heads: Int32):
    """For each warp of the producers' warpgroups, once; the last one clears the counters."""
    lane = cute.arch.lane_idx()
    ctas, _, _ = cute.arch.grid_dim()
    before = Int32(0)
    cute.arch.sync_warp()
    if lane == 0:
        before = dsl_store.atomic_add_acq_rel_gpu(target.counters + 4 * _LEFT, Int32(1))
    before = dsl.shuffle_from_lane(before, Int32(0))
    if before == PRODUCER_WARPS * ctas - 1:
        cute.arch.sync_warp()
        words = COPY_HEADER + target.copies * kv_heads * (target.capacity // COPY_BLOCK)
        for i in cutlass.range(lane, words, 32, unroll=1):
            dsl.st_global_b32(target.counters + 4 * i, Int32(0))


class Copier:
    """A warp that copies."""

    def __init__(
        self,
        config: PrefillConfig,
        lengths: Lengths,
        shape: Shape,
        source: PagedSource,
        copying: Copying,
    ):
        self.config, self.lengths, self.shape = config, lengths, shape
        self.source, self.copying = source, copying
        self.rows = ROWS[config.copies_from]()
        self.vectors = config.head_size // 8

    @cute.jit
    def run(self):
        lengths, shape, target = self.lengths, self.shape, self.copying.target
        ticket = self._ticket()
        first = Int32(0)
        copy = Int32(0)
        while copy < target.copies:
            b = _sequence_of(lengths, shape, copy)
            q_len = Int32(0)
            start = Int32(0)
            used = Int32(0)
            if b < shape.batch:
                q_len = lengths.mCuQ[b + 1] - lengths.mCuQ[b]
                if self.source.paged == 0:
                    start = lengths.mCuK[b]
                if lengths.has_used != 0:
                    used = lengths.mUsedK[b]
                else:
                    used = lengths.mCuK[b + 1] - lengths.mCuK[b]
            used = cutlass.min(cutlass.max(used, Int32(0)), shape.most_keys)
            low = cutlass.max(used - q_len - shape.window_left, Int32(0))
            block = low // COPY_BLOCK
            blocks = cutlass.max((used + (COPY_BLOCK - 1)) // COPY_BLOCK - block, Int32(0))
            units = blocks * shape.kv_heads * _UNITS_A_BLOCK
            while ticket - first < units:
                following = self._draw()
                self._copy(b, start, low, used, copy, block, ticket - first)
                ticket = dsl.shuffle_from_lane(following, Int32(0))
            first = first + units
            copy = copy + 1

    def _ticket(self) -> Int32:
        return dsl.shuffle_from_lane(self._draw(), Int32(0))

    @cute.jit
    def _draw(self) -> Int32:
        """The next unit's number, in lane 0."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = dsl_store.atomic_add_gpu(
                self.copying.target.counters + 4 * _TICKETS, Int32(1)
            )
        return number

    @cute.jit
    def _copy(
        self,
        b: Int32,
        start: Int32,
        low: Int32,
        used: Int32,
        copy: Int32,
        first_block: Int32,
        unit: Int32,
    ):
        shape, source, target = self.shape, self.source, self.copying.target
        lane = cute.arch.lane_idx()
        place = unit // _UNITS_A_BLOCK
        block = place // shape.kv_heads
        head = place - block * shape.kv_heads
        block = first_block + block
        begin = block * COPY_BLOCK + (unit % 2) * _UNIT
        token = cutlass.min(cutlass.max(begin + lane, low), used - 1)
        page = Int32(0)
        in_page = token + start
        if source.paged != 0:
            index = token // source.page_size
            in_page = token - index * source.page_size
            page = source.mTable[b, cutlass.min(index, source.table_width - 1)]
        rows = []
        for k, v in zip(self.copying.k, self.copying.v, strict=True):
            base, by_page, by_token, by_head = k
            if unit & 2 != 0:
                base, by_page, by_token, by_head = v
            rows.append(base + page * by_page + in_page * by_token + head * by_head)
        to = target.k
        if unit & 2 != 0:
            to = target.v
        first = Int64(head * target.copies + copy) * target.capacity + begin
        self._convert(tuple(rows), to + first * (2 * self.config.head_size))
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        if lane == 0:
            line = copy * shape.kv_heads + head
            counter = line * (target.capacity // COPY_BLOCK) + block
            dsl.red_add_release_gpu(target.counters + 4 * (COPY_HEADER + counter), Int32(1))

    @cute.jit
    def _convert(self, rows: tuple[Int64, ...], to: Int64):
        """A unit's rows, whose addresses in each plane the lanes have, to where they lie end to
        end."""
        lane = cute.arch.lane_idx()
        for begin in cutlass.range(0, _UNIT * self.vectors // 32, _BATCH, unroll=1):
            loaded = []
            for i in cutlass.range_constexpr(_BATCH):
                row, vector = self._place(begin, i)
                at = tuple(dsl_store.shuffle_b64(plane, row) for plane in rows)
                loaded.append(self.rows.load(at, vector))
            for i in cutlass.range_constexpr(_BATCH):
                place = to + ((begin + i) * 32 + lane) * 16
                dsl_store.st_global_b32x4(place, *self.rows.convert(loaded[i]))

    def _place(self, begin: Int32, i: int) -> tuple[Int32, Int32]:
        """Row and vector of it that a lane takes with load ``begin + i``; begin: a multiple of
        _BATCH."""
        lane = cute.arch.lane_idx()
        if self.vectors <= 32:
            rows_a_load = 32 // self.vectors
            row = (begin + i) * rows_a_load + lane // self.vectors
            return row, lane % self.vectors
        loads_a_row = self.vectors // 32
        return begin // loads_a_row + i // loads_a_row, i % loads_a_row * 32 + lane


class CopyReader(PrefillProducer):
    """The producer of an item whose keys are copied meanwhile; ``copy``: the sequence's number."""

    def __init__(
        self,
        config: PrefillConfig,
        lengths: Lengths,
        source: PagedSource,
        item: Item,
        copying: Copying,
        kv_heads: Int32,
        copy: Int32,
    ):
        super().__init__(config, lengths, source, item)
        target = copying.target
        self.first_token = copy * target.capacity
        line = (copy * kv_heads + item.head) * (target.capacity // COPY_BLOCK)
        self.counters = target.counters + 4 * (COPY_HEADER + line)

    @cute.jit
    def boxes_at(self, first_box: Int32):
        token = self.item.start + (first_box + cute.arch.lane_idx()) * COPY_BLOCK
        return Int32(0), token + self.first_token

    @cute.jit
    def await_tile(self, t: Int32, written: Int32) -> Int32:
        """Until a tile's boxes are written; bit i of ``written``: box i of the 32 that boxes_at
        found last is."""
        item = self.item
        boxes = self.config.tile_tokens // COPY_BLOCK
        first = (t * boxes) & 31
        wanted = Int32((1 << boxes) - 1) << first
        if first == 0:
            written = Int32(0)
        while (written & wanted) != wanted:
            block = item.start // COPY_BLOCK + (t * boxes - first) + cute.arch.lane_idx()
            count = Int32(_UNITS_A_BLOCK)
            if block * COPY_BLOCK < item.used:
                count = dsl.ld_acquire_gpu_b32(self.counters + 4 * block)
            written = Int32(cute.arch.vote_ballot_sync(count == _UNITS_A_BLOCK))
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
        return written
