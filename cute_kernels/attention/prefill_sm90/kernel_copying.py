"""SM90 prefill attention over an FP8 or NVFP4 cache by way of fp16 copies: the 16-bit kernel, whose
producer's neighbours make the copies that it reads (widen_sm90/copier.py). One launch."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr

from cute_kernels import dsl_together
from cute_kernels.attention.common import launch
from cute_kernels.attention.common.launch import ScaledStrides, Sizes, Strides
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource
from cute_kernels.attention.prefill_sm90.config import PRODUCER_WARPS, PrefillConfig
from cute_kernels.attention.prefill_sm90.kernel import Addresses, Scalars
from cute_kernels.attention.prefill_sm90.kernel_16_bits import PrefillSm90For16Bits
from cute_kernels.attention.prefill_sm90.producer import PrefillProducer
from cute_kernels.attention.prefill_sm90.schedule import Item, Shape
from cute_kernels.attention.widen_sm90.config import BLOCK_TOKENS, units_per_block
from cute_kernels.attention.widen_sm90.copier import (
    Copier,
    Copying,
    Plane,
    Target,
    copied_before,
    counter_of,
    leave,
)
from cute_kernels.attention.widen_sm90.formats import ROWS

# Of a cache with block scales.
ScaledAddresses = NamedTuple(
    "ScaledAddresses",
    [
        *((name, cute.Pointer) for name in Addresses._fields),
        ("k_scale", cute.Pointer),
        ("v_scale", cute.Pointer),
    ],
)


def operand_types(config: PrefillConfig):
    """(addresses, strides) that a variant takes."""
    if ROWS[config.copies_from].planes == 2:
        return ScaledAddresses, ScaledStrides
    return Addresses, Strides


class CopyReader(PrefillProducer):
    """The producer of an item whose keys are being copied; ``copy``: its sequence's number."""

    def __init__(
        self,
        config: PrefillConfig,
        lengths: Lengths,
        source: PagedSource,
        item: Item,
        target: Target,
        kv_heads: Int32,
        copy: Int32,
    ):
        super().__init__(config, lengths, source, item)
        self.first_token = copy * target.capacity
        self.counters = counter_of(target, kv_heads, copy, item.head, Int32(0))

    @cute.jit
    def boxes_at(self, first_box: Int32):
        box = first_box + cute.arch.lane_idx()
        return Int32(0), self.item.start + box * BLOCK_TOKENS + self.first_token

    @cute.jit
    def await_tile(self, t: Int32, written: Int32) -> Int32:
        """Blocks that hold no key are not copied, so not waited for."""
        item, boxes = self.item, self.config.tile_tokens // BLOCK_TOKENS
        all_units = units_per_block(self.config.head_size)
        first = (t * boxes) & 31
        wanted = Int32((1 << boxes) - 1) << first
        if first == 0:
            written = Int32(0)
        while (written & wanted) != wanted:
            block = item.start // BLOCK_TOKENS + (t * boxes - first) + cute.arch.lane_idx()
            units = Int32(all_units)
            if block * BLOCK_TOKENS < item.used:
                units = dsl_together.ld_acquire_gpu_b32(self.counters + 4 * block)
            written = Int32(cute.arch.vote_ballot_sync(units == all_units))
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
        return written


class PrefillSm90Copying(PrefillSm90For16Bits):
    @cute.jit
    def __call__(
        self,
        mCuQ: cute.Tensor,
        at: Addresses | ScaledAddresses,
        strides: Strides | ScaledStrides,
        sizes: Sizes,
        scalars: Scalars,
        target: Target,
        stream,
    ):
        config = self.config
        k = [Plane(at.k.toint(), strides.k_page, strides.k_token, strides.k_head)]
        v = [Plane(at.v.toint(), strides.v_page, strides.v_token, strides.v_head)]
        if const_expr(ROWS[config.copies_from].planes == 2):
            scales = launch.block_scales(at, strides)
            for planes, scale in zip((k, v), scales, strict=True):
                planes.append(Plane(scale.base, scale.page, Int64(scale.token), scale.head))
        tokens, row = target.copies * target.capacity, Int64(config.head_bytes)
        copies = strides._replace(
            k_page=Int64(16), k_token=row, k_head=row * tokens,
            v_page=Int64(16), v_token=row, v_head=row * tokens,
        )  # fmt: skip
        operands = launch.cache_operands(
            at._replace(k=_pointer(target.k), v=_pointer(target.v)),
            copies,
            sizes._replace(pages=Int32(1), page_size=tokens),
            self.layout,
            config.head_bytes,
        )
        copying = Copying(tuple(k), tuple(v), target)
        self._launch(mCuQ, at, strides, sizes, scalars, stream, operands, target.capacity, copying)

    def _make_producer(
        self, lengths: Lengths, shape: Shape, source: PagedSource, item: Item, copying: Copying
    ):
        copy = copied_before(lengths, shape, item.b)
        target = copying.target
        return CopyReader(self.config, lengths, source, item, target, shape.kv_heads, copy)

    def _spare(self, lengths: Lengths, shape: Shape, source: PagedSource, copying: Copying):
        config = self.config
        kind, size, loads = config.copies_from, config.head_size, config.copy_loads
        Copier(kind, size, loads, lengths, shape, source, copying).run()
        self._leave(shape, copying)

    def _leave(self, shape: Shape, copying: Copying):
        leave(copying.target, shape.kv_heads, PRODUCER_WARPS)


def _pointer(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=16)
