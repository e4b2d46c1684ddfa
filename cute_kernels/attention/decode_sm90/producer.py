"""The producer warp: brings K and V tiles of the CTA's stretch into the ring by TMA."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels import dsl, dsl_nvfp4
from cute_kernels.attention.common.tile_schedule import (
    Lengths,
    Segment,
    Shape,
    Stretch,
    after_segment,
    segment_at,
)
from cute_kernels.attention.decode_sm90.barriers import NamedBarrier
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS, DecodeConfig
from cute_kernels.attention.decode_sm90.layout import TileLayout, swizzle_bits
from cute_kernels.attention.decode_sm90.shared_items import open_item
from cute_kernels.attention.decode_sm90.staging import Staging, copy_queries
from cute_kernels.formats import NVFP4_GROUP

# Each byte of the cache is read once: L2 should drop it first (createpolicy evict_first).
EVICT_FIRST = 0x12F0000000000000


class BlockScales(NamedTuple):
    """K's or V's of a block-scaled cache: address, and strides in bytes; groups are contiguous."""

    base: Int64
    page: Int64
    token: Int32
    head: Int64


class ScalePiece(NamedTuple):
    """What a lane copies of a tile's scales in one go: of which token, and how much of it (0 for a
    token that no row may see)."""

    page: Int32
    in_page: Int32
    live_bytes: Int32


class PagedSource(NamedTuple):
    """Where tokens lie. mTable (batch, width) int32; ``paged`` 0 means one run of tokens (mCuK).

    block_scales: K's and V's of a block-scaled cache.
    """

    mTable: cute.Tensor
    table_width: Int32
    page_size: Int32
    paged: Int32
    block_scales: tuple[BlockScales, BlockScales] | None = None


class TmaOperand(NamedTuple):
    """K or V: the copy atom, and the cache as (row bytes, tokens, blocks, heads, pages)."""

    atom: cute.CopyAtom
    mCache: cute.Tensor


class Ring(NamedTuple):
    """Slots with their barriers: ``full`` (the bytes of bulk copies; lanes' copies of block scales
    count themselves in), ``empty`` (consumers)."""

    base: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class Producer:
    cache_policy = EVICT_FIRST

    def __init__(self, config: DecodeConfig, lengths: Lengths, shape: Shape, source: PagedSource):
        self.config = config
        self.layout = TileLayout(config)
        self.lengths, self.shape, self.source = lengths, shape, source

    def ring_boxes(self, base: cute.Pointer, slots: int, slot_bytes: int) -> cute.Tensor:
        """A ring as (elements of a box, boxes of a slot, slots)."""
        layout = self.layout
        swizzle = cute.make_swizzle(swizzle_bits(layout.row_bytes), 4, 3)
        tile = cute.make_layout(
            (layout.row_bytes, layout.box_tokens, layout.blocks, layout.boxes, slots),
            stride=(1, layout.row_bytes, layout.block_bytes, layout.box_bytes, slot_bytes),
        )
        pointer = cute.recast_ptr(base, swizzle, dtype=Uint8)
        return cute.group_modes(cute.make_tensor(pointer, tile), 0, 3)

    @cute.jit
    def load_box(
        self,
        operand: TmaOperand,
        sBox: cute.Tensor,
        token: Int32,
        head: Int32,
        page: Int32,
        full: cute.Pointer,
        block: cutlass.Constexpr = 0,
    ):
        """Tokens from ``token`` on, column blocks from ``block`` on."""
        layout = self.layout
        box = (layout.row_bytes, layout.box_tokens, layout.blocks)
        gPage = cute.domain_offset((0, token, block), operand.mCache[None, None, None, head, page])
        gBox = cute.local_tile(gPage, box, (0, 0, 0))
        s, g = cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sBox, 0, 1),
            cute.group_modes(gBox, 0, 3),
        )
        cute.copy(operand.atom, g, s, tma_bar_ptr=full, cache_policy=Int64(self.cache_policy))

    @cute.jit
    def scale_pieces(self, boxes, segment, tile: Int32):
        """The lane's pieces of a tile's block scales.

        Copies of a token's scales, not TMA boxes: in a page with the heads of a token side by side
        a row is as short as 4 bytes. Lanes take neighbouring pieces. Of tokens that no row may see
        the copy writes zeros: a NaN among those scales must not reach an MMA, and with a scale of
        zero K and V are zeros too.
        """
        config = self.config
        size, lanes = config.scale_piece
        tokens = 32 // lanes
        lane = cute.arch.lane_idx()
        pieces = []
        for i in cutlass.range_constexpr(TILE_TOKENS // tokens):
            in_tile = i * tokens + lane // lanes
            page, in_page = boxes[i * tokens // config.box_tokens]
            if const_expr(config.box_tokens < tokens):
                other = boxes[i * tokens // config.box_tokens + 1]
                second = lane // lanes >= config.box_tokens
                page = cutlass.select_(second, other[0], page)
                in_page = cutlass.select_(second, other[1], in_page)
            token = tile * TILE_TOKENS + in_tile
            live = Int32(size)
            if (token < segment.low) | (token >= segment.seq.used):
                live = Int32(0)
            pieces.append(ScalePiece(page, in_page + (in_tile & (config.box_tokens - 1)), live))
        return pieces

    @cute.jit
    def copy_scales(
        self, scales: BlockScales, head: Int32, ring: Ring, tile: Int32, full: cute.Pointer, pieces
    ):
        """A tile's block scales, by all lanes. ``full`` waits for them: before anyone arrives there
        this must be done, and the warp be in step."""
        config = self.config
        size, lanes = config.scale_piece
        lane = cute.arch.lane_idx()
        first = scales.base + Int64(head) * scales.head + (lane % lanes) * size
        shared = self.scales_in_ring(ring, tile) + lane * size
        for i in cutlass.range_constexpr(len(pieces)):
            piece = pieces[i]
            at = first + Int64(piece.page) * scales.page + Int64(piece.in_page) * scales.token
            dsl_nvfp4.copy_async_or_zero(shared + i * 32 * size, at, size, piece.live_bytes)
        dsl_nvfp4.arrive_after_copies(full.toint())

    def scales_in_ring(self, ring: Ring, tile: Int32) -> Int32:
        return ring.base.toint() + tile * self.config.tile_bytes + self.config.data_bytes

    @cute.jit
    def scales_are_whole(self) -> Int32:
        """Whether a tile's block scales of a head are one run of bytes that a bulk copy can take:
        pages with the scales of each head together. The scales of dead tokens come along then."""
        config = self.config
        whole = Int32(0)
        if const_expr(self.layout.boxes == 1):
            k, v = self.source.block_scales
            unaligned = k.base | k.page | k.head | v.base | v.page | v.head
            row = config.head_size // NVFP4_GROUP
            if (k.token == row) & (v.token == row) & ((unaligned & 15) == 0):
                whole = self.source.paged
        return whole

    @cute.jit
    def begin_slot(
        self, ring: Ring, slot: Int32, operands, whole: Int32, boxes, segment, tile: Int32
    ):
        """Say what the slot's ``full`` barrier waits for, and load block scales piece by piece if
        they are not whole."""
        config, full = self.config, ring.full + slot
        count = len(operands)
        expected = Int32(count * config.data_bytes)
        if const_expr(config.block_scaled):
            if whole != 0:
                expected = Int32(count * config.tile_bytes)
            else:
                pieces = self.scale_pieces(boxes, segment, tile)
                for operand in operands:
                    scales = self.source.block_scales[operand]
                    to = count * slot + operand if const_expr(count > 1) else slot
                    self.copy_scales(scales, segment.head, ring, to, full, pieces)
                cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, expected)

    def boxes_from(self, page: Int32, in_page: Int32, ahead: Int32):
        """(page, first token in it) of each box of a tile: of box ``ahead`` and those behind it,
        from the lanes that have looked them up."""
        lanes = [(ahead + i) & 31 for i in range(self.layout.boxes)]
        return [
            (dsl.shuffle_from_lane(page, lane), dsl.shuffle_from_lane(in_page, lane))
            for lane in lanes
        ]

    @cute.jit
    def look_up(self, segment: Segment, tile: Int32):
        """(page, first token in it) of the lane's box, of the 32 from a tile on."""
        config, source = self.config, self.source
        # A box without live tokens (past the end, or before the window) takes the nearest live one
        # instead: its own entry may hold anything, and its page may be freed.
        box = tile * self.layout.boxes + cute.arch.lane_idx()
        token = cutlass.max(box * config.box_tokens, segment.low)
        token = cutlass.min(token, segment.seq.used - 1)
        index = dsl.quotient(token, source.page_size)
        in_page = (token - index * source.page_size) & -config.box_tokens
        page = Int32(0)
        if source.paged != 0:
            page = source.mTable[segment.b, cutlass.min(index, source.table_width - 1)]
        else:
            in_page = self.lengths.mCuK[segment.b] + box * config.box_tokens
        return page, in_page

    @cute.jit
    def run(
        self,
        ring: Ring,
        k: TmaOperand,
        v: TmaOperand,
        stretch: Stretch,
        mQ: cute.Tensor,
        staging: Staging,
        plan_at: Int32,
        entries_at: Int32,
    ):
        config, layout, shape, source = self.config, self.layout, self.shape, self.source
        operands_a_slot = 2 if const_expr(config.paired) else 1
        sBoxes = self.ring_boxes(ring.base, operands_a_slot * config.stages, config.tile_bytes)
        whole = Int32(0)
        if const_expr(config.block_scaled):
            whole = self.scales_are_whole()
        line = stretch.begin + stretch.skip
        first_line = line
        end = stretch.begin + stretch.count
        b, item, tile = stretch.b, stretch.item, stretch.tile
        slot = Int32(0)
        phase = Int32(1)
        items = Int32(0)
        fresh = Int32(1)
        while line < end:
            segment = segment_at(self.lengths, shape, b, item, tile, end - line, config.rows)
            b = segment.b
            if const_expr(config.block_scaled):
                first = [
                    scales.base + Int64(segment.head) * scales.head
                    for scales in source.block_scales
                ]
            ahead = Int32(0)
            tile_end = segment.chunk.tile_end
            page, in_page = self.look_up(segment, segment.chunk.tile_begin)
            if const_expr(config.narrow):
                if fresh != 0:
                    open_item(
                        config, shape, plan_at, entries_at, segment, line - tile, tile, end - line
                    )
            if const_expr(config.stages_queries):
                # While the table's entries are on their way.
                if fresh != 0:
                    copy_queries(config, staging, mQ, shape, segment, (items & 1) ^ 1)
                    items = items + 1
            elif const_expr(config.asks_first):
                if line == first_line:
                    # Consumers' loads of the first queries, or they would wait for all tiles.
                    cute.arch.sync_warp()
                    cute.arch.barrier(
                        barrier_id=int(NamedBarrier.ASKED),
                        number_of_threads=config.consumer_threads + 32,
                    )
            for t in cutlass.range(segment.chunk.tile_begin, tile_end, config.warpgroups, unroll=1):
                if ((ahead & 31) == 0) & (ahead > 0):
                    page, in_page = self.look_up(segment, t)
                box_of_step = ahead
                boxes_of_tile = []
                for _ in cutlass.range_constexpr(config.warpgroups):
                    boxes_of_tile.append(self.boxes_from(page, in_page, ahead))
                    ahead = ahead + layout.boxes
                # Of a step's tiles first all keys, then the values: as the consumers ask for them.
                for operand in cutlass.range_constexpr(2):
                    begins = const_expr(operand == 0 or not config.paired)
                    ends = const_expr(operand == 1 or not config.paired)
                    for z in cutlass.range_constexpr(config.warpgroups):
                        boxes = boxes_of_tile[z]
                        # Beside block scales it has no registers to keep those of two tiles.
                        if const_expr(config.block_scaled and config.warpgroups > 1):
                            number = box_of_step + z * layout.boxes
                            boxes = self.boxes_from(page, in_page, number)
                        live = Int32(1)
                        if const_expr(z > 0):
                            if t + z >= tile_end:
                                live = Int32(0)
                        if live != 0:
                            if const_expr(begins):
                                cute.arch.mbarrier_wait(ring.empty + slot, phase)
                                operands = (0, 1) if const_expr(config.paired) else (operand,)
                                self.begin_slot(ring, slot, operands, whole, boxes, segment, t + z)
                            in_ring = operands_a_slot * slot + (operand if config.paired else 0)
                            for i in cutlass.range_constexpr(layout.boxes):
                                self.load_box(
                                    k if const_expr(operand == 0) else v,
                                    sBoxes[None, i, in_ring],
                                    boxes[i][1],
                                    segment.head,
                                    boxes[i][0],
                                    ring.full + slot,
                                )
                            if const_expr(config.block_scaled):
                                if whole != 0:
                                    scales = source.block_scales[operand]
                                    at = first[operand] + Int64(boxes[0][0]) * scales.page
                                    at = at + Int64(boxes[0][1]) * scales.token
                                    to = self.scales_in_ring(ring, in_ring)
                                    with cute.arch.elect_one():
                                        dsl_nvfp4.copy_bulk(
                                            to, at, config.scale_bytes, (ring.full + slot).toint()
                                        )
                            if const_expr(ends):
                                slot = slot + 1
                                if slot == config.stages:
                                    slot = Int32(0)
                                    phase = phase ^ 1
            line = line + segment.count
            if line < end:
                b, item, tile = after_segment(segment, shape, tile, stretch.item_step)
                fresh = Int32(0)
                if tile == 0:
                    fresh = Int32(1)
                    line = line + stretch.gap
        if const_expr(config.block_scaled):
            dsl_nvfp4.wait_for_copies()
