"""Which part of the batch a CTA works on: found on the device, from the lengths alone.

An *item* is one chunk of ``rows`` packed query rows (query token x group member) of one sequence,
for one KV head. Items are numbered sequence by sequence, within a sequence from its last chunk to
its first, so that under a causal mask the long ones start early; KV heads are innermost, so that
the CTAs beside each other share what they read. A CTA serves one item after the other: number
``cta`` of the grid's first round, then, back and forth, one of each further round.

Nothing here reads the host, and nothing of an item depends on the rest of the batch: a sequence's
bits are the same whatever its neighbours are.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl
from cute_kernels.attention.common.line import inclusive_scan
from cute_kernels.attention.common.tile_schedule import Lengths, query_token
from cute_kernels.attention.prefill_sm90.config import HALF_TOKENS, TILE_TOKENS


class Shape(NamedTuple):
    """Run-time numbers that all roles need.

    group: query heads per KV head; group_magic: ceil(2^32 / group), for an exact division.
    window_left, window_right: visible keys beside a row's own position, ``UNLIMITED`` for all.
    skip_rows: sequences of at most so many packed rows are left to another kernel.
    most_keys: of a sequence; more would be a caller's error, and are left out.
    """

    batch: Int32
    kv_heads: Int32
    group: Int32
    group_magic: Int64
    window_left: Int32
    window_right: Int32
    skip_rows: Int32
    most_keys: Int32


class Item(NamedTuple):
    """A CTA's work; ``live`` is 0 where there is none.

    Rows [first_row, rows_end) of sequence b, whose queries start at token q_start and which has
    ``used`` keys. own: key position of query token 0. Tile t of ``tiles`` holds the keys from
    start + 128 t on. low: the first key that any row of the sequence sees.
    """

    live: Int32
    b: Int32
    head: Int32
    q_start: Int32
    used: Int32
    own: Int32
    first_row: Int32
    rows_end: Int32
    start: Int32
    tiles: Int32
    low: Int32


class View(NamedTuple):
    """Keys [low, high) that every row of the item sees: tiles inside need no mask."""

    low: Int32
    high: Int32


@cute.jit
def _chunks(lengths: Lengths, shape: Shape, b: Int32, rows: cutlass.Constexpr) -> Int32:
    """Chunks of sequence b; 0 past the batch, and for one that another kernel serves."""
    chunks = Int32(0)
    if b < shape.batch:
        packed = (lengths.mCuQ[b + 1] - lengths.mCuQ[b]) * shape.group
        if packed > shape.skip_rows:
            chunks = (packed + (rows - 1)) // rows
    return chunks


@cute.jit
def item_number(cta: Int32, ctas: Int32, turn: Int32) -> Int32:
    """The item that CTA ``cta`` of ``ctas`` serves in its turn 0, 1, ...

    Every other round goes backwards: items come long ones first, so the CTA with a round's longest
    has the next one's shortest.
    """
    place = cta
    if turn % 2 == 1:
        place = ctas - 1 - cta
    return turn * ctas + place


@cute.jit
def find_item(
    lengths: Lengths,
    shape: Shape,
    number: Int32,
    rows: cutlass.Constexpr,
    tile_tokens: cutlass.Constexpr = TILE_TOKENS,
) -> Item:
    """Item ``number``; every warp finds it for itself."""
    lane = cute.arch.lane_idx()
    index = number // shape.kv_heads
    head = number - index * shape.kv_heads
    line = Int32(0)
    base = Int32(0)
    live = Int32(0)
    b = Int32(0)
    chunk = Int32(0)
    while (base < shape.batch) & (live == 0):
        chunks = _chunks(lengths, shape, base + lane, rows)
        end = line + inclusive_scan(chunks, lane)
        owner = dsl.count_le(end, index)
        if owner < 32:
            live = Int32(1)
            b = base + owner
            # counted from the end of the owner's chunks: the last chunk comes first
            chunk = dsl.shuffle_from_lane(end, owner) - 1 - index
        line = dsl.shuffle_from_lane(end, Int32(31))
        base = base + 32
    return _item(lengths, shape, live, b, head, chunk * rows, rows, tile_tokens)


@cute.jit
def _item(
    lengths: Lengths,
    shape: Shape,
    live: Int32,
    b: Int32,
    head: Int32,
    first_row: Int32,
    rows: cutlass.Constexpr,
    tile_tokens: cutlass.Constexpr,
) -> Item:
    q_start = Int32(0)
    q_len = Int32(0)
    used = Int32(0)
    if live != 0:
        q_start = lengths.mCuQ[b]
        q_len = lengths.mCuQ[b + 1] - q_start
        if lengths.has_used != 0:
            used = lengths.mUsedK[b]
        else:
            used = lengths.mCuK[b + 1] - lengths.mCuK[b]
    used = cutlass.min(cutlass.max(used, Int32(0)), shape.most_keys)
    own = used - q_len
    rows_end = cutlass.min(first_row + rows, q_len * shape.group)
    first = own + query_token(shape, first_row)
    last = own + query_token(shape, rows_end - 1)
    begin = cutlass.max(first - shape.window_left, Int32(0))
    end = cutlass.min(used, last + shape.window_right + 1)
    start = begin & -HALF_TOKENS
    tiles = cutlass.max(end - start + (tile_tokens - 1), Int32(0)) // tile_tokens
    # begin behind the end: no row sees a key
    if begin >= end:
        tiles = Int32(0)
    low = cutlass.max(own - shape.window_left, Int32(0))
    return Item(live, b, head, q_start, used, own, first_row, rows_end, start, tiles, low)


def view_of(item: Item, shape: Shape) -> View:
    first = item.own + query_token(shape, item.first_row)
    last = item.own + query_token(shape, item.rows_end - 1)
    return View(
        cutlass.max(last - shape.window_left, Int32(0)),
        cutlass.min(first + shape.window_right + 1, item.used),
    )


def clamped_row(item: Item, row_in_item: Int32) -> Int32:
    """Packed row of the sequence; rows past the item are copies of its last row.

    Their scores are computed and dropped: nothing is written for them.
    """
    return cutlass.min(item.first_row + row_in_item, item.rows_end - 1)


def token_and_head(item: Item, shape: Shape, row_in_item: Int32) -> tuple[Int32, Int32]:
    """Query token and head of a row, for the layouts of Q and O."""
    row = clamped_row(item, row_in_item)
    token = query_token(shape, row)
    return item.q_start + token, item.head * shape.group + row - token * shape.group
