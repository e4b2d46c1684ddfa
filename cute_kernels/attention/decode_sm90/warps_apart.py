"""Softmax and values where each warp keeps to its own tokens (``DecodeConfig.warps_apart``).

Warp w scores tokens 16 w .. 16 w + 15 of a tile, and multiplies their probabilities with their
values for the whole head: P^T goes from the accumulator to the next B operand by a transposition in
registers. Maxima and sums are the warp's own, so that warps meet at nothing but the ring, and their
waits do not add up. At the end of an item's part the four outputs become one, and from there on a
warp owns the same part of the head as elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels import dsl
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from cute_kernels.attention.decode_sm90.lane import NO_KEY, Softmax
from cute_kernels.attention.decode_sm90.tile_math import MAX_LAG, TileMath

# A row's lag before it has a reference: every score exceeds it, and no masked one.
_NO_REFERENCE = -3.4028234663852886e38


class OwnTile(NamedTuple):
    """A tile: its index, where it is in the ring, and which of the item's tiles need care.

    offset: of the slot in bytes, which would be a multiplication at each use.
    plain_from, plain: the first tile, and how many from there on, whose keys all rows see, without
    softcap. low, high: keys that any row sees.
    """

    index: Int32
    slot: Int32
    phase: Int32
    offset: Int32
    plain_from: Int32
    plain: Int32
    low: Int32
    high: Int32


class WarpsApart(TileMath):
    def make_lags(self) -> cute.Tensor:
        """How far scores may exceed each row's reference before it moves: see ``open_rows``."""
        return cute.make_rmem_tensor((2,), Float32)

    def plain_tiles(self, low: Int32, high: Int32) -> tuple[Int32, Int32]:
        """``OwnTile.plain_from`` and ``plain``, for keys [low, high) that all rows see."""
        begin = (low + (TILE_TOKENS - 1)) // TILE_TOKENS
        count = cutlass.max(high // TILE_TOKENS - begin, Int32(0))
        count = cutlass.select_(self.softcap == 0.0, count, Int32(0))
        # Not an expression that the loop over tiles would compute anew.
        return begin, cute.arch.make_warp_uniform(count)

    @cute.jit
    def open_rows(self, state: Softmax, lags: cute.Tensor):
        """Before an item's first tile: references of 0, which the first score replaces.

        Between here and ``join_warps`` references are finite, so that a score less its reference is
        one FFMA and never NaN.
        """
        for r in cutlass.range_constexpr(2):
            state.rMax[r] = Float32(0.0)
            lags[r] = Float32(_NO_REFERENCE)

    @cute.jit
    def own_probabilities(
        self,
        rS: cute.Tensor,
        rQ: cute.Tensor,
        rScale: cute.Tensor,
        acc: cute.Tensor,
        state: Softmax,
        lags: cute.Tensor,
        tile: OwnTile,
    ):
        """Scores and online softmax of the warp's tokens of a tile: P^T as a B operand, and the
        words of V where they are loaded before (else None)."""
        passes = self.config.head_size // 64
        values_at = tile.offset + self.config.tile_bytes
        for i in cutlass.range_constexpr(4):
            rS[i] = Float32(0.0)
        cute.arch.mbarrier_wait(self.ring.full + tile.slot, tile.phase)
        loaded = None
        values = None
        for p in cutlass.range_constexpr(passes):
            loaded = self.kv.load_keys_at(tile.offset, p, loaded)
            if const_expr(p == passes - 1):
                values = self.kv.early_own_values(values_at)
            self._scores_mma(rS, rQ, loaded, p)
        above = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(4):
            above[i] = dsl.fma(rS[i], rScale[i % 2], -state.rMax[i % 2])
        if Uint32(tile.index - tile.plain_from) >= Uint32(tile.plain):
            self._mind_some_keys(above, rS, rScale, state, tile, values)
        self.kv.prepare_own_values(values_at)
        tops = [dsl.fmax(above[r], above[2 + r]) for r in range(2)]
        if cute.arch.vote_any_sync((tops[0] > lags[0]) | (tops[1] > lags[1])):
            self._move_references(above, tops, acc, state, lags)
        p = [dsl.exp2(above[z]) for z in range(4)]
        for r in cutlass.range_constexpr(2):
            state.rSum[r] = state.rSum[r] + (p[r] + p[2 + r])
        operand = [dsl.transpose_8x8_b16(dsl.pack_f16x2(p[z], p[z + 1])) for z in (0, 2)]
        return operand, values

    @cute.jit
    def _mind_some_keys(
        self,
        above: cute.Tensor,
        rS: cute.Tensor,
        rScale: cute.Tensor,
        state: Softmax,
        tile: OwnTile,
        values,
    ):
        """Softcap and mask. V that no row may see becomes 0 (its block scales do, if it has them):
        P is 0 there, but 0 * NaN is NaN."""
        if self.softcap != 0.0:
            for i in cutlass.range_constexpr(4):
                above[i] = rS[i] * rScale[i % 2]
            self.cap(above)
            for i in cutlass.range_constexpr(4):
                above[i] = above[i] - state.rMax[i % 2]
        self.mask(above, tile.index)
        first_token = tile.index * TILE_TOKENS
        if (first_token < tile.low) | (first_token + TILE_TOKENS > tile.high):
            at = tile.offset + self.config.tile_bytes
            self.kv.drop_dead_values(values, at, first_token, tile.low, tile.high)

    @cute.jit
    def _move_references(
        self, above: cute.Tensor, tops, acc: cute.Tensor, state: Softmax, lags: cute.Tensor
    ):
        """To the warp's largest scores, where those are larger or the first of their row."""
        correction = []
        for r in cutlass.range_constexpr(2):
            top = tops[r]
            for step in cutlass.range_constexpr(3):
                top = dsl.fmax(top, dsl.shuffle_xor_f32(top, Int32(4 << step)))
            before = state.rMax[r]
            moved = before + dsl.fmax(top, Float32(0.0))
            factor = dsl.exp2(before - moved)
            if lags[r] != MAX_LAG:
                moved, factor = Float32(0.0), Float32(1.0)
                if top > _NO_REFERENCE:
                    moved, lags[r] = top, Float32(MAX_LAG)
            for i in cutlass.range_constexpr(2):
                above[2 * i + r] = above[2 * i + r] - (moved - before)
            state.rMax[r] = moved
            state.rSum[r] = state.rSum[r] * factor
            correction.append(factor)
        self._rescale(acc, correction, 0)

    @cute.jit
    def own_values(self, acc: cute.Tensor, tile: OwnTile, p, values):
        """acc += V^T P^T of the warp's tokens of one tile, then hands its slot back."""
        blocks = self.kv.blocks_per_unit
        for load in cutlass.range_constexpr(self.kv.own_units // 2):
            if const_expr(values is None):
                loaded = self.kv.load_own_values(tile.offset + self.config.tile_bytes, load)
            else:
                loaded = [values[4 * load + z] for z in range(4)]
            for unit in cutlass.range_constexpr(2):
                operands = self.kv.own_value_operands(loaded, unit)
                for block in cutlass.range_constexpr(blocks):
                    at = 4 * (blocks * (2 * load + unit) + block)
                    sums = [acc[at + z] for z in range(4)]
                    d = dsl.mma_m16n8k16(operands[block], p, sums, self.mma_kind)
                    for z in cutlass.range_constexpr(4):
                        acc[at + z] = d[z]
        self.release(tile.slot)

    @cute.jit
    def join_warps(self, acc: cute.Tensor, state: Softmax, lags: cute.Tensor):
        """The first blocks of acc become what the warp owns of the output over all tokens, relative
        to common maxima.

        All blocks pass through shared memory (which has been read since an item's last end: warps
        have met for the maxima); the owner of a block adds the four. A lane reads what its like in
        the other warps wrote.
        """
        for r in cutlass.range_constexpr(2):
            if lags[r] != MAX_LAG:
                state.rMax[r] = Float32(NO_KEY)
        self._raise_maxima([state.rMax[0], state.rMax[1]], acc, state)
        # (owners, warps, blocks of an owner) of 16 bytes a lane.
        lane, of_warp = self.smem.p + self.lane * 16, self.units * 512
        for owner in cutlass.range_constexpr(4):
            for u in cutlass.range_constexpr(self.units):
                at = 4 * (owner * self.units + u)
                dsl.st_shared_f32x4(
                    lane + (4 * owner + self.warp) * of_warp + u * 512,
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3],
                )  # fmt: skip
        self.barrier()
        own = lane + self.warp * (4 * of_warp)
        for u in cutlass.range_constexpr(self.units):
            total = [Float32(0.0) for _ in range(4)]
            for w in cutlass.range_constexpr(4):
                part = dsl.ld_shared_f32x4(own + w * of_warp + u * 512)
                total = [total[z] + part[z] for z in range(4)]
            for z in cutlass.range_constexpr(4):
                acc[4 * u + z] = total[z]
