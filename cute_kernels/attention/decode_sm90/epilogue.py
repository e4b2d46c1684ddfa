"""What happens to an item's result: the final output, or one part of it for fixup.py."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import dsl, dsl_together
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
from cute_kernels.attention.common.tile_schedule import Chunk, Sequence, Shape, query_token
from cute_kernels.attention.decode_sm90.config import WARPGROUP_THREADS
from cute_kernels.attention.decode_sm90.lane import NO_KEY, ConsumerLane, Softmax


class Epilogue(ConsumerLane):
    @cute.jit
    def reduce_sums(self, state: Softmax):
        """Row sums over all tokens; afterwards every lane of a row holds the same sum. A row that
        has seen no key gets the maximum -inf."""
        for n in cutlass.range_constexpr(self.row_blocks):
            for r in cutlass.range_constexpr(2):
                total = state.rSum[2 * n + r]
                for step in cutlass.range_constexpr(3):
                    total = total + dsl.shuffle_xor_f32(total, Int32(4 << step))
                state.rSum[2 * n + r] = total
            if self.g == 0:
                dsl.st_shared_f32x2(
                    self._warp_row(self.smem.row_sum, self.warp, n),
                    state.rSum[2 * n],
                    state.rSum[2 * n + 1],
                )
        self.barrier()
        for n in cutlass.range_constexpr(self.row_blocks):
            total = [Float32(0.0), Float32(0.0)]
            for w in cutlass.range_constexpr(self.config.consumer_warps):
                other = dsl.ld_shared_f32x2(self._warp_row(self.smem.row_sum, w, n))
                total = [total[0] + other[0], total[1] + other[1]]
            for r in cutlass.range_constexpr(2):
                state.rSum[2 * n + r] = total[r]
                if state.rMax[2 * n + r] == NO_KEY:
                    state.rMax[2 * n + r] = Float32(dsl.NEG_INF)

    @cute.jit
    def write_output(
        self,
        output: Output,
        acc: cute.Tensor,
        state: Softmax,
        v_scale: Float32,
        seq: Sequence,
        chunk: Chunk,
        head: Int32,
    ):
        """The whole item was this CTA's: write O and LSE."""
        shape: Shape = self.shape
        first = self.kv.first_element()
        for n in cutlass.range_constexpr(self.row_blocks):
            for r in cutlass.range_constexpr(2):
                row = chunk.first_row + 8 * n + 2 * self.j + r
                if row < chunk.rows_end:
                    token = query_token(shape, row)
                    query_head = head * shape.group + row - token * shape.group
                    token = token + seq.q_start
                    final = finish_row(
                        state.rMax[2 * n + r],
                        state.rSum[2 * n + r],
                        sink_of_head(output, query_head),
                        v_scale,
                    )
                    address = output_address(output, token, query_head, first)
                    for u in cutlass.range_constexpr(self.units):
                        at = (u * self.row_blocks + n) * 4 + r
                        packed = pack_output(
                            output.mO, acc[at] * final.factor, acc[at + 2] * final.factor
                        )
                        dsl.st_global_b32(address + 2 * self.kv.block_element(u), packed)
                    if self.tid < 4:
                        store_lse(output, token, query_head, final.lse)

    def _part_address(self, partial: Partial, slot: Int32, row: Int32):
        """Addresses of a part's row: of the lane's first output element, and of its state."""
        line = Int64(slot) * self.config.rows + row
        element = line * self.config.head_size + self.kv.first_element()
        return partial.mO.iterator.toint() + element * 4, partial.mState.iterator.toint() + line * 8

    @cute.jit
    def write_partial(
        self,
        partial: Partial,
        acc: cute.Tensor,
        state: Softmax,
        v_scale: Float32,
        chunk: Chunk,
        slot: Int32,
    ):
        """One part of an item: sums of p * v, descaled, and the softmax state.

        Of a row block with any row of the chunk all rows are written: one address, and all stores
        at a constant distance from it (code that runs once is slow, so there is little of it).
        """
        row_bytes = 4 * self.config.head_size
        address, state_address = self._part_address(partial, slot, 2 * self.j)
        for n in cutlass.range_constexpr(self.row_blocks):
            if (n == 0) | (chunk.first_row + 8 * n < chunk.rows_end):
                for r in cutlass.range_constexpr(2):
                    for u in cutlass.range_constexpr(self.units):
                        at = (u * self.row_blocks + n) * 4 + r
                        dsl.st_global_f32x2(
                            address + ((8 * n + r) * row_bytes + 4 * self.kv.block_element(u)),
                            acc[at] * v_scale,
                            acc[at + 2] * v_scale,
                        )
                    if self.tid < 4:
                        i = 2 * n + r
                        dsl.st_global_f32x2(
                            state_address + 8 * (8 * n + r), state.rMax[i], state.rSum[i]
                        )

    @cute.jit
    def keep_fold(self, acc: cute.Tensor, state: Softmax, v_scale: Float32):
        """Keep what was folded of an item's splits, descaled, for ``fold_kept``: each thread its
        own accumulators and state, in shared memory."""
        at = self.smem.fold + self.tid * 16
        for u in cutlass.range_constexpr(self.units):
            elements = [acc[4 * u + i] * v_scale for i in range(4)]
            dsl.st_shared_f32x4(at + u * (WARPGROUP_THREADS * 16), *elements)
        dsl.st_shared_f32x4(
            at + self.units * (WARPGROUP_THREADS * 16),
            *(state.rMax[i] for i in range(2)),
            *(state.rSum[i] for i in range(2)),
        )

    @cute.jit
    def fold_kept(self, acc: cute.Tensor, state: Softmax, v_scale: Float32):
        """acc, state = what was kept and the CTA's latest split; descaled."""
        at = self.smem.fold + self.tid * 16
        elements = [
            dsl.ld_shared_f32x4(at + u * (WARPGROUP_THREADS * 16)) for u in range(self.units)
        ]
        states = dsl.ld_shared_f32x4(at + self.units * (WARPGROUP_THREADS * 16))
        for r in cutlass.range_constexpr(2):
            pairs = [(each[r], each[r + 2]) for each in elements]
            self._fold_row(acc, state, v_scale, 0, r, (states[r], states[2 + r]), pairs)

    @cute.jit
    def fold_into_registers(
        self,
        partial: Partial,
        acc: cute.Tensor,
        state: Softmax,
        v_scale: Float32,
        chunk: Chunk,
        slot: Int32,
    ):
        """acc, state = what the CTA folded before, in ``slot``, and its latest split; descaled.

        Rows past the chunk, which nobody reads, take those of its last row.
        """
        last = chunk.rows_end - chunk.first_row - 1
        for n in cutlass.range_constexpr(self.row_blocks):
            # A branch a row block: loads of several of them in flight at once would spill.
            if 8 * n <= last:
                stored = []
                for r in cutlass.range_constexpr(2):
                    row = cutlass.min(8 * n + 2 * self.j + r, last)
                    address, state_address = self._part_address(partial, slot, row)
                    elements = [
                        dsl_together.ld_global_cg_f32x2(address + 4 * self.kv.block_element(u))
                        for u in range(self.units)
                    ]
                    stored.append((dsl_together.ld_global_cg_f32x2(state_address), elements))
                for r in cutlass.range_constexpr(2):
                    self._fold_row(acc, state, v_scale, n, r, *stored[r])
        # All warps have read the states before one of them writes the new ones.
        self.barrier()

    @cute.jit
    def _fold_row(
        self,
        acc: cute.Tensor,
        state: Softmax,
        v_scale: Float32,
        n: cutlass.Constexpr,
        r: cutlass.Constexpr,
        before,
        elements,
    ):
        i = 2 * n + r
        fold = fold_of(before[0], state.rMax[i])
        state.rMax[i] = fold.top
        state.rSum[i] = dsl.fma(state.rSum[i], fold.weight, before[1] * fold.keep)
        for u in cutlass.range_constexpr(self.units):
            for z in cutlass.range_constexpr(2):
                at = (u * self.row_blocks + n) * 4 + r + 2 * z
                acc[at] = dsl.fma(acc[at] * v_scale, fold.weight, elements[u][z] * fold.keep)
