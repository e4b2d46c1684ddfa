"""Where the bytes of a 64-token K or V tile lie in shared memory, and which lane reads which.

A tile is stored as TMA writes it: one box after the other (a box is ``box_tokens`` tokens of one
page), within a box one 128-byte column block after the other (of FP8 at head size 64 one of 64),
within a block one row a token, the 16-byte units of a row xor-swizzled with the token. Rows of a
small head may be 64 or 32 bytes. Block scales of a tile follow it, a row a token, in token order.

Tokens are taken in groups of 8, and position r of a group is token ``token_of(r)``. K rows, V rows
and probabilities all use that order, so it never has to be undone. It is chosen so that the eight
lanes of one LDS.128 phase (two positions, four units) touch all 32 banks once:

- 128-byte rows: tokens T and T + 4, whose swizzle differs in bit 2, fill both halves of a row;
- 64-byte rows: tokens T and T + 1 are neighbours in one 128-byte line.

NVFP4 takes tokens in their own order: its lanes read every other unit, or half units.
"""

from __future__ import annotations

from cutlass import Int32

from cute_kernels.attention.decode_sm90.config import TILE_TOKENS, DecodeConfig


def swizzle_bits(row_bytes: int) -> int:
    """Of TMA's swizzle (bits, 4, 3): as many as number the 16-byte units of a row."""
    return (row_bytes // 16).bit_length() - 1


class TileLayout:
    """Byte offsets inside one ring slot. Plain numbers at compile time, Int32 where a lane asks."""

    def __init__(self, config: DecodeConfig):
        self.in_order = config.kv_format == "nvfp4"
        self.box_tokens = config.box_tokens
        self.row_bytes = min(config.head_bytes, 128)
        self.blocks = config.head_bytes // self.row_bytes
        self.box_bytes = config.box_tokens * config.head_bytes
        self.block_bytes = config.box_tokens * self.row_bytes
        self.boxes = TILE_TOKENS // config.box_tokens
        self.units = self.row_bytes // 16

    def token_of(self, position: Int32) -> Int32:
        if self.in_order or self.row_bytes == 64:
            return position
        return ((position & 1) << 2) | (position >> 1)

    def swizzle_of(self, token: Int32) -> Int32:
        """What the unit index of a row is xor-ed with."""
        if self.row_bytes == 32:
            return (token >> 2) & 1
        if self.row_bytes == 64:
            return (token >> 1) & 3
        return token & 7

    def row(self, token: Int32) -> Int32:
        """Offset of a token's row in column block 0."""
        if self.boxes == 1:
            return token * self.row_bytes
        box = token // self.box_tokens
        return box * self.box_bytes + (token - box * self.box_tokens) * self.row_bytes

    @property
    def second_half(self) -> int:
        """Distance from the row of token t to that of token t + 32 (t < 32)."""
        if self.boxes == 1:
            return 32 * self.row_bytes
        return (32 // self.box_tokens) * self.box_bytes
