"""What a consumer lane of the prefill kernel knows all along: fragment coordinates, addresses.

Eight consumer warps: warpgroup h (0, 1), warp w (0 to 3) in it. With lane = 4 g + j and row block
n = 0 .. rows/8 - 1:

- S^T: tokens 64 h + 16 w + T(g) of the tile and 8 further (T: the operand's token order), rows
  8 n + 2 j, + 1;
- O^T: some head-dim elements (products.py), the same rows. So the softmax state of a row sits in
  the lanes that hold its output, and rescaling needs no exchange. At head size 64 a warpgroup has
  the O^T of half of the rows only, those from ``row_offset`` on.

A row's scores are kept relative to a *reference*: some earlier maximum of the row, in log2 units.
It moves only when a score exceeds it by more than ``HEADROOM``, so the usual tile needs neither
shuffles nor an exchange between warps.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.attention.prefill_sm90.config import (
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    PrefillConfig,
)
from cute_kernels.attention.prefill_sm90.layout import make_layout
from cute_kernels.attention.prefill_sm90.schedule import Item, Shape, token_and_head

# exp2 of it times the largest rounding of a sum stays far inside fp16's range (2^16).
HEADROOM = 8.0


class NamedBarrier(IntEnum):
    CONSUMERS = 1


class Rings(NamedTuple):
    """Slots, emptied by all 8 warps; of FP8 of half a tile, those of K by the 4 warps of their
    warpgroup. ``full`` counts the bytes of the TMA."""

    k: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer


class ConsumerSmem(NamedTuple):
    """Shared addresses of the consumers' tables (bytes), and Q^T and P^T as MMA operands.

    q: queries. p: probabilities, both 16-bit; two buffers of two halves of (rows x 64 tokens).
    maxima: (8 warps, rows) float32. reference: per pair of rows {scale, scale, -reference,
    -reference}. position: (rows,) int32 key position of the row's own token. flags: two entries
    of (8 warps,) int32, the last tile (of even, of odd number) in which a warp moved a reference.
    p_full: two mbarriers, one a buffer of p.
    """

    q: Int32
    p: Int32
    maxima: Int32
    reference: Int32
    position: Int32
    flags: Int32
    p_full: cute.Pointer
    sQ: cute.Tensor
    sP: cute.Tensor


class Softmax(NamedTuple):
    """Registers of a tile's softmax: scores, sums of the lane's two rows a block, packed P."""

    rS: cute.Tensor
    rSum: cute.Tensor
    rP: cute.Tensor


class Place(NamedTuple):
    """A tile: its number in the item, and the key position it starts at."""

    number: Int32
    first_token: Int32


class Lane:
    """What lanes of both kernels have. smem: a tuple with ``reference`` (addresses)."""

    def __init__(self, config: PrefillConfig, shape: Shape, item: Item, smem):
        self.config, self.shape, self.item, self.smem = config, shape, item, smem
        tid, _, _ = cute.arch.thread_idx()
        self.tid = tid
        self.lane = tid % 32
        # 0 .. 7; the warpgroup's and the warp's share of it
        self.index = cute.arch.make_warp_uniform(tid // 32)
        self.half = self.index // 4
        self.warp = self.index % 4
        self.g = self.lane // 4
        self.j = self.lane % 4

    @cute.jit
    def arrive(self, mbarrier: cute.Pointer):
        """One arrival a warp, after all of its lanes."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(mbarrier)

    def reference_of(self, row: Int32) -> Int32:
        """Address of a row's -reference; its scale lies 8 bytes before."""
        return self.smem.reference + (row // 2) * 16 + (row % 2) * 4 + 8

    def token_and_head(self, row_in_item: Int32) -> tuple[Int32, Int32]:
        return token_and_head(self.item, self.shape, row_in_item)


class ConsumerLane(Lane):
    """Of the FP8 kernel."""

    def __init__(
        self,
        config: PrefillConfig,
        mmas,
        shape: Shape,
        item: Item,
        rings: Rings,
        smem: ConsumerSmem,
        softcap: Float32,
    ):
        super().__init__(config, shape, item, smem)
        self.layout = make_layout(config)
        self.begin_scores, self.add_scores, self.add_values = mmas
        self.rings = rings
        self.softcap = softcap
        self.row_blocks = config.rows // 8
        self.value_row_blocks = config.value_rows // 8
        self._set_addresses()

    def _set_addresses(self):
        config, lane, warp = self.config, self.lane, self.warp
        self.row_offset = Int32(0)
        if config.splits_rows:
            self.row_offset = self.half * config.value_rows
        self.pair = self.j * 8
        lane_row = lane % 8
        quarter = lane // 8
        unit = (2 * warp + quarter % 2) ^ lane_row
        self.p_address = (
            self.smem.p
            + self.half * (config.rows * 128)
            + ((quarter // 2) * 8 + lane_row) * 128
            + unit * 16
        )

    def barrier(self):
        cute.arch.barrier(
            barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=CONSUMER_THREADS
        )

    def maxima_of(self, warp) -> Int32:
        """Address of rows 2 j, + 1 of block 0 in a warp's maxima; a block is 32 bytes on."""
        return self.smem.maxima + warp * (self.config.rows * 4) + self.pair

    def maximum_of(self, warp, row: Int32) -> Int32:
        """Address of one row's entry in a warp's maxima."""
        return self.smem.maxima + warp * (self.config.rows * 4) + row * 4

    def make_state(self):
        """(output accumulators, softmax registers), zero where they accumulate."""
        config = self.config
        acc = cute.make_rmem_tensor((config.value_blocks * self.value_row_blocks * 4,), Float32)
        state = Softmax(
            cute.make_rmem_tensor((4 * self.row_blocks,), Float32),
            cute.make_rmem_tensor((2 * self.row_blocks,), Float32),
            cute.make_rmem_tensor((2 * self.row_blocks,), Int32),
        )
        for i in range(config.value_blocks * self.value_row_blocks * 4):
            acc[i] = Float32(0.0)
        for i in range(2 * self.row_blocks):
            state.rSum[i] = Float32(0.0)
        return acc, state


WARPS = range(CONSUMER_WARPS)
