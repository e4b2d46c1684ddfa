"""The two consumer warpgroups of the 16-bit kernel: S = Q K^T and O += P V, queries as M.

A warpgroup serves 64 of the item's 128 rows and shares nothing with the other but K and V. (At head
size 512 both serve the same 64 rows, each half of the columns of O, and both compute S.) With
lane = 4 g + j a lane of warp w has rows 16 w + g and 8 further, of every 8 columns the two from
2 j on, in S and in O. So a row is 4 lanes', and P is the second product's A operand as it is.

Scores of tile t and values of tile t - 1 are in flight together, and the softmax of t runs while
the latter, and the other warpgroup's MMAs, keep the tensor cores busy: the warpgroups take turns
in issuing. A row's scores are kept relative to a reference as in the FP8 kernel
(lane.py); a row without a reference takes any finite score for one.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.common.launch import Scales, descales_of
from cute_kernels.attention.common.output import (
    Output,
    finish_row,
    output_address,
    pack_output,
    sink_of_head,
    store_lse,
)
from cute_kernels.attention.decode_sm90.config import WARPGROUP_THREADS
from cute_kernels.attention.prefill_sm90.config import (
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    PrefillConfig,
)
from cute_kernels.attention.prefill_sm90.lane import HEADROOM, Rings
from cute_kernels.attention.prefill_sm90.products import accumulator
from cute_kernels.attention.prefill_sm90.queries import QueryLoading
from cute_kernels.attention.prefill_sm90.schedule import Item, Shape, View, view_of
from cute_kernels.attention.prefill_sm90.turns import NamedBarrier, Turns


class Smem(NamedTuple):
    """q: address of the queries, which the output replaces. reference: as in lane.ConsumerSmem.

    sQ, sK, sV: the queries and the rings as MMA operands.
    """

    q: Int32
    reference: Int32
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor


class Rows(NamedTuple):
    """Registers of the lane's two rows: factor of the raw scores, -reference, how far a score may
    exceed the reference, sum, factor of O due to this tile."""

    rScale: cute.Tensor
    rReference: cute.Tensor
    rHeadroom: cute.Tensor
    rSum: cute.Tensor
    rKeep: cute.Tensor


class Consumer16Bits(QueryLoading):
    def __init__(
        self, config: PrefillConfig, mmas, shape: Shape, item: Item, rings: Rings, smem: Smem,
        softcap: Float32,
    ):  # fmt: skip
        super().__init__(config, shape, item, smem)
        self.begin_scores, self.add_scores, self.add_values = mmas
        self.rings, self.softcap, self.turns = rings, softcap, Turns()
        self.scales_queries = config.mma_dtype == "fp16"
        self.pack = dsl.pack_f16x2 if config.mma_dtype == "fp16" else dsl.pack_bf16x2
        # First row and column of the warp.
        self.warp_row = 16 * (self.warp if config.shares_rows else self.index)
        self.column = self.half * config.value_columns if config.shares_rows else Int32(0)
        self.row = self.warp_row + self.g

    def _warpgroup_barrier(self):
        cute.arch.barrier(
            barrier_id=self.half + int(NamedBarrier.WARPGROUP), number_of_threads=WARPGROUP_THREADS
        )

    def _queries_barrier(self):
        """Of the warps that share queries."""
        if self.config.shares_rows:
            cute.arch.barrier(
                barrier_id=int(NamedBarrier.QUERIES), number_of_threads=CONSUMER_THREADS
            )
        else:
            self._warpgroup_barrier()

    def store_query_words(self, row: Int32, unit: int, words):
        """16 bytes of a row: elements 64 (unit / 2) + 16 j + 8 (unit % 2) on."""
        at = self.smem.q + (unit // 2) * (self.config.rows * 128) + row * 128
        dsl.st_shared_b32x4(at + ((2 * self.j + unit % 2) ^ self.g) * 16, *words)

    @cute.jit
    def run(self, mQ: cute.Tensor, scales: Scales, output: Output, done: Int32):
        """Serve the item; ``done``: tiles that have gone through the rings before."""
        item = self.item
        k_scale, v_scale = descales_of(scales, item.b, item.head)
        self._load_rows(mQ, scales.softmax_scale * k_scale * dsl.LOG2_E)
        acc, rows = self._make_state()
        if item.tiles > 0:
            self._walk(acc, rows, done)
        self._write_output(output, acc, rows, v_scale)

    def _load_rows(self, mQ: cute.Tensor, base_scale: Float32):
        """The warp's own 16 rows, or 8 of the shared ones."""
        count = self.config.rows // CONSUMER_WARPS
        rows = [count * self.index + 8 * i + self.g for i in range(count // 8)]
        loaded = [self.read_query_row(mQ, row) for row in rows]
        for row, words in zip(rows, loaded, strict=True):
            self.store_query_row(mQ, base_scale, row, words)
        cute.arch.fence_proxy("async.shared", space="cta")
        self._queries_barrier()

    def _make_state(self) -> tuple[cute.Tensor, Rows]:
        acc = cute.make_rmem_tensor((self.config.value_columns // 2,), Float32)
        for i in range(self.config.value_columns // 2):
            acc[i] = Float32(0.0)
        rows = Rows(*(cute.make_rmem_tensor((2,), Float32) for _ in Rows._fields))
        for r in range(2):
            rows.rScale[r] = dsl.ld_shared_f32(self.reference_of(self.row + 8 * r) - 8)
            rows.rReference[r] = Float32(0.0)
            rows.rHeadroom[r] = Float32(dsl.NEG_INF)
            rows.rSum[r] = Float32(0.0)
            rows.rKeep[r] = Float32(1.0)
        return acc, rows

    @cute.jit
    def _walk(self, acc: cute.Tensor, rows: Rows, done: Int32):
        """O and sums of all tiles, for the rows' final references."""
        config, item = self.config, self.item
        tile = config.tile_tokens
        view = view_of(item, self.shape)
        rS = cute.make_rmem_tensor((tile // 2,), Float32)
        kind = self.add_values.op.a_dtype
        rP = cute.make_rmem_tensor(((2, 2, 2), 1, tile // 16), kind)
        self.turns.wait()
        self._scores(rS, done)
        self.turns.hand_over()
        self._finish_scores(done, 0)
        self._softmax(rS, rows, item.start, view)
        self._store_probabilities(rS, rP)
        for t in cutlass.range(1, item.tiles, unroll=1):
            self.turns.wait()
            self._scores(rS, done + t)
            self._values(acc, rP, t - 1, done)
            self.turns.hand_over()
            self._finish_scores(done + t, 1)
            moved = self._softmax(rS, rows, item.start + tile * t, view)
            # ptxas moves the wait in front of the exponentials unless a branch lies between.
            if moved != 0:
                warpgroup.wait_group(0)
                for i in cutlass.range_constexpr(config.value_columns // 2):
                    acc[i] = acc[i] * rows.rKeep[(i // 2) % 2]
            warpgroup.wait_group(0)
            self.arrive(self.rings.v_empty + self._value_slot(done + t - 1)[0])
            self._store_probabilities(rS, rP)
        self._values(acc, rP, item.tiles - 1, done)
        warpgroup.wait_group(0)
        self.arrive(self.rings.v_empty + self._value_slot(done + item.tiles - 1)[0])

    def _score_slot(self, number: Int32, part: int):
        """Slot and phase of a part of tile ``number`` of K."""
        slots = self.config.k_slots
        at = self.config.slots_per_tile * number + part
        return at % slots, (at // slots) & 1

    def _value_slot(self, number: Int32):
        """Slot and phase of what the warpgroup reads of tile ``number`` of V."""
        tiles = self.config.v_slots // self.config.slots_per_tile
        slot = number % tiles
        if self.config.shares_rows:
            slot = self.config.slots_per_tile * slot + self.half
        return slot, (number // tiles) & 1

    def _scores(self, rS: cute.Tensor, number: Int32):
        """Issue S = Q K^T of tile ``number``: raw products, a group of MMAs for each slot."""
        config, mma = self.config, self.add_scores
        thread = mma.get_slice(0)
        sQ = cute.local_tile(self.smem.sQ, (64, config.head_size), (self.warp_row // 64, 0))
        tQ = mma.make_fragment_A(thread.partition_A(sQ))
        tK = mma.make_fragment_B(thread.partition_B(self.smem.sK))
        target = accumulator(rS, 0, config.tile_tokens // 8)
        steps = config.head_size // 16 // config.slots_per_tile
        for part in range(config.slots_per_tile):
            slot, phase = self._score_slot(number, part)
            cute.arch.mbarrier_wait(self.rings.k_full + slot, phase)
            warpgroup.fence()
            for k in range(steps):
                at = part * steps + k
                which = self.begin_scores if at == 0 else mma
                cute.gemm(which, target, tQ[None, None, at], tK[None, None, k, slot], target)
            warpgroup.commit_group()

    def _finish_scores(self, number: Int32, behind: int):
        """Wait for the scores, behind which so many groups were issued; hand the slots back."""
        parts = self.config.slots_per_tile
        for part in range(parts):
            warpgroup.wait_group(parts - 1 - part + behind)
            self.arrive(self.rings.k_empty + self._score_slot(number, part)[0])

    def _values(self, acc: cute.Tensor, rP: cute.Tensor, t: Int32, done: Int32):
        """Issue O += P V of tile t."""
        config, mma = self.config, self.add_values
        slot, phase = self._value_slot(done + t)
        cute.arch.mbarrier_wait(self.rings.v_full + slot, phase)
        self._clear_dead_values(self.item.start + config.tile_tokens * t, slot)
        tV = mma.make_fragment_B(mma.get_slice(0).partition_B(self.smem.sV))
        target = accumulator(acc, 0, config.value_columns // 8)
        warpgroup.fence()
        for k in range(config.tile_tokens // 16):
            cute.gemm(mma, target, rP[None, None, k], tV[None, None, k, slot], target)
        warpgroup.commit_group()

    def _store_probabilities(self, rS: cute.Tensor, rP: cute.Tensor):
        """The accumulator's fragment, packed, is the operand's."""
        words = cute.recast_tensor(rP, Int32)
        for i in range(self.config.tile_tokens // 4):
            words[i] = self.pack(rS[2 * i], rS[2 * i + 1])

    @cute.jit
    def _softmax(self, rS: cute.Tensor, rows: Rows, first_token: Int32, view: View) -> Int32:
        """Raw products -> probabilities, summed up; not 0 if O needs the factors ``rKeep``."""
        count = const_expr(self.config.tile_tokens // 2)
        self._relative_scores(rS, rows)
        if (first_token < view.low) | (first_token + self.config.tile_tokens > view.high):
            self._mask(rS, first_token)
        top = [rS[0], rS[2]]
        for i in cutlass.range_constexpr(count):
            top[(i // 2) % 2] = dsl.fmax(top[(i // 2) % 2], rS[i])
        moved = Int32(0)
        above = (top[0] > rows.rHeadroom[0]) | (top[1] > rows.rHeadroom[1])
        if cute.arch.vote_any_sync(above):
            moved = Int32(1)
            self._move_references(rS, rows, top)
        for i in cutlass.range_constexpr(count):
            rS[i] = dsl.exp2(rS[i])
        for n in cutlass.range_constexpr(count // 4):
            for r in cutlass.range_constexpr(2):
                at = 4 * n + 2 * r
                rows.rSum[r] = rows.rSum[r] + (rS[at] + rS[at + 1])
        return moved

    @cute.jit
    def _relative_scores(self, rS: cute.Tensor, rows: Rows):
        """Raw products -> log2-domain scores relative to the rows' references."""
        count = const_expr(self.config.tile_tokens // 2)
        if self.softcap != 0.0:
            # cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)); x is in log2 units already
            inverse = 2.0 / self.softcap
            cap = self.softcap * dsl.LOG2_E
            for i in cutlass.range_constexpr(count):
                r = (i // 2) % 2
                e = dsl.exp2(rS[i] * rows.rScale[r] * inverse)
                capped = cap - (2.0 * cap) * cute.arch.rcp_approx(1.0 + e)
                rS[i] = capped + rows.rReference[r]
        else:
            for i in cutlass.range_constexpr(count):
                r = (i // 2) % 2
                rS[i] = dsl.fma(rS[i], rows.rScale[r], rows.rReference[r])

    @cute.jit
    def _mask(self, rS: cute.Tensor, first_token: Int32):
        """-inf for keys that a row does not see."""
        shape, used = self.shape, self.item.used
        for r in cutlass.range_constexpr(2):
            position = self.position_of(self.row + 8 * r) - first_token - 2 * self.j
            low = position - shape.window_left
            high = cutlass.min(position + shape.window_right + 1, used - first_token - 2 * self.j)
            for n in cutlass.range_constexpr(self.config.tile_tokens // 8):
                for e in cutlass.range_constexpr(2):
                    key = 8 * n + e
                    if (low > key) | (high <= key):
                        rS[4 * n + 2 * r + e] = Float32(dsl.NEG_INF)

    @cute.jit
    def _move_references(self, rS: cute.Tensor, rows: Rows, top):
        """To the maximum found, in rows where it is too far above the reference, or the first."""
        for r in cutlass.range_constexpr(2):
            highest = top[r]
            for step in cutlass.range_constexpr(2):
                highest = dsl.fmax(highest, dsl.shuffle_xor_f32(highest, Int32(1 << step)))
            shift = Float32(0.0)
            keep = Float32(1.0)
            if highest > rows.rHeadroom[r]:
                shift = highest
                # The first: sum and O are 0, and the factor must be finite.
                if rows.rHeadroom[r] == HEADROOM:
                    keep = dsl.exp2(-shift)
                rows.rHeadroom[r] = Float32(HEADROOM)
            rows.rReference[r] = rows.rReference[r] - shift
            rows.rSum[r] = rows.rSum[r] * keep
            rows.rKeep[r] = keep
            for n in cutlass.range_constexpr(self.config.tile_tokens // 8):
                for e in cutlass.range_constexpr(2):
                    at = 4 * n + 2 * r + e
                    rS[at] = rS[at] - shift

    @cute.jit
    def _clear_dead_values(self, first_token: Int32, slot: Int32):
        """Zero V of tokens that no row may see: P is 0 there, but 0 * NaN is NaN.

        Each warpgroup clears all that it reads, so that it need not wait for the other, which may
        be reading too: what it finds are zeros already. The fence is for the MMAs, which read
        through the async proxy, and for the TMA that reuses the slot.
        """
        config, item = self.config, self.item
        tokens = const_expr(config.tile_tokens)
        if (first_token < item.low) | (first_token + tokens > item.used):
            base = self.rings.v.toint() + slot * config.slot_bytes
            zero = Int32(0)
            thread = self.tid % WARPGROUP_THREADS
            threads_a_token = const_expr(WARPGROUP_THREADS // tokens)
            in_slot = thread % tokens
            token = first_token + in_slot
            if (token < item.low) | (token >= item.used):
                for i in cutlass.range_constexpr(config.value_columns // 8 // threads_a_token):
                    unit = thread // tokens + threads_a_token * i
                    at = base + in_slot * 128 + (unit // 8) * (tokens * 128) + (unit % 8) * 16
                    dsl.st_shared_b32x4(at, zero, zero, zero, zero)
            cute.arch.fence_proxy("async.shared", space="cta")
            self._warpgroup_barrier()

    @cute.jit
    def _write_output(self, output: Output, acc: cute.Tensor, rows: Rows, v_scale: Float32):
        """Normalised rows through the warp's part of the queries' memory, so that stores are whole
        lines; their LSE."""
        item, config = self.item, self.config
        # All MMAs have read the queries.
        self._queries_barrier()
        for r in cutlass.range_constexpr(2):
            total = rows.rSum[r]
            for step in cutlass.range_constexpr(2):
                total = total + dsl.shuffle_xor_f32(total, Int32(1 << step))
            reference = -rows.rReference[r]
            if rows.rHeadroom[r] == dsl.NEG_INF:
                reference = Float32(dsl.NEG_INF)
            row = self.row + 8 * r
            token, query_head = self.token_and_head(row)
            final = finish_row(reference, total, sink_of_head(output, query_head), v_scale)
            if (self.j == 0) & (self.column == 0) & (item.first_row + row < item.rows_end):
                store_lse(output, token, query_head, final.lse)
            at = self._staged(row, self.column) + 4 * self.j
            for n in cutlass.range_constexpr(config.value_columns // 8):
                low, high = acc[4 * n + 2 * r], acc[4 * n + 2 * r + 1]
                word = pack_output(output.mO, low * final.factor, high * final.factor)
                block = (n // 8) * (config.rows * 128)
                dsl.st_shared_b32(at + block + ((n % 8) ^ self.g) * 16, word)
        cute.arch.sync_warp()
        self._store_rows(output)

    def _staged(self, row: Int32, column: Int32) -> Int32:
        """Where a row's elements from ``column``, a multiple of 64, on lie; units are swizzled."""
        return self.smem.q + (column // 64) * (self.config.rows * 128) + row * 128

    @cute.jit
    def _store_rows(self, output: Output):
        """The warp's 16 rows, 8 bytes a lane."""
        config = self.config
        pieces = const_expr(config.value_columns // 4)
        for i in cutlass.range_constexpr(16 * pieces // 32):
            piece = 32 * i + self.lane
            row = self.warp_row + piece // pieces
            element = self.column + 4 * (piece % pieces)
            if self.item.first_row + row < self.item.rows_end:
                token, query_head = self.token_and_head(row)
                unit = ((element // 8) % 8) ^ (row % 8)
                at = self._staged(row, element & -64) + unit * 16 + (element % 8) * 2
                words = dsl.ld_shared_b32x2(at)
                address = output_address(output, token, query_head, element)
                dsl.st_global_b32x2(Int64(address), *words)
        if const_expr(config.shares_rows):
            self._queries_barrier()
        else:
            cute.arch.sync_warp()
