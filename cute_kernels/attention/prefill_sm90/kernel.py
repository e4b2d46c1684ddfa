"""SM90 prefill attention over a paged KV cache, FP8 (e4m3) or 16 bits: the kernel and its launch.

Shapes: Q and O (total_q, heads, D) bf16 or fp16; K and V (pages, page_size, kv_heads, D) e4m3 or
Q's type, with any 16-byte-aligned strides and contiguous D, D one of 64, 128, 256 and, for e4m3,
512; page_size a multiple of the variant's ``box_tokens``. A ragged K or V (total_k, kv_heads, D) is
one page of total_k tokens.

One CTA serves ``rows`` packed query rows of one sequence and KV head (schedule.py) with a producer
warp and two consumer warpgroups over tiles of 128 keys. Warpgroup h scores half h of a tile and
adds half of the head-dim rows of O^T; the probabilities cross through shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common import launch
from cute_kernels.attention.common.launch import Scales, Sizes, Strides
from cute_kernels.attention.common.output import Output
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource, TmaOperand
from cute_kernels.attention.prefill_sm90.config import (
    CONSUMER_WARPS,
    HALF_TOKENS,
    THREADS,
    TILE_TOKENS,
    PrefillConfig,
)
from cute_kernels.attention.prefill_sm90.consumer import Consumer16Bits, ConsumerFp8
from cute_kernels.attention.prefill_sm90.lane import ConsumerSmem, Rings
from cute_kernels.attention.prefill_sm90.layout import make_layout
from cute_kernels.attention.prefill_sm90.producer import PrefillProducer
from cute_kernels.attention.prefill_sm90.schedule import Shape, find_item

Q_TYPES = {"bf16": BFloat16, "fp16": Float16}


class Addresses(NamedTuple):
    """Device addresses of the operands. 0 where an optional operand is absent."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    sinks: cute.Pointer
    k_descale: cute.Pointer
    v_descale: cute.Pointer
    used_k: cute.Pointer
    cu_k: cute.Pointer
    table: cute.Pointer


class Scalars(NamedTuple):
    """softmax_scale; softcap, 0 for none; window sides (``UNLIMITED`` for none).

    skip_rows: sequences of at most so many packed rows are not written. ctas: at least as many as
    there are items.
    """

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    skip_rows: Int32
    ctas: Int32


