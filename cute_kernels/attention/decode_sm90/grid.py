"""How many CTAs a launch has, and how items are cut where bits must not depend on the batch.

Import-light, as config.py.
"""

from __future__ import annotations

from typing import NamedTuple

from cute_kernels.attention.decode_sm90.config import DecodeConfig

MAX_SPLITS = 64  # of an item
_MAX_SPLIT_ELEMENTS = 1 << 18


def grid_ctas(config: DecodeConfig, sm_count: int) -> int:
    """CTAs to launch. All of them are resident at once, which fixup.py relies on.

    At one CTA an SM, 128 of 132 SMs read faster than all of them, also where the work is dealt to
    128 CTAs either way (H200, 2026-11-29: B64 S8192 32/4 D512 470 us with 128 launched, 480 us with
    132 launched and 4 idle). At two CTAs an SM it is the other way round (B32 64/8 D128: 128, 126).
    """
    if config.ctas_per_sm == 1:
        return sm_count - sm_count % 16 if sm_count >= 16 else sm_count
    return sm_count * config.ctas_per_sm


class FixedSplits(NamedTuple):
    """How items are cut where bits must not depend on the batch: ``tile_schedule.split_tiles``.

    splits: the most of an item; least, most: tiles of one. All 0: items may be cut anywhere.
    """

    splits: int = 0
    least: int = 0
    most: int = 0


def fixed_splits(config: DecodeConfig, kv_heads: int) -> FixedSplits:
    """A function of what all sequences of a launch have in common, and not of their number.

    A split's first and last tile cost 1 to 2 us: splits have 256 KiB of an FP8 cache at least
    (H200, 2026-11-30: perf/NOTES.md); a single KV head's items are few, so theirs have half.
    """
    least = 2048 // config.head_size
    # Partial results of so many splits a CTA are kept.
    splits = min(MAX_SPLITS, max(8, _MAX_SPLIT_ELEMENTS // (config.rows * config.head_size)))
    most = 8 if kv_heads == 1 and config.fold_bytes else 16
    return FixedSplits(splits, least, max(most, least))
