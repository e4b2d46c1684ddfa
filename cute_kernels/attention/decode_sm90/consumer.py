"""The consumer warpgroup: walks the CTA's stretch of tiles, one item after the other."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common.output import Output, Partial
from cute_kernels.attention.common.tile_schedule import (
    Chunk,
    Lengths,
    Sequence,
    Stretch,
    next_item,
    query_token,
    segment_at,
)
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from cute_kernels.attention.decode_sm90.epilogue import Epilogue
from cute_kernels.attention.decode_sm90.fixup import Fixup, no_item, shared_item
from cute_kernels.attention.decode_sm90.queries import QueryLoading
from cute_kernels.attention.decode_sm90.tile_math import TileMath


class Scales(NamedTuple):
    """mK, mV (batch, kv_heads) float32 descales, address 0 for 1; the softmax scale; softcap."""

    mK: cute.Tensor
    mV: cute.Tensor
    softmax_scale: Float32
    softcap: Float32


class Consumer(QueryLoading, TileMath, Epilogue, Fixup):
    @cute.jit
    def publish_visible(self, seq: Sequence, chunk: Chunk):
        """Table of the key range each row sees; rows past the chunk see nothing."""
        shape = self.shape
        if self.tid < self.config.rows:
            row = chunk.first_row + self.tid
            own = seq.used - seq.q_len + query_token(shape, row)
            low = cutlass.max(own - shape.window_left, Int32(0))
            high = cutlass.min(own + shape.window_right + 1, seq.used)
            if row >= chunk.rows_end:
                high = Int32(0)
            dsl.st_shared_b32x2(self.smem.visible + self.tid * 8, low, high)

    @cute.jit
    def run(
        self,
        mQ: cute.Tensor,
        scales: Scales,
        lengths: Lengths,
        output: Output,
        partial: Partial,
        stretch: Stretch,
        cta: Int32,
        ctas: Int32,
    ):
        """The consumer's walk over the CTA's stretch: one segment (part of an item) a turn."""
        config, shape = self.config, self.shape
        if const_expr(config.uses_wgmma):
            self.mma.set(warpgroup.Field.ACCUMULATE, True)
        acc, state = self.make_state()
        rS = cute.make_rmem_tensor((self.chains * self.row_blocks * 4,), Float32)
        rQ = cute.make_rmem_tensor((1 if config.uses_wgmma else config.head_size // 8,), Int32)
        rScale = cute.make_rmem_tensor((2,), Float32)
        if const_expr(not config.loader_only):
            # before the first tile arrives, so it costs nothing
            self.write_rows_without_keys(output, lengths, cta, ctas)
        continued = no_item()
        begun = no_item()
        done = Int32(0)
        b, item, tile = stretch.b, stretch.item, stretch.tile
        slot = Int32(0)
        phase = Int32(0)
        while done < stretch.count:
            segment = segment_at(lengths, shape, b, item, tile, stretch.count - done, config.rows)
            seq, chunk, head = segment.seq, segment.chunk, segment.head
            b = segment.b
            k_scale = Float32(1.0)
            v_scale = Float32(1.0)
            if scales.mK.iterator.toint() != 0:
                k_scale = scales.mK[b, head]
            if scales.mV.iterator.toint() != 0:
                v_scale = scales.mV[b, head]
            base_scale = scales.softmax_scale * k_scale * dsl.LOG2_E
            if const_expr(not config.loader_only):
                if const_expr(config.uses_wgmma):
                    self.load_queries_to_smem(mQ, base_scale, seq, chunk, head)
                else:
                    self.load_queries_to_registers(mQ, rQ, rScale, base_scale, seq, chunk, head)
                self.publish_visible(seq, chunk)
                self.reset(acc, state)
                self.barrier()
            # Tiles that every row sees whole need no mask; V is cleared only where a tile holds
            # tokens that no row may see.
            own_first = seq.used - seq.q_len + query_token(shape, chunk.first_row)
            own_last = seq.used - seq.q_len + query_token(shape, chunk.rows_end - 1)
            all_see_from = cutlass.max(own_last - shape.window_left, Int32(0))
            all_see_to = cutlass.min(own_first + shape.window_right + 1, seq.used)
            for t in cutlass.range(chunk.tile_begin, chunk.tile_end, unroll=1):
                k_slot = slot
                k_phase = phase
                slot = slot + 1
                if slot == config.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
                v_slot = slot
                v_phase = phase
                slot = slot + 1
                if slot == config.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
                if const_expr(config.loader_only):
                    cute.arch.mbarrier_wait(self.ring.full + k_slot, k_phase)
                    self.release(k_slot)
                    cute.arch.mbarrier_wait(self.ring.full + v_slot, v_phase)
                    self.release(v_slot)
                else:
                    first_token = t * TILE_TOKENS
                    end_token = first_token + TILE_TOKENS
                    masked = Int32(0)
                    if (first_token < all_see_from) | (end_token > all_see_to):
                        masked = Int32(1)
                    self.scores(rS, rQ, k_slot, k_phase)
                    self.scale_and_mask(rS, rScale, t, masked)
                    self.softmax(rS, acc, state)
                    cute.arch.mbarrier_wait(self.ring.full + v_slot, v_phase)
                    if (first_token < segment.low) | (end_token > seq.used):
                        self.clear_dead_values(seq, segment.low, t, v_slot)
                    self.values(acc, v_slot)
            if const_expr(not config.loader_only):
                self.reduce_sums(state)
                if segment.count == seq.tiles:
                    self.write_output(output, acc, state, v_scale, seq, chunk, head)
                else:
                    line_start = stretch.begin + done - tile
                    shared = shared_item(stretch, segment.b, item, line_start, seq.tiles)
                    slot_out = 2 * cta
                    if tile == 0:
                        slot_out = slot_out + 1
                        begun = shared
                    else:
                        continued = shared
                    self.write_partial(partial, acc, state, v_scale, chunk, slot_out)
                    self.arrive(partial, shared)
            done = done + segment.count
            tile = Int32(0)
            b, item = next_item(segment, shape)
        if const_expr(not config.loader_only):
            if continued.b >= 0:
                self.finish(output, partial, lengths, continued, cta)
            if begun.b >= 0:
                self.finish(output, partial, lengths, begun, cta)
