"""How the tiles of a batch are dealt to CTAs: planned on the device, from the lengths alone.

Words: a *sequence* has ``q_len * group`` packed query rows per KV head, cut into *chunks* of
``rows``; an *item* is one (sequence, chunk, KV head); every item of a sequence walks the same
``tiles`` key tiles of 64 tokens (those that the sequence's window can see). Items are laid end to
end and the resulting line of tiles is cut into equal stretches, one a CTA ("stream-K"). So a CTA
takes the tail of one item, whole items, and the head of another: at most two partial results,
whatever the lengths are, and no CTA is left with a long sequence of its own.

Where a token's KV heads share lines of memory, as many CTAs side by side as heads have the same
stretch, a head each (``abreast``): the line is one of head sets then, and "CTA" means so many.

Where bits must not depend on the batch, items consist of *splits* of a length that follows from
their own tiles alone (``split_tiles``), and a CTA takes the splits that begin in its stretch.

Nothing here reads the host: the same launch serves any lengths, which is what a captured graph
needs. Every warp plans for itself with shuffles, because a broadcast would cost a barrier.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl
from cute_kernels.attention.common.line import inclusive_scan, start_of_cta
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS

TILE_SHIFT = TILE_TOKENS.bit_length() - 1
# Stands for "no limit" in a window; sums with a position stay below 2^31.
UNLIMITED = 1 << 30


class Lengths(NamedTuple):
    """Device tensors that say how long each sequence is.

    mCuQ: (batch + 1,) int32. mUsedK: (batch,) int32, read when ``has_used`` is not 0; otherwise
    lengths are differences of mCuK (batch + 1,) int32.
    """

    mCuQ: cute.Tensor
    mUsedK: cute.Tensor
    mCuK: cute.Tensor
    has_used: Int32


class Shape(NamedTuple):
    """Run-time numbers that all roles need.

    head_sets: sets of ``abreast`` neighbouring KV heads; place: this CTA's head in them.
    group: query heads per KV head; group_magic: ceil(2^32 / group), for an exact division.
    window_left, window_right: visible keys beside a row's own position, ``UNLIMITED`` for all.
    min_tiles: a CTA takes at least as many tiles, if it takes part at all. gap: how many tiles'
    time beginning an item costs, see ``Stretch``.
    min_rows, max_rows: sequences of at most so many, or of more packed rows are left to another
    launch.
    splits: 0: a CTA's stretch may end anywhere in an item. Else items are cut into at most so many
    splits, see ``split_tiles``, which split_least and split_most (tiles) are for.
    """

    batch: Int32
    head_sets: Int32
    group: Int32
    group_magic: Int64
    window_left: Int32
    window_right: Int32
    min_tiles: Int32
    gap: Int32
    min_rows: Int32
    max_rows: Int32
    splits: Int32
    split_least: Int32
    split_most: Int32
    abreast: Int32
    place: Int32


class Sequence(NamedTuple):
    """One sequence: first query token, query tokens, keys, first key tile, tiles, chunks.

    No chunks: it has no queries, or they are another kernel's.
    """

    q_start: Int32
    q_len: Int32
    used: Int32
    first_tile: Int32
    tiles: Int32
    chunks: Int32


class Chunk(NamedTuple):
    """Rows [first_row, rows_end) of a sequence and the tiles [tile_begin, tile_end) they see."""

    first_row: Int32
    rows_end: Int32
    tile_begin: Int32
    tile_end: Int32


def query_token(shape: Shape, row: Int32) -> Int32:
    """The query token of a packed row: row // group, exact for row * group < 2^32."""
    return Int32((Int64(row) * shape.group_magic) >> 32)


@cute.jit
def sequence(lengths: Lengths, shape: Shape, b: Int32, rows: cutlass.Constexpr) -> Sequence:
    q_start = lengths.mCuQ[b]
    q_len = lengths.mCuQ[b + 1] - q_start
    used = Int32(0)
    if lengths.has_used != 0:
        used = lengths.mUsedK[b]
    else:
        used = lengths.mCuK[b + 1] - lengths.mCuK[b]
    used = cutlass.max(used, Int32(0))
    lowest = cutlass.max(used - q_len - shape.window_left, Int32(0))
    first_tile = lowest >> TILE_SHIFT
    tiles = cutlass.max(((used + (TILE_TOKENS - 1)) >> TILE_SHIFT) - first_tile, Int32(0))
    packed = q_len * shape.group
    chunks = (packed + (rows - 1)) >> (rows.bit_length() - 1)
    if (packed > shape.max_rows) | (packed <= shape.min_rows):
        chunks = Int32(0)
    return Sequence(q_start, q_len, used, first_tile, tiles, chunks)


