"""Which CTA has which tile of the line that tile_schedule.py lays out, and the other way round.

CTAs have equal stretches; with ``pairs`` = 1 CTAs 2 p and 2 p + 1 share what two would have, and
the first one has more of it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl

# Of what a pair has, in 128ths: the second one's.
_SMALLER_SHARE = 54


@cute.jit
def participants(
    total: Int32, tiles: Int32, uniform: Int32, max_ctas: Int32, min_tiles: Int32
) -> Int32:
    """How many CTAs share the line.

    CTAs with few tiles cost more in partial results than they save. Where all items are alike,
    giving up at most an eighth of the CTAs can make every stretch a whole fraction or multiple of
    an item: fewer partial results, and the heads of a page are read at the same time (H200, B64
    S8192 32/4 D512: 128 CTAs take 486 us, 132 take 498).
    """
    limit = cutlass.max(cutlass.min(max_ctas, dsl.quotient(total, min_tiles)), Int32(1))
    ctas = limit
    if (uniform != 0) & (tiles > 0):
        candidate = cutlass.max(limit - cute.arch.lane_idx(), Int32(1))
        length = dsl.quotient(total, candidate)
        fits = Int32(0)
        if (length * candidate == total) & (
            (tiles - dsl.quotient(tiles, length) * length == 0)
            | (length - dsl.quotient(length, tiles) * tiles == 0)
        ):
            fits = candidate
        fits = dsl.warp_max_b32(fits)
        if 8 * fits >= 7 * limit:
            ctas = fits
    return ctas


@cute.jit
def start_of_cta(cta: Int32, total: Int32, ctas: Int32, pairs: Int32) -> Int32:
    """Where a CTA's stretch begins on the line."""
    sharing, place = ctas >> pairs, cta >> pairs
    quotient = dsl.quotient(total, sharing)
    remainder = total - quotient * sharing
    start = place * quotient + cutlass.min(place, remainder)
    if (pairs & cta) != 0:
        length = quotient
        if place < remainder:
            length = length + 1
        smaller = (length >> 7) * _SMALLER_SHARE + (((length & 127) * _SMALLER_SHARE) >> 7)
        start = start + length - smaller
    return start


@cute.jit
def splits_of_first_cta(
    first: Int32, line_start: Int32, split: Int32, total: Int32, ctas: Int32
) -> Int32:
    """How many splits of an item at ``line_start`` are those of the CTA that begins it; there are
    no pairs then."""
    end = start_of_cta(first + 1, total, ctas, Int32(0))
    return dsl.quotient(end - line_start + (split - 1), split)


@cute.jit
def cta_of_tile(tile: Int32, total: Int32, ctas: Int32, pairs: Int32) -> Int32:
    """The CTA whose stretch holds a tile of the line (the inverse of ``stretch_of_cta``)."""
    sharing = ctas >> pairs
    quotient = dsl.quotient(total, sharing)
    remainder = total - quotient * sharing
    boundary = remainder * (quotient + 1)
    cta = dsl.quotient(tile, quotient + 1)
    if tile >= boundary:
        cta = remainder + dsl.quotient(tile - boundary, cutlass.max(quotient, Int32(1)))
    if pairs != 0:
        cta = 2 * cta
        if tile >= start_of_cta(cta + 1, total, ctas, pairs):
            cta = cta + 1
    return cta
