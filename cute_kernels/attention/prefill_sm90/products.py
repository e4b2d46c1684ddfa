"""The two matrix products of a tile, S^T = K Q^T and O^T += V^T P^T, from an FP8 cache.

K and V are the A operand of wgmma, taken from registers: an FP8 byte is read from shared memory
once, converted to fp16 in the lane that multiplies it, and never written back. The loads of the
next step are issued before the MMAs of this one.

A slot is handed back once the MMAs that consume its last bytes have been issued: then the loads are
known to have returned. Handing it back right behind the load instructions lets TMA overwrite what
they have not read yet (H200, 2026-11-30, head size 128: V of warp 0, in a sixth of all rows).

Not ``cute.jit``: these bodies have no dynamic branch, and are unrolled where they are called.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.prefill_sm90.config import TILE_TOKENS
from cute_kernels.attention.prefill_sm90.lane import ConsumerLane, Place


def _operand(steps: int):
    """A registers of ``steps`` MMA k-steps, as a wgmma operand and as words."""
    fragment = cute.make_rmem_tensor(((2, 2, 2), 1, steps), Float16)
    return fragment, cute.recast_tensor(fragment, Int32)


def accumulator(registers: cute.Tensor, offset: int, row_blocks: int) -> cute.Tensor:
    layout = cute.make_layout(((2, 2, row_blocks), 1, 1), stride=((1, 2, 4), 0, 0))
    return cute.make_tensor(registers.iterator + offset, layout)


class ProductsFp8(ConsumerLane):
    """K and V in fp8_e4m3. The lane has elements 16 u + 2 g, + 1 for the warp's units u."""

    # fp16 has less range than bf16
    scales_queries = True

    def set_operand_addresses(self):
        config, layout, lane, warp = self.config, self.layout, self.lane, self.warp
        token = layout.token_of(self.g)
        self.token_in_tile = 64 * self.half + 16 * warp + token
        self.k_address = (
            self.rings.k.toint()
            + self.half * config.slot_bytes
            + layout.row(16 * warp)
            + token * layout.row_bytes
            + ((self.j ^ layout.swizzle_of(token)) * 16)
        )
        v_token = 8 * (lane // 8) + layout.token_of(lane % 8)
        first_unit = warp * config.value_blocks
        if not config.splits_rows:
            first_unit = first_unit + self.half * (config.head_size // 32)
        self.v_swizzle = layout.swizzle_of(v_token)
        # A warp's units lie in one column block: there are 1, 2 or 4 of them, aligned.
        self.v_columns = (first_unit // layout.units) * layout.block_bytes
        self.v_address = self.rings.v.toint() + layout.row(v_token) + self.v_columns
        self.v_unit = first_unit % layout.units
        self.out_bytes = 32 * first_unit + 4 * self.g

    def store_query_words(self, row: Int32, unit: int, words):
        """16 bytes of a row: elements 64 (unit / 2) + 16 j + 8 (unit % 2) on, in K's order."""
        at = self.smem.q + (unit // 2) * (self.config.rows * 128) + row * 128 + 4 * self.j
        for z in range(4):
            dsl.st_shared_b32(at + ((4 * (unit % 2) + z) ^ self.g) * 16, words[z])

    def output_words(self, acc: cute.Tensor, n: int, r: int, factor: Float32, pack):
        """(byte offset in the row, two neighbouring elements) of the lane, block by block."""
        words = []
        for u in range(self.config.value_blocks):
            at = (u * self.value_row_blocks + n) * 4 + r
            words.append((self.out_bytes + 32 * u, pack(acc[at] * factor, acc[at + 2] * factor)))
        return words

    def scores(self, rS: cute.Tensor, number: Int32):
        """rS = K Q^T of the warpgroup's half of tile ``number``, raw products.

        Hands the slot back. With ``overlap`` the last MMAs are left in flight.
        """
        config, layout, rings = self.config, self.layout, self.rings
        stages = config.k_slots // 2
        stage = number % stages
        slot = 2 * stage + self.half
        cute.arch.mbarrier_wait(rings.k_full + slot, (number // stages) & 1)
        base = self.k_address + 2 * stage * config.slot_bytes
        target = accumulator(rS, 0, self.row_blocks)
        tQ = self.add_scores.make_fragment_B(self.add_scores.get_slice(0).partition_B(self.smem.sQ))
        passes, steps = config.head_size // 64, config.score_steps

        def load(p: int):
            address = base + (p // 2) * layout.block_bytes
            if p % 2 == 1:
                # unit 4 + j instead of j: bit 2 of the unit, xor-ed after the swizzle
                address = (base ^ 64) + (p // 2) * layout.block_bytes
            return dsl.ld_shared_b32x4(address), dsl.ld_shared_b32x4(address + 8 * layout.row_bytes)

        ahead = load(0)
        for p in range(passes):
            low, high = ahead
            for part in range(4 // steps):
                last = part == 4 // steps - 1
                rA, words = _operand(steps)
                for s in range(steps):
                    at = part * steps + s
                    words[4 * s], words[4 * s + 2] = dsl.e4m3x4_to_f16x4(low[at])
                    words[4 * s + 1], words[4 * s + 3] = dsl.e4m3x4_to_f16x4(high[at])
                if last and p + 1 < passes:
                    ahead = load(p + 1)
                warpgroup.fence()
                for s in range(steps):
                    at = part * steps + s
                    mma = self.begin_scores if p + at == 0 else self.add_scores
                    cute.gemm(mma, target, rA[None, None, s], tQ[None, None, 4 * p + at], target)
                warpgroup.commit_group()
                if last and p == passes - 1:
                    self.arrive(rings.k_empty + slot)
                    if config.overlap:
                        return
                warpgroup.wait_group(1)
        warpgroup.wait_group(0)

    def value_groups(self) -> int:
        """MMA groups of one tile's ``values``."""
        return 2 * self.config.value_blocks * (4 // self.config.value_steps)

    def values(self, acc: cute.Tensor, place: Place, between):
        """acc += V^T P^T of tile ``place``.

        between(i): called after MMA group i has been issued, for work to do meanwhile. The last
        MMAs are left in flight. Hands the slots back.
        """
        config, layout = self.config, self.layout
        stages = config.v_slots // 2
        buffer = place.number & 1
        slot = 2 * (place.number % stages)
        phase = (place.number // stages) & 1
        steps = config.value_steps
        parts = 4 // steps
        row_blocks = self.value_row_blocks
        mma = self.add_values
        sP = self.smem.sP
        if config.splits_rows:
            sP = cute.local_tile(sP, (config.value_rows, TILE_TOKENS, 2), (self.half, 0, 0))
        tP = mma.make_fragment_B(mma.get_slice(0).partition_B(sP))
        groups = [
            (half, u, part)
            for half in range(2)
            for u in range(config.value_blocks)
            for part in range(parts)
        ]

        def load(half: int, u: int, part: int):
            if u == 0 and part == 0:
                cute.arch.mbarrier_wait(self.rings.v_full + (slot + half), phase)
                self.clear_dead_values(place.first_token, slot, half)
            address = (
                self.v_address
                + (slot + half) * config.slot_bytes
                + (((self.v_unit + u) ^ self.v_swizzle) * 16)
            )
            words = []
            for pair in range(steps // 2):
                at = address + (part * (steps // 2) + pair) * layout.second_half
                words.append(dsl.ldmatrix_x4_trans(at))
            return words

        ahead = load(*groups[0])
        for i, (half, u, part) in enumerate(groups):
            rA, a = _operand(steps)
            for s in range(steps):
                near, far = ahead[s // 2][2 * (s % 2)], ahead[s // 2][2 * (s % 2) + 1]
                a[4 * s], a[4 * s + 1] = dsl.e4m3x4_to_f16x4(dsl.swap_middle_bytes(near))
                a[4 * s + 2], a[4 * s + 3] = dsl.e4m3x4_to_f16x4(dsl.swap_middle_bytes(far))
            if i + 1 < len(groups):
                ahead = load(*groups[i + 1])
            target = accumulator(acc, u * 4 * row_blocks, row_blocks)
            warpgroup.fence()
            for s in range(steps):
                at = 4 * half + part * steps + s
                cute.gemm(mma, target, rA[None, None, s], tP[None, None, at, buffer], target)
            warpgroup.commit_group()
            if u == config.value_blocks - 1 and part == parts - 1:
                self.arrive(self.rings.v_empty + (slot + half))
            between(i)
            warpgroup.wait_group(1)

    @cute.jit
    def clear_dead_values(self, first_token: Int32, slot: Int32, half: cutlass.Constexpr):
        """Zero V of tokens that no row may see: P is 0 there, but 0 * NaN is NaN.

        Each warp clears the columns it will read itself, so a warp-level barrier is enough; where
        the warpgroups share columns, the first clears them for both. The fence in ``_clear`` orders
        these writes before the TMA that reuses the slot.
        """
        begin = first_token + 64 * half
        if (begin < self.item.low) | (begin + 64 > self.item.used):
            if const_expr(self.config.splits_rows):
                if self.half == 0:
                    self._clear(begin, slot + half)
                self.barrier()
            else:
                self._clear(begin, slot + half)
                cute.arch.sync_warp()

    @cute.jit
    def _clear(self, begin: Int32, slot: Int32):
        """Zero the warp's columns of the dead tokens of a slot that begins at token ``begin``."""
        config, layout = self.config, self.layout
        columns = self.rings.v.toint() + slot * config.slot_bytes + self.v_columns
        zero = Int32(0)
        for part in cutlass.range_constexpr(2):
            in_slot = self.lane + 32 * part
            token = begin + in_slot
            row = columns + layout.row(in_slot)
            swizzle = layout.swizzle_of(in_slot)
            if (token < self.item.low) | (token >= self.item.used):
                for u in cutlass.range_constexpr(config.value_blocks):
                    unit = (self.v_unit + u) ^ swizzle
                    dsl.st_shared_b32x4(row + unit * 16, zero, zero, zero, zero)
        cute.arch.fence_proxy("async.shared", space="cta")
