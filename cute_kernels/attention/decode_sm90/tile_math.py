"""The arithmetic of one tile: scores, online softmax, output.

The problem is transposed: S^T = K Q^T and O^T = V^T P^T, so that K and V are the A operand, taken
from registers. A byte of the cache is read from shared memory once, converted to fp16 in the lane
that multiplies it (16 bits stay as they are; fragments.py: how, and in which order), and never
written back. The N of every MMA is the packed query rows.

Scores live in the log2 domain once they have been scaled: exp2 and log2 are what the hardware has.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common.tile_schedule import Sequence
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from cute_kernels.attention.decode_sm90.lane import ConsumerLane, Softmax

# How far (log2) scores may exceed the running maximum that probabilities refer to: fp16 holds up to
# 2^16 with the same relative precision, and sums and output are float32.
MAX_LAG = 8.0


def reference(top: Float32) -> Float32:
    """The maximum to subtract; 0 for a row that has seen no key, as (-inf) - (-inf) is NaN."""
    return cutlass.select_(top == dsl.NEG_INF, Float32(0.0), top)


class TileMath(ConsumerLane):
    @cute.jit
    def scores(self, rS: cute.Tensor, rQ: cute.Tensor, slot: Int32, phase: Int32):
        """rS = K Q^T of one tile (raw products), then hands the K slot back, if V is in another."""
        config = self.config
        for i in cutlass.range_constexpr(self.chains * self.row_blocks * 4):
            rS[i] = Float32(0.0)
        cute.arch.mbarrier_wait(self.ring.full + slot, phase)
        passes = config.head_size // 64
        loaded = None
        for p in cutlass.range_constexpr(passes):
            loaded = self.kv.load_keys(self.tile_in_ring(slot, 0), p, loaded)
            if const_expr(config.uses_wgmma):
                self._scores_wgmma(rS, loaded, p)
            else:
                self._scores_mma(rS, rQ, loaded, p)
        if const_expr(not config.paired):
            self.release(slot)
        if const_expr(config.uses_wgmma):
            warpgroup.wait_group(0)
        else:
            for chain in cutlass.range_constexpr(1, self.chains):
                for i in cutlass.range_constexpr(4):
                    rS[i] = rS[i] + rS[4 * chain + i]

    @cute.jit
    def _scores_wgmma(self, rS: cute.Tensor, loaded, p: cutlass.Constexpr):
        rA = cute.make_rmem_tensor(((2, 2, 2), 1, 4), self.mma_type)
        words = cute.recast_tensor(rA, Int32)
        steps = 4 // self.kv.words_per_pass
        for word in cutlass.range_constexpr(self.kv.words_per_pass):
            operands = self.kv.key_operands(loaded, p, word)
            for i in cutlass.range_constexpr(steps):
                for z in cutlass.range_constexpr(4):
                    words[4 * (steps * word + i) + z] = operands[i][z]
        tQ = self.mma.make_fragment_B(self.mma.get_slice(0).partition_B(self.smem.sQ))
        accumulator = cute.make_tensor(
            rS.iterator, cute.make_layout(((2, 2, self.row_blocks), 1, 1), stride=((1, 2, 4), 0, 0))
        )
        warpgroup.fence()
        for s in cutlass.range_constexpr(4):
            cute.gemm(
                self.mma, accumulator, rA[None, None, s], tQ[None, None, 4 * p + s], accumulator
            )
        warpgroup.commit_group()
        warpgroup.wait_group(1)

    @cute.jit
    def _scores_mma(self, rS: cute.Tensor, rQ: cute.Tensor, loaded, p: cutlass.Constexpr):
        steps = 4 // self.kv.words_per_pass
        for word in cutlass.range_constexpr(self.kv.words_per_pass):
            operands = self.kv.key_operands(loaded, p, word)
            for i in cutlass.range_constexpr(steps):
                s = steps * word + i
                if const_expr(not self.config.queries_in_smem):
                    b = (rQ[8 * p + 2 * s], rQ[8 * p + 2 * s + 1])
                else:
                    if const_expr(s % 2 == 0):
                        pair = self._query_fragments(2 * p + s // 2)
                    b = (pair[2 * (s % 2)], pair[2 * (s % 2) + 1])
                c = 4 * (s % self.chains)
                sums = [rS[c + z] for z in range(4)]
                d = dsl.mma_m16n8k16(operands[i], b, sums, self.mma_kind)
                for z in cutlass.range_constexpr(4):
                    rS[c + z] = d[z]

    def _query_fragments(self, load: int):
        """Of 8 rows in shared memory: B of k-steps 2 load and 2 load + 1."""
        return dsl.ld_shared_b32x4(self.smem.q + load * 512 + self.lane * 16)

    @cute.jit
    def scale_and_mask(self, rS: cute.Tensor, rScale: cute.Tensor, tile: Int32, masked: Int32):
        """Raw products -> log2-domain scores: descale and scale, then softcap, then mask."""
        for n in cutlass.range_constexpr(self.row_blocks):
            scale = (rScale[0], rScale[1])
            if const_expr(self.config.queries_in_smem):
                scale = dsl.ld_shared_f32x2(self.smem.q_scale + 32 * n + 8 * self.j)
            for i in cutlass.range_constexpr(4):
                rS[4 * n + i] = rS[4 * n + i] * scale[i % 2]
        if const_expr(self.config.block_scaled):
            # As one rare block it is branched around. By itself each part is issued for every tile,
            # predicated off, which costs only where instruction issue is the limit (H200,
            # 2026-11-30: B32 S8192 64/8 D128 nvfp4 101 us, as one block 96; FP8 gains nothing).
            if (masked != 0) | (self.softcap != 0.0):
                self._cap_and_mask(rS, tile, masked)
        else:
            self._cap_and_mask(rS, tile, masked)

    @cute.jit
    def _cap_and_mask(self, rS: cute.Tensor, tile: Int32, masked: Int32):
        if self.softcap != 0.0:
            self.cap(rS)
        if masked != 0:
            self.mask(rS, tile)

    def cap(self, rS: cute.Tensor):
        """cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)); x is in log2 units already."""
        inverse = 2.0 / self.softcap
        cap = self.softcap * dsl.LOG2_E
        for i in range(4 * self.row_blocks):
            e = dsl.exp2(rS[i] * inverse)
            rS[i] = cap - (2.0 * cap) * cute.arch.rcp_approx(1.0 + e)

    @cute.jit
    def mask(self, rS: cute.Tensor, tile: Int32):
        """-inf for scores of keys that their row does not see."""
        token = tile * TILE_TOKENS + self.token_in_tile
        for n in cutlass.range_constexpr(self.row_blocks):
            limits = dsl.ld_shared_b32x4(self.smem.visible + 64 * n + 16 * self.j)
            for i in cutlass.range_constexpr(4):
                position = token + 8 * (i // 2)
                low, high = limits[2 * (i % 2)], limits[2 * (i % 2) + 1]
                if (position < low) | (position >= high):
                    rS[4 * n + i] = Float32(dsl.NEG_INF)

    @cute.jit
    def softmax(self, scores, acc: cute.Tensor, state: Softmax, buffer: Int32):
        """Online softmax of a step's tiles over the four warps; leaves P^T in shared memory.

        scores: one rS per tile. The probabilities refer to the maxima of earlier steps, so that one
        barrier hands them over. Only where a score exceeds its row's maximum by 2^MAX_LAG (always
        in an item's first step) do the warps exchange maxima and start the step anew.
        """
        tops = self._lane_maxima(scores)
        exceeded = Int32(0)
        for i in cutlass.range_constexpr(2 * self.row_blocks):
            if tops[i] > state.rMax[i] + MAX_LAG:
                exceeded = Int32(1)
        added = cute.make_rmem_tensor((2 * self.row_blocks,), Float32)
        self._probabilities(scores, state, added, buffer)
        if self.barrier_any(exceeded) != 0:
            self._raise_maxima(tops, acc, state)
            self._probabilities(scores, state, added, buffer)
            self.barrier()
        for i in cutlass.range_constexpr(2 * self.row_blocks):
            state.rSum[i] = state.rSum[i] + added[i]

    @cute.jit
    def _lane_maxima(self, scores):
        tops = []
        for n in cutlass.range_constexpr(self.row_blocks):
            for r in cutlass.range_constexpr(2):
                x = dsl.fmax(scores[0][4 * n + r], scores[0][4 * n + 2 + r])
                for i in cutlass.range_constexpr(1, len(scores)):
                    x = dsl.fmax(x, dsl.fmax(scores[i][4 * n + r], scores[i][4 * n + 2 + r]))
                tops.append(x)
        return tops

    @cute.jit
    def _raise_maxima(self, tops, acc: cute.Tensor, state: Softmax):
        """Running maxima over all warps' scores of the step; sums and output follow them."""
        for n in cutlass.range_constexpr(self.row_blocks):
            top = [tops[2 * n], tops[2 * n + 1]]
            for r in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(3):
                    top[r] = dsl.fmax(top[r], dsl.shuffle_xor_f32(top[r], Int32(4 << step)))
            if self.g == 0:
                dsl.st_shared_f32x2(self._warp_row(self.smem.row_max, self.warp, n), top[0], top[1])
        self.barrier()
        for n in cutlass.range_constexpr(self.row_blocks):
            top = [state.rMax[2 * n], state.rMax[2 * n + 1]]
            for w in cutlass.range_constexpr(4):
                other = dsl.ld_shared_f32x2(self._warp_row(self.smem.row_max, w, n))
                top = [dsl.fmax(top[0], other[0]), dsl.fmax(top[1], other[1])]
            correction = []
            for r in cutlass.range_constexpr(2):
                correction.append(dsl.exp2(state.rMax[2 * n + r] - reference(top[r])))
                state.rMax[2 * n + r] = top[r]
                state.rSum[2 * n + r] = state.rSum[2 * n + r] * correction[r]
            self._rescale(acc, correction, n)

    @cute.jit
    def _probabilities(self, scores, state: Softmax, added: cute.Tensor, buffer: Int32):
        """P^T of the step into one of its two buffers, and what the lane adds to the row sums."""
        tiles = len(scores)
        for n in cutlass.range_constexpr(self.row_blocks):
            references = [reference(state.rMax[2 * n + r]) for r in range(2)]
            sums = [Float32(0.0), Float32(0.0)]
            for i in cutlass.range_constexpr(tiles):
                p = [dsl.exp2(scores[i][4 * n + z] - references[z % 2]) for z in range(4)]
                for r in cutlass.range_constexpr(2):
                    sums[r] = sums[r] + (p[r] + p[2 + r])
                near = dsl.transpose_8x8_b16(self.pack(p[0], p[1]))
                far = dsl.transpose_8x8_b16(self.pack(p[2], p[3]))
                self._store_probabilities(near, far, n, buffer * tiles + i)
            added[2 * n] = sums[0]
            added[2 * n + 1] = sums[1]
        if const_expr(self.config.uses_wgmma):
            cute.arch.fence_proxy("async.shared", space="cta")

    def _warp_row(self, table: Int32, warp, n: int) -> Int32:
        """Address of rows 8 n + 2 j, + 1 in a (4 warps, rows) table."""
        return table + (warp * self.config.rows + 8 * n) * 4 + self.j * 8

    @cute.jit
    def _store_probabilities(self, near: Int32, far: Int32, n: cutlass.Constexpr, tile: Int32):
        base = self.smem.p + tile * (self.config.rows * TILE_TOKENS * 2)
        if const_expr(self.config.uses_wgmma):
            row = base + (8 * n + self.g) * 128 + 4 * self.j
            dsl.st_shared_b32(row + ((2 * self.warp) ^ self.g) * 16, near)
            dsl.st_shared_b32(row + ((2 * self.warp + 1) ^ self.g) * 16, far)
        else:
            dsl.st_shared_b32x2(base + self.warp * 256 + self.lane * 8, near, far)

    @cute.jit
    def _rescale(self, acc: cute.Tensor, correction, n: cutlass.Constexpr):
        """Bring a row block's output to the new maxima; seldom needed after the first tiles."""
        if cute.arch.vote_any_sync((correction[0] != 1.0) | (correction[1] != 1.0)):
            for u in cutlass.range_constexpr(self.blocks):
                for i in cutlass.range_constexpr(4):
                    at = (u * self.row_blocks + n) * 4 + i
                    acc[at] = acc[at] * correction[i % 2]

    @cute.jit
    def clear_dead_values(self, seq: Sequence, low: Int32, tile: Int32, slot: Int32):
        """Zero V of tokens that no row may see: P is 0 there, but 0 * NaN is NaN.

        Each warp clears the columns it will read itself, so a warp-level barrier is enough. The
        fence orders these writes before the TMA that reuses the slot.
        """
        config, layout = self.config, self.layout
        columns = (
            self.ring.base.toint()
            + slot * config.tile_bytes
            + ((self.warp * config.value_units) // layout.units) * layout.block_bytes
        )
        zero = Int32(0)
        for half in cutlass.range_constexpr(2):
            in_tile = self.lane + 32 * half
            token = tile * TILE_TOKENS + in_tile
            row = columns + layout.row(in_tile)
            swizzle = layout.swizzle_of(in_tile)
            if (token < low) | (token >= seq.used):
                for u in cutlass.range_constexpr(config.value_units):
                    unit = (self.kv.v_unit + u % layout.units) ^ swizzle
                    at = row + (u // layout.units) * layout.block_bytes + unit * 16
                    dsl.st_shared_b32x4(at, zero, zero, zero, zero)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def values(self, acc: cute.Tensor, slot: Int32, tile: Int32, which: cutlass.Constexpr):
        """acc += V^T P^T of one tile (it has arrived), then hands its slot back.

        tile: index of its P^T among those in shared memory. which: its index in the step.
        """
        config = self.config
        base_p = self.smem.p + tile * (config.rows * TILE_TOKENS * 2)
        p = []
        if const_expr(not config.uses_wgmma):
            for w in cutlass.range_constexpr(4):
                p.append(dsl.ld_shared_b32x2(base_p + w * 256 + self.lane * 8))
        for load in cutlass.range_constexpr(self.kv.value_loads):
            loaded = self.kv.load_values(self.tile_in_ring(slot, 1), load, which)
            if const_expr(config.uses_wgmma):
                self._values_wgmma(acc, loaded, load, tile)
            else:
                self._values_mma(acc, loaded, p, load)
        self.release(slot)
        if const_expr(config.uses_wgmma):
            warpgroup.wait_group(0)

    @cute.jit
    def _values_wgmma(self, acc: cute.Tensor, loaded, load: cutlass.Constexpr, tile: Int32):
        blocks = self.kv.blocks_per_load
        fragments = [cute.make_rmem_tensor(((2, 2, 2), 1, 4), self.mma_type) for _ in range(blocks)]
        words = [cute.recast_tensor(rA, Int32) for rA in fragments]
        for s in cutlass.range_constexpr(4):
            operands = self.kv.value_operands(loaded, s)
            for block in cutlass.range_constexpr(blocks):
                for z in cutlass.range_constexpr(4):
                    words[block][4 * s + z] = operands[block][z]
        tP = self.mma.make_fragment_B(self.mma.get_slice(0).partition_B(self.smem.sP))
        warpgroup.fence()
        for block in cutlass.range_constexpr(blocks):
            accumulator = cute.make_tensor(
                acc.iterator + (load * blocks + block) * 4 * self.row_blocks,
                cute.make_layout(((2, 2, self.row_blocks), 1, 1), stride=((1, 2, 4), 0, 0)),
            )
            for s in cutlass.range_constexpr(4):
                cute.gemm(
                    self.mma,
                    accumulator,
                    fragments[block][None, None, s],
                    tP[None, None, s, tile],
                    accumulator,
                )
        warpgroup.commit_group()
        warpgroup.wait_group(self.config.value_loads_in_flight)

    @cute.jit
    def _values_mma(self, acc: cute.Tensor, loaded, p, load: cutlass.Constexpr):
        for s in cutlass.range_constexpr(4):
            operands = self.kv.value_operands(loaded, s)
            for block in cutlass.range_constexpr(self.kv.blocks_per_load):
                at = 4 * (load * self.kv.blocks_per_load + block)
                sums = [acc[at + z] for z in range(4)]
                d = dsl.mma_m16n8k16(operands[block], p[s], sums, self.mma_kind)
                for z in cutlass.range_constexpr(4):
                    acc[at + z] = d[z]
