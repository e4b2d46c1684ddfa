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
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_together
from cute_kernels.attention.common.output import (
    Output,
    Partial,
    finish_row,
    output_address,
    pack_output,
    sink_of_head,
    store_lse,
)
from cute_kernels.attention.common.tile_schedule import Lengths, query_token, sequence
from cute_kernels.attention.decode_sm90.combine import Combining, Share
from cute_kernels.attention.decode_sm90.parts import Parts
from cute_kernels.attention.decode_sm90.plan import Plan
from cute_kernels.attention.decode_sm90.shared_items import SharedItem, entry_of


class Block(NamedTuple):
    """Four elements of a row of an item that a thread combines; live: whether it writes them."""

    row: Int32
    element: Int32
    live: Int32


class Target(NamedTuple):
    """Where a block goes in the output: worked out before its parts are waited for."""

    address: Int64
    token: Int32
    query_head: Int32
    sink: Float32


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

    def _entry(self, which: Int32) -> Int32:
        return entry_of(self.smem.shared_items, which)

    @cute.jit
    def arrive(self, partial: Partial, started: Int32):
        """Tell the item's CTAs that this CTA's parts have been written."""
        self.barrier()
        if self.tid == 0:
            first, parts = dsl.ld_shared_b32x2(self._entry(cutlass.Int32(started == 0)) + 40)
            # Releases what the barrier ordered before it: the parts written by all threads.
            dsl_together.red_add_release_gpu((partial.mCounter.iterator + first).toint(), parts)

    @cute.jit
    def finish(self, output: Output, partial: Partial, which: Int32):
        """Combine this CTA's share of an item, if it has one, when its parts are there."""
        entry = self._entry(which)
        shared = SharedItem(
            *dsl.ld_shared_b32x4(entry),
            *dsl.ld_shared_b32x4(entry + 16),
            dsl.ld_shared_b32(entry + 32),
        )
        if shared.count > 0:
            width = 1 << shared.shift
            share = Share(
                shared.begin,
                shared.end,
                width,
                Int32(self.config.consumer_threads) >> shared.shift,
                self.tid >> shared.shift,
                self.tid & (width - 1),
            )
            # Known before the parts are there.
            block = self._block(share, share.begin)
            target = self._target(output, shared, block)
            self._wait(partial, entry, shared.count)
            if self.shape.splits == 0:
                self._combine(output, partial, shared, share, block, target)
            else:
                self._fold(output, partial, shared, share, block, target)

    @cute.jit
    def _wait(self, partial: Partial, entry: Int32, count: Int32):
        if self.tid == 0:
            first, parts = dsl.ld_shared_b32x2(entry + 40)
            counter = (partial.mCounter.iterator + first).toint()
            while dsl_together.ld_acquire_gpu_b32(counter) < count:
                pass
            # This CTA will not look at the counter again, and whoever is the last to leave it finds
            # it 0 for the next launch. An addition whose answer says who is last would take a trip
            # to L2 before the work.
            for _ in cutlass.range(parts, unroll=1):
                dsl_together.red_inc_gpu(counter, 2 * count - 1)
        self.barrier()

    @cute.jit
    def _combine(
        self,
        output: Output,
        partial: Partial,
        shared: SharedItem,
        share: Share,
        block: Block,
        target: Target,
    ):
        """Without splits. Where an item has few parts but many blocks, a thread takes several of
        these in one trip to L2."""
        many, threads = self.blocks_a_trip, self.config.consumer_threads
        spread = Int32(0)
        step = share.width
        if const_expr(many > 1):
            if (share.width == threads) & (shared.count <= self.parts_a_block):
                spread = Int32(1)
                step = Int32(threads * many)
        parts = Parts(shared.count, shared.begun, shared.base, Int32(2))
        for base in cutlass.range(share.begin, share.end, step, unroll=1):
            if base > share.begin:
                # What others wrote to the ring's memory has been read.
                self.barrier()
                block = self._block(share, base)
                target = self._target(output, shared, block)
            sums = self._combine_parts(partial, parts, share, base + share.column, spread)
            if block.live != 0:
                self._write_block(output, target, block.element, sums[0])
            if const_expr(many > 1):
                if spread != 0:
                    for h in cutlass.range_constexpr(1, many):
                        block = self._block(share, base + threads * h)
                        target = self._target(output, shared, block)
                        if block.live != 0:
                            self._write_block(output, target, block.element, sums[h])

    @cute.jit
    def _fold(
        self,
        output: Output,
        partial: Partial,
        shared: SharedItem,
        share: Share,
        block: Block,
        target: Target,
    ):
        """With splits."""
        parts = Parts(shared.count, shared.begun, shared.base, Int32(1))
        for base in cutlass.range(share.begin, share.end, share.width, unroll=1):
            if base > share.begin:
                block = self._block(share, base)
                target = self._target(output, shared, block)
            state = self._fold_parts(partial, parts, block.row, block.element, share, base)
            if block.live != 0:
                self._write_block(output, target, block.element, state)

    @cute.jit
    def _block(self, share: Share, base: Int32) -> Block:
        block = base + share.column
        live = cutlass.Int32((block < share.end) & (share.group == 0))
        block = cutlass.min(block, share.end - 1)
        row = block >> (self.blocks_of_row.bit_length() - 1)
        return Block(row, 4 * (block - row * self.blocks_of_row), live)

    @cute.jit
    def _target(self, output: Output, shared: SharedItem, block: Block) -> Target:
        shape = self.shape
        packed_row = shared.first_row + block.row
        token = query_token(shape, packed_row)
        query_head = shared.head * shape.group + packed_row - token * shape.group
        token = token + shared.q_start
        sink = sink_of_head(output, query_head)
        address = output_address(output, token, query_head, block.element)
        return Target(address, token, query_head, sink)

    @cute.jit
    def _write_block(self, output: Output, target: Target, element: Int32, state):
        top, total, o0, o1, o2, o3 = state
        final = finish_row(top, total, target.sink, Float32(1.0))
        dsl.st_global_b32x2(
            target.address,
            pack_output(output.mO, o0 * final.factor, o1 * final.factor),
            pack_output(output.mO, o2 * final.factor, o3 * final.factor),
        )
        if element == 0:
            store_lse(output, target.token, target.query_head, final.lse)

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
