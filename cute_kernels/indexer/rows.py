"""The rows that a CTA's tokens complete: listed in shared memory, and whether they are repeated.

A thread looks at a token, whose slot, position and sequence are loaded at once. What completes a
row is listed, so that warps get as many rows as others wherever the complete tokens are. Of rows
with one slot the last is stored: each CTA looks through all later tokens, for all its rows at once,
by a table of what its slots' low bits may be. That takes a load of 8 bytes and one of a byte a
token, while the states of the rows are on their way.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_nvfp4, dsl_store
from cute_kernels.indexer.config import ENTRY_BYTES, FLAG_BYTES, MARKS, IndexerKConfig
from cute_kernels.indexer.tokens import Tokens, completes, position_of, sequence_of

# Of `Entry.slot`.
_SLOT_BYTE = 4
# Slots that a thread has in flight while it looks for repeated ones.
_BATCH = 8


class Entry(NamedTuple):
    """What a complete token has; its slot and position are below 2^31."""

    token: Int32
    slot: Int32
    position: Int32
    sequence: Int32


class Rows:
    """count, entries, flags (1: repeated) and marks are addresses in shared memory."""

    def __init__(self, config: IndexerKConfig):
        self.config = config

    def _parts(self, shared: Int32):
        """Of `config.list_bytes` from an address on: entries, flags, marks, count."""
        entries, threads = shared, self.config.threads
        flags = entries + ENTRY_BYTES * threads
        marks = flags + FLAG_BYTES * threads
        return entries, flags, marks, marks + MARKS

    def prefetch(self, slots, tokens: Tokens, token: Int32):
        """Bring what is known of a token to L2; that may be before it is written."""
        at = dsl_store.min_s32(token, tokens.tokens - 1)
        dsl_store.prefetch_l2(slot_at(slots, at))
        dsl_store.prefetch_l2(tokens.positions + Int64(at) * tokens.position)
        dsl_store.prefetch_l2(tokens.sequences + Int64(at) * tokens.sequence)

    @cute.jit
    def clear(self, shared: Int32):
        """An empty list, for all threads after their next barrier."""
        tid, _, _ = cute.arch.thread_idx()
        _, flags, marks, count = self._parts(shared)
        zero = Int32(0)
        dsl.st_shared_b32(flags + FLAG_BYTES * tid, zero)
        for i in cutlass.range_constexpr(MARKS // (16 * self.config.threads)):
            place = marks + 16 * (tid + i * self.config.threads)
            dsl.st_shared_b32x4(place, zero, zero, zero, zero)
        if tid == 0:
            dsl.st_shared_b32(count, zero)

    @cute.jit
    def gather(self, slots, tokens: Tokens, shared: Int32, start: Int32, end: Int32) -> Int32:
        """List the complete ones of a CTA's tokens from `start` on, one a thread; their number."""
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        entries, _, marks, count = self._parts(shared)
        token = start + tid
        near = dsl_store.min_s32(token, end - 1)
        slot = dsl_store.ld_global_b64(slot_at(slots, near))
        position, sequence = position_of(tokens, near), sequence_of(tokens, near)
        live = completes(tokens, slot, position) & Int32(token < end)
        bits = Int32(cute.arch.vote_ballot_sync(live != 0))
        if bits != 0:
            before = Int32(0)
            if lane == 0:
                before = dsl_store.atomic_add_shared(count, Int32(cute.arch.popc(bits)))
            before = dsl.shuffle_from_lane(before, Int32(0))
            if live != 0:
                rank = Int32(cute.arch.popc(bits & ((Int32(1) << lane) - 1)))
                low = Int32(slot)
                place = entries + ENTRY_BYTES * (before + rank)
                dsl.st_shared_b32x4(place, token, low, Int32(position), sequence)
                dsl_store.st_shared_b8(marks + (low & (MARKS - 1)), Int32(1))
        cute.arch.sync_threads()
        return dsl.ld_shared_b32(count)

    def entry(self, shared: Int32, i: Int32) -> Entry:
        return Entry(*dsl.ld_shared_b32x4(shared + ENTRY_BYTES * i))

    def repeated(self, shared: Int32, i: Int32) -> Int32:
        """Right after a barrier after `scan`."""
        return dsl.ld_shared_b32(self._parts(shared)[1] + FLAG_BYTES * i)

    @cute.jit
    def compare(self, shared: Int32, i: Int32, count: Int32):
        """Flag row i where a later one of the list has its slot; by all lanes of a warp."""
        entries, flags, _, _ = self._parts(shared)
        own = self.entry(shared, i)
        for other in cutlass.range(cute.arch.lane_idx(), count, 32, unroll=1):
            token, slot = dsl.ld_shared_b32x2(entries + ENTRY_BYTES * other)
            if slot == own.slot and token > own.token:
                dsl.st_shared_b32(flags + FLAG_BYTES * i, Int32(1))
        cute.arch.sync_warp()

    @cute.jit
    def scan(self, slots, tokens: Tokens, shared: Int32, after: Int32, count: Int32):
        """Flag rows of the list for whose slot a token from `after` on, where the list's tokens
        end, completes another; by all threads."""
        tid, _, _ = cute.arch.thread_idx()
        _, _, marks, _ = self._parts(shared)
        threads, last = self.config.threads, tokens.tokens - 1
        for first in cutlass.range(after + tid, tokens.tokens + tid, _BATCH * threads, unroll=1):
            places = [dsl_store.min_s32(first + threads * k, last) for k in range(_BATCH)]
            # Low halves: slots that exist have nothing in the others.
            halves = [dsl_store.ld_global_b32(slot_at(slots, place)) for place in places]
            marked = [dsl_nvfp4.ld_shared_u8(marks + (half & (MARKS - 1))) for half in halves]
            some = marked[0]
            for one in marked[1:]:
                some = some | one
            if cute.arch.vote_any_sync(some != 0):
                for k in cutlass.range(_BATCH, unroll=1):
                    place = dsl_store.min_s32(first + threads * k, last)
                    self._look(slots, tokens, shared, count, place)

    @cute.jit
    def _look(self, slots, tokens: Tokens, shared: Int32, count: Int32, place: Int32):
        """Compare a token of each lane with all rows, one token after the other."""
        entries, flags, marks, _ = self._parts(shared)
        half = dsl_store.ld_global_b32(slot_at(slots, place))
        marked = dsl_nvfp4.ld_shared_u8(marks + (half & (MARKS - 1)))
        left = Int32(cute.arch.vote_ballot_sync(marked != 0))
        while left != 0:
            lane, left = lowest(left), left & (left - 1)
            token = dsl.shuffle_from_lane(place, lane)
            low = dsl.shuffle_from_lane(half, lane)
            for i in cutlass.range(cute.arch.lane_idx(), count, 32, unroll=1):
                if dsl.ld_shared_b32(entries + ENTRY_BYTES * i + _SLOT_BYTE) == low:
                    slot = dsl_store.ld_global_b64(slot_at(slots, token))
                    if completes(tokens, slot, position_of(tokens, token)) != 0:
                        dsl.st_shared_b32(flags + FLAG_BYTES * i, Int32(1))


def slot_at(slots: Int64, token: Int32) -> Int64:
    """The address of a token's slot."""
    return slots + Int64(token) * 8


def lowest(bits: Int32) -> Int32:
    """The number of the lowest bit."""
    return Int32(cute.arch.popc((bits & -bits) - 1))
