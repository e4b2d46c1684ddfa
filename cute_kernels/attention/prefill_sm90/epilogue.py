"""Closing an item's rows: their sums over all warps, the output, the LSE."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl
from cute_kernels.attention.common.output import (
    Output,
    finish_row,
    output_address,
    pack_output,
    sink_of_head,
    store_lse,
)
from cute_kernels.attention.common.tile_schedule import query_token
from cute_kernels.attention.prefill_sm90.config import CONSUMER_THREADS
from cute_kernels.attention.prefill_sm90.lane import WARPS, ConsumerLane, Softmax


class Epilogue(ConsumerLane):
    @cute.jit
    def write_output(self, output: Output, acc: cute.Tensor, state: Softmax, v_scale: Float32):
        for n in cutlass.range_constexpr(self.row_blocks):
            total = [state.rSum[2 * n], state.rSum[2 * n + 1]]
            for step in cutlass.range_constexpr(3):
                for r in cutlass.range_constexpr(2):
                    total[r] = total[r] + dsl.shuffle_xor_f32(total[r], Int32(4 << step))
            if self.g == 0:
                dsl.st_shared_f32x2(self.maxima_of(self.index) + 32 * n, total[0], total[1])
        self.barrier()
        if self.tid < self.config.rows:
            self._close_row(output, v_scale)
        self.barrier()
        for n in cutlass.range_constexpr(self.value_row_blocks):
            row = self.row_offset + 8 * n + 2 * self.j
            factor = dsl.ld_shared_f32x2(self.smem.p + 8 * self.config.rows + 4 * row)
            address = dsl.ld_shared_b64x2(self.smem.p + 8 * row)
            for r in cutlass.range_constexpr(2):
                pack = partial(pack_output, output.mO)
                words = self.output_words(acc, n, r, factor[r], pack)
                if address[r] != 0:
                    for u in cutlass.range_constexpr(self.config.value_blocks):
                        dsl.st_global_b32(address[r] + words[u][0], words[u][1])

    @cute.jit
    def _close_row(self, output: Output, v_scale: Float32):
        """One row, that of this thread's number: its LSE, its output's factor and address.

        They take the place of the probabilities, which all MMAs have read. The address of a row
        that is not there is 0.
        """
        item = self.item
        total = Float32(0.0)
        for w in cutlass.range_constexpr(len(WARPS)):
            total = total + dsl.ld_shared_f32(self.maximum_of(w, self.tid))
        reference = -dsl.ld_shared_f32(self.reference_of(self.tid))
        if total == 0.0:
            reference = Float32(dsl.NEG_INF)  # no key seen: the 0 of the table is no maximum
        token, query_head = self.token_and_head(self.tid)
        final = finish_row(reference, total, sink_of_head(output, query_head), v_scale)
        dsl.st_shared_f32(self.smem.p + 8 * self.config.rows + 4 * self.tid, final.factor)
        address = Int64(0)
        if item.first_row + self.tid < item.rows_end:
            store_lse(output, token, query_head, final.lse)
            address = output_address(output, token, query_head, 0)
        dsl.st_shared_b64(self.smem.p + 8 * self.tid, address)

    @cute.jit
    def write_rows_without_keys(self, output: Output):
        """The item has no tile: output 0, LSE the sink or -inf."""
        item, shape = self.item, self.shape
        row_blocks = const_expr(self.config.head_size // 4)
        blocks = (item.rows_end - item.first_row) * row_blocks
        for block in cutlass.range(self.tid, blocks, CONSUMER_THREADS, unroll=1):
            row = block // row_blocks
            element = 4 * (block - row * row_blocks)
            row = row + item.first_row
            token = query_token(shape, row)
            query_head = item.head * shape.group + row - token * shape.group
            token = token + item.q_start
            zero = Int32(0)
            dsl.st_global_b32x2(output_address(output, token, query_head, element), zero, zero)
            if element == 0:
                sink = sink_of_head(output, query_head)
                final = finish_row(Float32(dsl.NEG_INF), Float32(0.0), sink, Float32(1.0))
                store_lse(output, token, query_head, final.lse)
