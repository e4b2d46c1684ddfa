"""From a window of compressor states to one row: a softmax over the window in each channel.

A warp takes `WINDOW_ROWS` rows at a time, all loads before the first use; lane l has the channels
4 l .. 4 l + 3 (with more vectors, also those 128 further on). The softmax is a running one, in
base 2: maximum, sum and weighted sum are rescaled when the maximum grows. Warps that share a window
leave theirs in shared memory, and the first warp joins them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.config import (
    JOIN_ROW_BYTES,
    JOINED_WARPS,
    LANE_CHANNELS,
    WARP_CHANNELS,
    WINDOW_ROWS,
    IndexerKConfig,
)
from cute_kernels.indexer.rows import Entry
from cute_kernels.store.kernel import Divisor, divided

_NEG_INF_BITS = -(1 << 23)


class State(NamedTuple):
    """Compressor states and their block table: addresses and strides in bytes.

    vector: 1 where a lane may load 16 bytes at once. width: bytes from entries to scores. window:
    its rows; from `late_rows` on their columns begin `late` bytes further on.
    """

    state: Int64
    vector: Int32
    block: Int64
    token: Int64
    element: Int64
    width: Int64
    late: Int64
    window: Int32
    late_rows: Int32
    head_size: Int32
    last_block: Int32
    block_tokens: Divisor
    table: Int64
    table_row: Int64
    table_column: Int64
    last_sequence: Int32
    last_column: Int32


class Place(NamedTuple):
    """Of a row of a window: what its entry of the block table says, and bytes into the block."""

    block: Int32
    offset: Int64


class Softmax(NamedTuple):
    """Of a channel: maximum of the scores, sum of the weights, weighted sum of the entries."""

    top: Float32
    total: Float32
    value: Float32


def finite_or_zero(top: Float32) -> Float32:
    """What exponents are taken relative to: without any score, 0."""
    return dsl_store.where_negative_infinite(top, Float32(0.0))


def weight(score: Float32, reference: Float32) -> Float32:
    """exp(score - reference). The difference comes first: it is small where weights are not."""
    return dsl.exp2((score - reference) * dsl.LOG2_E)


class Compressor:
    def __init__(self, config: IndexerKConfig):
        self.config = config

    def allocate(self) -> Int32:
        """`config.shared_bytes` of shared memory: an address."""
        allocator = cutlass.memory.SmemAllocator()
        words = self.config.shared_bytes // 4
        return allocator.allocate_array(Int32, words, byte_alignment=128).toint()

    def warp(self) -> Int32:
        """The warp's number among those that share a window."""
        if self.config.warps == 1:
            return Int32(0)
        tid, _, _ = cute.arch.thread_idx()
        return tid >> 5

    def independent_warp(self) -> Int32:
        """The warp's number among those with windows of their own."""
        if self.config.warps > 1:
            return Int32(0)
        tid, _, _ = cute.arch.thread_idx()
        return tid >> 5

    @cute.jit
    def window(self, state: State, row: Entry, early, late):
        """The softmax of the warp's rows of the window, in each channel of each lane, by vector;
        and what `late` returns.

        `early()` is called while entries of the block table are on their way, `late`, with what it
        returned, while states are.
        """
        if const_expr(not self.config.loop):
            first = self.warp() * WINDOW_ROWS
            place = self._places(state, row, first)
            result = early()
            words = self._state_words(state, self._addresses(state, place), 0)
            result = late(result)
            channels = [self._softmax(state, row, first, words, None)]
        else:
            result = late(early())
            empty = (dsl.NEG_INF, 0.0, 0.0)
            channels = [
                [Softmax(*map(Float32, empty)) for _ in range(LANE_CHANNELS)]
                for _ in range(self.config.vectors)
            ]
            batches = cute.ceil_div(state.window, WINDOW_ROWS)
            for batch in cutlass.range(self.warp(), batches, self.config.warps, unroll=1):
                first = batch * WINDOW_ROWS
                address = self._addresses(state, self._places(state, row, first))
                for v in cutlass.range_constexpr(self.config.vectors):
                    words = self._state_words(state, address, v)
                    channels[v] = self._softmax(state, row, first, words, channels[v])
        return channels, result

    def compressed(self, shared: Int32, channels):
        """The compressed channels of each lane, by vector; several warps all have them."""
        if self.config.warps > 1:
            return self._joined(shared, channels)
        return [[one.value * dsl_store.rcp(one.total) for one in of] for of in channels]

    def _exists(self, state: State, row: Entry, index: Int32) -> Int32:
        """Ones where row `index` of the window is one, at a position from 0 on; else 0."""
        count = dsl_store.min_s32(row.position, state.window - 1) + 1
        return dsl_store.ones_below(index - (state.window - count), count)

    @cute.jit
    def _places(self, state: State, row: Entry, first: Int32) -> Place:
        """In lane l: of row first + l of the window; of its last for l of 8 or more, and where
        there is none."""
        index = first + cute.arch.lane_idx() % WINDOW_ROWS
        near = row.position
        if self._exists(state, row, index) != 0:
            near = near - (state.window - 1 - index)
        column, token = divided(near, state.block_tokens)
        sequence = dsl_store.clamp_s32(row.sequence, state.last_sequence)
        entry = state.table + Int64(sequence) * state.table_row
        column = dsl_store.min_s32(column, state.last_column)
        block = dsl_store.ld_global_b32(entry + Int64(column) * state.table_column)
        late = Int64(0)
        if index >= state.late_rows:
            late = state.late
        return Place(block, Int64(token) * state.token + late)

    def _addresses(self, state: State, place: Place) -> Int64:
        block = dsl_store.clamp_s32(place.block, state.last_block)
        return state.state + Int64(block) * state.block + place.offset

    def _state_words(self, state: State, address: Int64, v: int):
        """Of the lane's channels of a vector, in the rows at `address`."""
        channel = v * WARP_CHANNELS + cute.arch.lane_idx() * LANE_CHANNELS
        # Lanes past the row load channels of others, and are not stored.
        channel = dsl_store.min_s32(channel, state.head_size - LANE_CHANNELS)
        return self._load(state, address, Int64(channel) * state.element)

    def _softmax(self, state: State, row: Entry, first: Int32, words, channels):
        """The channels of a vector after the rows whose words `_state_words` loaded."""
        entries, scores = [], []
        for r in range(WINDOW_ROWS):
            keep = self._exists(state, row, first + r)
            missing = ~keep & _NEG_INF_BITS
            own = words[2 * LANE_CHANNELS * r :]
            entries.append([dsl.bits_to_f32(x & keep) for x in own[:LANE_CHANNELS]])
            own = own[LANE_CHANNELS : 2 * LANE_CHANNELS]
            scores.append([dsl.bits_to_f32(x & keep | missing) for x in own])
        return [
            self._with_rows(
                None if channels is None else channels[i],
                [row[i] for row in entries],
                [row[i] for row in scores],
            )
            for i in range(LANE_CHANNELS)
        ]

    @cute.jit
    def _load(self, state: State, address: Int64, offset: Int64):
        """Entries and scores of the lane's channels, of one row after the other.

        All branch at once, and the first way takes half the registers for addresses.
        """
        words = [Int32(0)] * (2 * LANE_CHANNELS * WINDOW_ROWS)
        if const_expr(not self.config.loop):
            words = self._load_wide(state, address, offset)
        else:
            if state.vector != 0:
                words = self._load_wide(state, address, offset)
            else:
                words = self._load_single(state, address, offset)
        return words

    def _load_wide(self, state: State, address: Int64, offset: Int64):
        # In units of 16 bytes 32 bits reach far enough (``op.prepare_k``).
        unit = Int32((address - state.state) >> 4)
        bases, words = (state.state + offset, state.state + offset + state.width), []
        for r in range(WINDOW_ROWS):
            row = dsl.shuffle_from_lane(unit, Int32(r))
            for base in bases:
                words += dsl_store.ld_global_once_b32x4(dsl_store.add_16_times(base, row))
        return words

    def _load_single(self, state: State, address: Int64, offset: Int64):
        words = []
        for r in range(WINDOW_ROWS):
            row = dsl_store.shuffle_b64(address, Int32(r)) + offset
            for base in (row, row + state.width):
                places = [base + i * state.element for i in range(LANE_CHANNELS)]
                words += [dsl_store.ld_global_b32(place) for place in places]
        return words

    def _with_rows(self, one: Softmax | None, entries, scores) -> Softmax:
        """A channel with further rows; None: with no others."""
        top = functools.reduce(dsl.fmax, scores if one is None else [one.top, *scores])
        reference = finite_or_zero(top)
        weights = [weight(score, reference) for score in scores]
        if one is None:
            total, value = weights[0], weights[0] * entries[0]
            weights, entries = weights[1:], entries[1:]
        else:
            old = weight(one.top, reference)
            total, value = one.total * old, one.value * old
        for entry, new in zip(entries, weights, strict=True):
            total, value = total + new, dsl.fma(new, entry, value)
        return Softmax(top, total, value)

    @cute.jit
    def _joined(self, shared: Int32, channels):
        """As `compressed`, of windows that warps share.

        All threads join: `_JOINED` warps' parts of a channel each, then with their neighbours.
        """
        tid, _, _ = cute.arch.thread_idx()
        vectors, rows = self.config.vectors, self.config.warps * self.config.vectors
        result = shared + 3 * rows * JOIN_ROW_BYTES
        at = cute.arch.lane_idx() * (4 * LANE_CHANNELS)
        for v in cutlass.range_constexpr(vectors):
            for field in cutlass.range_constexpr(3):
                row = shared + (field * rows + self.warp() * vectors + v) * JOIN_ROW_BYTES
                dsl.st_shared_f32x4(row + at, *[one[field] for one in channels[v]])
        cute.arch.sync_threads()
        # Threads next to each other have one channel.
        neighbours = self.config.warps // JOINED_WARPS
        channel, part = tid // neighbours, tid % neighbours
        for v in cutlass.range_constexpr(vectors):
            first = shared + (part * vectors + v) * JOIN_ROW_BYTES + channel * 4
            value = self._ratio(first, rows, neighbours * vectors)
            dsl.st_shared_f32(result + (v * WARP_CHANNELS + channel) * 4, value)
        cute.arch.sync_threads()
        return [dsl.ld_shared_f32x4(result + v * (4 * WARP_CHANNELS) + at) for v in range(vectors)]

    def _ratio(self, first: Int32, rows: int, step: int) -> Float32:
        """The compressed channel whose first part's maximum is at `first`; to all its threads."""
        top, total, value = (
            [
                dsl.ld_shared_f32(first + (field * rows + i * step) * JOIN_ROW_BYTES)
                for i in range(JOINED_WARPS)
            ]
            for field in range(3)
        )
        masks = [mask for mask in (1, 2) if mask < self.config.warps // JOINED_WARPS]
        largest = functools.reduce(dsl.fmax, top)
        for mask in masks:
            largest = dsl.fmax(largest, dsl.shuffle_xor_f32(largest, Int32(mask)))
        factors = [weight(one, finite_or_zero(largest)) for one in top]
        sums = [Float32(0.0), Float32(0.0)]
        for k, parts in enumerate((total, value)):
            for part, factor in zip(parts, factors, strict=True):
                sums[k] = dsl.fma(part, factor, sums[k])
            for mask in masks:
                sums[k] = sums[k] + dsl.shuffle_xor_f32(sums[k], Int32(mask))
        return sums[1] * dsl_store.rcp(sums[0])
