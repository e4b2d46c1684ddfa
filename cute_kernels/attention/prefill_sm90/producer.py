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
                self.load_box(operand, sBox, in_page, self.item.head, page, full + slot, column)

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
        for begin in cutlass.range_constexpr(0, rows * lines, 32):
            line = begin + cute.arch.lane_idx()
            token, head = token_and_head(self.item, shape, line // lines)
            element = cute.crd2idx((token, head, (line % lines) * (L2_LINE // 2)), mQ.layout)
            dsl_store.prefetch_l2(mQ.iterator.toint() + 2 * Int64(element))

    @cute.jit
    def run(self, rings: Rings, k: TmaOperand, v: TmaOperand, done: Int32):
        """The item's tiles; ``done``: tiles that have gone through the rings before."""
        config, layout, item = self.config, self.layout, self.item
        slots = config.slots_per_tile
        v_stages = config.v_slots // slots
        sK = self.ring_boxes(rings.k, slots * config.k_stages, config.slot_bytes)
        sV = self.ring_boxes(rings.v, config.v_slots, config.slot_bytes)
        boxes_per_tile = slots * layout.token_boxes
        tiles_per_read = 32 // boxes_per_tile
        page = Int32(0)
        in_page = Int32(0)
        old_page = Int32(0)
        old_in_page = Int32(0)
        # V follows one tile behind K, as the consumers want them.
        for t in cutlass.range(0, item.tiles + 1, unroll=1):
            if t % tiles_per_read == 0:
                old_page = page
                old_in_page = in_page
                page, in_page = self.boxes_at(t * boxes_per_tile)
            if t < item.tiles:
                number = done + t
                phase = ((number // config.k_stages) & 1) ^ 1
                for i in cutlass.range_constexpr(slots):
                    boxes = self._boxes(page, in_page, t * boxes_per_tile + i * layout.token_boxes)
                    slot = slots * (number % config.k_stages) + i
                    self.load_slot(k, sK, boxes, slot, phase, rings.k_full, rings.k_empty)
            if t > 0:
                v_page = page
                v_in_page = in_page
                if t % tiles_per_read == 0:
                    v_page = old_page
                    v_in_page = old_in_page
                number = done + t - 1
                phase = ((number // v_stages) & 1) ^ 1
                for i in cutlass.range_constexpr(slots):
                    first = (t - 1) * boxes_per_tile + i * layout.token_boxes
                    boxes = self._boxes(v_page, v_in_page, first)
                    slot = slots * (number % v_stages) + i
                    self.load_slot(v, sV, boxes, slot, phase, rings.v_full, rings.v_empty)

    def _boxes(self, page: Int32, in_page: Int32, first_box: Int32):
        """Boxes first_box, ... of a slot, from the lanes that looked them up."""
        lanes = [(first_box + i) & 31 for i in range(self.layout.token_boxes)]
        return [
            (dsl.shuffle_from_lane(page, lane), dsl.shuffle_from_lane(in_page, lane))
            for lane in lanes
        ]
