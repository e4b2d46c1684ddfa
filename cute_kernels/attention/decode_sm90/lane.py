"""What a consumer lane knows all along: its fragment coordinates, addresses, and barriers.

Fragment coordinates, with lane = 4 g + j and row block n = 0 .. rows/8 - 1:

- S^T of warp w (of its warpgroup): tokens 16 w + T(g) and 8 further (T: ``TileLayout.token_of``),
  rows 8 n + 2 j, + 1;
- O^T of warp w: two neighbouring head-dim elements for each of its blocks u (which: fragments.py),
  the same rows. So the softmax state of a row sits in the lanes that hold its output, and rescaling
  needs no exchange.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from cute_kernels import dsl
from cute_kernels.attention.common.tile_schedule import Shape
from cute_kernels.attention.decode_sm90.barriers import NamedBarrier
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.attention.decode_sm90.fragments import FRAGMENTS
from cute_kernels.attention.decode_sm90.layout import TileLayout
from cute_kernels.attention.decode_sm90.plan import Plan, read_plan
from cute_kernels.attention.decode_sm90.producer import Ring

# Maximum of a row that has seen no key: below all scores, and finite, so that a difference with it
# is no NaN. It becomes -inf at the end of a segment.
NO_KEY = -3.0e38
TYPES = {"bf16": BFloat16, "fp16": Float16}


class ConsumerSmem(NamedTuple):
    """Shared addresses of the consumer's tables (bytes), and Q^T and P^T as MMA operands.

    p: probabilities, rows x 64 tokens for each tile of two steps: while warps still read those of
    one step, others fill the next one's. row_max, row_sum: (warps, rows) float32. visible:
    (rows,) pairs [low, high) of key positions. q_scale: (rows,) float32, what turns a raw score
    into a log2-domain score. q_max: (warps, rows) packed bf16 maxima. shared_items: two entries
    of SHARED_ITEM_WORDS words, see shared_items.py. scales: V scales of a step, see
    fragments_nvfp4.py. fold: see ``DecodeConfig.fold_bytes``. plan: a ``Plan``.
    """

    p: Int32
    row_max: Int32
    row_sum: Int32
    visible: Int32
    q_scale: Int32
    q_max: Int32
    shared_items: Int32
    scales: Int32
    q: Int32
    fold: Int32
    plan: Int32
    sQ: cute.Tensor
    sP: cute.Tensor


class Softmax(NamedTuple):
    """Register state per row of the lane, two rows a block: running maximum and sum."""

    rMax: cute.Tensor
    rSum: cute.Tensor


class ConsumerLane:
    def __init__(
        self,
        config: DecodeConfig,
        mma: cute.TiledMma,
        shape: Shape,
        ring: Ring,
        smem: ConsumerSmem,
        softcap: Float32,
    ):
        self.config, self.layout = config, TileLayout(config)
        self.mma, self.shape, self.ring, self.smem, self.softcap = mma, shape, ring, smem, softcap
        self.mma_type = TYPES[config.mma_dtype]
        self.mma_kind, self.pack = "f16", dsl.pack_f16x2
        if config.mma_dtype == "bf16":
            self.mma_kind, self.pack = "bf16", dsl.pack_bf16x2
        self.row_blocks = config.rows // 8
        # Blocks of 16 head-dim elements that one warp owns in O^T: at the end, and of a tile.
        self.units = config.head_size // (16 * config.consumer_warps)
        self.blocks = config.head_size // 16 if config.warps_apart else self.units
        self.chains = config.chains
        tid, _, _ = cute.arch.thread_idx()
        self.tid = tid
        self.lane = tid % 32
        self.warp = cute.arch.make_warp_uniform(tid // 32)
        self.g = self.lane // 4
        self.j = self.lane % 4
        # Which quarter of a tile's tokens the warp scores, and of which of the step's tiles.
        self.quarter, self.own_tile = self.warp, 0
        if config.warpgroups > 1:
            self.quarter, self.own_tile = self.warp % 4, self.warp // 4
        self.token_in_tile = 16 * self.quarter + self.layout.token_of(self.g)
        self.kv = FRAGMENTS[config.kv_format](config, self.layout, self, smem.scales)

    def make_state(self):
        """(output accumulators, softmax state); filled anew by ``reset`` for each item."""
        rows = 2 * self.row_blocks
        acc = cute.make_rmem_tensor((self.blocks * self.row_blocks * 4,), Float32)
        state = Softmax(
            cute.make_rmem_tensor((rows,), Float32),
            cute.make_rmem_tensor((rows,), Float32),
        )
        return acc, state

    @cute.jit
    def reset(self, acc: cute.Tensor, state: Softmax):
        for u in cutlass.range_constexpr(self.blocks):
            for i in cutlass.range_constexpr(self.row_blocks * 4):
                acc[u * self.row_blocks * 4 + i] = Float32(0.0)
        for i in cutlass.range_constexpr(2 * self.row_blocks):
            state.rMax[i] = Float32(NO_KEY)
            state.rSum[i] = Float32(0.0)

    def plan(self) -> Plan:
        return read_plan(self.smem.plan)

    def barrier(self):
        cute.arch.barrier(
            barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=self.config.consumer_threads
        )

    def barrier_any(self, condition: Int32) -> Int32:
        """Barrier of the consumers; nonzero for all of them where any thread's condition was."""
        return dsl.barrier_reduce_or(
            Int32(int(NamedBarrier.CONSUMERS)), Int32(self.config.consumer_threads), condition
        )

    def tile_in_ring(self, slot: Int32, operand: int) -> Int32:
        """Of K (0) or V (1) of a slot: its number among the ring's tiles."""
        return 2 * slot + operand if self.config.paired else slot

    @cute.jit
    def release(self, slot: Int32, arrivals: cutlass.Constexpr = 1):
        """Hand a slot back to the producer. arrivals: how many warps the warp arrives for.

        The fence orders the warp's reads before the TMA that reuses the slot. An arrival alone does
        not: it is issued right behind the loads and may overtake them (in the prefill kernel TMA
        overwrote values before ``ldmatrix`` had read them; H200, all SMs at work).
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if const_expr(self.config.block_scaled):
            cute.arch.mbarrier_arrive(self.ring.empty + slot, arrive_count=arrivals)
        else:
            if self.lane == 0:
                cute.arch.mbarrier_arrive(self.ring.empty + slot, arrive_count=arrivals)
