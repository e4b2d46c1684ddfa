"""SM90 prefill attention over a paged FP8 (e4m3) KV cache: the kernel, and the launch of both.

Shapes: Q and O (total_q, heads, D) bf16 or fp16; K and V (pages, page_size, kv_heads, D) e4m3, or
16-bit for the kernel of kernel_16_bits.py, with any 16-byte-aligned strides and contiguous D;
page_size a multiple of the variant's ``box_tokens``. A ragged K or V (total_k, kv_heads, D) is one
page of total_k tokens.

One CTA serves items, ``rows`` packed query rows of one sequence and KV head each (schedule.py),
with a producer warp and two consumer warpgroups over tiles of 128 keys. Warpgroup h scores half h
of a tile and adds half of the head-dim rows of O^T; the probabilities cross through shared memory.
The producer brings the next item's first tiles while the last rows are written.
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
from cute_kernels.attention.common.tile_schedule import UNLIMITED, Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource, TmaOperand
from cute_kernels.attention.prefill_sm90.config import (
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    THREADS,
    TILE_TOKENS,
    PrefillConfig,
)
from cute_kernels.attention.prefill_sm90.consumer import Consumer
from cute_kernels.attention.prefill_sm90.lane import ConsumerSmem, Rings
from cute_kernels.attention.prefill_sm90.layout import make_layout
from cute_kernels.attention.prefill_sm90.mailbox import Mailbox, collect, post
from cute_kernels.attention.prefill_sm90.producer import PrefillProducer
from cute_kernels.attention.prefill_sm90.schedule import (
    Item,
    Shape,
    find_item,
    item_number,
)

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

    skip_rows: sequences of at most so many packed rows are not written. ctas: of the grid.
    """

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    skip_rows: Int32
    ctas: Int32


