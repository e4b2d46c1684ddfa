"""How a tile's bytes become MMA operands: the policies of the cache formats.

A policy is made per consumer lane (coordinates in lane.py) and knows the lane's addresses in a ring
slot. The other files of the kernel are the same for all formats. MMA k-steps of S^T = K Q^T come in
passes of 64 head-dim elements; of O^T = V^T P^T there are four, of 16 tokens each.

A policy says also what its operands fall short of the cache's values by (``magnitude``), and in
which order Q's elements and O's blocks belong to its K and V (``query_*``, ``*_element``).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, select_

from cute_kernels import dsl
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.attention.decode_sm90.fragments_nvfp4 import Nvfp4Fragments
from cute_kernels.attention.decode_sm90.layout import TileLayout


class RowFragments:
    """Elements of whole bytes. ``value_loads``: blocks of 16 output rows of a warp, a load each."""

    magnitude = 1.0
    words_per_pass = 4
    # Blocks of 16 output rows that one load of V serves.
    blocks_per_load = 1

    def __init__(self, config: DecodeConfig, layout: TileLayout, lane, scale_table: Int32):
        self.config, self.layout, self.lane = config, layout, lane
        self.value_loads = config.head_size // (16 * config.consumer_warps)
        ring = lane.ring.base.toint()
        token = layout.token_of(lane.g)
        self.k_address = (
            ring
            + layout.row(16 * lane.quarter)
            + token * layout.row_bytes
            + ((lane.j ^ layout.swizzle_of(token)) * 16)
        )
        v_token = self.value_token()
        first_unit = lane.warp * config.value_units
        self.v_swizzle = layout.swizzle_of(v_token)
        self.v_address = (
            ring + layout.row(v_token) + (first_unit // layout.units) * layout.block_bytes
        )
        self.v_unit = first_unit % layout.units

    def load_key_bytes(self, offset: Int32, half: int):
        """16 bytes of each of the lane's tokens (the first, and that 8 positions further), of 64
        bytes of their rows: unit j of the ``half``-th four."""
        base = self.k_address + offset
        address = base + (half // 2) * self.layout.block_bytes
        if half % 2 == 1:
            # unit 4 + j instead of j: bit 2 of the unit, xor-ed after the swizzle
            address = (base ^ 64) + (half // 2) * self.layout.block_bytes
        low = dsl.ld_shared_b32x4(address)
        return low, dsl.ld_shared_b32x4(address + 8 * self.layout.row_bytes)

    def arrange_queries(self, words):
        return words

    def prepare_values(self, slot: Int32, which: int):
        pass

    def block_element(self, u: int) -> int:
        """How far the elements of block u are from the lane's first."""
        return 16 * u


