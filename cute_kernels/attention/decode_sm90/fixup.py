"""Finishing items that several CTAs share, in the launch that computed them.

Each CTA of an item leaves its part (sums of p * v in float32 and the softmax state of each query
row), arrives at the item's counter, and goes on. When its stretch is done it waits until all parts
of the item have arrived, and then combines its own share of the output: the elements of all rows,
dealt in blocks of four over the item's CTAs. So the combination is spread over all SMs, and no
second launch waits for the slowest CTA.

Waiting for others is safe because all CTAs are resident: the grid is what the device holds at
once, and a cooperative launch refuses anything else. A part's order decides the order of
additions, not the order of arrival: the same inputs give the same bits.

An item of splits (tile_schedule.py) is the left fold over them, in registers where one CTA has
them from the first on (epilogue.py), else here: the CTA that begins the item leaves the fold of its
splits as one part, the others each split as a part of its own. So who had which splits is not seen
in the bits. Slots: 2 c of the item that CTA c continues and 2 c + 1 of the one it begins; with
splits, ``splits * c`` and as many behind it of the item that CTA c begins.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import dsl
from cute_kernels.attention.common.output import (
    Output,
    Partial,
    finish_row,
    fold_of,
    output_address,
    pack_output,
    sink_of_head,
    store_lse,
)
from cute_kernels.attention.common.tile_schedule import (
    Lengths,
    Segment,
    Shape,
    cta_of_tile,
    query_token,
    sequence,
    split_tiles,
    splits_of_first_cta,
)
from cute_kernels.attention.decode_sm90.lane import SHARED_ITEM_WORDS, ConsumerLane, Plan

# Threads that read one part's row side by side, at least: 4 times 16 bytes are two sectors.
_MIN_WIDTH = 4


class SharedItem(NamedTuple):
    """An item that CTAs first, first + 1, ... share, as every thread needs it to finish it.

    pieces: its parts, or with splits those; begun: how many the CTA ``first`` has. own: the number
    of this CTA's first piece, and in the upper half how many it has.

    Kept in shared memory meanwhile (SHARED_ITEM_WORDS words): it is needed after the last tile,
    when loading the lengths again would cost a trip to DRAM.
    """

    first: Int32
    pieces: Int32
    head: Int32
    q_start: Int32
    first_row: Int32
    rows_end: Int32
    own: Int32
    begun: Int32


class Parts(NamedTuple):
    """Where an item's ``count`` parts are: the first in slot ``begun``, part i in base + step i."""

    count: Int32
    begun: Int32
    base: Int32
    step: Int32


@cute.jit
def parts_of(shape: Shape, first: Int32, pieces: Int32, begun: Int32) -> Parts:
    count = pieces
    slot = 2 * first + 1
    base = 2 * first
    step = Int32(2)
    if shape.splits != 0:
        count = pieces - begun + 1
        slot = cutlass.max(shape.splits, Int32(2)) * first
        base = slot + begun - 1
        step = Int32(1)
    return Parts(count, slot, base, step)


@cute.jit
def slot_of_part(parts: Parts, part: Int32) -> Int32:
    slot = parts.base + parts.step * part
    if part == 0:
        slot = parts.begun
    return slot


@cute.jit
def slot_to_write(
    shape: Shape, plan: Plan, line_start: Int32, started: Int32, split: Int32
) -> Int32:
    """Slot of the part that a CTA has of an item; started: the tile at which it came to it; split:
    the number of its latest split."""
    slot = 2 * plan.cta
    if started == 0:
        slot = slot + 1
    if shape.splits != 0:
        stride = cutlass.max(shape.splits, Int32(2))
        slot = stride * plan.cta
        if started > 0:
            slot = stride * cta_of_tile(line_start, plan.total, plan.ctas) + split
    return slot


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


