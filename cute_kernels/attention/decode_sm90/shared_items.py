"""Items that several CTAs have parts of: what each of these keeps in mind of them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl
from cute_kernels.attention.common.line import cta_of_tile, splits_of_first_cta
from cute_kernels.attention.common.tile_schedule import Segment, Shape, split_tiles
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.attention.decode_sm90.parts import parts_of
from cute_kernels.attention.decode_sm90.plan import read_plan

SHARED_ITEM_WORDS = 12
# Threads that read one part's row side by side, at least: 4 times 16 bytes are two sectors. (Two
# threads, so that no warp needs another's sums, take 1.3 us longer: H200, B1 S32768 8/1 D512.)
MIN_SHIFT = 2


class SharedItem(NamedTuple):
    """An item that several CTAs have parts of, as a thread needs it to finish it.

    count: its parts, 0 where there is no such item; begun, base: slots, see ``Parts``. head,
    q_start, first_row: of its rows. begin, end: the blocks of four elements that this CTA
    combines. shift: log2 of how many threads side by side do.

    Kept in shared memory (SHARED_ITEM_WORDS words) from when the CTA comes to the item: what it
    takes to know all this would be waited for after the last tile.
    """

    count: Int32
    begun: Int32
    base: Int32
    head: Int32
    q_start: Int32
    first_row: Int32
    begin: Int32
    end: Int32
    shift: Int32


def entry_of(entries_at: Int32, which: Int32) -> Int32:
    """Shared address of the item that a CTA continues (0) or begins (1)."""
    return entries_at + which * (4 * SHARED_ITEM_WORDS)


@cute.jit
def open_item(
    config: DecodeConfig,
    shape: Shape,
    plan_at: Int32,
    entries_at: Int32,
    segment: Segment,
    line_start: Int32,
    tile: Int32,
    left: Int32,
):
    """If other CTAs have tiles of an item, too: keep in mind how to finish it. By one warp.

    line_start: where the item's tiles start on the line. tile: the item's tile at which the CTA
    comes to it, with ``left`` tiles to go.
    """
    plan, tiles = read_plan(plan_at), segment.seq.tiles
    own, pieces = plan.own, plan.pieces
    mine = Int32(1)
    begun = Int32(1)
    first = plan.cta - own
    if (shape.splits == 0) & (tile == 0) & (tiles <= left):
        pieces = Int32(1)
    if pieces == 0:
        first = cta_of_tile(line_start, plan.total, plan.ctas)
        if shape.splits == 0:
            pieces = cta_of_tile(line_start + tiles - 1, plan.total, plan.ctas) - first + 1
            own = plan.cta - first
        else:
            split = split_tiles(shape, tiles)
            own = dsl.quotient(tile, split)
            pieces = dsl.quotient(tiles + split - 1, split)
            mine = cutlass.min(dsl.quotient(left + split - 1, split), pieces - own)
            begun = splits_of_first_cta(first, line_start, split, plan.total, plan.ctas)
    if mine < pieces:
        parts = parts_of(shape, first, pieces, begun)
        blocks = (segment.chunk.rows_end - segment.chunk.first_row) * (config.head_size // 4)
        share = dsl.quotient(blocks + pieces - 1, pieces)
        begin = own * share
        end = cutlass.min(begin + mine * share, blocks)
        threads = config.consumer_threads
        shift = dsl.bits_of(cutlass.max(end - begin, Int32(1)) - 1)
        shift = cutlass.min(shift, Int32(threads.bit_length() - 1))
        shift = cutlass.max(shift, Int32(MIN_SHIFT))
        if cute.arch.lane_idx() == 0:
            entry = entry_of(entries_at, cutlass.Int32(tile == 0))
            dsl.st_shared_b32x4(entry, parts.count, parts.begun, parts.base, segment.head)
            dsl.st_shared_b32x4(
                entry + 16, segment.seq.q_start, segment.chunk.first_row, begin, end
            )
            dsl.st_shared_b32(entry + 32, shift)
            arrivals = Int32(1)
            if tile > 0:
                arrivals = mine
            dsl.st_shared_b32x2(entry + 40, first, arrivals)
