"""Which tokens complete a row of the indexer's K cache, and the claim of slots that repeat."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.store.kernel import Divisor, divided

_THREADS = 128


class Tokens(NamedTuple):
    """Addresses and byte strides of what a token has, and which tokens complete a row.

    owner: address of (capacity,) int32, the token that a slot belongs to; 0 for short calls.
    span: tokens of a warp, or of a CTA.
    """

    tokens: Int32
    span: Int32
    positions: Int64
    position: Int64
    sequences: Int64
    sequence: Int64
    ratio: Divisor
    capacity: Int64
    owner: Int64


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


class ClaimRows:
    """owner[slot] = token for every token that completes a row, whichever of several is last.

    Nothing need be initialised: only entries that were just written are read.
    """

    @cute.jit
    def __call__(self, mSlots: cute.Tensor, tokens: Tokens, stream):
        self.kernel(mSlots, tokens).launch(
            grid=(cute.ceil_div(tokens.tokens, _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mSlots: cute.Tensor, tokens: Tokens):
        # In this order: what is launched now may read what the kernels before this one wrote.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        token = cta * _THREADS + tid
        if token < tokens.tokens:
            slot = mSlots[token]
            if completes(tokens, slot, position_of(tokens, token)) != 0:
                dsl.st_global_b32(tokens.owner + slot * 4, token)