class PrefillSm90:
    consumer = Consumer

    def __init__(self, config: PrefillConfig):
        self.config = config
        self.layout = make_layout(config)
        self.q_type, self.mma_type = Q_TYPES[config.q_dtype], Q_TYPES[config.mma_dtype]

    def _mmas(self):
        """Of a tile's first scores, its other scores, its values: 64 x rows, A from registers."""
        config, major = self.config, OperandMajorMode.K

        def mma(columns: int) -> cute.TiledMma:
            shape, source = (64, columns, 16), warpgroup.OperandSource.RMEM
            return cute.make_tiled_mma(
                warpgroup.MmaF16BF16Op(Float16, Float32, shape, source, major, major)
            )

        return mma(config.rows), mma(config.rows), mma(config.value_rows)

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
        operands = launch.cache_operands(at, strides, sizes, self.layout, self.config.head_bytes)
        self._launch(mCuQ, at, strides, sizes, scalars, stream, operands)

    def _launch(
        self, mCuQ, at, strides, sizes, scalars, stream, operands, most_keys=UNLIMITED, copying=None
    ):
        D = self.config.head_size
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
            Int32(most_keys),
        )
        k, v = operands
        self.kernel(
            self._mmas(), *k, *v, mQ, scales, lengths, shape, source, output, copying
        ).launch(
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
        copying,
    ):
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        index = cute.arch.make_warp_uniform(tid // 32)
        rings, smem, mailbox = self._allocate()
        if tid == 0:
            cpasync.prefetch_descriptor(atomK)
            cpasync.prefetch_descriptor(atomV)
            self._init_rings(rings)
            cute.arch.mbarrier_init(mailbox.full, 1)
            cute.arch.mbarrier_init(mailbox.empty, CONSUMER_THREADS)
            self._init_consumers(smem)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if index >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if index == CONSUMER_WARPS:
                k, v = TmaOperand(atomK, mCacheK), TmaOperand(atomV, mCacheV)
                self._produce(rings, mailbox, k, v, mQ, lengths, shape, source, copying)
            else:
                self._spare(lengths, shape, source, copying)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            self._set_accumulation(mmas)
            self._consume(mmas, rings, smem, mailbox, mQ, scales, shape, output)

    @cute.jit
    def _produce(
        self,
        rings,
        mailbox: Mailbox,
        k: TmaOperand,
        v: TmaOperand,
        mQ: cute.Tensor,
        lengths: Lengths,
        shape: Shape,
        source: PagedSource,
        copying,
    ):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        done, turn, live = Int32(0), Int32(0), Int32(1)
        while live != 0:
            number = item_number(cta, ctas, turn)
            item = find_item(lengths, shape, number, config.rows, config.tile_tokens)
            post(mailbox, item, turn)
            if (item.live != 0) & (item.tiles > 0):
                producer = self._make_producer(lengths, shape, source, item, copying)
                producer.prefetch_queries(mQ, shape)
                producer.run(rings, k, v, done)
            done = done + item.tiles
            turn = turn + 1
            live = item.live
        self._leave(shape, copying)

    def _make_producer(
        self, lengths: Lengths, shape: Shape, source: PagedSource, item: Item, copying
    ):
        return PrefillProducer(self.config, lengths, source, item)

    def _spare(self, lengths: Lengths, shape: Shape, source: PagedSource, copying):
        """The work of the producer's three neighbours."""

    def _leave(self, shape: Shape, copying):
        """What the producer does last."""

    @cute.jit
    def _consume(
        self,
        mmas,
        rings,
        smem,
        mailbox: Mailbox,
        mQ: cute.Tensor,
        scales: Scales,
        shape: Shape,
        output: Output,
    ):
        done, turn, live = Int32(0), Int32(0), Int32(1)
        while live != 0:
            item = collect(mailbox, turn)
            if item.live != 0:
                consumer = self.consumer(
                    self.config, mmas, shape, item, rings, smem, scales.softcap
                )
                consumer.run(mQ, scales, output, done)
            done = done + item.tiles
            turn = turn + 1
            live = item.live

    def _init_consumers(self, smem: ConsumerSmem):
        for buffer in range(2):
            cute.arch.mbarrier_init(smem.p_full + buffer, CONSUMER_WARPS)
        for i in range(2 * CONSUMER_WARPS):
            dsl.st_shared_b32(smem.flags + 4 * i, Int32(-1))

    def _set_accumulation(self, mmas):
        begin_scores, add_scores, add_values = mmas
        begin_scores.set(warpgroup.Field.ACCUMULATE, False)
        add_scores.set(warpgroup.Field.ACCUMULATE, True)
        add_values.set(warpgroup.Field.ACCUMULATE, True)

    def _init_rings(self, rings: Rings):
        """Mbarriers of the rings. Of FP8 each warpgroup has slots of K for itself; where they share
        rows, slots of V."""
        config = self.config
        half = CONSUMER_WARPS // 2
        k_readers = half if config.converts else CONSUMER_WARPS
        v_readers = half if config.shares_rows else CONSUMER_WARPS
        for slot in range(config.k_slots):
            cute.arch.mbarrier_init(rings.k_full + slot, 1)
            cute.arch.mbarrier_init(rings.k_empty + slot, k_readers)
        for slot in range(config.v_slots):
            cute.arch.mbarrier_init(rings.v_full + slot, 1)
            cute.arch.mbarrier_init(rings.v_empty + slot, v_readers)

    def _allocate_slots(self, array) -> tuple[cute.Pointer, cute.Pointer]:
        """Of K and of V. What needs 1024-byte alignment comes first, or padding costs memory."""
        config = self.config
        k = array(Uint8, config.k_slots * config.slot_bytes, 1024)
        return k, array(Uint8, config.v_slots * config.slot_bytes, 1024)

    def _allocate_barriers(self, array, k: cute.Pointer, v: cute.Pointer) -> Rings:
        config = self.config
        k_slots, v_slots = config.k_slots, config.v_slots
        k_full, k_empty = array(Int64, k_slots, 8), array(Int64, k_slots, 8)
        v_full, v_empty = array(Int64, v_slots, 8), array(Int64, v_slots, 8)
        return Rings(k, k_full, k_empty, v, v_full, v_empty)

    def _allocate_mailbox(self, array) -> Mailbox:
        words = array(Int32, len(Item._fields), 16)
        return Mailbox(words.toint(), array(Int64, 1, 8), array(Int64, 1, 8))

    def _operand(self, pointer: cute.Pointer, layout) -> cute.Tensor:
        """Shared memory as an MMA operand."""
        pointer = cute.recast_ptr(pointer, layout.inner, dtype=self.mma_type)
        return cute.make_tensor(pointer, layout.outer)

    def _allocate(self):
        rows, D = self.config.rows, self.config.head_size
        array = shared_arrays()
        k, v = self._allocate_slots(array)
        q = array(self.mma_type, rows * D, 1024)
        p = array(self.mma_type, 2 * rows * TILE_TOKENS, 1024)
        maxima = array(Float32, CONSUMER_WARPS * rows, 16)
        reference = array(Float32, 2 * rows, 16)
        position = array(Int32, rows, 16)
        flags = array(Int32, 2 * CONSUMER_WARPS, 16)
        rings = self._allocate_barriers(array, k, v)
        p_full = array(Int64, 2, 8)
        k_major = warpgroup.make_smem_layout_atom(
            warpgroup.SmemLayoutAtomKind.K_SW128, self.mma_type
        )
        sQ = self._operand(q, cute.tile_to_shape(k_major, (rows, D), order=(0, 1)))
        p_shape = (rows, TILE_TOKENS, 2)
        sP = self._operand(p, cute.tile_to_shape(k_major, p_shape, order=(0, 1, 2)))
        tables = [x.toint() for x in (q, p, maxima, reference, position, flags)]
        return rings, ConsumerSmem(*tables, p_full, sQ, sP), self._allocate_mailbox(array)


def shared_arrays():
    """A function that cuts (element type, count, byte alignment) from shared memory."""
    allocator = cutlass.memory.SmemAllocator()

    def array(element, count: int, alignment: int) -> cute.Pointer:
        return allocator.allocate_array(element, count, byte_alignment=alignment)

    return array
