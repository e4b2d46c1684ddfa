"""How a tile's bytes become MMA operands: the policies of the cache formats.

A policy is made per consumer lane (coordinates in lane.py) and knows the lane's addresses in a ring
slot. The other files of the kernel are the same for all formats. MMA k-steps of S^T = K Q^T come in
passes of 64 head-dim elements; of O^T = V^T P^T there are four, of 16 tokens each.

A policy says also what its operands fall short of the cache's values by (``magnitude``), and in
which order Q's elements and O's blocks belong to its K and V (``query_*``, ``*_element``).
"""

from __future__ import annotations

from cutlass import Int32

from cute_kernels import dsl
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.attention.decode_sm90.fragments_nvfp4 import Nvfp4Fragments
from cute_kernels.attention.decode_sm90.layout import TileLayout


class Fp8Fragments:
    """fp8_e4m3: K bytes of a lane are 16 neighbours of a row, four k-steps of a pass."""

    magnitude = 1.0
    words_per_pass = 4
    # Blocks of 16 output rows that one load of V serves.
    blocks_per_load = 1

    def __init__(self, config: DecodeConfig, layout: TileLayout, lane, scale_table: Int32):
        self.config, self.layout, self.lane = config, layout, lane
        blocks = config.head_size // 64
        self.value_loads = blocks
        ring = lane.ring.base.toint()
        token = layout.token_of(lane.g)
        self.k_address = (
            ring
            + layout.row(16 * lane.warp)
            + token * layout.row_bytes
            + ((lane.j ^ layout.swizzle_of(token)) * 16)
        )
        v_token = 8 * (lane.lane // 8) + layout.token_of(lane.lane % 8)
        first_unit = lane.warp * blocks
        self.v_swizzle = layout.swizzle_of(v_token)
        self.v_address = (
            ring + layout.row(v_token) + (first_unit // layout.units) * layout.block_bytes
        )
        self.v_unit = first_unit % layout.units
        self.query_stride = 16

    def load_keys(self, slot: Int32, p: int, _):
        """Words of the lane's tokens of pass p: of the first and of that 8 positions further."""
        base = self.k_address + slot * self.config.tile_bytes
        address = base + (p // 2) * self.layout.block_bytes
        if p % 2 == 1:
            # unit 4 + j instead of j: bit 2 of the unit, xor-ed after the swizzle
            address = (base ^ 64) + (p // 2) * self.layout.block_bytes
        low = dsl.ld_shared_b32x4(address)
        return low, dsl.ld_shared_b32x4(address + 8 * self.layout.row_bytes)

    def key_operands(self, loaded, p: int, word: int):
        """A of the k-steps of a word, one for FP8: k-step ``word`` of pass p."""
        a0, a2 = dsl.e4m3x4_to_f16x4(loaded[0][word])
        a1, a3 = dsl.e4m3x4_to_f16x4(loaded[1][word])
        return ((a0, a1, a2, a3),)

    def query_offset(self, load):
        """Bytes from the lane's first query element to those of a load (two k-steps)."""
        return (load // 2) * 128 + (load % 2) * 16

    def arrange_queries(self, words):
        return words

    def prepare_values(self, slot: Int32, which: int):
        pass

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

    def first_element(self) -> Int32:
        """The head-dim element of the lane's first output."""
        return self.lane.warp * self.value_loads * 16 + 2 * self.lane.g

    def block_element(self, u: int) -> int:
        """How far those of block u are from it."""
        return 16 * u


FRAGMENTS = {"fp8_e4m3": Fp8Fragments, "nvfp4": Nvfp4Fragments}
