"""What all CTAs read first comes to L2 while they work out who takes which tile.

Otherwise table entries, queries and descales are asked for one after the other, each behind what
says which of them, and all behind the first tiles' loads.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl_store
from cute_kernels.attention.common.launch import Scales
from cute_kernels.attention.decode_sm90.config import LINE_BYTES
from cute_kernels.attention.decode_sm90.producer import PagedSource

_WARP = 32


@cute.jit
def _fetch_line(tensor: cute.Tensor, element_bytes: Int32, line: Int32):
    """Line ``line`` of the memory from a tensor's first to its last element, if it has so many."""
    begin = tensor.iterator.toint()
    shape = tensor.layout.shape
    last = tuple(shape[i] - 1 for i in range(cute.rank(tensor)))
    end = begin + Int64(cute.crd2idx(last, tensor.layout)) * element_bytes
    at = begin + Int64(line) * LINE_BYTES
    if (begin != 0) & (at <= end):
        dsl_store.prefetch_l2(at)


@cute.jit
def fetch_what_is_read_first(
    mQ: cute.Tensor, scales: Scales, source: PagedSource, tid: Int32, cta: Int32, ctas: Int32
):
    """One line a thread of the consumers' last three warps (the first one sets up barriers), dealt
    over the CTAs: up to 64 a CTA of the queries, 30 of the table, one of each kind of descales."""
    lane = tid % _WARP
    if tid >= _WARP:
        if tid < 3 * _WARP:
            _fetch_line(mQ, Int32(2), (tid - _WARP) * ctas + cta)
        elif tid < 4 * _WARP - 2:
            _fetch_line(source.mTable, Int32(4), lane * ctas + cta)
        elif tid == 4 * _WARP - 2:
            _fetch_line(scales.mK, Int32(4), cta)
        elif tid == 4 * _WARP - 1:
            _fetch_line(scales.mV, Int32(4), cta)
