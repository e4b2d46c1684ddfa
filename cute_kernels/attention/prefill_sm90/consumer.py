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
    def run(self, mQ: cute.Tensor, scales: Scales, output: Output):
        item = self.item
        self.set_operand_addresses()
        k_scale, v_scale = descales_of(scales, item.b, item.head)
        if item.tiles > 0:
            self.load_queries(mQ, scales.softmax_scale * k_scale * dsl.LOG2_E)
            self.publish_positions()
            cute.arch.fence_proxy("async.shared", space="cta")
            self.barrier()
            acc, state = self.make_state()
            self.walk(acc, state)
            self.write_output(output, acc, state, v_scale)
        else:
            self.write_rows_without_keys(output)

    @cute.jit
    def walk(self, acc: cute.Tensor, state: Softmax):
        """O and sums of all tiles, for the rows' final references."""
        config, item, rings = self.config, self.item, self.rings
        view = view_of(item, self.shape)
        place = Place(Int32(0), item.start)
        cute.arch.mbarrier_wait(rings.k_full + self.half, Int32(0))
        self.scores(state.rS, Int32(0))
        if const_expr(config.overlap):
            warpgroup.wait_group(0)
        self.relative_scores(state.rS, place, view)
        self.set_references(state.rS)
        for n in cutlass.range_constexpr(self.row_blocks):
            self.exponentiate(state, n)
        self.store_probabilities(state, Int32(0))
        k_stage = Int32(1 % config.k_stages)
        k_phase = Int32(1 // config.k_stages)
        v_slot = Int32(0)
        v_phase = Int32(0)
        for t in cutlass.range(1, item.tiles, unroll=1):
            cute.arch.mbarrier_wait(rings.k_full + (2 * k_stage + self.half), k_phase)
            self.scores(state.rS, 2 * k_stage)
            k_stage = k_stage + 1
            if k_stage == config.k_stages:
                k_stage = Int32(0)
                k_phase = k_phase ^ 1
            before = Place(t - 1, item.start + TILE_TOKENS * (t - 1))
            cute.arch.mbarrier_wait(self.smem.p_full + ((t - 1) & 1), ((t - 1) >> 1) & 1)
            self.settle(state, acc, before)
            place = Place(t, item.start + TILE_TOKENS * t)
            self.values(
                acc,
                (t - 1) & 1,
                v_slot,
                v_phase,
                partial(self.clear_dead_values, before.first_token, v_slot),
                partial(self.softmax_share, state, place, view),
            )
            v_slot = v_slot + 2
            if v_slot == config.v_slots:
                v_slot = Int32(0)
                v_phase = v_phase ^ 1
            self.store_probabilities(state, t)
        last = item.tiles - 1
        before = Place(last, item.start + TILE_TOKENS * last)
        cute.arch.mbarrier_wait(self.smem.p_full + (last & 1), (last >> 1) & 1)
        self.settle(state, acc, before)
        self.values(
            acc,
            last & 1,
            v_slot,
            v_phase,
            partial(self.clear_dead_values, before.first_token, v_slot),
            lambda group: None,
        )
        warpgroup.wait_group(0)

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
