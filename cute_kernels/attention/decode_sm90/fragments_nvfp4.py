"""NVFP4 K and V as MMA operands: the policy of fragments.py for E2M1 codes with E4M3 block scales.

SM90 has no instruction for E2M1. Eight codes become four fp16 pairs worth 2^-14 of their values
with ten integer instructions, and the products with the group's scale are exact in fp16: at most
6 * 448 / 2^14, multiples of 2^-24. The factor 2^14 is applied in float32, to the score scale and to
the output scale. Unlike FP8, this is bound by the issue of instructions, so the pairs that come out
are not put back into order: Q and the output follow them.

*K*: a lane has a unit (16 bytes, 32 elements) of a row a load, or half a one at head size 64; of a
word of 8 elements, k-step 0 takes elements 0, 4, 1, 5 and k-step 1 the others. *V*: ``ldmatrix``
moves b16, here 4 elements of a token, so a unit makes two blocks of 16 output rows, of which a lane
has elements 4 g .. 4 g + 3.

Where warps are apart (config.py), a warp has all units of its 16 tokens' V instead of some units of
all tokens'.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl, dsl_nvfp4
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.attention.decode_sm90.layout import TileLayout


def in_register(x: Int32) -> Int32:
    """x, as a value that has a register: ptxas would compute an address of a lane anew from the
    thread's index for every tile, which took 30 of a tile's 350 instructions at head size 128."""
    return dsl.shuffle_xor_b32(x, Int32(0))


class Nvfp4Fragments:
    """See the module, and ``Fp8Fragments`` for what the methods are.

    scale_table: shared address of (warps, tiles of a step, groups of a warp) entries of 128
    bytes: for each token pair (2 j, 2 j + 1) of each 8 tokens the two V scales, as f16x2. Where
    warps are apart, (4 warps, tiles of a step) entries (2, 4, head_size / 32, 2) of f16x2: of group
    2 u + i, token pair j of the warp's 8 tokens o at (i, j, u, o).
    """

    magnitude = 2.0**14
    words_per_pass = 2
    blocks_per_unit = 2

    def __init__(self, config: DecodeConfig, layout: TileLayout, lane, scale_table: Int32):
        self.config, self.layout, self.lane = config, layout, lane
        head_size, warp, g, j = config.head_size, lane.warp, lane.g, lane.j
        self.whole_units = head_size > 64
        self.blocks_per_load = 2 if self.whole_units else 1
        elements_of_units = 32 * config.consumer_warps
        self.value_loads = max(1, head_size // elements_of_units)
        # Units of a row's column block that a lane of K has, side by side: 4 lanes share a block.
        self.units_per_lane = max(1, layout.units // 4)
        self.scale_bytes = head_size // 16
        ring = lane.ring.base.toint()
        scales = ring + config.data_bytes
        token = 16 * lane.quarter + g
        self.k_row = ring + layout.row(16 * lane.quarter) + g * layout.row_bytes
        self.k_swizzle = layout.swizzle_of(g)
        self.k_scales = scales + token * self.scale_bytes + j * min(4, self.scale_bytes // 4)
        v_token = lane.lane
        first_unit = warp * head_size // elements_of_units if self.whole_units else warp // 2
        self.v_row = ring + layout.row(v_token) + (first_unit // layout.units) * layout.block_bytes
        self.v_swizzle = layout.swizzle_of(v_token)
        self.v_unit = first_unit % layout.units
        self.v_scales = scales + 2 * lane.lane * self.scale_bytes + 2 * first_unit
        self.v_first = 32 * first_unit + 4 * g
        self.groups = config.value_groups
        table = scale_table + warp * (self.groups * config.step_tiles * 128)
        self.table_to = table + j * 32 + g * 4
        self.table_from = table + (g // 4) * 128 + j * 32
        if not self.whole_units:
            self.v_first = self.v_first + 2 * (warp % 2)
        if config.warps_apart:
            self._take_own_tokens(scale_table, ring, scales)
        self.query_stride = 32 * self.units_per_lane if self.whole_units else 16

    def _take_own_tokens(self, scale_table: Int32, ring: Int32, scales: Int32):
        """Addresses in V for a warp that has its own tokens only: octet ``lane // 8 % 2``, every
        other unit by ``lane // 16``; of the scale table, token pair ``lane % 8``."""
        layout, lane, warp = self.layout, self.lane.lane, self.lane.warp
        self.own_units = self.config.head_size // 32
        in_warp = lane % 16
        self.own_row = ring + layout.row(16 * warp) + in_warp * layout.row_bytes
        self.own_swizzle = layout.swizzle_of(in_warp)
        self.own_unit = lane // 16
        pair, quarter = lane % 8, lane // 8
        token = 16 * warp + 2 * pair
        self.own_scales = scales + token * self.scale_bytes + quarter * (self.scale_bytes // 4)
        words = 16 * self.own_units
        table = scale_table + warp * (words * 4 * self.config.step_tiles)
        row = 8 * self.own_units
        to = table + (pair % 4) * row + (pair // 4) * 4
        if self.own_units == 2:
            to = to + (quarter % 2) * (4 * row) + (quarter // 2) * 8
        else:
            to = to + quarter * 8
        self.own_table_to = to
        self.own_table_from = table + ((self.lane.g // 4) * 4 + self.lane.j) * row
        self.dead_scales = scales + self.own_token() * self.scale_bytes
        if self.whole_units:
            unit = (self.lane.j ^ self.k_swizzle) * 16
        else:
            unit = ((self.lane.j >> 1) ^ self.k_swizzle) * 16 + (self.lane.j & 1) * 8
        self.k_unit = in_register(self.k_row + unit)
        self.k_scales = in_register(self.k_scales)
        self.own_loads = [
            in_register(self.own_row + ((2 * u + self.own_unit) ^ self.own_swizzle) * 16)
            for u in range(self.own_units // 2)
        ]
        self.own_scales = in_register(self.own_scales)
        if self.config.box_tokens > 16:  # else ptxas spills two of these
            self.own_table_to = in_register(self.own_table_to)
        self.own_table_from = in_register(self.own_table_from)

    def load_keys(self, slot: Int32, p: int, loaded):
        return self.load_keys_at(slot * self.config.tile_bytes, p, loaded)

    def load_keys_at(self, offset: Int32, p: int, loaded):
        """(words of both tokens, their scales as f16x2); a load serves two passes."""
        if p % 2 == 1:
            return loaded
        if not self.whole_units:
            address = self._half_unit(offset)
            words = (
                dsl.ld_shared_b32x2(address),
                dsl.ld_shared_b32x2(address + 8 * self.layout.row_bytes),
            )
            at = self.k_scales + offset
            codes = [dsl_nvfp4.ld_shared_u8(at + 8 * half * self.scale_bytes) for half in range(2)]
            return words, [dsl_nvfp4.e4m3x2_to_f16x2(code) for code in codes]
        unit = (p // 2) % self.units_per_lane
        block = (p // 2) // self.units_per_lane
        scales = self._key_scales(offset, unit, block, loaded)
        address = self._unit(offset, unit, block)
        low = dsl.ld_shared_b32x4(address)
        high = dsl.ld_shared_b32x4(address + 8 * self.layout.row_bytes)
        return (low, high), [scales[0][unit], scales[1][unit]], scales

    def _half_unit(self, offset: Int32) -> Int32:
        if self.config.warps_apart:
            return self.k_unit + offset
        j = self.lane.j
        return self.k_row + offset + (((j >> 1) ^ self.k_swizzle) * 16 + (j & 1) * 8)

    def _unit(self, offset: Int32, unit: int, block: int) -> Int32:
        if self.config.warps_apart:
            return self.k_unit + offset
        return (
            self.k_row
            + offset
            + block * self.layout.block_bytes
            + ((self.units_per_lane * self.lane.j + unit) ^ self.k_swizzle) * 16
        )

    def _key_scales(self, offset: Int32, unit: int, block: int, loaded):
        """Of both tokens, per unit of the block: the scales of its two groups."""
        if unit > 0:
            return loaded[2]
        scales = []
        for half in range(2):
            at = self.k_scales + offset + 16 * block + 8 * half * self.scale_bytes
            if self.units_per_lane == 2:
                scales.append(dsl.e4m3x4_to_f16x4(dsl.ld_shared_b32(at)))
            else:
                scales.append((dsl_nvfp4.e4m3x2_to_f16x2(dsl_nvfp4.ld_shared_b16(at)),))
        return scales

    def key_operands(self, loaded, p: int, word: int):
        index = 2 * (p % 2) + word
        multiply = dsl_nvfp4.mul_f16x2_by_low
        if p % 2 == 1:
            multiply = dsl_nvfp4.mul_f16x2_by_high
        operands = []
        for half in range(2):
            pairs = dsl_nvfp4.e2m1x8_to_f16x8(loaded[0][half][index])
            scaled = [multiply(pair, loaded[1][half]) for pair in pairs]
            operands.append((scaled[:2], scaled[2:]))
        first, second = operands
        return tuple((first[i][0], second[i][0], first[i][1], second[i][1]) for i in range(2))

    def query_offset(self, load):
        per_block = 4 * self.units_per_lane
        return (load % per_block) * 16 + (load // per_block) * 512

    def arrange_queries(self, words):
        """Four pairs of elements (0, 1) .. (6, 7) as (0, 4), (1, 5), (2, 6), (3, 7)."""
        low, high = Int32(0x5410), Int32(0x7632)
        return tuple(
            dsl_nvfp4.permute_bytes(words[i], words[i + 2], selector)
            for i in range(2)
            for selector in (low, high)
        )

    def first_token(self) -> Int32:
        """Of a tile: the first of the two tokens whose V scales the lane puts into the table."""
        return 2 * self.lane.lane

    def prepare_values(self, slot: Int32, which: int, kept):
        """The warp's V scales of a tile into its table: a lane takes a pair of tokens.

        kept: for each of the two, all bits or none: scales of tokens that no row may see become 0.
        """
        offset = slot * self.config.tile_bytes
        address = self.v_scales + offset
        table = self.table_to + which * (self.groups * 128)
        load, words = (dsl_nvfp4.ld_shared_b16, 1)
        if self.groups >= 4:
            load, words = (dsl.ld_shared_b32, self.groups // 4)
        first = [load(address + 4 * i) & kept[0] for i in range(words)]
        second = [load(address + self.scale_bytes + 4 * i) & kept[1] for i in range(words)]
        for i in range(words):
            for pair in range(min(2, self.groups // 2)):
                selector = Int32((0x5140, 0x7362)[pair])
                both = dsl_nvfp4.permute_bytes(first[i], second[i], selector)
                scales = dsl.e4m3x4_to_f16x4(both)
                for z in range(2):
                    dsl.st_shared_b32(table + (4 * i + 2 * pair + z) * 128, scales[z])
        cute.arch.sync_warp()

    def own_token(self) -> Int32:
        """Of a tile: the token whose V scales the lane clears if they are dead."""
        return 16 * self.lane.warp + self.lane.lane % 16

    @cute.jit
    def drop_dead_values(self, _, offset: Int32, first_token: Int32, low: Int32, high: Int32):
        """V scales of the warp's tokens outside [low, high) become 0, where they came from the
        cache: TMA may write here once the slot has been handed back, behind a proxy fence."""
        token = first_token + self.own_token()
        if (token < low) | (token >= high):
            at = self.dead_scales + offset
            for i in cutlass.range_constexpr(self.scale_bytes // 4):
                dsl.st_shared_b32(at + 4 * i, Int32(0))
        cute.arch.sync_warp()

    def prepare_own_values(self, offset: Int32):
        """V scales of the warp's tokens of a tile into its table: a lane takes a pair of tokens."""
        address = self.own_scales + offset
        table = self.own_table_to
        load = dsl_nvfp4.ld_shared_u8 if self.own_units == 2 else dsl_nvfp4.ld_shared_b16
        both = dsl_nvfp4.permute_bytes(
            load(address), load(address + self.scale_bytes), Int32(0x5140)
        )
        if self.own_units == 2:
            dsl.st_shared_b32(table, dsl_nvfp4.e4m3x2_to_f16x2(both))
        else:
            scales = dsl.e4m3x4_to_f16x4(both)
            for half in range(2):
                dsl.st_shared_b32(table + half * (32 * self.own_units), scales[half])
        cute.arch.sync_warp()

    def load_values(self, slot: Int32, u: int, which: int):
        """(words of the first 32 tokens and of the last, scales likewise)."""
        base = self.v_row + slot * self.config.tile_bytes
        address = base + (((self.v_unit + u) ^ self.v_swizzle) * 16)
        table = self.table_from + (which * self.groups + 2 * u) * 128
        near = dsl.ldmatrix_x4_trans(address)
        far = dsl.ldmatrix_x4_trans(address + self.layout.second_half)
        return (near, far), [dsl.ld_shared_b32x4(table + 16 * half) for half in range(2)]

    def early_own_values(self, _):
        """There are no registers for them before the softmax."""

    def load_own_values(self, offset: Int32, u: int):
        """Of units 2 u and 2 u + 1: (words of the warp's first 8 tokens and of its others, for the
        first unit, then for the second; scales likewise)."""
        words = dsl.ldmatrix_x4_trans(self.own_loads[u] + offset)
        return words, dsl.ld_shared_b32x4(self.own_table_from + 16 * u)

    def own_value_operands(self, loaded, unit: int):
        """A of one of a load's two units, for each of its two blocks."""
        words, scales = loaded
        halves = []
        for half in range(2):
            pairs = dsl_nvfp4.e2m1x8_to_f16x8(words[2 * unit + half])
            halves.append([dsl_nvfp4.mul_f16x2(x, scales[2 * unit + half]) for x in pairs])
        return tuple((*halves[0][2 * i : 2 * i + 2], *halves[1][2 * i : 2 * i + 2]) for i in (0, 1))

    def value_operands(self, loaded, s: int):
        words, scales = loaded
        blocks = [[] for _ in range(self.blocks_per_load)]
        for half in range(2):
            word = words[s // 2][2 * (s % 2) + half]
            scale = scales[s // 2][2 * (s % 2) + half]
            if not self.whole_units:
                # Warps 2 i and 2 i + 1 share a unit: one takes its first block, one its second.
                word = word >> (8 * (self.lane.warp % 2))
            pairs = dsl_nvfp4.e2m1x8_to_f16x8(word)
            for block in range(self.blocks_per_load):
                for pair in pairs[2 * block : 2 * block + 2]:
                    blocks[block].append(dsl_nvfp4.mul_f16x2(pair, scale))
        return tuple(map(tuple, blocks))

    def first_element(self) -> Int32:
        return self.v_first

    def pair_outputs(self, acc: cute.Tensor, row_blocks: int):
        pass

    def block_element(self, u: int) -> int:
        return 32 * (u // 2) + 2 * (u % 2)
