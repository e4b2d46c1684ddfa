"""What the bytes of an indexer K cache mean: element and scale formats, and the order in a block.

An indexer cache has one row (the K of one compressed token, head size D) a slot and no heads. Its
format is a name that writer and reader must agree on, since nothing in the bytes tells; with
the head size it fixes the bytes a row takes, no two formats giving the same number, so that a
wrong name is refused. docs/formats.md has the byte map.

A leaf: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cute_kernels.formats import unknown_name

HEAD_MULTIPLE = 32  # of every head size: an mxfp4 group


class BlockLayout(Enum):
    """Where a block (page) keeps values and scales."""

    PLANAR = "planar"  # all tokens' values, then all tokens' scales


@dataclass(frozen=True)
class IndexerFormat:
    """A format of an indexer K cache.

    name: "mxfp4" or "fp8_e4m3".
    element_bits: bits of a value.
    group: consecutive elements that share a scale; 0 means the whole row.
    scale_type, scale_bytes: "ue8m0", 1 byte, or "float32", 4 bytes, little-endian; powers of two.
    layout: order within a block.
    """

    name: str
    element_bits: int
    group: int
    scale_type: str
    scale_bytes: int
    layout: BlockLayout = BlockLayout.PLANAR

    def row_parts(self, head_size: int) -> tuple[int, int]:
        """Bytes of a token's values, and of its scales.

        Raises:
            ValueError: a head size that is no positive multiple of 32.
        """
        check_head_size("head_size", head_size)
        groups = head_size // self.group if self.group else 1
        return head_size * self.element_bits // 8, groups * self.scale_bytes

    def row_bytes(self, head_size: int) -> int:
        """Bytes that one token takes: values and scales, as `row_parts`."""
        return sum(self.row_parts(head_size))


def check_head_size(name: str, head_size: int) -> None:
    """Check a head size that argument `name` has.

    Raises:
        ValueError: it is no positive multiple of 32.
    """
    if type(head_size) is not int or head_size <= 0 or head_size % HEAD_MULTIPLE:
        raise ValueError(
            f"{name}: got head size {head_size}; accepted: positive multiples of {HEAD_MULTIPLE}"
        )


INDEXER_FORMATS: dict[str, IndexerFormat] = {
    storage.name: storage
    for storage in (
        IndexerFormat("mxfp4", 4, group=32, scale_type="ue8m0", scale_bytes=1),
        IndexerFormat("fp8_e4m3", 8, group=0, scale_type="float32", scale_bytes=4),
    )
}


def get_indexer_format(name: str) -> IndexerFormat:
    """The format of exactly this name.

    Raises:
        ValueError: an unknown name; the message has the nearest known ones.
    """
    if not isinstance(name, str) or name not in INDEXER_FORMATS:
        raise ValueError(unknown_name("cache_format", name, INDEXER_FORMATS))
    return INDEXER_FORMATS[name]
