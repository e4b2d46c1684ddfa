"""The producer warp: brings the item's K and V tiles into their rings by TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.attention.common.tile_schedule import Lengths
from cute_kernels.attention.decode_sm90.producer import PagedSource, Producer, TmaOperand
from cute_kernels.attention.prefill_sm90.config import PrefillConfig
from cute_kernels.attention.prefill_sm90.lane import Rings
from cute_kernels.attention.prefill_sm90.layout import make_layout
from cute_kernels.attention.prefill_sm90.schedule import Item, Shape, token_and_head

# CTAs beside each other read the same pages: L2 treats them as any data (createpolicy).
EVICT_NORMAL = 0x1000000000000000
L2_LINE = 128


class PrefillProducer(Producer):
    cache_policy = EVICT_NORMAL

    def __init__(self, config: PrefillConfig, lengths: Lengths, source: PagedSource, item: Item):
        self.config, self.layout = config, make_layout(config)
        self.lengths, self.source, self.item = lengths, source, item

    @cute.jit
    def load_slot(
        self,
        operand: TmaOperand,
        sBoxes: cute.Tensor,
        boxes,
        slot: Int32,
        phase: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        first_column: cutlass.Constexpr,
    ):
        """Boxes, (page, token in page) each, into a ring slot."""
        cute.arch.mbarrier_wait(empty + slot, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.config.slot_bytes)
        layout = self.layout
        for column in cutlass.range_constexpr(layout.columns):
            for i in cutlass.range_constexpr(layout.token_boxes):
                page, in_page = boxes[i]
                sBox = sBoxes[None, column * layout.token_boxes + i, slot]
                block = first_column + column
                self.load_box(operand, sBox, in_page, self.item.head, page, full + slot, block)

    @cute.jit
    def boxes_at(self, first_box: Int32):
        """(page, token in page) of box first_box + lane.

        A box without live tokens (past the end, or before the window) takes the nearest live one
        instead: its own entry may hold anything, and its page may be freed.
        """
        config, item, source = self.config, self.item, self.source
        box = first_box + cute.arch.lane_idx()
        token = item.start + box * config.box_tokens
        page = Int32(0)
        in_page = token
        if source.paged != 0:
            token = cutlass.min(cutlass.max(token, item.low), item.used - 1)
            index = token // source.page_size
            in_page = (token - index * source.page_size) & -config.box_tokens
            page = source.mTable[item.b, cutlass.min(index, source.table_width - 1)]
        else:
            in_page = token + self.lengths.mCuK[item.b]
        return page, in_page

    @cute.jit
    def prefetch_queries(self, mQ: cute.Tensor, shape: Shape):
        """The item's rows to L2, while the consumers are still at the item before."""
        rows, lines = self.config.rows, self.config.head_size * 2 // L2_LINE
        for begin in cutlass.range(0, rows * lines, 32, unroll=1):
            line = begin + cute.arch.lane_idx()
            token, head = token_and_head(self.item, shape, line // lines)
            element = cute.crd2idx((token, head, (line % lines) * (L2_LINE // 2)), mQ.layout)
            dsl_store.prefetch_l2(mQ.iterator.toint() + 2 * Int64(element))

    @cute.jit
    def run(self, rings: Rings, k: TmaOperand, v: TmaOperand, done: Int32):
        """The item's tiles; ``done``: tiles that have gone through the rings before."""
        config, item = self.config, self.item
        slots = config.slots_per_tile
        sK = self.ring_boxes(rings.k, config.k_slots, config.slot_bytes)
        sV = self.ring_boxes(rings.v, config.v_slots, config.slot_bytes)
        boxes_per_tile = config.tile_tokens // config.box_tokens
        tiles_per_read = 32 // boxes_per_tile
        page = Int32(0)
        in_page = Int32(0)
        old_page = Int32(0)
        old_in_page = Int32(0)
        written = Int32(0)
        # V follows one tile behind K, as the consumers want them.
        for t in cutlass.range(0, item.tiles + 1, unroll=1):
            if t % tiles_per_read == 0:
                old_page = page
                old_in_page = in_page
                page, in_page = self.boxes_at(t * boxes_per_tile)
            if t < item.tiles:
                written = self.await_tile(t, written)
                for i in cutlass.range_constexpr(slots):
                    first_box, column = self._part(t, i)
                    boxes = self._boxes(page, in_page, first_box)
                    number = slots * (done + t) + i
                    slot, phase = number % config.k_slots, ((number // config.k_slots) & 1) ^ 1
                    self.load_slot(k, sK, boxes, slot, phase, rings.k_full, rings.k_empty, column)
            if t > 0:
                v_page = page
                v_in_page = in_page
                if t % tiles_per_read == 0:
                    v_page = old_page
                    v_in_page = old_in_page
                for i in cutlass.range_constexpr(slots):
                    first_box, column = self._part(t - 1, i)
                    boxes = self._boxes(v_page, v_in_page, first_box)
                    number = slots * (done + t - 1) + i
                    slot, phase = number % config.v_slots, ((number // config.v_slots) & 1) ^ 1
                    self.load_slot(v, sV, boxes, slot, phase, rings.v_full, rings.v_empty, column)

    def await_tile(self, t: Int32, written: Int32) -> Int32:
        """Until a tile can be read: the cache can at once."""
        return written

    def _part(self, t: Int32, i: int):
        """First box and first column block of slot i of a tile."""
        config, layout = self.config, self.layout
        first_box = t * (config.tile_tokens // config.box_tokens)
        if config.converts:
            return first_box + i * layout.token_boxes, 0
        return first_box, i * layout.columns

    def _boxes(self, page: Int32, in_page: Int32, first_box: Int32):
        """Boxes first_box, ... of a slot, from the lanes that looked them up."""
        lanes = [(first_box + i) & 31 for i in range(self.layout.token_boxes)]
        return [
            (dsl.shuffle_from_lane(page, lane), dsl.shuffle_from_lane(in_page, lane))
            for lane in lanes
        ]
