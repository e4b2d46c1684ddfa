"""How K or V lies in a ring slot: decode's layout for FP8, and one for 16 bits."""

from __future__ import annotations

from cute_kernels.attention.decode_sm90.layout import TileLayout
from cute_kernels.attention.prefill_sm90.config import PrefillConfig


class Layout16Bits:
    """In a slot column blocks of 128 bytes (64 elements), in each the tokens one after the other,
    128-byte swizzled: a K-major operand for K, an N-major one for V. A TMA box is one column block
    of ``box_tokens`` tokens, so that boxes leave no gap in the operand."""

    row_bytes = 128
    blocks = 1

    def __init__(self, config: PrefillConfig):
        self.box_tokens = config.box_tokens
        self.token_boxes = config.slot_tokens // config.box_tokens
        self.columns = config.value_columns * 2 // self.row_bytes
        self.boxes = self.token_boxes * self.columns
        self.box_bytes = self.block_bytes = config.box_tokens * self.row_bytes


class LayoutFp8(TileLayout):
    """One box has all column blocks of its tokens."""

    columns = 1

    @property
    def token_boxes(self) -> int:
        return self.boxes


def make_layout(config: PrefillConfig) -> LayoutFp8 | Layout16Bits:
    return LayoutFp8(config) if config.converts else Layout16Bits(config)
