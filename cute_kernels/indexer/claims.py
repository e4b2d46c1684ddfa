"""Which of the tokens that complete rows for one slot stores it: the first to claim it.

Two rows with one slot must not leave the codes of one beside the scale of the other. A row's warp
swaps its slot into a hash table, which is empty when a launch begins; who finds the slot there
already does not store. The answer comes while states are on their way.

There are two tables. A launch uses one and empties the other, for the next launch: when a CTA is
done with the table others may still have to claim in it. Whose turn it is says a word for each CTA
of a launch, all of which each launch changes, however many CTAs it has. So all of it must be zero
before the first launch, and belong to one launch at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.config import TURNS


class Claims(NamedTuple):
    """memory: address of `TURNS` + 2 * `buckets` words; buckets: a power of two, at least two for
    each token."""

    memory: Int64
    buckets: Int32

    def turn(self) -> Int32:
        """0 or 1, of a thread whose CTA has not called `hand_on` yet."""
        cta, _, _ = cute.arch.block_idx()
        return dsl_store.ld_volatile_b32(self.memory + Int64(cta) * 4)

    def table(self, turn: Int32) -> Int64:
        return self.memory + Int64(TURNS + turn * self.buckets) * 4

    def ask(self, turn: Int32, slot: Int32) -> Int32:
        """What the first bucket of a slot holds, which gets the slot if it is empty: 0."""
        return self._swap(turn, slot, slot)

    @cute.jit
    def won(self, turn: Int32, slot: Int32, found: Int32) -> Int32:
        """1 if the slot is the caller's, by what `ask` found."""
        bucket = slot
        while found != 0 and found != slot + 1:
            # An odd step visits all buckets; slots of one block of a cache have one.
            bucket = bucket + (((slot >> 6) + 1) * -1640531535 | 1)
            found = self._swap(turn, slot, bucket)
        return Int32(found == 0)

    def _swap(self, turn: Int32, slot: Int32, bucket: Int32) -> Int32:
        at = self.table(turn) + Int64(bucket & (self.buckets - 1)) * 4
        return dsl_store.compare_and_swap_gpu(at, Int32(0), slot + 1)

    @cute.jit
    def hand_on(self, turn: Int32):
        """Empty the other table and make it the next launch's; by all threads of all CTAs."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        threads, _, _ = cute.arch.block_dim()
        ctas, _, _ = cute.arch.grid_dim()
        other = 1 - turn
        for i in cutlass.range(cta * threads + tid, self.buckets, ctas * threads, unroll=1):
            dsl.st_global_b32(self.table(other) + Int64(i) * 4, Int32(0))
        for i in cutlass.range(cta + ctas * tid, TURNS, ctas * threads, unroll=1):
            dsl.st_global_b32(self.memory + Int64(i) * 4, other)
