"""From a window of compressor states to one row: a softmax over the window in each channel.

A warp takes `WINDOW_ROWS` rows at a time, all loads before the first use; lane l has the channels
4 l .. 4 l + 3 (with more vectors, also those 128 further on). The softmax is a running one, in
base 2: maximum, sum and weighted sum are rescaled when the maximum grows. Warps that share a window
leave theirs in shared memory, and the first warp joins them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.config import (
    LANE_CHANNELS,
    WARP_CHANNELS,
    WINDOW_ROWS,
    IndexerKConfig,
)
from cute_kernels.store.kernel import Divisor, divided

_NEG_INF_BITS = -(1 << 23)
_ROW_BYTES = 4 * WARP_CHANNELS


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


class Row(NamedTuple):
    """What a token completes: the window up to its position in its sequence."""

    position: Int64
    sequence: Int32


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
        """Address of `config.shared_floats` in shared memory."""
        if self.config.shared_floats == 0:
            return Int32(0)
        allocator = cutlass.memory.SmemAllocator()
        floats = allocator.allocate_array(Float32, self.config.shared_floats, byte_alignment=128)
        return floats.toint()

    def _warp(self) -> Int32:
        """The warp's number among those that share a window."""
        if self.config.warps == 1:
            return Int32(0)
        tid, _, _ = cute.arch.thread_idx()
        return tid >> 5

    @cute.jit
    def window(self, state: State, row: Row):
        """The softmax of the warp's rows of the window, in each channel of each lane, by vector."""
        empty = (dsl.NEG_INF, 0.0, 0.0)
        channels = [
            [Softmax(*map(Float32, empty)) for _ in range(LANE_CHANNELS)]
            for _ in range(self.config.vectors)
        ]
        batches = cute.ceil_div(state.window, WINDOW_ROWS)
        for batch in cutlass.range(self._warp(), batches, self.config.warps, unroll=1):
            address, exists = self._addresses(state, row, batch * WINDOW_ROWS)
            for v in cutlass.range_constexpr(self.config.vectors):
                channels[v] = self._batch(state, address, exists, v, channels[v])
        return channels

    def compressed(self, shared: Int32, channels):
        """The compressed channels of each lane, by vector; right in the first of several warps."""
        if self.config.warps > 1:
            channels = self._joined(shared, self._warp(), channels)
        return [[one.value * dsl_store.rcp(one.total) for one in of] for of in channels]

    @cute.jit
    def _addresses(self, state: State, row: Row, first: Int32):
        """In lane l: the address of row first + l of the window (of an existing one for l of 8 or
        more, or before position 0), and ones where it exists, else 0."""
        index = first + cute.arch.lane_idx() % WINDOW_ROWS
        at = row.position - Int64(state.window - 1 - index)
        exists = Int32(0)
        if index < state.window and at >= 0:
            exists = Int32(-1)
        # Of the window's positions the last exists: what does not is read there, and dropped.
        near = Int32(dsl_store.clamp_s64(at, Int64(2**31 - 1)))
        if exists == 0:
            near = Int32(dsl_store.clamp_s64(row.position, Int64(2**31 - 1)))
        column, token = divided(near, state.block_tokens)
        sequence = dsl_store.clamp_s32(row.sequence, state.last_sequence)
        entry = state.table + Int64(sequence) * state.table_row
        column = dsl_store.min_s32(column, state.last_column)
        block = dsl_store.ld_global_b32(entry + Int64(column) * state.table_column)
        block = dsl_store.clamp_s32(block, state.last_block)
        address = state.state + Int64(block) * state.block + Int64(token) * state.token
        if index >= state.late_rows:
            address = address + state.late
        return address, exists

    def _batch(self, state: State, address: Int64, exists: Int32, v: int, channels):
        """The channels of one vector after the rows that `_addresses` found."""
        channel = v * WARP_CHANNELS + cute.arch.lane_idx() * LANE_CHANNELS
        # Lanes past the row load channels of others, and are not stored.
        channel = dsl_store.min_s32(channel, state.head_size - LANE_CHANNELS)
        words = self._load(state, address, Int64(channel) * state.element)
        entries, scores = [], []
        for r in range(WINDOW_ROWS):
            keep = dsl.shuffle_from_lane(exists, Int32(r))
            missing = ~keep & _NEG_INF_BITS
            own = words[2 * LANE_CHANNELS * r :]
            entries.append([dsl.bits_to_f32(x & keep) for x in own[:LANE_CHANNELS]])
            own = own[LANE_CHANNELS : 2 * LANE_CHANNELS]
            scores.append([dsl.bits_to_f32(x & keep | missing) for x in own])
        return [
            self._with_rows(one, [row[i] for row in entries], [row[i] for row in scores])
            for i, one in enumerate(channels)
        ]

    @cute.jit
    def _load(self, state: State, address: Int64, offset: Int64):
        """Entries and scores of the lane's channels, of one row after the other.

        All branch at once, and the first way takes half the registers for addresses.
        """
        words = [Int32(0)] * (2 * LANE_CHANNELS * WINDOW_ROWS)
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
                words += dsl_store.ld_global_b32x4(dsl_store.add_16_times(base, row))
        return words

    def _load_single(self, state: State, address: Int64, offset: Int64):
        words = []
        for r in range(WINDOW_ROWS):
            row = dsl_store.shuffle_b64(address, Int32(r)) + offset
            for base in (row, row + state.width):
                places = [base + i * state.element for i in range(LANE_CHANNELS)]
                words += [dsl_store.ld_global_b32(place) for place in places]
        return words

    def _with_rows(self, one: Softmax, entries, scores) -> Softmax:
        top = one.top
        for score in scores:
            top = dsl.fmax(top, score)
        reference = finite_or_zero(top)
        old = weight(one.top, reference)
        total, value = one.total * old, one.value * old
        for entry, score in zip(entries, scores, strict=True):
            new = weight(score, reference)
            total, value = total + new, dsl.fma(new, entry, value)
        return Softmax(top, total, value)

    @cute.jit
    def _joined(self, shared: Int32, warp: Int32, channels):
        """Sums and weighted sums of all warps, in the first warp.

        All warps first learn all maxima, so that what they then leave only has to be added.
        """
        warps, vectors = self.config.warps, self.config.vectors
        tops = shared + cute.arch.lane_idx() * (4 * LANE_CHANNELS)
        sums = tops + warps * vectors * _ROW_BYTES
        own = warp * (vectors * _ROW_BYTES)
        for v in cutlass.range_constexpr(vectors):
            top = [one.top for one in channels[v]]
            dsl.st_shared_f32x4(tops + own + v * _ROW_BYTES, *top)
        cute.arch.sync_threads()
        for v in cutlass.range_constexpr(vectors):
            top = [one.top for one in channels[v]]
            for other in cutlass.range_constexpr(warps):
                more = dsl.ld_shared_f32x4(tops + (other * vectors + v) * _ROW_BYTES)
                top = [dsl.fmax(x, y) for x, y in zip(top, more, strict=True)]
            factor = [
                weight(one.top, finite_or_zero(x)) for one, x in zip(channels[v], top, strict=True)
            ]
            total = [one.total * x for one, x in zip(channels[v], factor, strict=True)]
            value = [one.value * x for one, x in zip(channels[v], factor, strict=True)]
            dsl.st_shared_f32x4(sums + 2 * own + 2 * v * _ROW_BYTES, *total)
            dsl.st_shared_f32x4(sums + 2 * own + (2 * v + 1) * _ROW_BYTES, *value)
        cute.arch.sync_threads()
        if warp == 0:
            for v in cutlass.range_constexpr(vectors):
                total, value = ([Float32(0.0)] * LANE_CHANNELS for _ in range(2))
                for other in cutlass.range_constexpr(warps):
                    at = sums + 2 * (other * vectors + v) * _ROW_BYTES
                    parts = dsl.ld_shared_f32x4(at), dsl.ld_shared_f32x4(at + _ROW_BYTES)
                    total = [x + y for x, y in zip(total, parts[0], strict=True)]
                    value = [x + y for x, y in zip(value, parts[1], strict=True)]
                channels[v] = [
                    Softmax(one.top, x, y)
                    for one, x, y in zip(channels[v], total, value, strict=True)
                ]
        return channels