class PrefillSm90:
    def __init__(self, config: PrefillConfig):
        self.config = config
        self.layout = make_layout(config)
        self.q_type, self.mma_type = Q_TYPES[config.q_dtype], Q_TYPES[config.mma_dtype]

    def _mma(self, columns: int, a_major=OperandMajorMode.K) -> cute.TiledMma:
        """64 x ``columns``; A from registers where it is converted, else from shared memory."""
        source = warpgroup.OperandSource
        return cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                self.mma_type,
                Float32,
                (64, columns, 16),
                source.RMEM if self.config.converts else source.SMEM,
                a_major,
                OperandMajorMode.K,
            )
        )

    @cute.jit
    def __call__(
        self,
        mCuQ: cute.Tensor,
        at: Addresses,
        strides: Strides,
        sizes: Sizes,
        scalars: Scalars,
        stream,
    ):
        config, D = self.config, self.config.head_size
        k, v = launch.cache_operands(at, strides, sizes, self.layout, config.head_bytes)
        mQ = launch.queries(at, strides, sizes, D)
        output = launch.outputs(at, strides, sizes, D)
        scales = launch.scales(at, strides, sizes, scalars.softmax_scale, scalars.softcap)
        lengths = launch.lengths(at, mCuQ, sizes)
        source = launch.pages(at, strides, sizes)
        shape = Shape(
            sizes.batch,
            sizes.kv_heads,
            sizes.group,
            sizes.group_magic,
            scalars.window_left,
            scalars.window_right,
            scalars.skip_rows,
        )
        v_major = OperandMajorMode.K if config.converts else OperandMajorMode.MN
        values = self._mma(config.value_rows, v_major)
        mmas = (self._mma(config.rows), self._mma(config.rows), values)
        self.kernel(mmas, *k, *v, mQ, scales, lengths, shape, source, output).launch(
            grid=(scalars.ctas, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            # Without it ptxas may ignore setmaxnreg.
            min_blocks_per_mp=1,
        )

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
        begin_scores, add_scores, add_values = mmas
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        index = cute.arch.make_warp_uniform(tid // 32)
        rings, smem = self._allocate()
        if tid == 0:
            cpasync.prefetch_descriptor(atomK)
            cpasync.prefetch_descriptor(atomV)
            for slot in cutlass.range_constexpr(2 * config.k_stages):
                cute.arch.mbarrier_init(rings.k_full + slot, 1)
                cute.arch.mbarrier_init(rings.k_empty + slot, CONSUMER_WARPS // 2)
            for slot in cutlass.range_constexpr(config.v_slots):
                cute.arch.mbarrier_init(rings.v_full + slot, 1)
                cute.arch.mbarrier_init(rings.v_empty + slot, CONSUMER_WARPS)
            for buffer in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(smem.p_full + buffer, CONSUMER_WARPS)
            cute.arch.mbarrier_init_fence()
        if tid < 2 * CONSUMER_WARPS:
            dsl.st_shared_b32(smem.flags + 4 * tid, Int32(-1))
        item = find_item(lengths, shape, cta, config.rows)
        cute.arch.sync_threads()
        if index >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if (index == CONSUMER_WARPS) & (item.tiles > 0) & (item.live != 0):
                producer = PrefillProducer(config, lengths, source, item)
                producer.run(rings, TmaOperand(atomK, mCacheK), TmaOperand(atomV, mCacheV))
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            begin_scores.set(warpgroup.Field.ACCUMULATE, False)
            add_scores.set(warpgroup.Field.ACCUMULATE, True)
            add_values.set(warpgroup.Field.ACCUMULATE, True)
            if item.live != 0:
                kind = ConsumerFp8 if cutlass.const_expr(config.converts) else Consumer16Bits
                consumer = kind(
                    config,
                    (begin_scores, add_scores, add_values),
                    shape,
                    item,
                    rings,
                    smem,
                    scales.softcap,
                )
                consumer.run(mQ, scales, output)

    def _allocate(self):
        config = self.config
        rows, D = config.rows, config.head_size
        allocator = cutlass.memory.SmemAllocator()

        def array(element, count, alignment):
            return allocator.allocate_array(element, count, byte_alignment=alignment)

        ring_k = array(Uint8, 2 * config.k_stages * config.half_bytes, 1024)
        ring_v = array(Uint8, config.v_slots * config.half_bytes, 1024)
        kind = self.mma_type
        q = array(kind, rows * D, 1024)
        p = array(kind, 2 * rows * TILE_TOKENS, 1024)
        maxima = array(Float32, CONSUMER_WARPS * rows, 16)
        reference = array(Float32, 2 * rows, 16)
        position = array(Int32, rows, 16)
        flags = array(Int32, 2 * CONSUMER_WARPS, 16)
        k_full = array(Int64, 2 * config.k_stages, 8)
        k_empty = array(Int64, 2 * config.k_stages, 8)
        v_full = array(Int64, config.v_slots, 8)
        v_empty = array(Int64, config.v_slots, 8)
        p_full = array(Int64, 2, 8)
        kinds = warpgroup.SmemLayoutAtomKind
        k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, kind)

        def operand(pointer, layout):
            return cute.make_tensor(
                cute.recast_ptr(pointer, layout.inner, dtype=kind), layout.outer
            )

        sQ = operand(q, cute.tile_to_shape(k_major, (rows, D), order=(0, 1)))
        sP = operand(p, cute.tile_to_shape(k_major, (rows, TILE_TOKENS, 2), order=(0, 1, 2)))
        sK = sV = None
        if not config.converts:
            m_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, kind)
            k_shape = (HALF_TOKENS, D, 2 * config.k_stages)
            v_shape = (D, HALF_TOKENS, config.v_slots)
            sK = operand(ring_k, cute.tile_to_shape(k_major, k_shape, order=(0, 1, 2)))
            sV = operand(ring_v, cute.tile_to_shape(m_major, v_shape, order=(1, 0, 2)))
        tables = [x.toint() for x in (q, p, maxima, reference, position, flags)]
        rings = Rings(ring_k, k_full, k_empty, ring_v, v_full, v_empty)
        return rings, ConsumerSmem(*tables, p_full, sQ, sP, sK, sV)
