"""Which of the tokens that complete rows for one slot stores it: the first to claim it.

Two rows with one slot must not leave the codes of one beside the scale of the other. A row's warp
swaps its slot into a hash table, which is empty when a launch begins; who finds the slot there
already does not store. The answer comes while states are on their way. (Calls with as many tokens
as a CTA has threads, or fewer, need no table: see `rows.py`.)

There are two tables. A launch uses one and empties the other, for the next launch: when a CTA is
done with the table others may still have to claim in it. Whose turn it is says a word for each CTA
of a launch, all of which each launch changes, however many CTAs it has. So all of it must be zero
before the first launch, and belong to one launch at a time (`cute_kernels/counters.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.config import TURNS


class Claims(NamedTuple):
    """memory: address of `TURNS` + 2 * `buckets` words, aligned to 16 bytes. buckets: a power of
    two, at least two for each token; 0 where there is no table."""

    memory: Int64
    buckets: Int32

    def turn_at(self) -> Int64:
        cta, _, _ = cute.arch.block_idx()
        return self.memory + Int64(cta) * 4

    def ask(self, turn: Int32, slot: Int32) -> Int32:
        """What the first bucket of a slot holds, which gets the slot if that is 0; in lane 0."""
        return self._fill(turn, slot, slot)

    @cute.jit
    def won(self, turn: Int32, slot: Int32, found: Int32) -> Int32:
        """1 if the slot is the warp's, by what `ask` found."""
        found = dsl.shuffle_from_lane(found, Int32(0))
        bucket = slot
        while found != 0 and found != slot + 1:
            # An odd step comes to all buckets. It is one for a block of a cache, whose slots do not
            # meet each other then.
            bucket = bucket + (((slot >> 6) + 1) * -1640531535 | 1)
            found = dsl.shuffle_from_lane(self._fill(turn, slot, bucket), Int32(0))
        return Int32(found == 0)

    def _fill(self, turn: Int32, slot: Int32, bucket: Int32) -> Int32:
        at = self._table(turn) + Int64(bucket & (self.buckets - 1)) * 4
        return dsl_store.fill_if_zero_gpu(at, slot + 1, cute.arch.lane_idx())

    def _table(self, turn: Int32) -> Int64:
        return self.memory + Int64(TURNS + turn * self.buckets) * 4

    @cute.jit
    def hand_on(self, turn: Int32):
        """Empty the other table and make it the next launch's; by a warp of each CTA, after all
        have read `turn_at`."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        zero, other = Int32(0), 1 - turn
        first = cta * 32 + cute.arch.lane_idx()
        for i in cutlass.range(first, self.buckets >> 2, ctas * 32, unroll=1):
            dsl_store.st_global_b32x4(self._table(other) + Int64(i) * 16, zero, zero, zero, zero)
        for i in cutlass.range(cta + ctas * cute.arch.lane_idx(), TURNS, ctas * 32, unroll=1):
            dsl.st_global_b32(self.memory + Int64(i) * 4, other)