@cute.jit
def split_tiles(shape: Shape, tiles: Int32) -> Int32:
    """Tiles of a split of an item with ``tiles`` tiles; its last split may have fewer.

    A function of the sequence's own length, or bits would depend on the batch. An eighth of the
    item, within [split_least, split_most], but no item has more than ``splits``. 1 where items may
    be cut anywhere.
    """
    split = Int32(1)
    if shape.splits != 0:
        split = cutlass.min(cutlass.max((tiles + 7) >> 3, shape.split_least), shape.split_most)
        split = cutlass.max(split, dsl.quotient(tiles + (shape.splits - 1), shape.splits))
    return split


@cute.jit
def chunk_of(
    seq: Sequence, shape: Shape, chunk: Int32, tile: Int32, count: Int32, rows: cutlass.Constexpr
) -> Chunk:
    """The part of the item's tiles [tile, tile + count) that some row of the chunk can see."""
    first_row = chunk * rows
    rows_end = cutlass.min(first_row + rows, seq.q_len * shape.group)
    own = seq.used - seq.q_len
    last = own + query_token(shape, rows_end - 1)
    low = cutlass.max(own + query_token(shape, first_row) - shape.window_left, Int32(0))
    high = cutlass.min(seq.used, last + shape.window_right + 1)
    begin = cutlass.max(seq.first_tile + tile, low >> TILE_SHIFT)
    end = cutlass.min(seq.first_tile + tile + count, (high + (TILE_TOKENS - 1)) >> TILE_SHIFT)
    return Chunk(first_row, rows_end, begin, end)


class Segment(NamedTuple):
    """The part of one item that a CTA works on without a break.

    count: tiles of the item's line it covers, live or not: at most one split, where there are
    such; ``low``: the first key position that any row of the sequence sees.
    """

    b: Int32
    item: Int32
    head: Int32
    count: Int32
    low: Int32
    seq: Sequence
    chunk: Chunk


@cute.jit
def segment_at(
    lengths: Lengths,
    shape: Shape,
    b: Int32,
    item: Int32,
    tile: Int32,
    left: Int32,
    rows: cutlass.Constexpr,
) -> Segment:
    """The segment at tile ``tile`` of an item, at most ``left`` tiles long.

    Sequences without work are passed over; ``left > 0`` says that one with work follows.
    """
    seq = sequence(lengths, shape, b, rows)
    while seq.tiles * seq.chunks == 0:
        b = b + 1
        seq = sequence(lengths, shape, b, rows)
    most = left
    if shape.splits != 0:
        most = split_tiles(shape, seq.tiles)
    count = cutlass.min(seq.tiles - tile, most)
    chunk_index = dsl.quotient(item, shape.head_sets)
    head = (item - chunk_index * shape.head_sets) * shape.abreast + shape.place
    chunk = chunk_of(seq, shape, chunk_index, tile, count, rows)
    low = cutlass.max(seq.used - seq.q_len - shape.window_left, Int32(0))
    return Segment(b, item, head, count, low, seq, chunk)


@cute.jit
def next_item(segment: Segment, shape: Shape, step: Int32):
    """(sequence, item) ``step`` items after a segment's; more than one only where all sequences
    have equally many."""
    items = segment.seq.chunks * shape.head_sets
    item = segment.item + step
    carry = dsl.quotient(item, items)
    return segment.b + carry, item - carry * items


@cute.jit
def after_segment(segment: Segment, shape: Shape, tile: Int32, step: Int32):
    """(sequence, item, tile) with which a CTA goes on behind a segment at tile ``tile``."""
    b = segment.b
    item = segment.item
    tile = tile + segment.count
    if tile >= segment.seq.tiles:
        tile = Int32(0)
        b, item = next_item(segment, shape, step)
    return b, item, tile


@cute.jit
def work_of(lengths: Lengths, shape: Shape, b: Int32, rows: cutlass.Constexpr):
    """(tiles of all items of sequence b, tiles of one item, items with tiles); 0 past the batch."""
    tiles = Int32(0)
    items = Int32(0)
    if b < shape.batch:
        seq = sequence(lengths, shape, b, rows)
        tiles = seq.tiles
        items = seq.chunks * shape.head_sets
        if tiles == 0:
            items = Int32(0)
    return tiles * items, tiles, items


class Stretch(NamedTuple):
    """A CTA's tiles: it starts at tile ``tile`` of item ``item`` of sequence ``b``.

    begin: where its ``count`` tiles begin on the line of all ``total`` tiles, shared by ``ctas``.
    skip: how far behind begin the CTA starts: where a split begins. The last one may reach past its
    end. item_step: how many items further the CTA's next item is. gap: tiles that nobody works on,
    on the line before each item; 0 where all sequences are alike. Without it CTAs with many short
    sequences are late (H200, log-normal, 64/8 D128: 78 % of the loader). pieces: how many CTAs
    share each item, this one having piece ``own``; 0 where that differs.
    """

    b: Int32
    item: Int32
    tile: Int32
    count: Int32
    begin: Int32
    total: Int32
    ctas: Int32
    item_step: Int32
    skip: Int32
    gap: Int32
    pieces: Int32
    own: Int32


