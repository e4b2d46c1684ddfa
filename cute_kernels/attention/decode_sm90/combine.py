"""Reading an item's parts and adding them up: of four neighbouring elements of a row a thread.

All that a CTA needs is copied to shared memory at once (the ring's: every tile has been read, and
no TMA load is outstanding), however many parts and blocks there are: one trip to L2. Meanwhile the
warps work out the parts' weights, row by row.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import dsl, dsl_nvfp4
from cute_kernels.attention.common.output import Partial, fold_of
from cute_kernels.attention.decode_sm90.config import MAX_SPLITS
from cute_kernels.attention.decode_sm90.lane import ConsumerLane
from cute_kernels.attention.decode_sm90.parts import Parts, slot_of_part

# Threads that read one part's row side by side, at least: 4 times 16 bytes are two sectors.
MIN_WIDTH = 4
_BLOCK_BYTES = 16
_WARP = 32


class Share(NamedTuple):
    """What a CTA combines of an item: blocks [begin, end), ``width`` of them side by side.

    Threads side by side (``column``) take neighbouring blocks; ``groups`` groups of them, this
    thread's being ``group``, share the parts.
    """

    begin: Int32
    end: Int32
    width: Int32
    groups: Int32
    group: Int32
    column: Int32


class Batch(NamedTuple):
    """Blocks from ``base`` on and parts [first, first + count) that are in shared memory together:
    ``rounds`` blocks a thread. first_row, end_row: the rows that the blocks belong to."""

    base: Int32
    rounds: Int32
    first: Int32
    count: Int32
    first_row: Int32
    end_row: Int32


def no_parts():
    """(reference, sum, four elements) of nothing. -0, to which a part adds up to itself, its sign
    included."""
    return Float32(dsl.NEG_INF), Float32(0.0), *(Float32(-0.0) for _ in range(4))


class Combining(ConsumerLane):
    def _areas(self):
        """(of values, bytes of them, of tables, of sums): areas of the ring's memory."""
        ring_bytes = self.config.stages * self.config.stage_bytes
        values_bytes = ring_bytes * 3 // 4 // 2048 * 2048
        base = self.ring.base.toint()
        sums = base + ring_bytes - self.config.consumer_threads * _BLOCK_BYTES
        return base, values_bytes, base + values_bytes, sums

    def _value_at(self, share: Share, batch: Batch, round: Int32, part: Int32) -> Int32:
        place = (round * batch.count + part) * share.width + share.column
        return self.ring.base.toint() + place * _BLOCK_BYTES

    @cute.jit
    def _table_at(self, parts: Parts, batch: Batch, row: Int32) -> Int32:
        """Of a row: 16 bytes a part with splits, else 8, and 8 more."""
        stride = 8 * parts.count + 8
        if self.shape.splits != 0:
            stride = 16 * parts.count
        return self._areas()[2] + (row - batch.first_row) * stride

    @cute.jit
    def combine_share(self, write, partial: Partial, parts: Parts, share: Share):
        """Combine the CTA's blocks; ``write(row, element, state)`` takes those of one."""
        row_blocks = self.config.head_size // 4
        capacity = dsl.quotient(Int32(self._areas()[1] // _BLOCK_BYTES), share.width)
        in_batch = cutlass.min(parts.count, capacity)
        most_rounds = cutlass.max(dsl.quotient(capacity, parts.count), Int32(1))
        step = most_rounds * share.width
        for base in cutlass.range(share.begin, share.end, step, unroll=1):
            end = cutlass.min(base + step, share.end)
            rounds = dsl.quotient(end - base + share.width - 1, share.width)
            state = no_parts()
            for first in cutlass.range(0, parts.count, in_batch, unroll=1):
                count = cutlass.min(parts.count - first, in_batch)
                last_row = (end - 1) // row_blocks
                batch = Batch(base, rounds, first, count, base // row_blocks, last_row + 1)
                # The memory's former contents have been used.
                self.barrier()
                self._load_values(partial, parts, share, batch)
                if first == 0:
                    self._tabulate(partial, parts, batch)
                dsl_nvfp4.wait_for_copies()
                self.barrier()
                for round in cutlass.range(rounds, unroll=1):
                    block = base + round * share.width + share.column
                    live = block < share.end
                    block = cutlass.min(block, share.end - 1)
                    row = block // row_blocks
                    table = self._table_at(parts, batch, row)
                    if self.shape.splits == 0:
                        state = self._add_parts(state, parts, share, batch, table, round)
                    else:
                        state = self._fold_parts(state, share, batch, table, round)
                    if first + count >= parts.count:
                        if self.shape.splits == 0:
                            state = self._merge_groups(state, share)
                        if live & (share.group == 0):
                            write(row, 4 * (block - row * row_blocks), state)
                        state = no_parts()

    @cute.jit
    def _load_values(self, partial: Partial, parts: Parts, share: Share, batch: Batch):
        rows, row_blocks = self.config.rows, self.config.head_size // 4
        base = partial.mO.iterator.toint()
        for round in cutlass.range(batch.rounds, unroll=1):
            block = batch.base + round * share.width + share.column
            block = base + Int64(cutlass.min(block, share.end - 1)) * _BLOCK_BYTES
            for part in cutlass.range(
                share.group, batch.count, share.groups, unroll=self.config.parts_in_flight
            ):
                slot = Int64(slot_of_part(parts, batch.first + part))
                dsl_nvfp4.copy_async_or_zero(
                    self._value_at(share, batch, round, part),
                    block + slot * (rows * row_blocks * _BLOCK_BYTES),
                    _BLOCK_BYTES,
                    Int32(_BLOCK_BYTES),
                )

    @cute.jit
    def _tabulate(self, partial: Partial, parts: Parts, batch: Batch):
        """The tables of the batch's rows, a row a warp at a time."""
        warps = self.config.consumer_warps
        for row in cutlass.range(batch.first_row + self.warp, batch.end_row, warps, unroll=1):
            state_at = partial.mState.iterator.toint() + row * 8
            table = self._table_at(parts, batch, row)
            if self.shape.splits == 0:
                self._tabulate_weights(state_at, parts, table)
            else:
                self._tabulate_folds(state_at, parts, table)

    @cute.jit
    def _load_states(self, state_at: Int64, parts: Parts, first: Int32, count: cutlass.Constexpr):
        """(reference, sum) of parts first + lane, first + 32 + lane, ...; the last part's instead
        of those behind it."""
        loaded = []
        for i in cutlass.range_constexpr(count):
            part = cutlass.min(first + i * _WARP + self.lane, parts.count - 1)
            slot = Int64(slot_of_part(parts, part))
            loaded.append(dsl.ld_global_cg_f32x2(state_at + slot * (self.config.rows * 8)))
        return loaded

    @cute.jit
    def _tabulate_weights(self, state_at: Int64, parts: Parts, table: Int32):
        """By one warp: each part's weight, for a reference that all share; it and the sum of all
        come behind them."""
        in_flight = self.config.parts_in_flight
        top = Float32(dsl.NEG_INF)
        for first in cutlass.range(0, parts.count, in_flight * _WARP, unroll=1):
            loaded = self._load_states(state_at, parts, first, in_flight)
            for i in cutlass.range_constexpr(in_flight):
                part = first + i * _WARP + self.lane
                top = dsl.fmax(top, loaded[i][0])
                if part < parts.count:
                    dsl.st_shared_f32x2(table + 8 * part, *loaded[i])
        for step in cutlass.range_constexpr(5):
            top = dsl.fmax(top, dsl.shuffle_xor_f32(top, Int32(1 << step)))
        reference = cutlass.select_(top == dsl.NEG_INF, Float32(0.0), top)
        total = Float32(0.0)
        # A lane reads what it wrote.
        for part in cutlass.range(self.lane, parts.count, _WARP, unroll=1):
            part_top, part_total = dsl.ld_shared_f32x2(table + 8 * part)
            weight = dsl.exp2(part_top - reference)
            total = dsl.fma(weight, part_total, total)
            dsl.st_shared_f32(table + 8 * part, weight)
        for step in cutlass.range_constexpr(5):
            total = total + dsl.shuffle_xor_f32(total, Int32(1 << step))
        if self.lane == 0:
            dsl.st_shared_f32x2(table + 8 * parts.count, top, total)

    @cute.jit
    def _add_parts(
        self, state, parts: Parts, share: Share, batch: Batch, table: Int32, round: Int32
    ):
        """The thread's parts of the batch, weighted."""
        _, _, o0, o1, o2, o3 = state
        for part in cutlass.range(
            share.group, batch.count, share.groups, unroll=self.config.parts_in_flight
        ):
            weight = dsl.ld_shared_f32(table + 8 * (batch.first + part))
            x0, x1, x2, x3 = dsl.ld_shared_f32x4(self._value_at(share, batch, round, part))
            o0 = dsl.fma(x0, weight, o0)
            o1 = dsl.fma(x1, weight, o1)
            o2 = dsl.fma(x2, weight, o2)
            o3 = dsl.fma(x3, weight, o3)
        top, total = dsl.ld_shared_f32x2(table + 8 * parts.count)
        return top, total, o0, o1, o2, o3

    @cute.jit
    def _merge_groups(self, state, share: Share):
        """Group 0 gathers what the other groups of threads found for its blocks: those of its warp
        by shuffles, other warps' through shared memory."""
        sums = tuple(state[2:])
        for step in cutlass.range_constexpr(3):
            distance = MIN_WIDTH << step
            if share.width <= distance:
                sums = tuple([x + dsl.shuffle_xor_f32(x, Int32(distance)) for x in sums])
        if share.groups > 1:
            at = self._areas()[3] + self.tid * _BLOCK_BYTES
            dsl.st_shared_f32x4(at, *sums)
            self.barrier()
            # from here on a group is the warps that hold the same blocks
            stride = cutlass.max(share.width, Int32(_WARP))
            for other in cutlass.range(stride, self.config.consumer_threads, stride, unroll=1):
                if self.tid < stride:
                    theirs = dsl.ld_shared_f32x4(at + other * _BLOCK_BYTES)
                    sums = tuple([sums[i] + theirs[i] for i in range(4)])
        return state[0], state[1], *sums

    @cute.jit
    def _tabulate_folds(self, state_at: Int64, parts: Parts, table: Int32):
        """By one warp: of each part, how the left fold adds it (``fold_of``: keep, weight), its
        sum, and the reference with it. A lane a part: the references before it are a running
        maximum."""
        loaded = self._load_states(state_at, parts, Int32(0), MAX_SPLITS // _WARP)
        before = Float32(dsl.NEG_INF)
        for i in cutlass.range_constexpr(MAX_SPLITS // _WARP):
            part_top, part_total = loaded[i]
            top = part_top
            for step in cutlass.range_constexpr(5):
                distance = 1 << step
                source = cutlass.select_(self.lane >= distance, self.lane - distance, self.lane)
                top = dsl.fmax(top, dsl.shuffle_from_lane_f32(top, source))
            previous = dsl.shuffle_from_lane_f32(top, cutlass.max(self.lane - 1, Int32(0)))
            if self.lane == 0:
                previous = Float32(dsl.NEG_INF)
            fold = fold_of(dsl.fmax(before, previous), part_top)
            part = i * _WARP + self.lane
            if part < parts.count:
                dsl.st_shared_f32x4(table + 16 * part, fold.keep, fold.weight, part_total, fold.top)
            before = dsl.shuffle_from_lane_f32(fold.top, Int32(_WARP - 1))

    @cute.jit
    def _fold_parts(self, state, share: Share, batch: Batch, table: Int32, round: Int32):
        """The left fold over the batch's parts, by group 0."""
        top, total, o0, o1, o2, o3 = state
        if share.group == 0:
            for part in cutlass.range(batch.count, unroll=self.config.parts_in_flight):
                at = table + 16 * (batch.first + part)
                keep, weight, part_total, top = dsl.ld_shared_f32x4(at)
                x0, x1, x2, x3 = dsl.ld_shared_f32x4(self._value_at(share, batch, round, part))
                total = dsl.fma(part_total, weight, total * keep)
                o0 = dsl.fma(x0, weight, o0 * keep)
                o1 = dsl.fma(x1, weight, o1 * keep)
                o2 = dsl.fma(x2, weight, o2 * keep)
                o3 = dsl.fma(x3, weight, o3 * keep)
        return top, total, o0, o1, o2, o3
