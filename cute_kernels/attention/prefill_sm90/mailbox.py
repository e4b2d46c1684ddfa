"""How the producer tells the consumers what comes next, so that they need not look for it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl
from cute_kernels.attention.prefill_sm90.schedule import Item


class Mailbox(NamedTuple):
    """Where the producer leaves the item of a turn for the consumers: shared address of its words,
    and mbarriers: ``full`` (one arrival), ``empty`` (one of each consumer thread, all of which read
    the words)."""

    words: Int32
    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def post(mailbox: Mailbox, item: Item, turn: Int32):
    """Leave a turn's item, once the one before has been collected; for one whole warp."""
    cute.arch.mbarrier_wait(mailbox.empty, (turn & 1) ^ 1)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(Item._fields)):
            dsl.st_shared_b32(mailbox.words + 4 * i, item[i])
        cute.arch.mbarrier_arrive(mailbox.full)


@cute.jit
def collect(mailbox: Mailbox, turn: Int32) -> Item:
    """A turn's item; for each consumer thread, once."""
    cute.arch.mbarrier_wait(mailbox.full, turn & 1)
    item = Item(*(dsl.ld_shared_b32(mailbox.words + 4 * i) for i in range(len(Item._fields))))
    cute.arch.mbarrier_arrive(mailbox.empty)
    return item
