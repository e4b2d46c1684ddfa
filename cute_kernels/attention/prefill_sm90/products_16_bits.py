"""The two matrix products of a tile from a cache in the queries' own 16-bit type.

K and V^T are the A operand as they lie in shared memory: nothing is converted, and no lane reads
them. A slot is handed back when the MMAs that read it are done.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.prefill_sm90.config import HALF_TOKENS, TILE_TOKENS
from cute_kernels.attention.prefill_sm90.lane import ConsumerLane
from cute_kernels.attention.prefill_sm90.products import accumulator


class Products16Bits(ConsumerLane):
    """The lane has, of each 64-row block of O^T, rows 16 w + g and 8 further."""

    scales_queries = False

    def set_operand_addresses(self):
        self.token_in_tile = 64 * self.half + 16 * self.warp + self.g
        # After a swap with the lane of row g ^ 1 it has two neighbouring elements.
        first = 16 * self.warp + (self.g & 6) + 8 * (self.g & 1)
        if not self.config.splits_rows:
            first = first + self.half * (64 * self.config.value_blocks)
        self.out_bytes = 2 * first

    def store_query_words(self, row: Int32, unit: int, words):
        """16 bytes of a row: elements 64 (unit / 2) + 16 j + 8 (unit % 2) on."""
        at = self.smem.q + (unit // 2) * (self.config.rows * 128) + row * 128
        dsl.st_shared_b32x4(at + ((2 * self.j + unit % 2) ^ self.g) * 16, *words)

    def output_words(self, acc: cute.Tensor, n: int, r: int, factor: Float32, pack):
        """(byte offset in the row, two neighbouring elements) of the lane, block by block."""
        words = []
        odd = (self.g & 1) == 1
        for u in range(self.config.value_blocks):
            at = (u * self.value_row_blocks + n) * 4 + r
            near, far = acc[at] * factor, acc[at + 2] * factor
            other = dsl.shuffle_xor_f32(cutlass.select_(odd, near, far), Int32(4))
            low, high = cutlass.select_(odd, other, near), cutlass.select_(odd, far, other)
            words.append((self.out_bytes + 128 * u, pack(low, high)))
        return words

    def scores(self, rS: cute.Tensor, slot: Int32):
        """rS = K Q^T of the warpgroup's half of the tile in slots ``slot``, + 1: raw products."""
        mma = self.add_scores
        tK = mma.make_fragment_A(mma.get_slice(0).partition_A(self.smem.sK))
        tQ = mma.make_fragment_B(mma.get_slice(0).partition_B(self.smem.sQ))
        target = accumulator(rS, 0, self.row_blocks)
        warpgroup.fence()
        for k in range(self.config.head_size // 16):
            which = self.begin_scores if k == 0 else mma
            a = tK[None, None, k, slot + self.half]
            cute.gemm(which, target, a, tQ[None, None, k], target)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.arrive(self.rings.k_empty + slot + self.half)

    def value_groups(self) -> int:
        """MMA groups of one tile's ``values``."""
        return 2

    def values(self, acc: cute.Tensor, buffer: Int32, slot: Int32, phase: Int32, arrived, between):
        """acc += V^T P^T of a tile; see ``ProductsFp8.values``. All MMAs are done afterwards."""
        config, mma, rings = self.config, self.add_values, self.rings
        row_blocks = self.value_row_blocks
        sP = self.smem.sP
        if config.splits_rows:
            sP = cute.local_tile(sP, (config.value_rows, TILE_TOKENS, 2), (self.half, 0, 0))
        tP = mma.make_fragment_B(mma.get_slice(0).partition_B(sP))
        for half in range(2):
            cute.arch.mbarrier_wait(rings.v_full + (slot + half), phase)
            arrived(half)
            warpgroup.fence()
            for u in range(config.value_blocks):
                block = u if config.splits_rows else self.half * config.value_blocks + u
                shape = (64, HALF_TOKENS, config.v_slots)
                sV = cute.local_tile(self.smem.sV, shape, (block, 0, 0))
                tV = mma.make_fragment_A(mma.get_slice(0).partition_A(sV))
                target = accumulator(acc, u * 4 * row_blocks, row_blocks)
                for k in range(4):
                    a = tV[None, None, k, slot + half]
                    cute.gemm(mma, target, a, tP[None, None, 4 * half + k, buffer], target)
            warpgroup.commit_group()
            between(half)
            if half == 1:
                warpgroup.wait_group(1)
                self.arrive(rings.v_empty + slot)
        warpgroup.wait_group(0)
        self.arrive(rings.v_empty + (slot + 1))

    @cute.jit
    def clear_dead_values(self, first_token: Int32, slot: Int32, half: cutlass.Constexpr):
        """Zero V of tokens that no row may see: P is 0 there, but 0 * NaN is NaN.

        All consumers share the rows out; the fence is for the MMAs, which read through the async
        proxy, and for the TMA that reuses the slot.
        """
        begin = first_token + HALF_TOKENS * half
        if (begin < self.item.low) | (begin + HALF_TOKENS > self.item.used):
            in_slot = self.tid % HALF_TOKENS
            token = begin + in_slot
            row = self.rings.v.toint() + (slot + half) * self.config.half_bytes + in_slot * 128
            zero = Int32(0)
            if (token < self.item.low) | (token >= self.item.used):
                for i in cutlass.range_constexpr(self.config.head_bytes // 64):
                    unit = self.tid // HALF_TOKENS + 4 * i
                    at = row + (unit // 8) * (HALF_TOKENS * 128) + (unit % 8) * 16
                    dsl.st_shared_b32x4(at, zero, zero, zero, zero)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.barrier()
