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


class TileMath(ConsumerLane):
    @cute.jit
    def scores(self, rS: cute.Tensor, rQ: cute.Tensor, slot: Int32, phase: Int32):
        """rS = K Q^T of one tile (raw products), then hands the K slot back, if V is in another."""
        config = self.config
        for i in cutlass.range_constexpr(self.chains * self.row_blocks * 4):
            rS[i] = Float32(0.0)
        cute.arch.mbarrier_wait(self.ring.full + slot, phase)
        passes, tile = config.head_size // 64, self.tile_in_ring(slot, 0)
        if const_expr(config.loads_first):
            loaded = [self.kv.load_keys(tile, p, None) for p in range(passes)]
            self.release(slot, config.warpgroups)
            if const_expr(config.values_overlap):
                warpgroup.wait_group(0)
            for p in cutlass.range_constexpr(passes):
                self._scores_wgmma(rS, loaded[p], p)
        else:
            loaded = None
            for p in cutlass.range_constexpr(passes):
                loaded = self.kv.load_keys(tile, p, loaded)
                if const_expr(config.uses_wgmma):
                    self._scores_wgmma(rS, loaded, p)
                else:
                    self._scores_mma(rS, rQ, loaded, p)
            if const_expr(not config.paired):
                self.release(slot, config.warpgroups)
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
                for n in cutlass.range_constexpr(self.row_blocks):
                    if const_expr(not self.config.queries_in_smem):
                        at = n * (self.config.head_size // 8) + 8 * p + 2 * s
                        b = (rQ[at], rQ[at + 1])
                    else:
                        if const_expr(s % 2 == 0):
                            pair = self._query_fragments(2 * p + s // 2)
                        b = (pair[2 * (s % 2)], pair[2 * (s % 2) + 1])
                    c = 4 * ((s % self.chains) * self.row_blocks + n)
                    sums = [rS[c + z] for z in range(4)]
                    d = dsl.mma_m16n8k16(operands[i], b, sums, self.mma_kind)
                    for z in cutlass.range_constexpr(4):
                        rS[c + z] = d[z]

    def _query_fragments(self, load: int):
        """Of 8 rows in shared memory: B of k-steps 2 load and 2 load + 1."""
        return dsl.ld_shared_b32x4(self.smem.q + load * 512 + self.lane * 16)

    @cute.jit
    def scale_and_mask(self, rS: cute.Tensor, rScale: cute.Tensor, tile: Int32, masked: Int32):
        """Raw products -> log2-domain scores: descale and scale, then softcap, then mask.

        Of wgmma's many rows raw products stay so where there is nothing to cap or to mask, and
        rScale says what their exponents multiply them by, in the addition that they take anyway.
        """
        if const_expr(self.config.uses_wgmma):
            for n in cutlass.range_constexpr(self.row_blocks):
                rScale[2 * n], rScale[2 * n + 1] = self._scales_of_block(n)
            if (masked != 0) | (self.softcap != 0.0):
                for i in cutlass.range_constexpr(4 * self.row_blocks):
                    rS[i] = rS[i] * rScale[2 * (i // 4) + i % 2]
                for i in cutlass.range_constexpr(2 * self.row_blocks):
                    rScale[i] = Float32(1.0)
                self._cap_and_mask(rS, tile, masked)
        else:
            scale = (rScale[0], rScale[1])
            if const_expr(self.config.queries_in_smem):
                scale = self._scales_of_block(0)
            for i in cutlass.range_constexpr(4):
                rS[i] = rS[i] * scale[i % 2]
            if const_expr(self.config.block_scaled):
                # As one rare block it is branched around. By itself each part is issued for every
                # tile, predicated off, which costs only where instruction issue is the limit (H200,
                # 2026-11-30: B32 S8192 64/8 D128 nvfp4 101 us, as one block 96; FP8 gains nothing).
                if (masked != 0) | (self.softcap != 0.0):
                    self._cap_and_mask(rS, tile, masked)
            else:
                self._cap_and_mask(rS, tile, masked)

    def _scales_of_block(self, n: int):
        """Scales of rows 8 n + 2 j, + 1 from shared memory."""
        return dsl.ld_shared_f32x2(self.smem.q_scale + 32 * n + 8 * self.j)

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
    def softmax(self, scores, scales, acc: cute.Tensor, state: Softmax, buffer: Int32):
        """Online softmax of a step's tiles over all warps; leaves P^T in shared memory.

        scores, scales: an rS and an rScale for each tile that the warp scores. The probabilities
        refer to the maxima of earlier steps, so that one barrier hands them over. Only where a
        score exceeds its row's maximum by 2^MAX_LAG (always in an item's first step) do the warps
        exchange maxima and start the step anew.
        """
        added = cute.make_rmem_tensor((2 * self.row_blocks,), Float32)
        exceeded = Int32(0)
        if self._probabilities(scores, scales, state, added, buffer) > MAX_LAG:
            exceeded = Int32(1)
        if self.barrier_any(exceeded) != 0:
            self._raise_maxima(self._lane_maxima(scores, scales), acc, state)
            self._probabilities(scores, scales, state, added, buffer)
            self.barrier()
        for i in cutlass.range_constexpr(2 * self.row_blocks):
            state.rSum[i] = state.rSum[i] + added[i]

    @cute.jit
    def _lane_maxima(self, scores, scales=None):
        tops = []
        for n in cutlass.range_constexpr(self.row_blocks):
            for r in cutlass.range_constexpr(2):
                row = 2 * n + r
                x = None
                for i in cutlass.range_constexpr(len(scores)):
                    y = dsl.fmax(scores[i][4 * n + r], scores[i][4 * n + 2 + r])
                    if const_expr(scales is not None):
                        y = dsl.fmax(
                            scores[i][4 * n + r] * scales[i][row],
                            scores[i][4 * n + 2 + r] * scales[i][row],
                        )
                    x = y if const_expr(i == 0) else dsl.fmax(x, y)
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
            for w in cutlass.range_constexpr(self.config.consumer_warps):
                other = dsl.ld_shared_f32x2(self._warp_row(self.smem.row_max, w, n))
                top = [dsl.fmax(top[0], other[0]), dsl.fmax(top[1], other[1])]
            correction = []
            for r in cutlass.range_constexpr(2):
                correction.append(dsl.exp2(state.rMax[2 * n + r] - top[r]))
                state.rMax[2 * n + r] = top[r]
                state.rSum[2 * n + r] = state.rSum[2 * n + r] * correction[r]
            self._rescale(acc, correction, n)

    @cute.jit
    def _probabilities(self, scores, scales, state: Softmax, added: cute.Tensor, buffer: Int32):
        """P^T of the step into one of its two buffers, and what the lane adds to the row sums.

        Returns the lane's largest exponent.
        """
        top = Float32(dsl.NEG_INF)
        words = [[] for _ in scores]
        for n in cutlass.range_constexpr(self.row_blocks):
            sums = [Float32(0.0), Float32(0.0)]
            for i in cutlass.range_constexpr(len(scores)):
                scale = None if scales is None else scales[i]
                exponents = [self._exponent(scores[i], scale, state, 4 * n + z) for z in range(4)]
                for z in cutlass.range_constexpr(4):
                    top = dsl.fmax(top, exponents[z])
                p = [dsl.exp2(exponents[z]) for z in range(4)]
                for r in cutlass.range_constexpr(2):
                    sums[r] = sums[r] + (p[r] + p[2 + r])
                words[i] += [self.pack(p[0], p[1]), self.pack(p[2], p[3])]
                tile = buffer * self.config.step_tiles + (i + self.own_tile)
                if const_expr(not self.config.uses_wgmma):
                    self._store_probabilities_mma(words[i], tile)
                elif const_expr(n % 2 == 1):
                    self._store_probabilities_wgmma(words[i][-4:], n - 1, tile)
            added[2 * n] = sums[0]
            added[2 * n + 1] = sums[1]
        if const_expr(self.config.uses_wgmma):
            cute.arch.fence_proxy("async.shared", space="cta")
        return top

    def _exponent(self, rS: cute.Tensor, rScale, state: Softmax, z: int) -> Float32:
        """How far score z of a tile is above its row's maximum."""
        row = 2 * (z // 4) + z % 2
        if rScale is None:
            return rS[z] - state.rMax[row]
        return dsl.fma(rS[z], rScale[row], -state.rMax[row])

    def _warp_row(self, table: Int32, warp, n: int) -> Int32:
        """Address of rows 8 n + 2 j, + 1 in a (4 warps, rows) table."""
        return table + (warp * self.config.rows + 8 * n) * 4 + self.j * 8

    def _tile_of_probabilities(self, tile: Int32) -> Int32:
        return self.smem.p + tile * (self.config.rows * TILE_TOKENS * 2)

    def _store_probabilities_mma(self, words, tile: Int32):
        """P^T of the warp's 16 tokens as it is read as a B operand."""
        near, far = [dsl.transpose_8x8_b16(word) for word in words]
        at = self._tile_of_probabilities(tile) + self.warp * 256 + self.lane * 8
        dsl.st_shared_b32x2(at, near, far)

    def _store_probabilities_wgmma(self, words, n: int, tile: Int32):
        """P^T of the warp's tokens and row blocks n, n + 1: K-major, 128-byte swizzled."""
        lane = self.lane
        row, unit = 8 * (lane // 16) + lane % 8, 2 * self.quarter + lane // 8 % 2
        at = self._tile_of_probabilities(tile) + row * 128 + (unit ^ (lane % 8)) * 16
        dsl.stmatrix_x4_trans(at + n * 1024, *words)

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
        """acc += V^T P^T of one tile (it has arrived), then hands its slot back. Its last products
        may still be in flight (``values_overlap``).

        tile: index of its P^T among those in shared memory. which: its index in the step.
        """
        config = self.config
        base_p = self._tile_of_probabilities(tile)
        p = []
        if const_expr(not config.uses_wgmma):
            for w in cutlass.range_constexpr(4):
                p.append(dsl.ld_shared_b32x2(base_p + w * 256 + self.lane * 8))
        at = self.tile_in_ring(slot, 1)
        if const_expr(config.loads_first):
            loaded = [self.kv.load_values(at, i, which) for i in range(self.kv.value_loads)]
            self.release(slot)
            for load in cutlass.range_constexpr(self.kv.value_loads):
                self._values_wgmma(acc, loaded[load], load, tile)
        else:
            for load in cutlass.range_constexpr(self.kv.value_loads):
                loaded = self.kv.load_values(at, load, which)
                if const_expr(config.uses_wgmma):
                    self._values_wgmma(acc, loaded, load, tile)
                else:
                    self._values_mma(acc, loaded, p, load)
            self.release(slot)
        if const_expr(config.uses_wgmma and not config.values_overlap):
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
