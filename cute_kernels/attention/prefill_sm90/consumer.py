"""The two consumer warpgroups: their walk over the tiles of the item.

The values of tile t - 1 are added while the softmax of tile t is computed: their MMAs are issued
group by group, and between two groups a share of the exponentials is done.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common.launch import Scales, descales_of
from cute_kernels.attention.common.output import Output
from cute_kernels.attention.prefill_sm90.config import TILE_TOKENS
from cute_kernels.attention.prefill_sm90.epilogue import Epilogue
from cute_kernels.attention.prefill_sm90.lane import Place, Softmax
from cute_kernels.attention.prefill_sm90.products import ProductsFp8
from cute_kernels.attention.prefill_sm90.queries import QueryLoading
from cute_kernels.attention.prefill_sm90.schedule import View, view_of
from cute_kernels.attention.prefill_sm90.softmax import SoftmaxMath


class Consumer(QueryLoading, SoftmaxMath, Epilogue, ProductsFp8):
    @cute.jit
    def run(self, mQ: cute.Tensor, scales: Scales, output: Output, done: Int32):
        """Serve the item; ``done``: tiles that have gone through the rings before."""
        item = self.item
        self.set_operand_addresses()
        k_scale, v_scale = descales_of(scales, item.b, item.head)
        if item.tiles > 0:
            self.load_queries(mQ, scales.softmax_scale * k_scale * dsl.LOG2_E)
            self.publish_positions()
            cute.arch.fence_proxy("async.shared", space="cta")
            self.barrier()
            acc, state = self.make_state()
            self.walk(acc, state, done)
            self.write_output(output, acc, state, v_scale)
        else:
            self.write_rows_without_keys(output)

    @cute.jit
    def walk(self, acc: cute.Tensor, state: Softmax, done: Int32):
        """O and sums of all tiles, for the rows' final references.

        Tiles are numbered from ``done`` on, through all items of the CTA.
        """
        config, item = self.config, self.item
        view = view_of(item, self.shape)
        place = Place(done, item.start)
        self.scores(state.rS, done)
        if const_expr(config.overlap):
            warpgroup.wait_group(0)
        self.relative_scores(state.rS, place, view)
        self.set_references(state.rS)
        for n in cutlass.range_constexpr(self.row_blocks):
            self.exponentiate(state, n)
        self.store_probabilities(state, done)
        for t in cutlass.range(1, item.tiles, unroll=1):
            self.scores(state.rS, done + t)
            before = Place(done + t - 1, item.start + TILE_TOKENS * (t - 1))
            self.await_probabilities(before.number)
            self.settle(state, acc, before)
            place = Place(done + t, item.start + TILE_TOKENS * t)
            self.values(acc, before, partial(self.softmax_share, state, place, view))
            self.store_probabilities(state, place.number)
        before = Place(done + item.tiles - 1, item.start + TILE_TOKENS * (item.tiles - 1))
        self.await_probabilities(before.number)
        self.settle(state, acc, before)
        self.values(acc, before, lambda group: None)
        warpgroup.wait_group(0)

    def await_probabilities(self, number: Int32):
        cute.arch.mbarrier_wait(self.smem.p_full + (number & 1), (number >> 1) & 1)

    def softmax_share(self, state: Softmax, place: Place, view: View, group: int):
        """What is done of tile ``place``'s softmax after MMA group ``group`` of the values."""
        if group == 0:
            if self.config.overlap:
                warpgroup.wait_group(1)  # the scores, issued before this group
            self.relative_scores(state.rS, place, view)
            opening = cutlass.select_(place.first_token <= view.low, Int32(1), Int32(0))
            # With no left bound every row sees the first key, so the first tile opens all rows.
            self.check(state, place, opening)
        groups = self.value_groups()
        for n in range(group * self.row_blocks // groups, (group + 1) * self.row_blocks // groups):
            self.exponentiate(state, n)