@cute.jit
def _participants(
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
def next_split(
    shape: Shape, b: Int32, item: Int32, tile: Int32, tiles: Int32, items: Int32, gap: Int32
):
    """(sequence, item, tile, distance) of the first split that begins at a tile or behind it."""
    split = split_tiles(shape, tiles)
    start = dsl.quotient(tile + (split - 1), split) * split
    skip = start - tile
    if start >= tiles:
        skip = tiles - tile + gap
        start = Int32(0)
        item = item + 1
        if item >= items:
            item = Int32(0)
            b = b + 1
    return b, item, start, skip


@cute.jit
def stretch_of_cta(
    lengths: Lengths, shape: Shape, cta: Int32, max_ctas: Int32, rows: cutlass.Constexpr
) -> Stretch:
    """Where CTA ``cta`` of ``max_ctas`` starts and how many tiles it takes."""
    lane = cute.arch.lane_idx()
    total = Int32(0)
    all_items = Int32(0)
    most_work = Int32(0)
    least_work = Int32(0x7FFFFFFF)
    most_tiles = Int32(0)
    least_tiles = Int32(0x7FFFFFFF)
    work, tiles, items = work_of(lengths, shape, lane, rows)
    for base in cutlass.range(0, shape.batch, 32, unroll=1):
        if base > 0:
            work, tiles, items = work_of(lengths, shape, base + lane, rows)
        total = total + work
        all_items = all_items + items
        if work > 0:
            most_work = cutlass.max(most_work, work)
            least_work = cutlass.min(least_work, work)
            most_tiles = cutlass.max(most_tiles, tiles)
            least_tiles = cutlass.min(least_tiles, tiles)
    total = dsl.warp_sum_b32(total)
    most_work = dsl.warp_max_b32(most_work)
    most_tiles = dsl.warp_max_b32(most_tiles)
    # Equal work alone may be few long items or many short ones.
    uniform = Int32(0)
    if (most_work == dsl.warp_min_b32(least_work)) & (most_tiles == dsl.warp_min_b32(least_tiles)):
        uniform = Int32(1)
    ctas = _participants(total, most_tiles, uniform, max_ctas, shape.min_tiles)
    gap = Int32(0)
    if uniform == 0:
        gap = shape.gap
        total = total + gap * dsl.warp_sum_b32(all_items)

    begin = start_of_cta(cta, total, ctas)
    quotient = dsl.quotient(total, ctas)
    remainder = total - quotient * ctas
    count = quotient
    if cta < remainder:
        count = count + 1
    if cta >= ctas:
        count = Int32(0)

    item_step = Int32(1)
    if (uniform != 0) & (most_work * shape.batch == total) & (count > most_tiles):
        if (remainder == 0) & (quotient - dsl.quotient(quotient, most_tiles) * most_tiles == 0):
            # Whole items, several a CTA: deal them round-robin, so that the CTAs read the KV
            # heads of one page, which lie side by side in memory, at the same time.
            item_step = ctas
            begin = cta * most_tiles
    b = Int32(0)
    item = Int32(0)
    tile = Int32(0)
    skip = Int32(0)
    line = Int32(0)
    base = Int32(0)
    searching = count
    while (base < shape.batch) & (searching > 0):
        if shape.batch > 32:
            work, tiles, items = work_of(lengths, shape, base + lane, rows)
        work = work + gap * items
        end = line + inclusive_scan(work, lane)
        owner = dsl.count_le(end, begin)
        owner_lane = cutlass.min(owner, Int32(31))
        owner_tiles = dsl.shuffle_from_lane(tiles, owner_lane)
        owner_items = dsl.shuffle_from_lane(items, owner_lane)
        offset = begin - dsl.shuffle_from_lane(end - work, owner_lane)
        if owner < 32:
            searching = Int32(0)
            b = base + owner
            item = dsl.quotient(offset, owner_tiles + gap)
            behind = offset - item * (owner_tiles + gap) - gap
            tile = cutlass.max(behind, Int32(0))
            skip = tile - behind
            if shape.splits != 0:
                b, item, tile, more = next_split(
                    shape, b, item, tile, owner_tiles, owner_items, gap
                )
                skip = skip + more
        line = dsl.shuffle_from_lane(end, Int32(31))
        base = base + 32
    unknown = Int32(0)
    return Stretch(b, item, tile, count, begin, total, ctas, item_step, skip, gap, unknown, unknown)
