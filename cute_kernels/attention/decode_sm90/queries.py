"""Loading the packed query rows of an item as the B operand of S^T = K Q^T.

fp16 holds bf16's precision but not its range, so for a quantized cache, which becomes fp16, each
bf16 row is multiplied by a power of two that brings its largest finite element into [2^14, 2^15):
exact, and undone in float32 through the row's score scale. Elements 2^-28 below the row's maximum
stay normal numbers. Rows of the MMA's own type are taken as they are.

K's bytes are read 16 at a time, so which head-dim elements an MMA k-step has follows from the cache
format, and Q follows that order (fragments.py). For FP8, k-step s of pass p covers elements
64 p + 16 j + 4 s + {0, 1} (k 2j, 2j+1) and {2, 3} (k 2j+8, 2j+9).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels import dsl
from cute_kernels.attention.common.tile_schedule import Chunk, Sequence
from cute_kernels.attention.decode_sm90.lane import ConsumerLane
from cute_kernels.attention.decode_sm90.staging import Staging, release_queries, row_address


def scale_of_row(max_word: Int32):
    """(scale, 1 / scale) of a row, from its packed bf16 maxima."""
    low = max_word << 16
    high = max_word & Int32(0xFFFF0000 - (1 << 32))
    exponent = cutlass.max(low, high) >> 23
    exponent = cutlass.min(cutlass.max(exponent, Int32(15)), Int32(254))
    scale = dsl.bits_to_f32((Int32(268) - exponent) << 23)
    inverse = dsl.bits_to_f32((exponent - Int32(14)) << 23)
    return scale, inverse


class QueryLoading(ConsumerLane):
    def fetch_queries(self, mQ: cute.Tensor, seq: Sequence, chunk: Chunk, head: Int32):
        """Issue the loads of the lane's share of Q; ``keep_queries`` waits for them.

        Q in registers: all of it in each warp. In shared memory: of each row block, a warp's share
        of the half passes.
        """
        if self.config.queries_in_smem:
            half_passes, warps = self.config.head_size // 32, self.config.consumer_warps
            units = [
                cutlass.min(self.warp + warps * i, Int32(half_passes - 1))
                for i in range(max(1, half_passes // warps))
            ]
        else:
            units = range(self.config.head_size // 32)
        loaded = []
        for n in range(self.row_blocks):
            first = self.kv.query_stride * self.j
            address = row_address(mQ, self.shape, seq, chunk, head, 8 * n + self.g, first)
            loaded += [
                dsl.ld_global_nc_b32x4(address + self.kv.query_offset(unit)) for unit in units
            ]
        return loaded

    @cute.jit
    def staged_queries(self, staging: Staging, phase: Int32):
        """What ``fetch_queries`` loads, from where the producer brought it."""
        cute.arch.mbarrier_wait(staging.full, phase)
        row_bytes = self.config.staged_row_bytes
        at = staging.base + self.g * row_bytes + 2 * self.kv.query_stride * self.j
        loaded = [
            dsl.ld_shared_b32x4(at + 8 * n * row_bytes + self.kv.query_offset(unit))
            for n in range(self.row_blocks)
            for unit in range(self.config.head_size // 32)
        ]
        release_queries(staging, self.lane)
        return loaded

    @cute.jit
    def keep_queries_in_registers(
        self, mQ: cute.Tensor, loaded, rQ: cute.Tensor, rScale: cute.Tensor, base_scale: Float32
    ):
        """Every warp keeps all of Q as fragments, a row block after the other; rScale: scales of
        rows 8 n + 2j, + 1."""
        words = self.config.head_size // 8
        for n in cutlass.range_constexpr(self.row_blocks):
            for i in cutlass.range_constexpr(words // 4):
                arranged = self.kv.arrange_queries(loaded[n * (words // 4) + i])
                for z in cutlass.range_constexpr(4):
                    rQ[n * words + 4 * i + z] = arranged[z]
            rScale[2 * n] = base_scale
            rScale[2 * n + 1] = base_scale
            if const_expr(self.config.scales_queries):
                top = Int32(0)
                for i in cutlass.range_constexpr(words):
                    top = dsl.max_abs_bf16x2(top, rQ[n * words + i])
                for step in cutlass.range_constexpr(2):
                    top = dsl.max_abs_bf16x2(top, dsl.shuffle_xor_b32(top, Int32(1 << step)))
                scale, inverse = scale_of_row(top)
                for i in cutlass.range_constexpr(words):
                    rQ[n * words + i] = dsl.bf16x2_to_f16x2_scaled(rQ[n * words + i], scale)
                for r in cutlass.range_constexpr(2):
                    # lane 4 row holds the row's inverse
                    own = dsl.shuffle_from_lane_f32(inverse, 4 * (2 * self.j + r))
                    rScale[2 * n + r] = base_scale * own

    @cute.jit
    def keep_queries_in_smem(self, mQ: cute.Tensor, loaded, base_scale: Float32):
        """Q^T in shared memory: for wgmma a K-major, 128-byte-swizzled operand; for 8 rows the
        fragments of two k-steps after the other, 16 bytes a lane."""
        config, smem, warps = self.config, self.smem, self.config.consumer_warps
        half_passes = config.head_size // 32
        per_warp = max(1, half_passes // warps)
        if const_expr(config.scales_queries):
            for n in cutlass.range_constexpr(self.row_blocks):
                top = Int32(0)
                for i in cutlass.range_constexpr(per_warp):
                    for z in cutlass.range_constexpr(4):
                        top = dsl.max_abs_bf16x2(top, loaded[n * per_warp + i][z])
                for step in cutlass.range_constexpr(2):
                    top = dsl.max_abs_bf16x2(top, dsl.shuffle_xor_b32(top, Int32(1 << step)))
                if self.j == 0:
                    row = self.warp * config.rows + 8 * n + self.g
                    dsl.st_shared_b32(smem.q_max + row * 4, top)
            self.barrier()
        for n in cutlass.range_constexpr(self.row_blocks):
            row = 8 * n + self.g
            scale = Float32(1.0)
            inverse = Float32(1.0)
            if const_expr(config.scales_queries):
                top = Int32(0)
                for w in cutlass.range_constexpr(warps):
                    other = dsl.ld_shared_b32(smem.q_max + (w * config.rows + row) * 4)
                    top = dsl.max_abs_bf16x2(top, other)
                scale, inverse = scale_of_row(top)
            if self.tid < 32:
                if self.j == 0:
                    dsl.st_shared_f32(smem.q_scale + row * 4, base_scale * inverse)
            for i in cutlass.range_constexpr(per_warp):
                unit = self.warp + warps * i
                if unit < half_passes:
                    words = self.kv.arrange_queries(loaded[n * per_warp + i])
                    if const_expr(config.uses_wgmma):
                        at = smem.q + (unit // 2) * (config.rows * 128) + row * 128 + 4 * self.j
                        for z in cutlass.range_constexpr(4):
                            word = words[z]
                            if const_expr(config.scales_queries):
                                word = dsl.bf16x2_to_f16x2_scaled(word, scale)
                            position = (4 * (unit % 2) + z) ^ self.g
                            dsl.st_shared_b32(at + position * 16, word)
                    else:
                        if const_expr(config.scales_queries):
                            words = [dsl.bf16x2_to_f16x2_scaled(word, scale) for word in words]
                        dsl.st_shared_b32x4(smem.q + unit * 512 + self.lane * 16, *words)
        cute.arch.fence_proxy("async.shared", space="cta")
