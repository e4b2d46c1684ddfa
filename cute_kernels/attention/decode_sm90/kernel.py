"""SM90 decode attention over a paged FP8 (e4m3), NVFP4 or 16-bit KV cache: the kernel, its launch.

Shapes: Q and O (total_q, heads, D) bf16 or fp16; K and V (pages, page_size, kv_heads, D) with any
16-byte-aligned strides and contiguous D, D one of 64, 128, 256, 512 (nvfp4: D / 2 bytes, and
D / 16 block scales by strides of their own); page_size a multiple of the variant's ``box_tokens``.
A ragged K or V (total_k, kv_heads, D) is one page of total_k tokens.

One CTA is a producer warp and one or two consumer warpgroups around a ring of 64-token tiles in
shared memory: the producer loads K and V by TMA, the consumers multiply, out of registers in which
what has less than 16 bits becomes fp16 (consumer.py says how). Work is dealt in equal stretches of
tiles (common/tile_schedule.py); an item that several CTAs share is finished by them together at the
end of the same launch (fixup.py).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common import launch
from cute_kernels.attention.common.alike import planned_stretch
from cute_kernels.attention.common.launch import ScaledStrides, Scales, Sizes, Strides
from cute_kernels.attention.common.output import Output, Partial
from cute_kernels.attention.common.tile_schedule import Lengths, Shape
from cute_kernels.attention.decode_sm90.config import (
    PRODUCER_REGISTERS,
    TILE_TOKENS,
    DecodeConfig,
)
from cute_kernels.attention.decode_sm90.consumer import Consumer
from cute_kernels.attention.decode_sm90.lane import TYPES, ConsumerSmem
from cute_kernels.attention.decode_sm90.layout import TileLayout
from cute_kernels.attention.decode_sm90.producer import (
    PagedSource,
    Producer,
    Ring,
    TmaOperand,
)
from cute_kernels.attention.decode_sm90.shared_items import SHARED_ITEM_WORDS
from cute_kernels.attention.decode_sm90.staging import Staging

# CTAs wait for each other (fixup.py): refuse a grid that the device cannot hold at once.
COOPERATIVE = True


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
    cu_q: cute.Pointer
    used_k: cute.Pointer
    cu_k: cute.Pointer
    table: cute.Pointer
    counters: cute.Pointer


_OPERANDS = [(name, cute.Pointer) for name in Addresses._fields]
# Of a block-scaled cache; the scratch ``counters`` stays last.
ScaledAddresses = NamedTuple(
    "ScaledAddresses",
    [*_OPERANDS[:-1], ("k_scale", cute.Pointer), ("v_scale", cute.Pointer), _OPERANDS[-1]],
)


def operand_types(config: DecodeConfig):
    """(addresses, strides) that a variant takes."""
    return (ScaledAddresses, ScaledStrides) if config.block_scaled else (Addresses, Strides)


class Scalars(NamedTuple):
    """softmax_scale; softcap, 0 for none; window sides (``UNLIMITED`` for none); the CTA grid.

    min_rows, max_rows: sequences of at most so many, or of more packed rows are not written.
    min_tiles, gap, splits, split_least, split_most, abreast: see ``tile_schedule.Shape``; abreast
    divides ctas.
    """

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    ctas: Int32
    min_tiles: Int32
    gap: Int32
    min_rows: Int32
    max_rows: Int32
    splits: Int32
    split_least: Int32
    split_most: Int32
    abreast: Int32


class DecodeSm90:
    def __init__(self, config: DecodeConfig):
        self.config = config
        self.layout = TileLayout(config)
        self.mma_type = TYPES[config.mma_dtype]

    @cute.jit
    def __call__(
        self,
        mWorkspace: cute.Tensor,
        at: Addresses | ScaledAddresses,
        strides: Strides | ScaledStrides,
        sizes: Sizes,
        scalars: Scalars,
        stream,
    ):
        config, D = self.config, self.config.head_size
        k, v = launch.cache_operands(at, strides, sizes, self.layout, config.head_bytes)
        mQ = launch.queries(at, strides, sizes, D)
        output = launch.outputs(at, strides, sizes, D)
        scales = launch.scales(at, strides, sizes, scalars.softmax_scale, scalars.softcap)
        mCuQ = cute.make_tensor(at.cu_q, cute.make_layout(sizes.batch + 1))
        lengths = launch.lengths(at, mCuQ, sizes)
        abreast = scalars.abreast if config.heads_in_line > 1 else 1
        shape = Shape(
            sizes.batch,
            sizes.kv_heads // abreast,
            sizes.group,
            sizes.group_magic,
            scalars.window_left,
            scalars.window_right,
            scalars.min_tiles,
            scalars.gap,
            scalars.min_rows,
            scalars.max_rows,
            scalars.splits,
            scalars.split_least,
            scalars.split_most,
            Int32(abreast),
            Int32(0),
        )
        source = launch.pages(at, strides, sizes)
        if const_expr(config.block_scaled):
            source = source._replace(block_scales=launch.block_scales(at, strides))
        partial = self._workspace(mWorkspace, at.counters, scalars.ctas, scalars.splits)
        mma = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                self.mma_type,
                Float32,
                (64, max(config.rows, 8), 16),
                warpgroup.OperandSource.RMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        self.kernel(mma, *k, *v, mQ, scales, lengths, shape, source, output, partial).launch(
            grid=(scalars.ctas, 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
            cooperative=COOPERATIVE,
        )

    def _workspace(
        self, mWorkspace: cute.Tensor, counters: cute.Pointer, ctas: Int32, splits: Int32
    ) -> Partial:
        """Cut the float32 workspace (op.py sizes it) into its parts."""
        rows, D = self.config.rows, self.config.head_size
        slots = ctas * cutlass.max(splits + 1, Int32(2))
        base = mWorkspace.iterator
        state = base + Int64(slots) * (rows * D)
        return Partial(
            cute.make_tensor(base, cute.make_layout((slots, rows, D), stride=(rows * D, D, 1))),
            cute.make_tensor(state, cute.make_layout((slots, rows, 2), stride=(rows * 2, 2, 1))),
            cute.make_tensor(counters, cute.make_layout(ctas)),
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
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
        partial: Partial,
    ):
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        ring, staging, smem = self._allocate()
        if tid == 0:
            for slot in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(ring.full + slot, 1)
                cute.arch.mbarrier_init(ring.empty + slot, config.release_arrivals)
            if const_expr(config.stages_queries):
                cute.arch.mbarrier_init(staging.full, 1)
                cute.arch.mbarrier_init(staging.empty, config.consumer_warps)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(atomK)
            cpasync.prefetch_descriptor(atomV)
        if const_expr(config.heads_in_line > 1):
            ctas = ctas // shape.abreast
            place = cta % shape.abreast
            cta = cta // shape.abreast
            shape = shape._replace(place=place)
        else:
            shape = shape._replace(abreast=Int32(1), place=Int32(0))
        stretch = planned_stretch(lengths, shape, cta, ctas, config.rows)
        if tid == 0:
            plan = smem.plan
            dsl.st_shared_b32x4(plan, stretch.total, stretch.ctas, stretch.item_step, cta)
            dsl.st_shared_b32x2(plan + 16, shape.place, stretch.gap)
            dsl.st_shared_b32x2(plan + 24, stretch.pieces, stretch.own)
            for which in cutlass.range_constexpr(2):
                dsl.st_shared_b32(smem.shared_items + which * (4 * SHARED_ITEM_WORDS), Int32(0))
        cute.arch.sync_threads()
        if warp >= config.consumer_warps:
            if const_expr(config.consumer_registers > 0):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == config.consumer_warps:
                producer = Producer(config, lengths, shape, source)
                k, v = TmaOperand(atomK, mCacheK), TmaOperand(atomV, mCacheV)
                producer.run(ring, k, v, stretch, mQ, staging, smem.plan, smem.shared_items)
        else:
            if const_expr(config.consumer_registers > 0):
                cute.arch.setmaxregister_increase(config.consumer_registers)
            consumer = Consumer(config, mma, shape, ring, smem, scales.softcap)
            consumer.run(mQ, staging, scales, lengths, output, partial, stretch, cta, ctas)

    def _allocate(self):
        config = self.config
        rows, D, kind = config.rows, config.head_size, self.mma_type
        warps = config.consumer_warps
        allocator = cutlass.memory.SmemAllocator()

        def array(element, count, alignment):
            return allocator.allocate_array(element, count, byte_alignment=alignment)

        ring = array(Uint8, config.stage_bytes * config.stages, 1024)
        q = array(kind, rows * D if config.queries_in_smem else 8, 1024)
        p = array(Uint8, config.exchange_bytes, 1024)
        row_max = array(Float32, warps * rows, 128)
        row_sum = array(Float32, warps * rows, 128)
        visible = array(Int32, 2 * rows, 128)
        q_scale = array(Float32, rows, 128)
        q_max = array(Int32, warps * rows, 128)
        shared_items = array(Int32, 2 * SHARED_ITEM_WORDS, 32)
        scales = array(Uint8, config.scale_table_bytes, 128) if config.block_scaled else q
        fold = array(Uint8, config.fold_bytes, 128) if config.fold_bytes else q
        plan = array(Int32, 8, 16)
        full = array(Int64, config.stages, 8)
        empty = array(Int64, config.stages, 8)
        staged, barriers = q, full
        if config.stages_queries:
            staged = array(Uint8, rows * config.staged_row_bytes, 16)
            barriers = array(Int64, 2, 8)
        staging = Staging(staged.toint(), barriers, barriers + 1)
        sQ = sP = None
        if config.uses_wgmma:
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, kind)
            q_layout = cute.tile_to_shape(atom, (rows, D), order=(0, 1))
            p_shape = (rows, TILE_TOKENS, 2 * config.step_tiles)
            p_layout = cute.tile_to_shape(atom, p_shape, order=(0, 1, 2))
            sQ = cute.make_tensor(cute.recast_ptr(q, q_layout.inner, dtype=kind), q_layout.outer)
            sP = cute.make_tensor(cute.recast_ptr(p, p_layout.inner, dtype=kind), p_layout.outer)
        tables = (p, row_max, row_sum, visible, q_scale, q_max, shared_items, scales, q, fold, plan)
        addresses = [x.toint() for x in tables]
        return Ring(ring, full, empty), staging, ConsumerSmem(*addresses, sQ, sP)
