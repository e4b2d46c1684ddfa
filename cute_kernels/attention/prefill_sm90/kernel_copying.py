"""SM90 prefill attention over an FP8 cache by way of fp16 copies: the 16-bit kernel, whose spare
warps make the copies that it reads (copying.py). One launch."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr

from cute_kernels.attention.common import launch
from cute_kernels.attention.common.launch import ScaledStrides, Sizes, Strides
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource
from cute_kernels.attention.prefill_sm90.config import PrefillConfig
from cute_kernels.attention.prefill_sm90.copying import (
    Copier,
    Copying,
    CopyReader,
    Plane,
    Target,
    copied_before,
    leave,
)
from cute_kernels.attention.prefill_sm90.kernel import Addresses, Scalars
from cute_kernels.attention.prefill_sm90.kernel_16_bits import PrefillSm90For16Bits
from cute_kernels.attention.prefill_sm90.schedule import Item, Shape
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
        row = Int64(config.head_bytes)
        tokens = target.copies * target.capacity
        to_head = row * tokens
        at_copies = at._replace(k=_pointer(target.k), v=_pointer(target.v))
        copies = strides._replace(
            k_page=Int64(16), k_token=row, k_head=to_head,
            v_page=Int64(16), v_token=row, v_head=to_head,
        )  # fmt: skip
        one_page = sizes._replace(pages=Int32(1), page_size=tokens)
        operands = launch.cache_operands(at_copies, copies, one_page, self.layout, row)
        k = [Plane(at.k.toint(), strides.k_page, strides.k_token, strides.k_head)]
        v = [Plane(at.v.toint(), strides.v_page, strides.v_token, strides.v_head)]
        if const_expr(ROWS[config.copies_from].planes == 2):
            scales = launch.block_scales(at, strides)
            for planes, scale in zip((k, v), scales, strict=True):
                planes.append(Plane(scale.base, scale.page, Int64(scale.token), scale.head))
        copying = Copying(tuple(k), tuple(v), target)
        self._launch(
            mCuQ, at, strides, sizes, scalars, stream, operands, target.capacity, copying
        )

    def _make_producer(
        self, lengths: Lengths, shape: Shape, source: PagedSource, item: Item, copying: Copying
    ):
        copy = copied_before(lengths, shape, item.b)
        return CopyReader(self.config, lengths, source, item, copying, shape.kv_heads, copy)

    def _leave(self, shape: Shape, copying: Copying):
        leave(copying.target, shape.kv_heads)

    def _spare(self, lengths: Lengths, shape: Shape, source: PagedSource, copying: Copying):
        Copier(self.config, lengths, shape, source, copying).run()
        self._leave(shape, copying)


def _pointer(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=16)