class Fixup(ConsumerLane):
    def parts_of_place(self, partial: Partial, plan: Plan) -> Partial:
        """What belongs to the CTAs with one place in the head sets: an equal part of everything."""
        if self.config.heads_in_line == 1:
            return partial

        def part(tensor: cute.Tensor) -> cute.Tensor:
            first = cute.size(tensor, mode=[0]) // self.shape.abreast * plan.place
            if cute.rank(tensor) > 1:
                first = (first, *[0] * (cute.rank(tensor) - 1))
            return cute.domain_offset(first, tensor)

        return Partial(*[part(tensor) for tensor in partial])

    @cute.jit
    def arrive(
        self,
        partial: Partial,
        plan: Plan,
        segment: Segment,
        line_start: Int32,
        started: Int32,
        tile: Int32,
    ):
        """Tell the item's CTAs that this CTA's parts have been written, and keep the item in mind.

        line_start: where the item's tiles start on the line. started: the tile at which the CTA
        came to the item: 0 for the item that it begins. tile: of its last segment there.
        """
        self.barrier()
        if self.tid == 0:
            tiles = segment.seq.tiles
            first = cta_of_tile(line_start, plan.total, plan.ctas)
            last = cta_of_tile(line_start + tiles - 1, plan.total, plan.ctas)
            pieces = last - first + 1
            own = plan.cta - first
            count = Int32(1)
            begun = Int32(1)
            if self.shape.splits != 0:
                split = split_tiles(self.shape, tiles)
                pieces = (tiles + split - 1) // split
                own = started // split
                count = tile // split + 1 - own
                begun = splits_of_first_cta(first, line_start, split, plan.total, plan.ctas)
            # Releases what the barrier ordered before it: the parts written by all threads.
            dsl.red_add_release_gpu((partial.mCounter.iterator + first).toint(), count)
            chunk = segment.chunk
            entry = self._entry(cutlass.Int32(started == 0))
            dsl.st_shared_b32x4(entry, first, pieces, segment.head, segment.seq.q_start)
            packed = own + (count << 16)
            dsl.st_shared_b32x4(entry + 16, chunk.first_row, chunk.rows_end, packed, begun)

    def _entry(self, which: Int32) -> Int32:
        """Shared memory of the item that this CTA continues (0) or begins (1)."""
        return self.smem.shared_items + which * (4 * SHARED_ITEM_WORDS)

    @cute.jit
    def finish(self, output: Output, partial: Partial, which: Int32):
        """Wait for the item's parts, then combine this CTA's share of it."""
        entry = self._entry(which)
        left = Int32(0)
        if self.tid == 0:
            first, pieces = dsl.ld_shared_b32x2(entry)
            own, _ = dsl.ld_shared_b32x2(entry + 24)
            counter = (partial.mCounter.iterator + first).toint()
            while dsl.ld_acquire_gpu_b32(counter) < pieces:
                pass
            # This CTA will not look at the counter again; the answer is used after the work.
            left = dsl.atomic_add_acq_rel_gpu(counter, own >> 16)
        self.barrier()
        shared = SharedItem(*dsl.ld_shared_b32x4(entry), *dsl.ld_shared_b32x4(entry + 16))
        self._combine_share(output, partial, shared)
        # The last to leave finds that all others have left and clears the counter for the next
        # launch.
        if (self.tid == 0) & (left + (shared.own >> 16) == 2 * shared.pieces):
            dsl.st_global_b32((partial.mCounter.iterator + shared.first).toint(), Int32(0))

    @cute.jit
    def _combine_share(self, output: Output, partial: Partial, shared: SharedItem):
        row_blocks = self.config.head_size // 4
        blocks = (shared.rows_end - shared.first_row) * row_blocks
        parts = parts_of(self.shape, shared.first, shared.pieces, shared.begun)
        share = (blocks + shared.pieces - 1) // shared.pieces
        begin = (shared.own & 0xFFFF) * share
        end = cutlass.min(begin + (shared.own >> 16) * share, blocks)
        # Threads side by side take neighbouring blocks; the other consumers split the parts,
        # where they may be added in another order than one after the other.
        width = Int32(self.config.consumer_threads)
        while (width > _MIN_WIDTH) & (width >= 2 * share) & (self.shape.splits == 0):
            width = width >> 1
        groups = self.config.consumer_threads // width
        group = self.tid // width
        for base in cutlass.range(begin, end, width, unroll=1):
            block = base + self.tid - group * width
            live = block < end
            block = cutlass.min(block, end - 1)
            row = block // row_blocks
            element = 4 * (block - row * row_blocks)
            state = self._combine_parts(partial, parts, row, element, group, groups)
            state = self._merge_groups(state, width, groups)
            if live & (group == 0):
                self._write_block(output, shared, row, element, state)

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
        """(reference, sum, four elements) over parts group, group + groups, ...

        Of splits the left fold over all of them; of other parts sums a batch at a time, which is
        1 us less where there are many (H200, B1 S32768 64/8 D128).
        """
        rows, head_size = self.config.rows, self.config.head_size
        base_o = partial.mO.iterator.toint() + (row * head_size + element) * 4
        base_state = partial.mState.iterator.toint() + row * 8
        top = Float32(dsl.NEG_INF)
        total = Float32(0.0)
        # -0, to which a part adds up to itself, its sign included
        o0 = Float32(-0.0)
        o1 = Float32(-0.0)
        o2 = Float32(-0.0)
        o3 = Float32(-0.0)
        for first in cutlass.range(
            group, parts.count, groups * self.config.parts_in_flight, unroll=1
        ):
            states = []
            values = []
            for i in cutlass.range_constexpr(self.config.parts_in_flight):
                part = cutlass.min(first + i * groups, parts.count - 1)
                slot = Int64(slot_of_part(parts, part))
                states.append(dsl.ld_global_cg_f32x2(base_state + slot * (rows * 8)))
                values.append(dsl.ld_global_cg_f32x4(base_o + slot * (rows * head_size * 4)))
            if self.shape.splits == 0:
                new_top = top
                tops = []
                for i in cutlass.range_constexpr(self.config.parts_in_flight):
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
                for i in cutlass.range_constexpr(self.config.parts_in_flight):
                    weight = dsl.exp2(tops[i] - reference)
                    total = total + weight * states[i][1]
                    o0 = o0 + weight * values[i][0]
                    o1 = o1 + weight * values[i][1]
                    o2 = o2 + weight * values[i][2]
                    o3 = o3 + weight * values[i][3]
                top = new_top
            else:
                for i in cutlass.range_constexpr(self.config.parts_in_flight):
                    if first + i * groups < parts.count:
                        fold = fold_of(top, states[i][0])
                        top = fold.top
                        total = dsl.fma(states[i][1], fold.weight, total * fold.keep)
                        o0 = dsl.fma(values[i][0], fold.weight, o0 * fold.keep)
                        o1 = dsl.fma(values[i][1], fold.weight, o1 * fold.keep)
                        o2 = dsl.fma(values[i][2], fold.weight, o2 * fold.keep)
                        o3 = dsl.fma(values[i][3], fold.weight, o3 * fold.keep)
        return top, total, o0, o1, o2, o3

    @cute.jit
    def _merge_groups(self, state, width: Int32, groups: Int32):
        """Group 0 gathers what the other groups of threads found for its blocks.

        Groups of one warp merge by shuffles, warps through the ring's memory: every tile has been
        read, and no TMA load is outstanding.
        """
        for step in cutlass.range_constexpr(3):
            distance = _MIN_WIDTH << step
            if width <= distance:
                state = merged(state, [dsl.shuffle_xor_f32(x, Int32(distance)) for x in state])
        if groups > 1:
            at = self.ring.base.toint() + self.tid * 16
            sums = self.ring.base.toint() + self.config.consumer_threads * 16 + self.tid * 8
            dsl.st_shared_f32x4(at, *state[2:])
            dsl.st_shared_f32x2(sums, state[0], state[1])
            self.barrier()
            # from here on a group is the warps that hold the same blocks
            stride = cutlass.max(width, Int32(32))
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
    def _write_block(self, output: Output, shared: SharedItem, row: Int32, element: Int32, state):
        top, total, o0, o1, o2, o3 = state
        shape = self.shape
        packed_row = shared.first_row + row
        token = query_token(shape, packed_row)
        query_head = shared.head * shape.group + packed_row - token * shape.group
        token = token + shared.q_start
        final = finish_row(top, total, sink_of_head(output, query_head), Float32(1.0))
        dsl.st_global_b32x2(
            output_address(output, token, query_head, element),
            pack_output(output.mO, o0 * final.factor, o1 * final.factor),
            pack_output(output.mO, o2 * final.factor, o3 * final.factor),
        )
        if element == 0:
            store_lse(output, token, query_head, final.lse)

    @cute.jit
    def write_rows_without_keys(self, output: Output, lengths: Lengths, cta: Int32, ctas: Int32):
        """Rows of sequences that have no tile: output 0, LSE the sink or -inf."""
        shape, threads = self.shape, self.config.consumer_threads
        heads = shape.head_sets * shape.abreast * shape.group
        cta = cta * shape.abreast + shape.place
        ctas = ctas * shape.abreast
        for b in cutlass.range(cta, self.shape.batch, ctas, unroll=1):
            seq = sequence(lengths, self.shape, b, self.config.rows)
            blocks = seq.q_len * heads * (self.config.head_size // 4)
            if (seq.tiles > 0) | (seq.chunks == 0):
                blocks = Int32(0)
            for block in cutlass.range(self.tid, blocks, threads, unroll=1):
                row = block // (self.config.head_size // 4)
                element = 4 * (block - row * (self.config.head_size // 4))
                token = row // heads
                query_head = row - token * heads
                token = token + seq.q_start
                zero = Int32(0)
                dsl.st_global_b32x2(output_address(output, token, query_head, element), zero, zero)
                if element == 0:
                    sink = sink_of_head(output, query_head)
                    final = finish_row(Float32(dsl.NEG_INF), Float32(0.0), sink, Float32(1.0))
                    store_lse(output, token, query_head, final.lse)
