"""Reading an item's parts and adding them up: of four neighbouring elements of a row a thread."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_together
from cute_kernels.attention.common.output import Partial, fold_of
from cute_kernels.attention.decode_sm90.grid import MAX_SPLITS
from cute_kernels.attention.decode_sm90.lane import ConsumerLane
from cute_kernels.attention.decode_sm90.parts import Parts, slot_in_turn

# Parts whose loads a thread has in flight for one block.
PARTS_A_BLOCK = 4
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


def plus(sums, weight: Float32, others):
    """(sum, four elements) and as many others, which have this weight."""
    return [x + weight * y for x, y in zip(sums, others, strict=True)]


class Combining(ConsumerLane):
    @cute.jit
    def _load_parts(
        self, partial: Partial, parts: Parts, first: Int32, groups: Int32, block: Int32, end: Int32
    ):
        """(states, values) of parts first, first + groups, ... of a block; -inf and zeros where
        there is no such part, or no such block before ``end``."""
        part_bytes = self.config.rows * self.config.head_size * 4
        row = block >> (self.blocks_of_row.bit_length() - 1)
        at_o = partial.mO.iterator.toint() + block * 16
        at_state = partial.mState.iterator.toint() + row * 8
        count = cutlass.select_(block < end, parts.count, Int32(0))
        states = []
        values = []
        for i in cutlass.range_constexpr(self.parts_a_block):
            part = first + i * groups
            slot = parts.base + 2 * part
            if const_expr(i == 0):
                slot = slot + cutlass.Int32(part == 0)
            slot = Int64(slot)
            states.append(
                dsl_together.ld_global_cg_state_below(
                    at_state + slot * (self.config.rows * 8), part, count
                )
            )
            values.append(
                dsl_together.ld_global_cg_f32x4_below(at_o + slot * part_bytes, part, count)
            )
        return states, values

    @property
    def parts_a_block(self) -> int:
        return min(PARTS_A_BLOCK, self.config.parts_in_flight)

    @property
    def blocks_a_trip(self) -> int:
        """Blocks of one thread whose parts are in flight together, if these are few."""
        return self.config.parts_in_flight // self.parts_a_block

    @property
    def blocks_of_row(self) -> int:
        return self.config.head_size // 4

    @cute.jit
    def _add_parts(self, state, states, values):
        """(reference, sum, four elements) with loaded parts."""
        new_top = state[0]
        for i in cutlass.range_constexpr(self.parts_a_block):
            new_top = dsl.fmax(new_top, states[i][0])
        reference = cutlass.select_(new_top == dsl.NEG_INF, Float32(0.0), new_top)
        keep = dsl.exp2(state[0] - reference)
        sums = [x * keep for x in state[1:]]
        for i in cutlass.range_constexpr(self.parts_a_block):
            weight = dsl.exp2(states[i][0] - reference)
            sums = plus(sums, weight, (states[i][1], *values[i]))
        return new_top, *sums

    @cute.jit
    def _combine_parts(
        self, partial: Partial, parts: Parts, share: Share, block: Int32, spread: Int32
    ):
        """A state (reference, sum, four elements) for each of ``blocks_a_trip``: with ``spread`` of
        blocks as far apart as a CTA has threads, else all of it in the first, of group 0."""
        many = self.blocks_a_trip
        next_block = cutlass.select_(spread != 0, share.width, Int32(0))
        next_part = cutlass.select_(spread != 0, Int32(0), share.groups * self.parts_a_block)
        sums = [no_parts() for _ in range(many)]
        step = share.groups * (self.parts_a_block * many)
        for first in cutlass.range(share.group, parts.count, step, unroll=1):
            loaded = []
            for h in cutlass.range_constexpr(many):
                loaded.append(
                    self._load_parts(
                        partial,
                        parts,
                        first + h * next_part,
                        share.groups,
                        block + h * next_block,
                        share.end,
                    )
                )
            for h in cutlass.range_constexpr(many):
                sums[h] = self._add_parts(sums[h], *loaded[h])
        if spread == 0:
            sums[0] = self._merge_warps(self._merge_lanes(sums, share.width), share)
        return sums

    @cute.jit
    def _merge_lanes(self, sums, width: Int32):
        """One state of those of a thread, and of the lanes with the same block: the reference
        first, so that each is scaled once."""
        top = sums[0][0]
        for h in cutlass.range_constexpr(1, len(sums)):
            top = dsl.fmax(top, sums[h][0])
        distance = width
        while distance < _WARP:
            top = dsl.fmax(top, dsl.shuffle_xor_f32(top, distance))
            distance = distance << 1
        reference = cutlass.select_(top == dsl.NEG_INF, Float32(0.0), top)
        weight = dsl.exp2(sums[0][0] - reference)
        merged = [x * weight for x in sums[0][1:]]
        for h in cutlass.range_constexpr(1, len(sums)):
            merged = plus(merged, dsl.exp2(sums[h][0] - reference), sums[h][1:])
        total, o0, o1, o2, o3 = merged
        distance = width
        while distance < _WARP:
            total = total + dsl.shuffle_xor_f32(total, distance)
            o0 = o0 + dsl.shuffle_xor_f32(o0, distance)
            o1 = o1 + dsl.shuffle_xor_f32(o1, distance)
            o2 = o2 + dsl.shuffle_xor_f32(o2, distance)
            o3 = o3 + dsl.shuffle_xor_f32(o3, distance)
            distance = distance << 1
        return top, total, o0, o1, o2, o3

    @cute.jit
    def _merge_warps(self, state, share: Share):
        """Group 0 gathers what other warps found for its blocks: through the ring's memory, since
        every tile has been read, and no TMA load is outstanding."""
        top, total, o0, o1, o2, o3 = state
        threads = self.config.consumer_threads
        if share.width < threads:
            at = self.ring.base.toint() + self.tid * 16
            sums = self.ring.base.toint() + threads * 16 + self.tid * 8
            dsl.st_shared_f32x4(at, o0, o1, o2, o3)
            dsl.st_shared_f32x2(sums, top, total)
            self.barrier()
            if share.group == 0:
                # A warp has the same blocks as every ``apart``-th behind it.
                apart = cutlass.max(share.width >> 5, Int32(1))
                reference = top
                others = []
                for w in cutlass.range_constexpr(1, self.config.consumer_warps):
                    # No list: an assignment to one under a dynamic condition would be lost.
                    other_top, other, x0, x1, x2, x3 = no_parts()
                    if (w & (apart - 1)) == 0:
                        other_top, other = dsl.ld_shared_f32x2(sums + w * (_WARP * 8))
                        x0, x1, x2, x3 = dsl.ld_shared_f32x4(at + w * (_WARP * 16))
                    reference = dsl.fmax(reference, other_top)
                    others.append((other_top, other, x0, x1, x2, x3))
                top_of_all = reference
                reference = cutlass.select_(reference == dsl.NEG_INF, Float32(0.0), reference)
                weight = dsl.exp2(top - reference)
                top = top_of_all
                merged = [x * weight for x in (total, o0, o1, o2, o3)]
                for w in cutlass.range_constexpr(len(others)):
                    merged = plus(merged, dsl.exp2(others[w][0] - reference), others[w][1:])
                total, o0, o1, o2, o3 = merged
        return top, total, o0, o1, o2, o3

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
                values.append(
                    dsl_together.ld_global_cg_f32x4(base_o + slot * (rows * head_size * 4))
                )
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
            loaded.append(dsl_together.ld_global_cg_f32x2(state_at + slot * (self.config.rows * 8)))
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
