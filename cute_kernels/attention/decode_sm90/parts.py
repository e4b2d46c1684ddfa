"""Where the parts of items that several CTAs share lie in the workspace.

Slots: 2 c of the item that CTA c continues and 2 c + 1 of the one it begins. Where items consist of
splits, slots ``(splits + 1) * c`` and behind belong to the item that CTA c begins: the first to the
fold of what CTA c has of it, the others to the splits of other CTAs, by their numbers, and the last
one, which no other CTA reads, to the folds that CTA c has not finished.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.attention.common.line import cta_of_tile
from cute_kernels.attention.common.tile_schedule import Shape
from cute_kernels.attention.decode_sm90.plan import Plan


class Parts(NamedTuple):
    """Where an item's ``count`` parts are: the first in slot ``begun``, part i in base + step i."""

    count: Int32
    begun: Int32
    base: Int32
    step: Int32


@cute.jit
def parts_of(shape: Shape, first: Int32, pieces: Int32, begun: Int32) -> Parts:
    count = pieces
    slot = 2 * first + 1
    base = 2 * first
    step = Int32(2)
    if shape.splits != 0:
        count = pieces - begun + 1
        slot = (shape.splits + 1) * first
        base = slot + begun - 1
        step = Int32(1)
    return Parts(count, slot, base, step)


@cute.jit
def slot_in_turn(parts: Parts, part: Int32, turn: cutlass.Constexpr, step: Int32) -> Int64:
    """Slot of the part ``turn`` steps behind part ``part``; of the last one where there is none.
    There are two parts at least, so that only turn 0 can find the first one."""
    part = cutlass.min(part + turn * step, parts.count - 1)
    slot = parts.base + parts.step * part
    if (part == 0) & (turn == 0):
        slot = parts.begun
    return Int64(slot)


@cute.jit
def slot_to_write(
    shape: Shape, plan: Plan, line_start: Int32, started: Int32, split: Int32
) -> Int32:
    """Slot of the part that a CTA has of an item; started: the tile at which it came to it; split:
    the number of its latest split."""
    slot = 2 * plan.cta
    if started == 0:
        slot = slot + 1
    if shape.splits != 0:
        stride = shape.splits + 1
        slot = stride * plan.cta
        if started > 0:
            slot = stride * cta_of_tile(line_start, plan.total, plan.ctas) + split
    return slot
