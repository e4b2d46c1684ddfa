"""Softmax and values where each warp keeps to its own tokens (``DecodeConfig.warps_apart``).

Warp w scores tokens 16 w .. 16 w + 15 of a tile, and multiplies their probabilities with their
values for the whole head: P^T goes from the accumulator to the next B operand by a transposition in
registers. Maxima and sums are the warp's own, so that warps meet at nothing but the ring, and their
waits do not add up. At the end of an item's part the four outputs become one, and from there on a
warp owns the same part of the head as elsewhere.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels import dsl
from cute_kernels.attention.decode_sm90.lane import Softmax
from cute_kernels.attention.decode_sm90.tile_math import MAX_LAG, TileMath


class WarpsApart(TileMath):
    @cute.jit
    def softmax_of_warp(self, scores, acc: cute.Tensor, state: Softmax):
        """Online softmax of a step's tiles over the warp's tokens.

        Returns, per tile, P^T of the warp's 16 tokens as a B operand.
        """
        tops = self._lane_maxima(scores)
        exceeded = (tops[0] > state.rMax[0] + MAX_LAG) | (tops[1] > state.rMax[1] + MAX_LAG)
        if cute.arch.vote_any_sync(exceeded):
            self._raise_own_maxima(tops, acc, state)
        operands = []
        for i in cutlass.range_constexpr(len(scores)):
            p = [dsl.exp2(scores[i][z] - state.rMax[z % 2]) for z in range(4)]
            for r in cutlass.range_constexpr(2):
                state.rSum[r] = state.rSum[r] + (p[r] + p[2 + r])
            near = dsl.transpose_8x8_b16(dsl.pack_f16x2(p[0], p[1]))
            far = dsl.transpose_8x8_b16(dsl.pack_f16x2(p[2], p[3]))
            operands.append((near, far))
        return operands

    @cute.jit
    def _raise_own_maxima(self, tops, acc: cute.Tensor, state: Softmax):
        correction = []
        for r in cutlass.range_constexpr(2):
            top = tops[r]
            for step in cutlass.range_constexpr(3):
                top = dsl.fmax(top, dsl.shuffle_xor_f32(top, Int32(4 << step)))
            top = dsl.fmax(top, state.rMax[r])
            correction.append(dsl.exp2(state.rMax[r] - top))
            state.rMax[r] = top
            state.rSum[r] = state.rSum[r] * correction[r]
        self._rescale(acc, correction, 0)

    @cute.jit
    def own_values(self, acc: cute.Tensor, slot: Int32, p, which: cutlass.Constexpr):
        """acc += V^T P^T of the warp's tokens of one tile, then hands its slot back."""
        for load in cutlass.range_constexpr(self.kv.own_units // 2):
            loaded = self.kv.load_own_values(self.tile_in_ring(slot, 1), load, which)
            for unit in cutlass.range_constexpr(2):
                operands = self.kv.own_value_operands(loaded, unit)
                for block in cutlass.range_constexpr(2):
                    at = 4 * (4 * load + 2 * unit + block)
                    sums = [acc[at + z] for z in range(4)]
                    d = dsl.mma_m16n8k16(operands[block], p, sums, self.mma_kind)
                    for z in cutlass.range_constexpr(4):
                        acc[at + z] = d[z]
        self.release(slot)

    @cute.jit
    def join_warps(self, acc: cute.Tensor, state: Softmax):
        """The first blocks of acc become what the warp owns of the output over all tokens, relative
        to common maxima.

        One warp's blocks after the other pass through shared memory: every warp writes its share
        of them, their owner adds the four. A lane reads what its like in the other warps wrote. The
        sums go where the blocks of warp 0 were, which are sent first.
        """
        self._raise_maxima([state.rMax[0], state.rMax[1]], acc, state)
        size = 16 * self.units
        lane = self.smem.p + self.lane * size
        for owner in cutlass.range_constexpr(4):
            self.barrier()
            for u in cutlass.range_constexpr(self.units):
                at = 4 * (owner * self.units + u)
                dsl.st_shared_f32x4(
                    lane + self.warp * (32 * size) + 16 * u,
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3],
                )  # fmt: skip
            self.barrier()
            if self.warp == owner:
                for u in cutlass.range_constexpr(self.units):
                    total = [Float32(0.0) for _ in range(4)]
                    for w in cutlass.range_constexpr(4):
                        part = dsl.ld_shared_f32x4(lane + w * (32 * size) + 16 * u)
                        total = [total[z] + part[z] for z in range(4)]
                    for z in cutlass.range_constexpr(4):
                        acc[4 * u + z] = total[z]