class Fp8Fragments(RowFragments):
    """fp8_e4m3: K bytes of a lane are 16 neighbours of a row, four k-steps of a pass."""

    query_stride = 16
    # Blocks of 16 output rows that a 16-byte unit makes.
    blocks_per_unit = 1

    def __init__(self, config: DecodeConfig, layout: TileLayout, lane, scale_table: Int32):
        super().__init__(config, layout, lane, scale_table)
        if config.warps_apart:
            # In V, of a warp that has its own 16 tokens only: tokens by lane % 16, and of each two
            # units one by lane // 16.
            self.own_units = config.head_size // 16
            in_lane = lane.lane
            token = layout.token_of(in_lane % 8)
            self.own_address = (
                lane.ring.base.toint()
                + layout.row(16 * lane.warp)
                + (8 * (in_lane // 8 % 2) + token) * layout.row_bytes
                + ((in_lane // 16) ^ layout.swizzle_of(token)) * 16
            )

    def value_token(self) -> Int32:
        """Of the lane's address for ``ldmatrix``, among the first 32 tokens of a tile."""
        lane = self.lane.lane
        return 8 * (lane // 8) + self.layout.token_of(lane % 8)

    def load_keys(self, slot: Int32, p: int, loaded):
        return self.load_keys_at(slot * self.config.tile_bytes, p, loaded)

    def load_keys_at(self, offset: Int32, p: int, _):
        """Words of the lane's tokens of pass p, of the tile at an offset in the ring."""
        return self.load_key_bytes(offset, p)

    def key_operands(self, loaded, p: int, word: int):
        """A of the k-steps of a word, one for FP8: k-step ``word`` of pass p."""
        a0, a2 = dsl.e4m3x4_to_f16x4(loaded[0][word])
        a1, a3 = dsl.e4m3x4_to_f16x4(loaded[1][word])
        return ((a0, a1, a2, a3),)

    def query_offset(self, load):
        """Bytes from the lane's first query element to those of a load (two k-steps)."""
        return (load // 2) * 128 + (load % 2) * 16

    def load_values(self, slot: Int32, u: int, which: int):
        """Tokens' bytes of a 16-element unit of V, transposed: (first 32 tokens, last 32)."""
        base = self.v_address + slot * self.config.tile_bytes
        address = base + (((self.v_unit + u) ^ self.v_swizzle) * 16)
        near = dsl.ldmatrix_x4_trans(address)
        return near, dsl.ldmatrix_x4_trans(address + self.layout.second_half)

    def value_operands(self, words, s: int):
        """A of k-step s, one for each of ``blocks_per_load``."""
        near, far = words[s // 2][2 * (s % 2)], words[s // 2][2 * (s % 2) + 1]
        a0, a1 = dsl.e4m3x4_to_f16x4(dsl.swap_middle_bytes(near))
        a2, a3 = dsl.e4m3x4_to_f16x4(dsl.swap_middle_bytes(far))
        return ((a0, a1, a2, a3),)

    def prepare_own_values(self, offset: Int32):
        pass

    def early_own_values(self, offset: Int32) -> cute.Tensor:
        """V's words of the warp's tokens: of each 16-byte unit its first 8 tokens, then its others.
        Loaded before the softmax, so that they can be cleared in registers."""
        words = cute.make_rmem_tensor((2 * self.own_units,), Int32)
        for load in range(self.own_units // 2):
            loaded = dsl.ldmatrix_x4_trans((self.own_address + offset) ^ (32 * load))
            for z in range(4):
                words[4 * load + z] = loaded[z]
        return words

    def own_value_operands(self, words, unit: int):
        """A of one of a load's two units."""
        halves = [dsl.swap_middle_bytes(words[2 * unit + half]) for half in range(2)]
        pairs = [dsl.e4m3x4_to_f16x4(half) for half in halves]
        return ((*pairs[0], *pairs[1]),)

    def drop_dead_values(self, words: cute.Tensor, _, first_token: Int32, low: Int32, high: Int32):
        """Zero what was loaded of the warp's tokens outside [low, high)."""
        masks = []
        for half in range(2):
            mask = Int32(0)
            for z in range(2):
                in_octet = self.layout.token_of(2 * self.lane.j + z)
                token = first_token + 16 * self.lane.warp + 8 * half + in_octet
                bits = Int32(0xFFFF if z == 0 else -0x10000)
                mask = mask | select_((token >= low) & (token < high), bits, Int32(0))
            masks.append(mask)
        for i in range(2 * self.own_units):
            words[i] = words[i] & masks[i % 2]

    def first_element(self) -> Int32:
        """The head-dim element of the lane's first output."""
        return self.lane.warp * self.value_loads * 16 + 2 * self.lane.g

    def pair_outputs(self, acc: cute.Tensor, row_blocks: int):
        """Make MMA rows g and g + 8 of each block neighbouring elements: they are."""


class Fragments16Bits(RowFragments):
    """bf16 and fp16: words of K and V are MMA operands as they are.

    16 bytes of a row are two k-steps of K. ``ldmatrix`` transposes 8 tokens of two units of V, so
    MMA rows g and g + 8 of a block are elements g of its first and of its second unit: lanes g and
    g ^ 1 exchange halves of the output once an item, for stores of neighbours.
    """

    query_stride = 8

    def __init__(self, config: DecodeConfig, layout: TileLayout, lane, scale_table: Int32):
        super().__init__(config, layout, lane, scale_table)
        unit = self.v_unit + lane.lane // 8 % 2
        self.v_address = self.v_address + ((unit ^ self.v_swizzle) * 16)

    def value_token(self) -> Int32:
        """Of the lane's address for ``ldmatrix``, among the first 16 tokens of a tile."""
        lane = self.lane.lane
        return 8 * (lane // 16) + self.layout.token_of(lane % 8)

    def load_keys(self, slot: Int32, p: int, _):
        offset = slot * self.config.tile_bytes
        return [self.load_key_bytes(offset, 2 * p + half) for half in range(2)]

    def key_operands(self, loaded, p: int, word: int):
        """A of a k-step, which takes two words: k-step ``word`` of pass p."""
        low, high = loaded[word // 2]
        first = 2 * (word % 2)
        return ((low[first], high[first], low[first + 1], high[first + 1]),)

    def query_offset(self, load):
        return load * 64

    def load_values(self, slot: Int32, u: int, which: int):
        """A of the four k-steps of block u."""
        base = self.v_address + slot * self.config.tile_bytes
        # The two units of a block: bits 1 and 2 of the unit, xor-ed after the swizzle.
        address = (base ^ (32 * (u % 4))) + (u // 4) * self.layout.block_bytes
        return [dsl.ldmatrix_x4_trans(address + self.layout.row(16 * s)) for s in range(4)]

    def value_operands(self, words, s: int):
        # ldmatrix gives both units of the first 8 tokens, then those of the other 8.
        return (words[s],)

    def first_element(self) -> Int32:
        g = self.lane.g
        return self.lane.warp * self.value_loads * 16 + g + 7 * (g % 2)

    def pair_outputs(self, acc: cute.Tensor, row_blocks: int):
        odd = self.lane.g % 2 == 1
        for block in range(self.value_loads * row_blocks):
            for r in range(2):
                first, second = acc[4 * block + r], acc[4 * block + 2 + r]
                other = dsl.shuffle_xor_f32(select_(odd, first, second), Int32(4))
                acc[4 * block + r] = select_(odd, other, first)
                acc[4 * block + 2 + r] = select_(odd, second, other)


FRAGMENTS = {
    "fp8_e4m3": Fp8Fragments,
    "nvfp4": Nvfp4Fragments,
    "bf16": Fragments16Bits,
    "fp16": Fragments16Bits,
}
