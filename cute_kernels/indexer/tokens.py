"""Which tokens complete a row of the indexer's K cache."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, Int64

from cute_kernels import dsl_store
from cute_kernels.store.kernel import Divisor, divided


class Tokens(NamedTuple):
    """Addresses and byte strides of what a token has, and which tokens complete a row.

    span: tokens of a CTA.
    """

    tokens: Int32
    span: Int32
    positions: Int64
    position: Int64
    sequences: Int64
    sequence: Int64
    ratio: Divisor
    capacity: Int64


def completes(tokens: Tokens, slot: Int64, position: Int64) -> Int32:
    """1 where such a token completes a row that has a slot in the cache.

    No block table has positions from 2^31 - 1 on (``op.why_not``).
    """
    lives = Int32(slot >= 0) & Int32(slot < tokens.capacity) & Int32(position >= 0)
    _, rest = divided(Int32(position) + 1, tokens.ratio)
    return lives & Int32(position < 2**31 - 1) & Int32(rest == 0)


def position_of(tokens: Tokens, token: Int32) -> Int64:
    return dsl_store.ld_global_b64(tokens.positions + Int64(token) * tokens.position)


def sequence_of(tokens: Tokens, token: Int32) -> Int32:
    return dsl_store.ld_volatile_b32(tokens.sequences + Int64(token) * tokens.sequence)
