"""The barriers of a CTA's warps, by their hardware numbers; 0 is that of all threads."""

from __future__ import annotations

from enum import IntEnum


class NamedBarrier(IntEnum):
    """CONSUMERS: of them alone. ASKED: they, who need not wait, tell the producer that they have
    asked for their first queries."""

    CONSUMERS = 1
    ASKED = 2
