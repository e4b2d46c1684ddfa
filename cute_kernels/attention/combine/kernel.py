"""Finishes items that several CTAs computed in parts, and rows of sequences without keys.

Grid (items, rows, slices). Reads, per part, a normalised float32 row and its LSE in log2 units
(decode_sm90/epilogue.py), weighs the parts by exp2(LSE - max), adds the sink once, and writes O and
the LSE. Items that one CTA finished alone are left alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl
from cute_kernels.attention.combine.config import MAX_PARTS, CombineConfig
from cute_kernels.attention.common.output import (
    Output,
    Partial,
    finish_row,
    output_address,
    pack_output,
    sink_of_head,
    store_lse,
)
from cute_kernels.attention.common.tile_schedule import (
    Lengths,
    Shape,
    cta_of_tile,
    query_token,
)


class Combine:
    def __init__(self, config: CombineConfig):
        self.config = config

    @cute.kernel
    def kernel(
        self,
        lengths: Lengths,
        shape: Shape,
        output: Output,
        partial: Partial,
        max_chunks: Int32,
    ):
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        index, row, piece = cute.arch.block_idx()
        allocator = cutlass.memory.SmemAllocator()
        sWeight = allocator.allocate_array(Float32, MAX_PARTS, byte_alignment=16)
        sSum = allocator.allocate_array(Float32, max(config.groups, 4), byte_alignment=16)
        sPart = allocator.allocate_array(
            Float32, config.groups * config.slice_elements, byte_alignment=16
        )
        per_sequence = max_chunks * shape.kv_heads
        b = index // per_sequence
        item = index - b * per_sequence
        chunk = item // shape.kv_heads
        head = item - chunk * shape.kv_heads
        q_start = lengths.mCuQ[b]
        packed_row = chunk * config.rows + row
        if packed_row < (lengths.mCuQ[b + 1] - q_start) * shape.group:
            token = query_token(shape, packed_row)
            query_head = head * shape.group + packed_row - token * shape.group
            token = token + q_start
            cute.arch.griddepcontrol_wait()
            start = partial.mMeta[2 * b]
            tiles = partial.mMeta[2 * b + 1]
            total = partial.mMeta[2 * shape.batch]
            ctas = partial.mMeta[2 * shape.batch + 1]
            first = Int32(0)
            parts = Int32(0)
            if tiles > 0:
                start = start + item * tiles
                first = cta_of_tile(start, total, ctas)
                parts = cta_of_tile(start + tiles - 1, total, ctas) - first + 1
            if parts != 1:
                self._finish(
                    output,
                    partial,
                    sWeight,
                    sSum,
                    sPart,
                    first,
                    parts,
                    row,
                    token,
                    query_head,
                    piece,
                )

    @cute.jit
    def _finish(
        self,
        output: Output,
        partial: Partial,
        sWeight: cute.Pointer,
        sSum: cute.Pointer,
        sPart: cute.Pointer,
        first: Int32,
        parts: Int32,
        row: Int32,
        token: Int32,
        query_head: Int32,
        piece: Int32,
    ):
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        group = tid // config.slice_threads
        column = tid - group * config.slice_threads
        top = self._load_weights(partial, sWeight, first, parts, row, tid)
        reference = top
        if top == dsl.NEG_INF:
            reference = Float32(0.0)
        values, weight_sum = self._accumulate(
            partial, sWeight, first, parts, row, piece, group, column, reference
        )
        if const_expr(config.groups > 1):
            dsl.st_shared_f32x4(
                sPart.toint() + (group * config.slice_threads + column) * 16, *values
            )
            if column == 0:
                sSum[group] = weight_sum
            cute.arch.sync_threads()
        if group == 0:
            if const_expr(config.groups > 1):
                weight_sum = Float32(0.0)
                values = [Float32(0.0)] * 4
                for other in cutlass.range_constexpr(config.groups):
                    weight_sum = weight_sum + sSum[other]
                    part = dsl.ld_shared_f32x4(
                        sPart.toint() + (other * config.slice_threads + column) * 16
                    )
                    values = [values[i] + part[i] for i in range(4)]
            # The parts are normalised, so the row's sum relative to `top` is the weights' sum.
            final = finish_row(top, weight_sum, sink_of_head(output, query_head), Float32(1.0))
            x = [value * final.factor for value in values]
            element = piece * config.slice_elements + 4 * column
            dsl.st_global_b32x2(
                output_address(output, token, query_head, element),
                pack_output(output.mO, x[0], x[1]),
                pack_output(output.mO, x[2], x[3]),
            )
            if (column == 0) & (piece == 0):
                store_lse(output, token, query_head, final.lse)

    @cute.jit
    def _load_weights(
        self,
        partial: Partial,
        sWeight: cute.Pointer,
        first: Int32,
        parts: Int32,
        row: Int32,
        tid: Int32,
    ) -> Float32:
        """LSE of every part into shared memory; returns their maximum (log2 units).

        Each warp takes the maximum over all parts itself: one barrier instead of two.
        """
        lane = tid % 32
        top = Float32(dsl.NEG_INF)
        for base in cutlass.range(0, parts, 128, unroll=1):
            lse = [Float32(dsl.NEG_INF)] * 4
            for k in cutlass.range_constexpr(4):
                part = base + lane + 32 * k
                if part < parts:
                    lse[k] = partial.mLse[slot_of_part(first, part), row]
            top = dsl.fmax(dsl.fmax(dsl.fmax(lse[0], lse[1]), dsl.fmax(lse[2], lse[3])), top)
            if tid < 32:
                for k in cutlass.range_constexpr(4):
                    part = base + lane + 32 * k
                    if part < parts:
                        sWeight[part] = lse[k]
        for step in cutlass.range_constexpr(5):
            top = dsl.fmax(top, dsl.shuffle_xor_f32(top, Int32(1 << step)))
        cute.arch.sync_threads()
        return top

    @cute.jit
    def _accumulate(
        self,
        partial: Partial,
        sWeight: cute.Pointer,
        first: Int32,
        parts: Int32,
        row: Int32,
        piece: Int32,
        group: Int32,
        column: Int32,
        reference: Float32,
    ):
        """(four elements, sum of weights) over the parts of this thread's group."""
        config = self.config
        batch = 8 if config.groups >= 8 else 4
        o0 = Float32(0.0)
        o1 = Float32(0.0)
        o2 = Float32(0.0)
        o3 = Float32(0.0)
        total = Float32(0.0)
        offset = Int64(row) * config.head_size + piece * config.slice_elements + 4 * column
        base = partial.mO.iterator.toint() + offset * 4
        row_bytes = config.rows * config.head_size * 4
        for c in cutlass.range(group, parts, config.groups * batch, unroll=1):
            loaded = []
            weights = []
            for k in cutlass.range_constexpr(batch):
                part = c + k * config.groups
                weight = Float32(0.0)
                # past the last part: any part that exists, weighted 0
                source = group
                if part < parts:
                    weight = dsl.exp2(sWeight[part] - reference)
                    source = part
                weights.append(weight)
                loaded.append(
                    dsl.ld_global_f32x4(base + Int64(slot_of_part(first, source)) * row_bytes)
                )
            for k in cutlass.range_constexpr(batch):
                total = total + weights[k]
                o0 = o0 + weights[k] * loaded[k][0]
                o1 = o1 + weights[k] * loaded[k][1]
                o2 = o2 + weights[k] * loaded[k][2]
                o3 = o3 + weights[k] * loaded[k][3]
        return [o0, o1, o2, o3], total


@cute.jit
def slot_of_part(first: Int32, part: Int32) -> Int32:
    """Slot of an item's part: its first CTA begins the item there, the others continue it."""
    slot = 2 * (first + part)
    if part == 0:
        slot = slot + 1
    return slot
