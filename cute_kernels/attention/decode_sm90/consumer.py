"""The consumer warpgroup: walks the CTA's stretch of tiles, one item after the other."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common.launch import Scales, descales_of
from cute_kernels.attention.common.output import Output, Partial
from cute_kernels.attention.common.tile_schedule import (
    Chunk,
    Lengths,
    Sequence,
    Stretch,
    after_segment,
    query_token,
    segment_at,
    split_tiles,
)
from cute_kernels.attention.decode_sm90.barriers import NamedBarrier
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from cute_kernels.attention.decode_sm90.epilogue import Epilogue
from cute_kernels.attention.decode_sm90.fixup import Fixup
from cute_kernels.attention.decode_sm90.parts import slot_to_write
from cute_kernels.attention.decode_sm90.queries import QueryLoading
from cute_kernels.attention.decode_sm90.shared_items import open_item
from cute_kernels.attention.decode_sm90.staging import Staging
from cute_kernels.attention.decode_sm90.warps_apart import OwnTile, WarpsApart


class Position(NamedTuple):
    """A ring slot, and the phase of its ``full`` barrier that says the tile has arrived."""

    slot: Int32
    phase: Int32


def either(condition, a: Position, b: Position) -> Position:
    """a where the condition holds, else b."""
    return Position(*[cutlass.select_(condition, *pair) for pair in zip(a, b, strict=True)])


class TileOfStep(NamedTuple):
    """One tile of a step: its index, whether the step has it, and where K and V are."""

    index: Int32
    live: Int32
    k: Position
    v: Position


class View(NamedTuple):
    """Keys [low, high) that every row of the chunk sees: tiles inside need no mask."""

    low: Int32
    high: Int32


class Consumer(QueryLoading, WarpsApart, Epilogue, Fixup):
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

    def after(self, at: Position) -> Position:
        """The ring position behind ``at``."""
        slot = at.slot + 1
        wrapped = slot == self.config.stages
        return Position(cutlass.select_(wrapped, Int32(0), slot), at.phase ^ cutlass.Int32(wrapped))

    @cute.jit
    def discard(self, at: Position):
        cute.arch.mbarrier_wait(self.ring.full + at.slot, at.phase)
        self.release(at.slot)

    @cute.jit
    def tiles_of_step(self, first: Int32, tile_end: Int32, at: Position):
        """The tiles of the step that begins with tile ``first``, and the ring's position behind it.

        Two warpgroups find the keys of both tiles first, then the values (producer.py)."""
        config = self.config
        if const_expr(config.warpgroups > 1):
            other = self.after(at)
            live = cutlass.Int32(first + 1 < tile_end)
            v = either(live != 0, self.after(other), other)
            v_other = self.after(v)
            tiles = [
                TileOfStep(first, Int32(1), at, v),
                TileOfStep(first + 1, live, other, v_other),
            ]
            at = either(live != 0, self.after(v_other), v_other)
        else:
            tiles = []
            for i in cutlass.range_constexpr(config.step_tiles):
                v = at if const_expr(config.paired) else self.after(at)
                # the last step may have one tile less
                live = Int32(1)
                if const_expr(i > 0):
                    if first + i >= tile_end:
                        live = Int32(0)
                tiles.append(TileOfStep(first + i, live, at, v))
                at = either(live != 0, self.after(v), at)
        return tiles, at

    def tiles_of_warp(self, tiles):
        """Those of a step's tiles that the warp scores: all, or its warpgroup's."""
        if self.config.warpgroups == 1:
            return tiles
        a, b = tiles
        first = self.own_tile == 0
        k, v = either(first, a.k, b.k), either(first, a.v, b.v)
        index, live = [cutlass.select_(first, *pair) for pair in zip(a[:2], b[:2], strict=True)]
        return [TileOfStep(index, live, k, v)]

    def view_of(self, seq: Sequence, chunk: Chunk) -> View:
        own = seq.used - seq.q_len
        own_first = own + query_token(self.shape, chunk.first_row)
        own_last = own + query_token(self.shape, chunk.rows_end - 1)
        return View(
            cutlass.max(own_last - self.shape.window_left, Int32(0)),
            cutlass.min(own_first + self.shape.window_right + 1, seq.used),
        )

    @cute.jit
    def score_tile(
        self, rS: cute.Tensor, rQ: cute.Tensor, rScale: cute.Tensor, tile: TileOfStep, view: View
    ):
        """Masked log2-domain scores of one tile, -inf where the step lacks it."""
        if tile.live != 0:
            first_token = tile.index * TILE_TOKENS
            masked = Int32(0)
            if (first_token < view.low) | (first_token + TILE_TOKENS > view.high):
                masked = Int32(1)
            self.scores(rS, rQ, tile.k.slot, tile.k.phase)
            self.scale_and_mask(rS, rScale, tile.index, masked)
        else:
            for i in cutlass.range_constexpr(4 * self.row_blocks):
                rS[i] = Float32(dsl.NEG_INF)
            if const_expr(self.config.uses_wgmma):
                for i in cutlass.range_constexpr(2 * self.row_blocks):
                    rScale[i] = Float32(1.0)

    @cute.jit
    def prepare_values(self, tile: TileOfStep, which: cutlass.Constexpr, seq: Sequence, low: Int32):
        """What a block-scaled cache's V needs before the softmax, whose latency it fills."""
        if tile.live != 0:
            if const_expr(not self.config.paired):
                cute.arch.mbarrier_wait(self.ring.full + tile.v.slot, tile.v.phase)
            kept = [Int32(-1), Int32(-1)]
            first_token = tile.index * TILE_TOKENS
            if (first_token < low) | (first_token + TILE_TOKENS > seq.used):
                for z in cutlass.range_constexpr(2):
                    token = first_token + self.kv.first_token() + z
                    if (token < low) | (token >= seq.used):
                        kept[z] = Int32(0)
                # Keeps the block a branch: it would be issued for every tile, predicated off.
                cute.arch.sync_warp()
            self.kv.prepare_values(self.tile_in_ring(tile.v.slot, 1), which, kept)

    @cute.jit
    def add_values(
        self,
        acc: cute.Tensor,
        tile: TileOfStep,
        which: cutlass.Constexpr,
        buffer: Int32,
        seq: Sequence,
        low: Int32,
    ):
        if tile.live != 0:
            if const_expr(not self.config.block_scaled):
                cute.arch.mbarrier_wait(self.ring.full + tile.v.slot, tile.v.phase)
                first_token = tile.index * TILE_TOKENS
                if (first_token < low) | (first_token + TILE_TOKENS > seq.used):
                    self.clear_dead_values(seq, low, tile.index, tile.v.slot)
            self.values(acc, tile.v.slot, buffer * self.config.step_tiles + which, which)

    @cute.jit
    def run(
        self,
        mQ: cute.Tensor,
        staging: Staging,
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
        lags = self.make_lags() if config.warps_apart else None
        scored = range(config.step_tiles // config.warpgroups)
        scores = [
            cute.make_rmem_tensor((self.chains * self.row_blocks * 4,), Float32) for _ in scored
        ]
        rQ = cute.make_rmem_tensor((1 if config.queries_in_smem else config.head_size // 8,), Int32)
        rScale = cute.make_rmem_tensor((2,), Float32)
        row_scales = None
        if const_expr(config.uses_wgmma):
            row_scales = [cute.make_rmem_tensor((2 * self.row_blocks,), Float32) for _ in scored]
        if const_expr(not config.loader_only):
            # before the first tile arrives, so it costs nothing
            self.write_rows_without_keys(output, lengths, cta, ctas)
        at = stretch.begin + stretch.skip
        first = at
        end = stretch.begin + stretch.count
        b, item, tile = stretch.b, stretch.item, stretch.tile
        started = tile
        slot = Int32(0)
        phase = Int32(0)
        offset = Int32(0)
        buffer = Int32(0)
        items = Int32(0)
        while at < end:
            if const_expr(config.heads_in_line > 1):
                shape = shape._replace(place=self.plan().place)
            segment = segment_at(lengths, shape, b, item, tile, end - at, config.rows)
            seq, chunk, head = segment.seq, segment.chunk, segment.head
            b = segment.b
            if const_expr(not config.loader_only):
                # An item's next split finds them there.
                if tile == started:
                    if const_expr(not config.stages_queries):
                        # Before anything that waits: soon the tiles' loads fill all queues to DRAM.
                        queries = self.fetch_queries(mQ, seq, chunk, head)
                        if const_expr(config.asks_first):
                            if at == first:
                                cute.arch.barrier_arrive(
                                    barrier_id=int(NamedBarrier.ASKED),
                                    number_of_threads=config.consumer_threads + 32,
                                )
                    k_scale, _ = descales_of(scales, b, head)
                    base_scale = scales.softmax_scale * k_scale * (dsl.LOG2_E * self.kv.magnitude)
                    self.publish_visible(seq, chunk)
                    if const_expr(not config.narrow):
                        if self.warp == config.consumer_warps - 1:
                            # While the queries are on their way.
                            open_item(
                                config, shape, self.smem.plan, self.smem.shared_items,
                                segment, at - tile, tile, end - at,
                            )  # fmt: skip
                    if const_expr(config.stages_queries):
                        queries = self.staged_queries(staging, items & 1)
                        items = items + 1
                    if const_expr(config.queries_in_smem):
                        self.keep_queries_in_smem(mQ, queries, base_scale)
                    else:
                        self.keep_queries_in_registers(mQ, queries, rQ, rScale, base_scale)
                self.reset(acc, state)
                self.barrier()
            _, v_scale = descales_of(scales, b, head)
            if const_expr(config.block_scaled):
                v_scale = v_scale * self.kv.magnitude
            view = self.view_of(seq, chunk)
            if const_expr(config.warps_apart):
                self.open_rows(state, lags)
                plain_from, plain = self.plain_tiles(view.low, view.high)
            for t in cutlass.range(chunk.tile_begin, chunk.tile_end, config.step_tiles, unroll=1):
                if const_expr(config.warps_apart and not config.loader_only):
                    own = OwnTile(t, slot, phase, offset, plain_from, plain, segment.low, seq.used)
                    p, v = self.own_probabilities(scores[0], rQ, rScale, acc, state, lags, own)
                    self.own_values(acc, own, p, v)
                    slot, phase = self.after(Position(slot, phase))
                    offset = cutlass.select_(slot == 0, Int32(0), offset + config.stage_bytes)
                else:
                    tiles, at_ring = self.tiles_of_step(t, chunk.tile_end, Position(slot, phase))
                    slot, phase = at_ring
                    if const_expr(config.loader_only):
                        for i in cutlass.range_constexpr(config.step_tiles):
                            if tiles[i].live != 0:
                                self.discard(tiles[i].k)
                                if const_expr(not config.paired):
                                    self.discard(tiles[i].v)
                    else:
                        own = self.tiles_of_warp(tiles)
                        for i in cutlass.range_constexpr(len(own)):
                            scale = rScale if const_expr(row_scales is None) else row_scales[i]
                            self.score_tile(scores[i], rQ, scale, own[i], view)
                        if const_expr(config.block_scaled):
                            for i in cutlass.range_constexpr(config.step_tiles):
                                self.prepare_values(tiles[i], i, seq, segment.low)
                        self.softmax(scores, row_scales, acc, state, buffer)
                        for i in cutlass.range_constexpr(config.step_tiles):
                            self.add_values(acc, tiles[i], i, buffer, seq, segment.low)
                        buffer = buffer ^ 1
            if const_expr(not config.loader_only):
                if const_expr(config.values_overlap):
                    warpgroup.wait_group(0)
                if const_expr(config.warps_apart):
                    self.join_warps(acc, state, lags)
                self.reduce_sums(state)
                self.kv.pair_outputs(acc, self.row_blocks)
                line_start = at - tile
                ends = tile + segment.count == seq.tiles
                split = Int32(0)
                if shape.splits != 0:
                    split = dsl.quotient(tile, split_tiles(shape, seq.tiles))
                plan = self.plan()
                parts = self.parts_of_place(partial, plan)
                slot_of_part = slot_to_write(shape, plan, line_start, started, split)
                if (shape.splits != 0) & (started == 0) & (tile > 0):
                    if const_expr(config.fold_bytes > 0):
                        self.fold_kept(acc, state, v_scale)
                    else:
                        unfinished = slot_of_part + shape.splits
                        self.fold_into_registers(parts, acc, state, v_scale, chunk, unfinished)
                    v_scale = Float32(1.0)
                goes_on = (started == 0) & (at + segment.count < end)
                if ends & (started == 0):
                    self.write_output(output, acc, state, v_scale, seq, chunk, head)
                elif goes_on & (config.fold_bytes > 0):
                    self.keep_fold(acc, state, v_scale)
                else:
                    if goes_on:
                        slot_of_part = slot_of_part + shape.splits
                    self.write_partial(parts, acc, state, v_scale, chunk, slot_of_part)
                    if ends | (at + segment.count >= end):
                        self.arrive(parts, started)
            at = at + segment.count
            if at < end:
                b, item, tile = after_segment(segment, shape, tile, self.plan().item_step)
                if tile == 0:
                    started = Int32(0)
                    at = at + self.plan().gap
        if const_expr(not config.loader_only):
            if self.plan().pieces != 1:
                # The entries are there.
                self.barrier()
                parts = self.parts_of_place(partial, self.plan())
                for which in cutlass.range(2, unroll=1):
                    self.finish(output, parts, which)
