"""Loading an item's packed query rows as the B operand of S^T = K Q^T, and its tables.

fp16, to which FP8 is converted, holds bf16's precision but not its range, so each bf16 row is then
multiplied by a power of two that brings its largest finite element into [2^14, 2^15): exact, and
undone in float32 through the row's score scale. The element order is the operand's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from cute_kernels import dsl
from cute_kernels.attention.common.tile_schedule import query_token
from cute_kernels.attention.decode_sm90.queries import scale_of_row
from cute_kernels.attention.prefill_sm90.config import CONSUMER_WARPS
from cute_kernels.attention.prefill_sm90.lane import Lane
from cute_kernels.attention.prefill_sm90.schedule import clamped_row


class QueryLoading(Lane):
    """``scales_queries``: whether bf16 queries become fp16. ``store_query_words``: 16 bytes of a
    row, in the operand's order."""

    def position_of(self, row_in_item: Int32) -> Int32:
        """Key position of a row's own token."""
        return self.item.own + query_token(self.shape, clamped_row(self.item, row_in_item))

    @cute.jit
    def publish_positions(self):
        """Table of each row's own key position."""
        if self.tid < self.config.rows:
            dsl.st_shared_b32(self.smem.position + self.tid * 4, self.position_of(self.tid))

    def _row_address(self, mQ: cute.Tensor, row_in_item: Int32) -> Int64:
        """Address of the lane's first 16 bytes of a row."""
        token, query_head = self.token_and_head(row_in_item)
        element = cute.crd2idx((token, query_head, 16 * self.j), mQ.layout)
        return mQ.iterator.toint() + Int64(element) * 2

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, base_scale: Float32):
        """Q^T in shared memory as a K-major, 128-byte-swizzled wgmma operand; scales of the rows.

        A warp takes whole blocks of 8 rows, a quad of lanes one row.
        """
        row_blocks = self.config.rows // 8
        rounds = (row_blocks + CONSUMER_WARPS - 1) // CONSUMER_WARPS
        for i in cutlass.range_constexpr(rounds):
            block = self.index + CONSUMER_WARPS * i
            if block < row_blocks:
                row = 8 * block + self.g
                self.store_query_row(mQ, base_scale, row, self.read_query_row(mQ, row))

    def read_query_row(self, mQ: cute.Tensor, row: Int32) -> list:
        """The lane's quarter of a row, 16 bytes each."""
        address = self._row_address(mQ, row)
        half_passes = self.config.head_size // 32
        return [
            dsl.ld_global_nc_b32x4(address + (unit // 2) * 128 + (unit % 2) * 16)
            for unit in range(half_passes)
        ]

    @cute.jit
    def store_query_row(self, mQ: cute.Tensor, base_scale: Float32, row: Int32, loaded):
        half_passes = self.config.head_size // 32
        scale = Float32(1.0)
        inverse = Float32(1.0)
        if const_expr(self.scales_queries and mQ.element_type is BFloat16):
            top = Int32(0)
            for unit in cutlass.range_constexpr(half_passes):
                for z in cutlass.range_constexpr(4):
                    top = dsl.max_abs_bf16x2(top, loaded[unit][z])
            for step in cutlass.range_constexpr(2):
                top = dsl.max_abs_bf16x2(top, dsl.shuffle_xor_b32(top, Int32(1 << step)))
            scale, inverse = scale_of_row(top)
        if self.j == 0:
            # pairs of rows: {scale, scale, -reference, -reference}; no reference yet
            entry = self.reference_of(row)
            dsl.st_shared_f32(entry - 8, base_scale * inverse)
            dsl.st_shared_f32(entry, Float32(0.0))
        for unit in cutlass.range_constexpr(half_passes):
            words = loaded[unit]
            if const_expr(self.scales_queries and mQ.element_type is BFloat16):
                words = [dsl.bf16x2_to_f16x2_scaled(word, scale) for word in words]
            self.store_query_words(row, unit, words)
