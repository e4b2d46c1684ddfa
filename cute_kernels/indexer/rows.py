"""The rows that a CTA's tokens complete: listed in shared memory, and whether they are repeated.

A thread looks at a token, whose slot, position and sequence are loaded at once. What completes a
row is listed, so that warps get as many rows as others wherever the complete tokens are. Of rows
with one slot the last is stored: each CTA looks through all later tokens, for all its rows at once,
by a table of what the low bits of its slots are. Loads return in order, so slots that were loaded
after states would come after them: bulk copies, which do not queue there, bring them to shared
memory from the start.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_nvfp4, dsl_store
from cute_kernels.indexer.config import (
    ENTRY_BYTES,
    FLAG_BYTES,
    MARKS,
    SCAN_STAGES,
    SCAN_TOKENS,
    SLOT_BYTES,
    IndexerKConfig,
)
from cute_kernels.indexer.tokens import Tokens, completes, position_of, sequence_of

# Of `Entry.slot`.
_SLOT_BYTE = 4


class Entry(NamedTuple):
    """What a complete token has; its slot and position are below 2^31."""

    token: Int32
    slot: Int32
    position: Int32
    sequence: Int32


class Memory(NamedTuple):
    """Shared memory of a list: addresses, and barriers of the chunks of slots in `ring`."""

    entries: Int32
    flags: Int32
    marks: Int32
    count: Int32
    ring: Int32
    full: cute.Pointer


class Later(NamedTuple):
    """Tokens after those of the list: from `first` on, of which `count`, from `begin` on, are
    copied in chunks (bulk copies take pairs of slots), the n-th as chunk `chunk` + n of the CTA."""

    first: Int32
    begin: Int32
    count: Int32
    chunk: Int32

    @property
    def chunks(self) -> Int32:
        return cute.ceil_div(self.count, SCAN_TOKENS)


class Rows:
    def __init__(self, config: IndexerKConfig):
        self.config = config

    def memory(self, ring: Int32, full: cute.Pointer) -> Memory:
        """`config.ring_bytes` and `config.list_bytes` from an address on."""
        threads = self.config.threads
        entries = ring + self.config.ring_bytes
        flags = entries + ENTRY_BYTES * threads
        marks = flags + FLAG_BYTES * threads
        return Memory(entries, flags, marks, marks + MARKS, ring, full)

    @cute.jit
    def begin(self, memory: Memory):
        """Before a CTA's first barrier."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            for stage in cutlass.range_constexpr(SCAN_STAGES):
                cute.arch.mbarrier_init(memory.full + stage, 1)
            cute.arch.mbarrier_init_fence()
        self.clear(memory)

    def prefetch(self, slots, tokens: Tokens, token: Int32):
        """Bring what is known of a token to L2; that may be before it is written."""
        at = dsl_store.min_s32(token, tokens.tokens - 1)
        dsl_store.prefetch_l2(slot_at(slots, at))
        dsl_store.prefetch_l2(tokens.positions + Int64(at) * tokens.position)
        dsl_store.prefetch_l2(tokens.sequences + Int64(at) * tokens.sequence)

    @cute.jit
    def clear(self, memory: Memory):
        """An empty list, for all threads after their next barrier."""
        tid, _, _ = cute.arch.thread_idx()
        zero = Int32(0)
        dsl.st_shared_b32(memory.flags + FLAG_BYTES * tid, zero)
        for i in cutlass.range_constexpr(MARKS // (16 * self.config.threads)):
            place = memory.marks + 16 * (tid + i * self.config.threads)
            dsl.st_shared_b32x4(place, zero, zero, zero, zero)
        if tid == 0:
            dsl.st_shared_b32(memory.count, zero)

    def later(self, slots, tokens: Tokens, start: Int32, end: Int32, chunk: Int32) -> Later:
        """Than those of a CTA's tokens that are listed together with that at `start`."""
        first = dsl_store.min_s32(start + self.config.threads, end)
        begin = first + (Int32(slot_at(slots, first) >> 3) & 1)
        count = dsl_store.clamp_s32(tokens.tokens - begin, tokens.tokens) & -2
        return Later(first, begin, count, chunk)

    @cute.jit
    def fetch(self, slots, memory: Memory, later: Later):
        """Begin to copy all chunks, by a thread of the warp that is the last to get rows."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == self.config.threads - 32:
            for n in cutlass.range(later.chunks, unroll=1):
                stage = (later.chunk + n) % SCAN_STAGES
                begin = n * SCAN_TOKENS
                size = SLOT_BYTES * dsl_store.min_s32(later.count - begin, Int32(SCAN_TOKENS))
                full = memory.full + stage
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                to = memory.ring + stage * (SLOT_BYTES * SCAN_TOKENS)
                dsl_store.copy_bulk(to, slot_at(slots, later.begin + begin), size, full.toint())

    @cute.jit
    def gather(self, slots, tokens: Tokens, memory: Memory, start: Int32, end: Int32, later: Later):
        """List the complete ones of a CTA's tokens from `start` on, one a thread: their number; and
        of even lanes the low half of the first later slot, of odd lanes that of the last."""
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        token = start + tid
        near = dsl_store.min_s32(token, end - 1)
        slot = dsl_store.ld_global_b64(slot_at(slots, near))
        position, sequence = position_of(tokens, near), sequence_of(tokens, near)
        edge = dsl_store.min_s32(self._edge(tokens, later), tokens.tokens - 1)
        edge = dsl_store.ld_volatile_b32(slot_at(slots, edge))
        live = completes(tokens, slot, position) & Int32(token < end)
        bits = Int32(cute.arch.vote_ballot_sync(live != 0))
        if bits != 0:
            before = Int32(0)
            if lane == 0:
                before = dsl_store.atomic_add_shared(memory.count, Int32(cute.arch.popc(bits)))
            before = dsl.shuffle_from_lane(before, Int32(0))
            if live != 0:
                rank = Int32(cute.arch.popc(bits & ((Int32(1) << lane) - 1)))
                low = Int32(slot)
                place = memory.entries + ENTRY_BYTES * (before + rank)
                dsl.st_shared_b32x4(place, token, low, Int32(position), sequence)
                dsl_store.st_shared_b8(memory.marks + (low & (MARKS - 1)), Int32(1))
        cute.arch.sync_threads()
        return dsl.ld_shared_b32(memory.count), edge

    def _edge(self, tokens: Tokens, later: Later) -> Int32:
        """The first later token, in odd lanes the last."""
        return later.first + (cute.arch.lane_idx() & 1) * (tokens.tokens - 1 - later.first)

    def entry(self, memory: Memory, i: Int32) -> Entry:
        return Entry(*dsl.ld_shared_b32x4(memory.entries + ENTRY_BYTES * i))

    def repeated(self, memory: Memory, i: Int32) -> Int32:
        """After `compare`, and a barrier after `scan`."""
        return dsl.ld_shared_b32(memory.flags + FLAG_BYTES * i)

    @cute.jit
    def compare(self, memory: Memory, i: Int32, count: Int32):
        """Flag row i where a later one of the list has its slot; by all lanes of a warp."""
        own = self.entry(memory, i)
        for other in cutlass.range(cute.arch.lane_idx(), count, 32, unroll=1):
            token, slot = dsl.ld_shared_b32x2(memory.entries + ENTRY_BYTES * other)
            if slot == own.slot and token > own.token:
                dsl.st_shared_b32(memory.flags + FLAG_BYTES * i, Int32(1))
        cute.arch.sync_warp()

    @cute.jit
    def scan(self, slots, tokens: Tokens, memory: Memory, later: Later, edge: Int32, count: Int32):
        """Flag rows of the list for whose slot a later token completes another; by all threads."""
        tid, _, _ = cute.arch.thread_idx()
        threads = self.config.threads
        if tid >= threads - 32:
            live = Int32(cute.arch.lane_idx() < 2) & Int32(later.first < tokens.tokens)
            token = self._edge(tokens, later)
            self._look(slots, tokens, memory, count, token, edge, live)
        for n in cutlass.range(later.chunks, unroll=1):
            chunk = later.chunk + n
            stage = chunk % SCAN_STAGES
            cute.arch.mbarrier_wait(memory.full + stage, (chunk // SCAN_STAGES) & 1)
            ring = memory.ring + stage * (SLOT_BYTES * SCAN_TOKENS)
            pairs = dsl_store.min_s32(later.count - n * SCAN_TOKENS, Int32(SCAN_TOKENS)) >> 1
            some = Int32(0)
            for k in cutlass.range_constexpr(SCAN_TOKENS // 2 // threads):
                pair = dsl_store.min_s32(tid + k * threads, pairs - 1)
                # Low halves: slots that exist have nothing in the others.
                first, _, second, _ = dsl.ld_shared_b32x4(ring + 2 * SLOT_BYTES * pair)
                some = some | self._mark(memory, first) | self._mark(memory, second)
            if cute.arch.vote_any_sync(some != 0):
                # The same tokens: a warp knows of its own marks only.
                for k in cutlass.range(SCAN_TOKENS // threads, unroll=1):
                    i = 2 * (tid + (k >> 1) * threads) + (k & 1)
                    live = Int32(i < 2 * pairs)
                    low = dsl.ld_shared_b32(ring + SLOT_BYTES * i)
                    token = later.begin + n * SCAN_TOKENS + i
                    self._look(slots, tokens, memory, count, token, low, live)

    def _mark(self, memory: Memory, low: Int32) -> Int32:
        """1 if a row of the list may have such a slot."""
        return dsl_nvfp4.ld_shared_u8(memory.marks + (low & (MARKS - 1)))

    @cute.jit
    def _look(
        self,
        slots,
        tokens: Tokens,
        memory: Memory,
        count: Int32,
        token: Int32,
        low: Int32,
        live: Int32,
    ):
        """Compare a token of each lane, where live, with all rows, one token after the other.

        low: half of its slot.
        """
        left = Int32(cute.arch.vote_ballot_sync((self._mark(memory, low) & live) != 0))
        while left != 0:
            lane, left = lowest(left), left & (left - 1)
            one = dsl.shuffle_from_lane(token, lane)
            half = dsl.shuffle_from_lane(low, lane)
            for i in cutlass.range(cute.arch.lane_idx(), count, 32, unroll=1):
                if dsl.ld_shared_b32(memory.entries + ENTRY_BYTES * i + _SLOT_BYTE) == half:
                    slot = dsl_store.ld_global_b64(slot_at(slots, one))
                    if completes(tokens, slot, position_of(tokens, one)) != 0:
                        dsl.st_shared_b32(memory.flags + FLAG_BYTES * i, Int32(1))


def slot_at(slots: Int64, token: Int32) -> Int64:
    """The address of a token's slot."""
    return slots + Int64(token) * SLOT_BYTES


def lowest(bits: Int32) -> Int32:
    """The number of the lowest bit."""
    return Int32(cute.arch.popc((bits & -bits) - 1))
