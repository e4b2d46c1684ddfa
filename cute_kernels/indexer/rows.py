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
from cute_kernels.indexer.config import ENTRY_BYTES, FLAG_BYTES, SLOT_BYTES, IndexerKConfig
from cute_kernels.indexer.tokens import Tokens, completes, position_of, sequence_of


class Entry(NamedTuple):
    """What a complete token has; its slot and position are below 2^31."""

    token: Int32
    slot: Int32
    position: Int32
    sequence: Int32


class Memory(NamedTuple):
    """Shared memory of a list: addresses. slots: of the call's tokens, -1 for those without a row;
    if it has a thread for each. flags: 1 for rows that are to be stored, after `settled`."""

    entries: Int32
    slots: Int32
    flags: Int32
    count: Int32
    turn: Int32
    settled: cute.Pointer


class Rows:
    def __init__(self, config: IndexerKConfig):
        self.config = config

    def memory(self, shared: Int32, settled: cute.Pointer) -> Memory:
        """`config.list_bytes` from an address on, and a barrier."""
        threads = self.config.threads
        slots = shared + ENTRY_BYTES * threads
        flags = slots + SLOT_BYTES * threads
        count = flags + FLAG_BYTES * threads
        return Memory(shared, slots, flags, count, count + 4, settled)

    @cute.jit
    def begin(self, memory: Memory):
        """Before a CTA's first barrier."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            cute.arch.mbarrier_init(memory.settled, 1)
            cute.arch.mbarrier_init_fence()
        self.clear(memory)

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
        own = dsl_store.min_s32(end - start, Int32(self.config.threads))
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
                dsl.st_shared_b32(memory.slots + SLOT_BYTES * token, low | (live - 1))
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

    def entry(self, memory: Memory, i: Int32) -> Entry:
        return Entry(*dsl.ld_shared_b32x4(memory.entries + ENTRY_BYTES * i))

    @cute.jit
    def settle(self, claims: Claims, memory: Memory, count: Int32):
        """Which rows of the list are to be stored; by one warp."""
        lane = cute.arch.lane_idx()
        if claims.buckets > 0:
            turn = dsl.ld_shared_b32(memory.turn)
            for i in cutlass.range(lane, count, 32, unroll=1):
                won = claims.won(turn, self.entry(memory, i).slot)
                dsl.st_shared_b32(memory.flags + FLAG_BYTES * i, won)
        else:
            for i in cutlass.range(count, unroll=1):
                first = self._is_first(memory, self.entry(memory, i))
                if lane == 0:
                    dsl.st_shared_b32(memory.flags + FLAG_BYTES * i, first)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(memory.settled)

    def is_stored(self, memory: Memory, i: Int32, phase: Int32) -> Int32:
        """The flag of row i; `phase`: of the barrier."""
        cute.arch.mbarrier_wait(memory.settled, phase)
        return dsl.ld_shared_b32(memory.flags + FLAG_BYTES * i)

    @cute.jit
    def _is_first(self, memory: Memory, entry: Entry) -> Int32:
        """1 if no earlier token of the call has a row for this slot."""
        earlier = Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), entry.token, 32, unroll=1):
            if dsl.ld_shared_b32(memory.slots + SLOT_BYTES * i) == entry.slot:
                earlier = Int32(1)
        return Int32(cute.arch.vote_ballot_sync(earlier != 0) == 0)


def slot_at(slots: Int64, token: Int32) -> Int64:
    """The address of a token's slot."""
    return slots + Int64(token) * 8
