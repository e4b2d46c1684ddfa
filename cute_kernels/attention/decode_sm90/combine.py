"""Reading an item's parts and adding them up: of four neighbouring elements of a row a thread."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels import dsl
from cute_kernels.attention.common.output import Partial, fold_of
from cute_kernels.attention.decode_sm90.config import MAX_SPLITS
from cute_kernels.attention.decode_sm90.lane import ConsumerLane
from cute_kernels.attention.decode_sm90.parts import Parts, slot_in_turn

# Threads that read one part's row side by side, at least: 4 times 16 bytes are two sectors.
MIN_SHIFT = 2
MIN_WIDTH = 1 << MIN_SHIFT
_WARP = 32


class Share(NamedTuple):
    """What a CTA combines of an item: blocks [begin, end), ``width`` of them at a time.

    Threads side by side (``column``) take neighbouring blocks; ``groups`` groups of them, this
    thread's being ``group``, share the parts.
    """

    begin: Int32
    end: Int32
    width: Int32
    groups: Int32
    group: Int32
    column: Int32


def no_parts():
    """(reference, sum, four elements) of nothing. -0, to which a part adds up to itself, its sign
    included."""
    return Float32(dsl.NEG_INF), Float32(0.0), *(Float32(-0.0) for _ in range(4))


@cute.jit
def merged(a, b):
    """Two (maximum, sum, four elements) of disjoint parts as one."""
    top = dsl.fmax(a[0], b[0])
    reference = top
    if top == dsl.NEG_INF:
        reference = Float32(0.0)
    weight_a = dsl.exp2(a[0] - reference)
    weight_b = dsl.exp2(b[0] - reference)
    return (top, *(a[i] * weight_a + b[i] * weight_b for i in range(1, 6)))


class Combining(ConsumerLane):
    @cute.jit
    def _combine_parts(
        self,
        partial: Partial,
        parts: Parts,
        row: Int32,
        element: Int32,
        group: Int32,
        groups: Int32,
    ):
        """(reference, sum, four elements) over parts group, group + groups, ..., summed a batch at
        a time, which is 1 us less where there are many (H200, B1 S32768 64/8 D128)."""
        rows, head_size = self.config.rows, self.config.head_size
        in_flight = self.config.parts_in_flight
        base_o = partial.mO.iterator.toint() + (row * head_size + element) * 4
        base_state = partial.mState.iterator.toint() + row * 8
        top, total, o0, o1, o2, o3 = no_parts()
        for first in cutlass.range(group, parts.count, groups * in_flight, unroll=1):
            states = []
            values = []
            for i in cutlass.range_constexpr(in_flight):
                slot = slot_in_turn(parts, first, i, groups)
                states.append(dsl.ld_global_cg_f32x2(base_state + slot * (rows * 8)))
                values.append(dsl.ld_global_cg_f32x4(base_o + slot * (rows * head_size * 4)))
            new_top = top
            tops = []
            for i in cutlass.range_constexpr(in_flight):
                part_top = Float32(dsl.NEG_INF)
                if first + i * groups < parts.count:
                    part_top = states[i][0]
                tops.append(part_top)
                new_top = dsl.fmax(new_top, part_top)
            reference = cutlass.select_(new_top == dsl.NEG_INF, Float32(0.0), new_top)
            keep = dsl.exp2(top - reference)
            total = total * keep
            o0 = o0 * keep
            o1 = o1 * keep
            o2 = o2 * keep
            o3 = o3 * keep
            for i in cutlass.range_constexpr(in_flight):
                weight = dsl.exp2(tops[i] - reference)
                total = total + weight * states[i][1]
                o0 = o0 + weight * values[i][0]
                o1 = o1 + weight * values[i][1]
                o2 = o2 + weight * values[i][2]
                o3 = o3 + weight * values[i][3]
            top = new_top
        return top, total, o0, o1, o2, o3

    @cute.jit
    def _merge_groups(self, state, width: Int32, groups: Int32):
        """Group 0 gathers what the other groups of threads found for its blocks.

        Groups of one warp merge by shuffles, warps through the ring's memory: every tile has been
        read, and no TMA load is outstanding.
        """
        for step in cutlass.range_constexpr(3):
            distance = MIN_WIDTH << step
            if width <= distance:
                state = merged(state, [dsl.shuffle_xor_f32(x, Int32(distance)) for x in state])
        if groups > 1:
            at = self.ring.base.toint() + self.tid * 16
            sums = self.ring.base.toint() + self.config.consumer_threads * 16 + self.tid * 8
            dsl.st_shared_f32x4(at, *state[2:])
            dsl.st_shared_f32x2(sums, state[0], state[1])
            self.barrier()
            # from here on a group is the warps that hold the same blocks
            stride = cutlass.max(width, Int32(_WARP))
            for other in cutlass.range(stride, self.config.consumer_threads, stride, unroll=1):
                if self.tid < stride:
                    theirs = (
                        *dsl.ld_shared_f32x2(sums + other * 8),
                        *dsl.ld_shared_f32x4(at + other * 16),
                    )
                    state = merged(state, theirs)
            self.barrier()
        return state

    @cute.jit
    def _fold_parts(
        self, partial: Partial, parts: Parts, row: Int32, element: Int32, share: Share, base: Int32
    ):
        """(reference, sum, four elements) of group 0's blocks: the left fold over all parts.

        All groups of threads load, so that the parts come in one trip, and leave what they have in
        the ring's memory (every tile has been read, and no TMA load is outstanding); group 0 folds.
        base: the first block.
        """
        rows, head_size, in_flight = (
            self.config.rows,
            self.config.head_size,
            self.config.parts_in_flight,
        )
        row_blocks = head_size // 4
        base_o = partial.mO.iterator.toint() + (row * head_size + element) * 4
        values_at = self.ring.base.toint()
        table_at = values_at + in_flight * self.config.consumer_threads * 16
        first_row = base // row_blocks
        last_row = (cutlass.min(base + share.width, share.end) - 1) // row_blocks
        own_row_at = table_at + (row - first_row) * (MAX_SPLITS * 16)
        top, total, o0, o1, o2, o3 = no_parts()
        # The memory's former contents have been used.
        self.barrier()
        for first in cutlass.range(0, parts.count, share.groups * in_flight, unroll=1):
            values = []
            for i in cutlass.range_constexpr(in_flight):
                slot = slot_in_turn(parts, first + share.group, i, share.groups)
                values.append(dsl.ld_global_cg_f32x4(base_o + slot * (rows * head_size * 4)))
            if first == 0:
                for each in cutlass.range(
                    first_row + self.warp, last_row + 1, self.config.consumer_warps, unroll=1
                ):
                    at = table_at + (each - first_row) * (MAX_SPLITS * 16)
                    self._tabulate_folds(partial, parts, each, at)
            else:
                self.barrier()
            for i in cutlass.range_constexpr(in_flight):
                place = (i * share.groups + share.group) * share.width + share.column
                dsl.st_shared_f32x4(values_at + place * 16, *values[i])
            self.barrier()
            if share.group == 0:
                count = cutlass.min(parts.count - first, share.groups * in_flight)
                for part in cutlass.range(0, count, unroll=4):
                    keep, weight, part_total, top = dsl.ld_shared_f32x4(
                        own_row_at + (first + part) * 16
                    )
                    place = part * share.width + share.column
                    x0, x1, x2, x3 = dsl.ld_shared_f32x4(values_at + place * 16)
                    total = dsl.fma(part_total, weight, total * keep)
                    o0 = dsl.fma(x0, weight, o0 * keep)
                    o1 = dsl.fma(x1, weight, o1 * keep)
                    o2 = dsl.fma(x2, weight, o2 * keep)
                    o3 = dsl.fma(x3, weight, o3 * keep)
        return top, total, o0, o1, o2, o3

    @cute.jit
    def _tabulate_folds(self, partial: Partial, parts: Parts, row: Int32, at: Int32):
        """By one warp: of each part, in shared memory at ``at``, how the fold adds it to a row
        (``fold_of``: keep, weight), its sum, and the reference with it. A lane a part: the
        references before it are a running maximum."""
        state_at = partial.mState.iterator.toint() + row * 8
        loaded = []
        for i in cutlass.range_constexpr(MAX_SPLITS // _WARP):
            slot = slot_in_turn(parts, self.lane, i, Int32(_WARP))
            loaded.append(dsl.ld_global_cg_f32x2(state_at + slot * (self.config.rows * 8)))
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
            dsl.st_shared_f32x4(
                at + (i * _WARP + self.lane) * 16, fold.keep, fold.weight, part_total, fold.top
            )
            before = dsl.shuffle_from_lane_f32(fold.top, Int32(_WARP - 1))
