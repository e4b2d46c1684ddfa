"""Which CTA has which tile of the line that tile_schedule.py lays out, and the other way round."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl


@cute.jit
def start_of_cta(cta: Int32, total: Int32, ctas: Int32) -> Int32:
    """Where a CTA's stretch begins on the line."""
    quotient = dsl.quotient(total, ctas)
    return cta * quotient + cutlass.min(cta, total - quotient * ctas)


@cute.jit
def splits_of_first_cta(
    first: Int32, line_start: Int32, split: Int32, total: Int32, ctas: Int32
) -> Int32:
    """How many splits of an item at ``line_start`` are those of the CTA that begins it."""
    return dsl.quotient(start_of_cta(first + 1, total, ctas) - line_start + (split - 1), split)


@cute.jit
def cta_of_tile(tile: Int32, total: Int32, ctas: Int32) -> Int32:
    """The CTA whose stretch holds a tile of the line (the inverse of ``stretch_of_cta``)."""
    quotient = dsl.quotient(total, ctas)
    remainder = total - quotient * ctas
    boundary = remainder * (quotient + 1)
    cta = dsl.quotient(tile, quotient + 1)
    if tile >= boundary:
        cta = remainder + dsl.quotient(tile - boundary, cutlass.max(quotient, Int32(1)))
    return cta


@cute.jit
def inclusive_scan(x: Int32, lane: Int32) -> Int32:
    for step in cutlass.range_constexpr(5):
        x = x + dsl.shuffle_up_or_zero(x, Int32(1 << step))
    return x
