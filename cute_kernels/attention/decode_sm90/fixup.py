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
in the bits.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels import dsl
from cute_kernels.attention.common.line import cta_of_tile, splits_of_first_cta
from cute_kernels.attention.common.output import (
    Output,
    Partial,
    finish_row,
    output_address,
    pack_output,
    sink_of_head,
    store_lse,
)
from cute_kernels.attention.common.tile_schedule import (
    Lengths,
    Segment,
    query_token,
    sequence,
    split_tiles,
)
from cute_kernels.attention.decode_sm90.combine import MIN_WIDTH, Combining, Share, no_parts
from cute_kernels.attention.decode_sm90.lane import SHARED_ITEM_WORDS, Plan
from cute_kernels.attention.decode_sm90.parts import parts_of


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


class Fixup(Combining):
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
        # While the parts are on their way to L2.
        tiles = segment.seq.tiles
        first = cta_of_tile(line_start, plan.total, plan.ctas)
        own = plan.cta - first
        count = Int32(1)
        if self.shape.splits != 0:
            split = split_tiles(self.shape, tiles)
            own = dsl.quotient(started, split)
            count = dsl.quotient(tile, split) + 1 - own
        self.barrier()
        if self.tid == 0:
            # Releases what the barrier ordered before it: the parts written by all threads.
            dsl.red_add_release_gpu((partial.mCounter.iterator + first).toint(), count)
            last = cta_of_tile(line_start + tiles - 1, plan.total, plan.ctas)
            pieces = last - first + 1
            begun = Int32(1)
            if self.shape.splits != 0:
                split = split_tiles(self.shape, tiles)
                pieces = dsl.quotient(tiles + split - 1, split)
                begun = splits_of_first_cta(first, line_start, split, plan.total, plan.ctas)
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
        # The entry is there.
        self.barrier()
        entry = self._entry(which)
        shared = SharedItem(*dsl.ld_shared_b32x4(entry), *dsl.ld_shared_b32x4(entry + 16))
        share = self._share_of(shared)
        if self.tid == 0:
            counter = (partial.mCounter.iterator + shared.first).toint()
            while dsl.ld_acquire_gpu_b32(counter) < shared.pieces:
                pass
            # This CTA will not look at the counter again, and whoever is the last to leave it finds
            # it 0 for the next launch. An addition whose answer says who is last would take a trip
            # to L2 before the work.
            for _ in cutlass.range(shared.own >> 16, unroll=1):
                dsl.red_inc_gpu(counter, 2 * shared.pieces - 1)
        self.barrier()
        self._combine_share(output, partial, shared, share)

    @cute.jit
    def _share_of(self, shared: SharedItem) -> Share:
        row_blocks = self.config.head_size // 4
        blocks = (shared.rows_end - shared.first_row) * row_blocks
        share = dsl.quotient(blocks + shared.pieces - 1, shared.pieces)
        begin = (shared.own & 0xFFFF) * share
        end = cutlass.min(begin + (shared.own >> 16) * share, blocks)
        width = Int32(self.config.consumer_threads)
        while (width > MIN_WIDTH) & (width >= 2 * (end - begin)):
            width = width >> 1
        groups = self.config.consumer_threads // width
        group = self.tid // width
        return Share(begin, end, width, groups, group, self.tid - group * width)

    @cute.jit
    def _combine_share(self, output: Output, partial: Partial, shared: SharedItem, share: Share):
        row_blocks = self.config.head_size // 4
        parts = parts_of(self.shape, shared.first, shared.pieces, shared.begun)
        for base in cutlass.range(share.begin, share.end, share.width, unroll=1):
            block = base + share.column
            live = block < share.end
            block = cutlass.min(block, share.end - 1)
            row = block // row_blocks
            element = 4 * (block - row * row_blocks)
            state = no_parts()
            if self.shape.splits == 0:
                state = self._combine_parts(partial, parts, row, element, share.group, share.groups)
                state = self._merge_groups(state, share.width, share.groups)
            else:
                state = self._fold_parts(partial, parts, row, element, share, base)
            if live & (share.group == 0):
                self._write_block(output, shared, row, element, state)

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
