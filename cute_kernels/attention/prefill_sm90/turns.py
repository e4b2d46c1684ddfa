"""Where the warpgroups of the 16-bit kernel meet: its named barriers, and turns in issuing MMAs."""

from __future__ import annotations

from enum import IntEnum

import cutlass.cute as cute

from cute_kernels.attention.decode_sm90.config import WARPGROUP_THREADS
from cute_kernels.attention.prefill_sm90.config import CONSUMER_THREADS


class NamedBarrier(IntEnum):
    """Two each of the first: one a warpgroup. QUERIES: of both, where they share rows; one of them
    may be there while the other still meets on its own."""

    WARPGROUP = 1
    TURN = 3
    QUERIES = 5


class Turns:
    """The warpgroups issue MMAs in turn, the first one first."""

    def __init__(self):
        tid, _, _ = cute.arch.thread_idx()
        self.half = cute.arch.make_warp_uniform(tid // WARPGROUP_THREADS)

    def wait(self):
        barrier = self.half + int(NamedBarrier.TURN)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=CONSUMER_THREADS)

    def hand_over(self):
        other = (self.half ^ 1) + int(NamedBarrier.TURN)
        cute.arch.barrier_arrive(barrier_id=other, number_of_threads=CONSUMER_THREADS)

    @cute.jit
    def open(self):
        if self.half == 1:
            self.hand_over()

    @cute.jit
    def close(self):
        """Take the turn that the second warpgroup hands over last."""
        if self.half == 0:
            self.wait()
