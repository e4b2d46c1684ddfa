"""A batch as the plan of `common/tile_schedule.py` deals it, by the kernel's own functions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from tests.lanes import Memory, device_functions

line_plan = device_functions("cute_kernels/attention/common/line.py")
plan = device_functions(
    "cute_kernels/attention/common/tile_schedule.py",
    TILE_TOKENS=TILE_TOKENS,
    start_of_cta=line_plan.start_of_cta,
    inclusive_scan=line_plan.inclusive_scan,
)
alike = device_functions(
    "cute_kernels/attention/common/alike.py",
    **{
        name: getattr(plan, name)
        for name in ("Lengths", "Shape", "Stretch", "next_split", "stretch_of_cta", "work_of")
    },
)
parts_plan = device_functions(
    "cute_kernels/attention/decode_sm90/parts.py", cta_of_tile=line_plan.cta_of_tile
)
UNLIMITED = plan.UNLIMITED


class Part(NamedTuple):
    """A CTA's work on one item: tiles [tile, tile + count) of it.

    line_start: where the item's tiles start on the line, as the CTA works it out. started: the tile
    at which the CTA came to the item. slot: where the part would be left.
    """

    cta: int
    b: int
    item: int
    tile: int
    count: int
    line_start: int
    chunk: Any
    started: int
    slot: int


@dataclass(frozen=True)
class Batch:
    """kv_heads: sets of ``abreast`` heads, of which the CTAs have the one at ``place``."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    rows: int = 8
    left: int = UNLIMITED
    right: int = 0
    max_ctas: int = 8
    min_tiles: int = 1
    splits: tuple[int, int, int] = (0, 0, 0)
    gap_asked: int = 0
    abreast: int = 1
    place: int = 0

    @cached_property
    def shape(self) -> Any:
        magic = -(-(1 << 32) // self.group)
        heads = (self.kv_heads, self.group, magic)
        limits = (self.left, self.right, self.min_tiles, self.gap_asked, 0, plan.UNLIMITED)
        sets = (self.abreast, self.place)
        return plan.Shape(len(self.kv_lens), *heads, *limits, *self.splits, *sets)

    @cached_property
    def lengths(self) -> Any:
        starts = [sum(self.q_lens[:b]) for b in range(len(self.q_lens) + 1)]
        return plan.Lengths(Memory(starts), Memory(self.kv_lens), None, 1)

    @cached_property
    def sequences(self) -> list[Any]:
        indices = range(len(self.kv_lens))
        return [plan.sequence(self.lengths, self.shape, b, self.rows) for b in indices]

    @cached_property
    def starts(self) -> list[int]:
        """Where each sequence's items begin on the line, and where the line ends."""
        starts = [0]
        for seq in self.sequences:
            length = (seq.tiles + self.gap) * (seq.tiles > 0)
            starts.append(starts[-1] + length * seq.chunks * self.kv_heads)
        return starts

    @property
    def total(self) -> int:
        return self.starts[-1]

    def line_of(self, b: int, item: int) -> int:
        """Where an item's first tile is."""
        return self.starts[b] + item * (self.sequences[b].tiles + self.gap) + self.gap

    @property
    def gap(self) -> int:
        """Before each item on the line."""
        return self.stretches[0].gap

    @cached_property
    def stretches(self) -> list[Any]:
        found = [
            alike.planned_stretch(self.lengths, self.shape, cta, self.max_ctas, self.rows)
            for cta in range(self.max_ctas)
        ]
        return [plan.Stretch(*map(int, stretch)) for stretch in found]

    @cached_property
    def parts(self) -> list[Part]:
        return [
            part for cta, stretch in enumerate(self.stretches) for part in self.walk(cta, stretch)
        ]

    def walk(self, cta: int, stretch: Any) -> list[Part]:
        """The loop of the producer and of the consumers over their stretch."""
        parts, done = [], stretch.skip
        b, item, tile = stretch.b, stretch.item, stretch.tile
        started = tile
        while done < stretch.count:
            left = stretch.count - done
            segment = plan.segment_at(self.lengths, self.shape, b, item, tile, left, self.rows)
            start = stretch.begin + done - tile
            split = (
                tile // plan.split_tiles(self.shape, segment.seq.tiles) if any(self.splits) else 0
            )
            own = SimpleNamespace(total=stretch.total, ctas=stretch.ctas, cta=cta)
            slot = parts_plan.slot_to_write(self.shape, own, start, started, split)
            where = (cta, segment.b, segment.item, tile, segment.count, start)
            parts.append(Part(*where, segment.chunk, started, slot))
            head_set = segment.item % self.kv_heads
            assert segment.head == head_set * self.abreast + self.place
            done += segment.count
            b, item, tile = plan.after_segment(segment, self.shape, tile, stretch.item_step)
            done += 0 if tile else stretch.gap
            started = started if tile else 0
        return parts

    def by_item(self) -> dict[tuple[int, int], list[Part]]:
        items = defaultdict(list)
        for part in self.parts:
            items[part.b, part.item].append(part)
        return items
