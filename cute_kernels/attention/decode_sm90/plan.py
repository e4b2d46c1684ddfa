"""What a CTA knows of its stretch of tiles to the end, in shared memory."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32

from cute_kernels import dsl


class Plan(NamedTuple):
    """What the end of a segment needs of the CTA's ``Stretch``, and its ``cta`` and ``place``.

    It waits there in shared memory, since the loop over tiles has no registers to spare.
    """

    total: Int32
    ctas: Int32
    item_step: Int32
    cta: Int32
    place: Int32
    gap: Int32
    pieces: Int32
    own: Int32


def read_plan(at: Int32) -> Plan:
    """at: its shared address."""
    return Plan(*dsl.ld_shared_b32x4(at), *dsl.ld_shared_b32x4(at + 16))
