"""The rows that a CTA's tokens complete, listed in shared memory.

A thread looks at a token, whose slot, position and sequence are loaded at once. What completes a
row is listed, so that warps get as many rows as others wherever the complete tokens are.

A call with a thread of each CTA for each of its tokens is looked at by each CTA as a whole, so that
it knows which slots are repeated: the first token's row is stored. In longer calls rows claim their
slots (`claims.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.claims import Claims
from cute_kernels.indexer.config import ENTRY_BYTES, IndexerKConfig
from cute_kernels.indexer.tokens import Tokens, completes, position_of, sequence_of

SLOT_BYTES = 8


class Entry(NamedTuple):
    """What a complete token has; its slot and position are below 2^31."""

    token: Int32
    slot: Int32
    position: Int32
    sequence: Int32


class Memory(NamedTuple):
    """Shared memory of a list: addresses. slots: of the call's tokens, -1 for those without a row;
    if it has a thread for each."""

    entries: Int32
    slots: Int32
    count: Int32
    turn: Int32


class Rows:
    def __init__(self, config: IndexerKConfig):
        self.config = config

    def memory(self, shared: Int32) -> Memory:
        """`config.list_bytes` from an address on."""
        slots = shared + ENTRY_BYTES * self.config.threads
        count = slots + 4 * self.config.threads
        return Memory(shared, slots, count, count + 4)

    @cute.jit
    def prefetch(self, slots, tokens: Tokens, claims: Claims, token: Int32, end: Int32):
        """Bring what is known of a token to L2; that may be before it is written."""
        tid, _, _ = cute.arch.thread_idx()
        if token < end:
            dsl_store.prefetch_l2(slot_at(slots, token))
            dsl_store.prefetch_l2(tokens.positions + Int64(token) * tokens.position)
            dsl_store.prefetch_l2(tokens.sequences + Int64(token) * tokens.sequence)
        if tid == 0 and claims.buckets > 0:
            dsl_store.prefetch_l2(claims.turn_at())

    @cute.jit
    def clear(self, memory: Memory):
        """An empty list, for all threads after their next barrier."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            dsl.st_shared_b32(memory.count, Int32(0))

    @cute.jit
    def gather(
        self, slots, tokens: Tokens, claims: Claims, memory: Memory, start: Int32, end: Int32
    ):
        """List the complete ones of a CTA's tokens from `start` on, one a thread: their number."""
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        own = end - start
        looked_at = own
        if claims.buckets == 0:
            looked_at = tokens.tokens
        # Warps without a token ask for nothing.
        if tid & -32 < looked_at:
            # Its own tokens first: the first warps have them.
            token = start + dsl_store.min_s32(tid, looked_at - 1)
            if token >= tokens.tokens:
                token = token - tokens.tokens
            slot = dsl_store.ld_global_b64(slot_at(slots, token))
            position, sequence = position_of(tokens, token), sequence_of(tokens, token)
            turn = Int32(0)
            if claims.buckets > 0:
                turn = dsl_store.ld_volatile_b32(claims.turn_at())
            low = Int32(slot)
            live = completes(tokens, slot, position)
            if claims.buckets == 0 and tid < looked_at:
                dsl.st_shared_b32(memory.slots + 4 * token, low | (live - 1))
            live = live & Int32(tid < own)
            bits = Int32(cute.arch.vote_ballot_sync(live != 0))
            before, more = Int32(0), Int32(cute.arch.popc(bits))
            if own > 32:
                if lane == 0:
                    before = dsl_store.atomic_add_shared(memory.count, more)
                before = dsl.shuffle_from_lane(before, Int32(0))
            elif tid == 0:
                dsl.st_shared_b32(memory.count, more)
            if live != 0:
                rank = Int32(cute.arch.popc(bits & ((Int32(1) << lane) - 1)))
                place = memory.entries + ENTRY_BYTES * (before + rank)
                dsl.st_shared_b32x4(place, token, low, Int32(position), sequence)
            if tid == 0:
                dsl.st_shared_b32(memory.turn, turn)
        cute.arch.sync_threads()
        return dsl.ld_shared_b32(memory.count)

    def turn(self, memory: Memory) -> Int32:
        """Whose turn it is (`claims.py`)."""
        return dsl.ld_shared_b32(memory.turn)

    @cute.jit
    def is_first(self, memory: Memory, entry: Entry) -> Int32:
        """1 if no earlier token of the call has a row for this slot."""
        earlier = Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), entry.token, 32, unroll=1):
            if dsl.ld_shared_b32(memory.slots + 4 * i) == entry.slot:
                earlier = Int32(1)
        return Int32(cute.arch.vote_ballot_sync(earlier != 0) == 0)

    def entry(self, memory: Memory, i: Int32) -> Entry:
        return Entry(*dsl.ld_shared_b32x4(memory.entries + ENTRY_BYTES * i))


def slot_at(slots: Int64, token: Int32) -> Int64:
    """The address of a token's slot."""
    return slots + Int64(token) * SLOT_BYTES
