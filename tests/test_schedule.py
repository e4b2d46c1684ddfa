"""The plan of `common/tile_schedule.py`: who takes which tile, and where partial results go.

The functions under test are the kernel's own, run as Python by tests/lanes.py. Restated, from
`decode_sm90/consumer.py` and `fixup.py`, here and in schedule_model.py, are only the walk over a
CTA's segments, what is a part, and the CTAs that share an item.

Proved, for the lengths that hypothesis draws: the CTAs' shares are equal and cover every tile of
every item once; `cta_of_tile` is the inverse of the plan; a CTA has at most two partial results;
every part of an item lies in the slot where its readers look, no slot and no counter serves two
items; an item loads exactly the tiles in which one of its queries sees a key; no int32 overflows.
Of batches with splits too: where these are follows from the sequence alone, each is computed once,
and the parts are the fold of the first CTA's splits and then one split each, in order.

Only the GPU tests prove: that the compiled code does the same, that all CTAs are resident, that
parts are written before they are read and counters cleared for the next launch, and what is
computed on the tiles.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from tests.lanes import Memory
from tests.requires import requires_module
from tests.schedule_model import UNLIMITED, Batch, line_plan, parts_plan, plan

hypothesis = requires_module("hypothesis")
st = requires_module("hypothesis.strategies")

# ---- what must hold ----------------------------------------------------------------------------


def check_stretches(batch: Batch) -> None:
    """They share the line equally, and each begins at the tile it names."""
    first = batch.stretches[0]
    plans = {(s.total, s.ctas, s.item_step) for s in batch.stretches if s.count}
    assert plans <= {(batch.total, first.ctas, first.item_step)}
    assert 1 <= first.ctas <= batch.max_ctas
    working = batch.stretches[: first.ctas]
    assert sum(s.count for s in working) == batch.total
    assert not any(s.count for s in batch.stretches[first.ctas :])
    counts = {s.count for s in working}
    assert max(counts) - min(counts) <= 1
    assert first.ctas == 1 or min(counts) >= batch.min_tiles
    for stretch in filter(lambda s: s.count, working):
        if stretch.skip:
            assert any(batch.splits) or stretch.skip <= batch.gap
            continue  # where it goes on is seen from the parts
        seq = batch.sequences[stretch.b]
        assert 0 <= stretch.tile < seq.tiles
        assert 0 <= stretch.item < seq.chunks * batch.kv_heads
        assert batch.line_of(stretch.b, stretch.item) + stretch.tile == stretch.begin


def check_parts_cover_the_items(batch: Batch) -> None:
    """Every tile of the line is in one part, and no part crosses the end of its item."""
    line = 0
    for part in sorted(batch.parts, key=lambda part: (part.b, part.item, part.tile)):
        line += 0 if part.tile else batch.gap
        assert line == batch.line_of(part.b, part.item) + part.tile
        assert 0 < part.count <= batch.sequences[part.b].tiles - part.tile
        line += part.count
    assert line == batch.total


def check_owners(batch: Batch) -> None:
    """`cta_of_tile` inverts the plan, except where whole items are dealt round-robin."""
    ctas = batch.stretches[0].ctas
    for cta, stretch in enumerate(batch.stretches):
        if stretch.item_step == 1 and stretch.count:
            assert stretch.gap == batch.gap
            tiles = {stretch.begin, stretch.begin + stretch.count - 1}
            tiles |= set(range(stretch.begin, stretch.begin + min(stretch.count, 200)))
            assert {line_plan.cta_of_tile(tile, batch.total, ctas) for tile in tiles} == {cta}


def check_partial_results(batch: Batch) -> None:
    """All CTAs of a shared item find the same readers, slots and counter, which are its alone."""
    counters, slots = set(), set()
    ctas = batch.stretches[0].ctas
    for (b, item), parts in batch.by_item().items():
        tiles, start = batch.sequences[b].tiles, batch.line_of(b, item)
        assert parts[0].tile == parts[0].started == 0
        if all(part.started == 0 for part in parts):
            assert len({part.cta for part in parts}) == 1
            continue
        assert {part.line_start for part in parts} == {start}
        first = line_plan.cta_of_tile(start, batch.total, ctas)
        last = line_plan.cta_of_tile(start + tiles - 1, batch.total, ctas)
        begun = sum(part.started == 0 for part in parts)
        pieces = len(parts)
        if any(batch.splits):
            split = plan.split_tiles(batch.shape, tiles)
            assert pieces == -(-tiles // split)
            assert begun == line_plan.splits_of_first_cta(first, start, split, batch.total, ctas)
        else:
            assert [part.cta for part in parts] == list(range(first, last + 1))
        assert {part.cta for part in parts if part.started == 0} == {first}
        assert all(first < part.cta <= last for part in parts[begun:])
        found = parts_plan.parts_of(batch.shape, first, pieces, begun)
        where = [int(parts_plan.slot_in_turn(found, i, 0, 1)) for i in range(found.count)]
        # what the first CTA has is one part
        assert [part.slot for part in parts[begun - 1 :]] == where
        assert first not in counters and not slots & set(where)
        counters.add(first)
        slots |= set(where)
    # Without splits two slots a CTA: at most one item continued (even slot) and one begun.
    assert all(0 <= slot < max(2, batch.splits[0] + 1) * ctas for slot in slots)


def check_splits(batch: Batch) -> None:
    """Where an item is cut follows from its own tiles and what all batches have in common."""
    for part in batch.parts if any(batch.splits) else ():
        most, least, longest = batch.splits
        tiles = batch.sequences[part.b].tiles
        split = plan.split_tiles(batch.shape, tiles)
        assert part.tile % split == 0
        assert part.count == min(split, tiles - part.tile)
        assert split >= least
        assert -(-tiles // split) <= most
        assert split <= longest or -(-tiles // (split - 1)) > most


def check_loaded_tiles(batch: Batch) -> None:
    """An item loads the tiles from the first to the last in which one of its queries sees a key."""
    for (b, item), parts in batch.by_item().items():
        seq = batch.sequences[b]
        first_row = item // batch.kv_heads * batch.rows
        rows_end = min(first_row + batch.rows, seq.q_len * batch.group)
        seen = []
        for token in {row // batch.group for row in range(first_row, rows_end)}:
            own = seq.used - seq.q_len + token
            low, high = max(0, own - batch.left), min(seq.used, own + batch.right + 1)
            seen += [low, high - 1] if low < high else []
        wanted = range(min(seen) // TILE_TOKENS, max(seen) // TILE_TOKENS + 1) if seen else range(0)
        loaded = [range(p.chunk.tile_begin, p.chunk.tile_end) for p in parts]
        loaded = [tiles for tiles in loaded if tiles]
        assert all(x.stop == y.start for x, y in pairwise(loaded))
        got = range(loaded[0].start, loaded[-1].stop) if loaded else range(0)
        assert got == wanted
        assert {(p.chunk.first_row, p.chunk.rows_end) for p in parts} == {(first_row, rows_end)}


def check(batch: Batch) -> None:
    for seq, used in zip(batch.sequences, batch.kv_lens, strict=True):
        # Rows of sequences without tiles are written apart, as rows that see no key.
        assert seq.q_len == 0 or (seq.tiles > 0) == (used > 0)
    check_stretches(batch)
    check_parts_cover_the_items(batch)
    check_owners(batch)
    check_partial_results(batch)
    check_splits(batch)
    check_loaded_tiles(batch)


# ---- batches -----------------------------------------------------------------------------------

KV_LENS = st.one_of(st.integers(0, 200), st.sampled_from((0, 1, 63, 64, 65)), st.integers(0, 6000))
Q_LENS = st.one_of(st.integers(0, 3), st.integers(0, 3), st.integers(0, 80))


@st.composite
def batches(draw: Any) -> Batch:
    size = draw(st.integers(0, 70))
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(KV_LENS, Q_LENS), min_size=size, max_size=size))
    else:  # alike, or alike in work only: the plan treats such batches in ways of their own
        kv, q = draw(st.tuples(KV_LENS, Q_LENS))
        pairs = [(kv << k, q >> k) for k in draw(st.sampled_from(((0,), (0, 1), (2, 0))))]
        pairs = (pairs * size)[:size]
    abreast = draw(st.sampled_from((1, 2, 4)))
    return Batch(
        kv_lens=tuple(kv for kv, _ in pairs),
        q_lens=tuple(q for _, q in pairs),
        kv_heads=draw(st.integers(1, 8)),
        group=draw(st.integers(1, 16)),
        rows=draw(st.sampled_from((8, 16, 32, 64))),
        left=draw(st.sampled_from((UNLIMITED, 0, 1, 63, 64, 127, 1023))),
        right=draw(st.sampled_from((0, 0, UNLIMITED, 1, 100))),
        max_ctas=draw(st.integers(1, 40)),
        min_tiles=draw(st.sampled_from((1, 2, 8, 16))),
        gap_asked=draw(st.sampled_from((0, 0, 1, 3, 20))),
        splits=draw(st.sampled_from(((0, 0, 0), (0, 0, 0), (8, 4, 16), (64, 4, 8), (3, 1, 2)))),
        abreast=abreast,
        place=draw(st.integers(0, abreast - 1)),
    )


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(batches())
def test_any_batch(batch):
    check(batch)


@pytest.mark.parametrize(
    "batch",
    (
        Batch((), ()),
        Batch((0,), (1,)),
        Batch((0, 0, 0), (1, 0, 5), max_ctas=132),
        Batch((100, 3000, 1), (0, 0, 0)),
        Batch((-5, 70), (1, 1)),
        Batch((1,), (1,), max_ctas=528),
        Batch((130,), (1,), kv_heads=2, max_ctas=132, min_tiles=16),
        Batch((64, 6400), (1, 0), max_ctas=4),  # the longest sequence has no work
        Batch((0,) * 40 + (500,) + (0,) * 40, (1,) * 81, max_ctas=9),
        Batch((100,) * 33, (1,) * 33, max_ctas=132),
        Batch((128, 256), (32, 16), max_ctas=2),  # equal work, unlike items
        Batch((3,), (8,), group=4, rows=8),  # more queries than keys: the first see nothing
        Batch((20_000, 5), (300, 2), group=3, kv_heads=2, rows=16, left=500, max_ctas=132),
        Batch(((1 << 30) - 1,), (1,), kv_heads=8, group=8, max_ctas=528),
        Batch(((1 << 30) - 1, 5), (3, 1), right=UNLIMITED, left=1 << 20, max_ctas=132),
    ),
    ids=lambda batch: f"{len(batch.kv_lens)}x{max(batch.kv_lens, default=0)}",
)
def test_edges(batch):
    check(batch)


def test_more_sequences_than_one_warp_sees_at_once():
    """More than 32 for each CTA of an H200: 4224; most of them short, some empty, one long."""
    kv_lens = tuple((b * 37) % 90 * (b % 7 != 0) for b in range(4500)) + (60_000,)
    q_lens = tuple(1 + (b % 11 == 0) - (b % 13 == 0) for b in range(4501))
    check(Batch(kv_lens, q_lens, kv_heads=2, group=8, max_ctas=44, min_tiles=4))


def test_uniform_batches_get_whole_items():
    """64 sequences of 8192 keys and 4 KV heads: 128 of 132 CTAs take two whole items each."""
    batch = Batch((8192,) * 64, (1,) * 64, kv_heads=4, group=8, max_ctas=132)
    check(batch)
    assert batch.stretches[0].ctas == 128
    assert all(part.count == 128 for part in batch.parts)
    # Dealt round-robin: all CTAs are at neighbouring items at the same time.
    items = [(part.b * 4 + part.item) for part in batch.parts]
    assert items == [item for cta in range(128) for item in (cta, cta + 128)]
    # Giving up 3 of 10 CTAs is not worth it.
    batch = Batch((6400,) * 7, (1,) * 7, max_ctas=10)
    check(batch)
    assert batch.stretches[0].ctas == 10


def test_splits_do_not_depend_on_the_batch():
    """Alone, first, last and in the middle, one sequence is cut in the same places."""
    others = (700, 12_000, 64, 0, 3000)
    cuts = set()
    for kv_lens in ((8200,), (8200, *others), (*others, 8200), (*others, 8200, *others)):
        for max_ctas in (132, 264):
            batch = Batch(
                kv_lens, (1,) * len(kv_lens), kv_heads=2, max_ctas=max_ctas, splits=(64, 4, 16)
            )
            check(batch)
            b = kv_lens.index(8200)
            cuts.add(tuple(p.tile for p in batch.parts if (p.b, p.item) == (b, 0)))
    assert cuts == {tuple(range(0, 129, 16))}


@pytest.mark.parametrize(
    ("kv_len", "kv_heads", "batch_size", "max_ctas"),
    ((8192, 4, 64, 128), (8192, 4, 8, 128), (32768, 4, 1, 128), (8192, 8, 32, 264)),
)
def test_splits_leave_the_uniform_shares_as_they_are(kv_len, kv_heads, batch_size, max_ctas):
    """Shapes whose items divide evenly lose no CTA to splits."""
    fields = {"kv_heads": kv_heads, "group": 8, "max_ctas": max_ctas}
    plain = Batch((kv_len,) * batch_size, (1,) * batch_size, **fields)
    fixed = Batch((kv_len,) * batch_size, (1,) * batch_size, **fields, splits=(64, 4, 16))
    check(fixed)
    tiles = [defaultdict(int), defaultdict(int)]
    for found, batch in zip(tiles, (plain, fixed), strict=True):
        for part in batch.parts:
            found[part.cta] += part.count
    assert tiles[0] == tiles[1]


def test_lengths_as_differences_of_offsets():
    """Ragged keys: without seqused_k, cu_seqlens_k says the same."""
    batch = Batch((70, 0, 300), (2, 1, 1), kv_heads=2)
    ragged = batch.lengths._replace(mUsedK=None, mCuK=Memory((0, 70, 70, 370)), has_used=0)
    found = [plan.sequence(ragged, batch.shape, b, batch.rows) for b in range(3)]
    assert found == batch.sequences


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 256), st.integers(0, 2**31 - 1))
def test_query_token_is_an_exact_division(group, row):
    row = min(row % -(-(2**32) // group), 2**31 - 1)
    shape = Batch((), (), group=group).shape
    assert plan.query_token(shape, row) == row // group
