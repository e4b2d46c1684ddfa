"""The plan of a batch whose sequences are all alike: most launches', and a third of the work.

A launch begins with its plan, and code that runs once is slow (H200: 5 to 9 cycles an instruction):
the search that unequal lengths need takes 1,900 cycles from the lengths on.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl
from cute_kernels.attention.common.tile_schedule import (
    Lengths,
    Shape,
    Stretch,
    next_split,
    stretch_of_cta,
    work_of,
)


@cute.jit
def planned_stretch(
    lengths: Lengths, shape: Shape, cta: Int32, max_ctas: Int32, rows: cutlass.Constexpr
) -> Stretch:
    """What ``stretch_of_cta`` returns, sooner where all sequences have the same tiles and items and
    so many CTAs take part that items are cut, or dealt, evenly."""
    lane = cute.arch.lane_idx()
    work, tiles, items = work_of(lengths, shape, lane, rows)
    first_work = dsl.shuffle_from_lane(work, Int32(0))
    first_tiles = dsl.shuffle_from_lane(tiles, Int32(0))
    items = dsl.shuffle_from_lane(items, Int32(0))
    unlike = Int32(0)
    if (lane < shape.batch) & ((work != first_work) | (tiles != first_tiles)):
        unlike = Int32(1)
    for base in cutlass.range(32, shape.batch, 32, unroll=1):
        work, tiles, _ = work_of(lengths, shape, base + lane, rows)
        if (base + lane < shape.batch) & ((work != first_work) | (tiles != first_tiles)):
            unlike = Int32(1)
    tiles = first_tiles
    all_items = items * shape.batch
    total = all_items * tiles
    ctas = Int32(0)
    limit = Int32(1)
    length = Int32(0)
    share = Int32(0)
    if (dsl.warp_max_b32(unlike) == 0) & (first_work > 0):
        limit = cutlass.max(cutlass.min(max_ctas, dsl.quotient(total, shape.min_tiles)), Int32(1))
        # How many CTAs share an item, or, if there are more items than CTAs, how many take part: a
        # divisor of the item's tiles, or of the number of items.
        shared = all_items <= limit
        top, dividend = limit, all_items
        if shared:
            top = dsl.quotient(limit, all_items)
            dividend = tiles
        candidate = cutlass.max(top - lane, Int32(1))
        each = dsl.quotient(dividend, candidate)
        fits = Int32(0)
        if each * candidate == dividend:
            fits = candidate
        if shared & (all_items * candidate + 31 < limit):
            fits = Int32(0)
        fits = dsl.warp_max_b32(fits)
        each = dsl.shuffle_from_lane(each, cutlass.max(top - fits, Int32(0)) & 31)
        ctas = fits
        length = tiles * each
        if shared:
            ctas = all_items * fits
            length = each
            share = fits
    b = Int32(0)
    item = Int32(0)
    tile = Int32(0)
    begin = cta * length
    count = length
    item_step = Int32(1)
    skip = Int32(0)
    gap = Int32(0)
    pieces = Int32(0)
    own = Int32(0)
    if (ctas > 0) & (8 * ctas >= 7 * limit):
        if share == 0:
            # Round-robin, as ``stretch_of_cta`` says; an item each needs no step.
            item = cta
            pieces = Int32(1)
            if length > tiles:
                item_step = ctas
                begin = cta * tiles
        else:
            item = dsl.quotient(cta, share)
            own = cta - item * share
            tile = own * length
            pieces = share
        b = dsl.quotient(item, items)
        item = item - b * items
        if cta >= ctas:
            count = Int32(0)
        if shape.splits != 0:
            b, item, tile, skip = next_split(shape, b, item, tile, tiles, items, gap)
            if pieces > 1:
                pieces = Int32(0)
    else:
        other = stretch_of_cta(lengths, shape, cta, max_ctas, rows)
        b, item, tile, count, begin = other.b, other.item, other.tile, other.count, other.begin
        total, ctas, item_step, skip = other.total, other.ctas, other.item_step, other.skip
        gap = other.gap
    return Stretch(b, item, tile, count, begin, total, ctas, item_step, skip, gap, pieces, own)
