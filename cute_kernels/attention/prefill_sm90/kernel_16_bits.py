"""SM90 prefill attention over a 16-bit KV cache: queries are the M of both products.

K and V are the B operands as they lie in shared memory; see kernel.py for shapes and the launch.

A CTA serves one item after the other: number ``cta`` of the grid's first round, then, there and
back, of each further one. The producer brings the next item's first tiles while the last rows are
written. A launch of as many CTAs as items leaves the order to the hardware.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels.attention.common.launch import Scales
from cute_kernels.attention.common.output import Output
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource, TmaOperand
from cute_kernels.attention.prefill_sm90.config import CONSUMER_WARPS
from cute_kernels.attention.prefill_sm90.consumer_16_bits import Consumer16Bits, Smem, Turns
from cute_kernels.attention.prefill_sm90.kernel import PrefillSm90, shared_arrays
from cute_kernels.attention.prefill_sm90.producer import PrefillProducer
from cute_kernels.attention.prefill_sm90.schedule import Shape, find_item, item_number


class PrefillSm90For16Bits(PrefillSm90):
    def _mmas(self):
        """Of a tile's first scores, its other scores, its values: 64 rows by keys or elements."""
        config, k_major = self.config, OperandMajorMode.K
        source = warpgroup.OperandSource

        def mma(columns: int, a_source, b_major) -> cute.TiledMma:
            op = warpgroup.MmaF16BF16Op(
                self.mma_type, Float32, (64, columns, 16), a_source, k_major, b_major
            )
            return cute.make_tiled_mma(op)

        scores = (mma(config.tile_tokens, source.SMEM, k_major) for _ in range(2))
        return (*scores, mma(config.head_size, source.RMEM, OperandMajorMode.MN))

    @cute.kernel
    def kernel(
        self,
        mmas,
        atomK: cute.CopyAtom,
        mCacheK: cute.Tensor,
        atomV: cute.CopyAtom,
        mCacheV: cute.Tensor,
        mQ: cute.Tensor,
        scales: Scales,
        lengths: Lengths,
        shape: Shape,
        source: PagedSource,
        output: Output,
    ):
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        index = cute.arch.make_warp_uniform(tid // 32)
        rings, smem = self._allocate()
        if tid == 0:
            cpasync.prefetch_descriptor(atomK)
            cpasync.prefetch_descriptor(atomV)
            self._init_rings(rings)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if index >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if index == CONSUMER_WARPS:
                k, v = TmaOperand(atomK, mCacheK), TmaOperand(atomV, mCacheV)
                self._produce(rings, k, v, lengths, shape, source)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            self._set_accumulation(mmas)
            self._consume(mmas, rings, smem, mQ, scales, lengths, shape, output)

    @cute.jit
    def _produce(self, rings, k: TmaOperand, v: TmaOperand, lengths: Lengths, shape: Shape, source):
        done, turn, live = Int32(0), Int32(0), Int32(1)
        while live != 0:
            item = self._item(lengths, shape, turn)
            if (item.live != 0) & (item.tiles > 0):
                PrefillProducer(self.config, lengths, source, item).run(rings, k, v, done)
            done = done + item.tiles
            turn = turn + 1
            live = item.live

    @cute.jit
    def _consume(
        self, mmas, rings, smem: Smem, mQ, scales: Scales, lengths: Lengths, shape: Shape, output
    ):
        turns = Turns()
        turns.open()
        done, turn, live = Int32(0), Int32(0), Int32(1)
        while live != 0:
            item = self._item(lengths, shape, turn)
            if item.live != 0:
                consumer = Consumer16Bits(
                    self.config, mmas, shape, item, rings, smem, scales.softcap
                )
                consumer.run(mQ, scales, output, done)
            done = done + item.tiles
            turn = turn + 1
            live = item.live
        turns.close()

    def _item(self, lengths: Lengths, shape: Shape, turn: Int32):
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        number = item_number(cta, ctas, turn)
        return find_item(lengths, shape, number, self.config.rows, self.config.tile_tokens)

    def _allocate(self):
        config = self.config
        rows, D, tile = config.rows, config.head_size, config.tile_tokens
        array = shared_arrays()
        k, v = self._allocate_slots(array)
        q = array(self.mma_type, rows * D, 1024)
        reference = array(Float32, 2 * rows, 16)
        rings = self._allocate_barriers(array, k, v)
        kinds = warpgroup.SmemLayoutAtomKind
        k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, self.mma_type)
        n_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, self.mma_type)
        k_layout = cute.tile_to_shape(k_major, (tile, D, config.k_stages), order=(0, 1, 2))
        v_layout = cute.tile_to_shape(n_major, (D, tile, config.v_slots), order=(1, 0, 2))
        return rings, Smem(
            q.toint(),
            reference.toint(),
            self._operand(q, cute.tile_to_shape(k_major, (rows, D), order=(0, 1))),
            self._operand(k, k_layout),
            self._operand(v, v_layout),
        )
