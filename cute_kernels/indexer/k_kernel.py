"""The indexer's K kernel: windows of compressor states to rows of a block-planar cache.

Shapes: state (blocks, block_size, 2 W) float32, W = D or 2 D, D a multiple of 32 up to 512;
positions, slots (tokens,) int64; token_to_seq (tokens,) int32; table (B, columns) int32; cache
blocks as docs/formats.md has them. All strides are free.

A CTA has a span of tokens, of which it lists those that complete a row (`rows.py`). A warp takes
one row after the other; where windows are long all warps of a CTA share each (`window.py`). One
warp then finishes the row: RMSNorm, rotation, quantization, and the store.

Positions, sequences and blocks outside their tables are moved inside: nothing outside of the
tensors is read, and the row is then of no use. Of rows with one slot one is stored (`claims.py`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.claims import Claims
from cute_kernels.indexer.config import (
    CHUNK,
    LANE_CHANNELS,
    WARP_CHANNELS,
    IndexerKConfig,
)
from cute_kernels.indexer.quantize import (
    halves_joined,
    inverse_scales,
    largest_of,
    largest_over_lanes,
    quantizer,
    rotated_pair,
    table_value,
    table_values,
)
from cute_kernels.indexer.rows import Entry, Memory, Rows
from cute_kernels.indexer.tokens import Tokens
from cute_kernels.indexer.window import Compressor, State
from cute_kernels.store.kernel import Divisor, divided

# Lanes with the chunks of a group, and of a row: two lanes hold the elements of a chunk.
_GROUP_MASKS, _WARP_MASKS = (2, 4), (2, 4, 8, 16)


class Rotary(NamedTuple):
    """pairs: rotated ones of a row."""

    cos_sin: Int64
    row: Int64
    element: Int64
    last_position: Int64
    pairs: Int32
    is_bf16: Int32


class Norm(NamedTuple):
    """kind: a `Table`."""

    weight: Int64
    kind: Int32
    element: Int64
    eps: Float32
    inverse_size: Float32


class Cache(NamedTuple):
    """Byte strides; scales: where a block's scales begin. aligned: to 4 bytes, rows and all."""

    data: Int64
    aligned: Int32
    block: Int64
    scales: Int64
    row_values: Int32
    row_scales: Int32
    rows: Divisor


class Factors(NamedTuple):
    """What a lane's four channels are multiplied with: norm weights, cos and sin of two pairs."""

    weight0: Float32
    weight1: Float32
    weight2: Float32
    weight3: Float32
    cos0: Float32
    cos1: Float32
    sin0: Float32
    sin1: Float32


class IndexerK(Compressor):
    def __init__(self, config: IndexerKConfig):
        super().__init__(config)
        self.quantizer = quantizer(config.cache_format, config.e2m1_instruction)
        self.rows = Rows(config)

    @cute.jit
    def __call__(
        self,
        mSlots: cute.Tensor,
        tokens: Tokens,
        claims: Claims,
        state: State,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
        stream,
    ):
        self.kernel(mSlots, tokens, claims, state, rotary, norm, cache).launch(
            grid=(cute.ceil_div(tokens.tokens, tokens.span), 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=self.config.smem_carveout,
        )

    @cute.kernel
    def kernel(
        self,
        mSlots: cute.Tensor,
        tokens: Tokens,
        claims: Claims,
        state: State,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
    ):
        shared = self.allocate()
        memory = self.rows.memory(shared + 4 * self.config.join_floats)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        slots = mSlots.iterator.toint()
        first = cta * tokens.span
        end = dsl_store.min_s32(first + tokens.span, tokens.tokens)
        self.rows.prefetch(slots, tokens, claims, first + tid, end)
        self.rows.clear(memory)
        cute.arch.sync_threads()
        # In this order: what is launched now may read what the kernels before this one wrote.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for start in cutlass.range(first, end, self.config.threads, unroll=1):
            count = self.rows.gather(slots, tokens, claims, memory, start, end)
            warp = self.independent_warp()
            for i in cutlass.range(warp, count, self.config.independent_warps, unroll=1):
                self._row(tokens, claims, state, rotary, norm, cache, memory, shared, i)
            if start + self.config.threads < end:
                cute.arch.sync_threads()
                self.rows.clear(memory)
                cute.arch.sync_threads()
        # The last warp is the last to get rows.
        if claims.buckets > 0 and tid >= self.config.threads - 32:
            claims.hand_on(self.rows.turn(memory))

    @cute.jit
    def _row(
        self,
        tokens: Tokens,
        claims: Claims,
        state: State,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
        memory: Memory,
        shared: Int32,
        i: Int32,
    ):
        """Compress and insert row i of the list; all lanes take part."""
        entry = self.rows.entry(memory, i)
        early = partial(self._early, tokens, claims, memory, rotary, norm, entry, state.head_size)
        late = partial(self._late, claims, memory, entry)
        channels, (factors, stored) = self.window(state, entry, early, late)
        compressed = self.compressed(shared, channels)
        if self.warp() == 0:
            # Read again instead of kept in registers.
            slot = self.rows.entry(memory, i).slot
            self._finish(rotary, norm, cache, slot, compressed, factors, stored)

    @cute.jit
    def _early(
        self,
        tokens: Tokens,
        claims: Claims,
        memory: Memory,
        rotary: Rotary,
        norm: Norm,
        entry: Entry,
        head_size: Int32,
    ):
        """Ask for the row's slot, and for what multiplies the row."""
        found = Int32(0)
        if claims.buckets > 0 and self.warp() == 0:
            found = claims.ask(self.rows.turn(memory), entry.slot)
        return self._factors_of(tokens, rotary, norm, entry.position, head_size), found

    @cute.jit
    def _late(self, claims: Claims, memory: Memory, entry: Entry, asked):
        """What multiplies the row, and 1 if it is the one to be stored of those with its slot."""
        factors, found = asked
        stored = Int32(0)
        if self.warp() == 0:
            if claims.buckets > 0:
                stored = claims.won(self.rows.turn(memory), entry.slot, found)
            else:
                stored = self.rows.is_first(memory, entry)
        return factors, stored

    def _factors_of(
        self, tokens: Tokens, rotary: Rotary, norm: Norm, position: Int32, head_size: Int32
    ):
        """By vector."""
        # (position // ratio) * ratio of a token that completes a row.
        first = Int64(position + 1 - tokens.ratio.divisor)
        first = dsl_store.clamp_s64(first, rotary.last_position)
        table = rotary.cos_sin + first * rotary.row
        return [
            self._factors(rotary, norm, table, self._channel(head_size, v), head_size)
            for v in range(self.config.vectors)
        ]

    def _channel(self, head_size: Int32, v: int) -> Int32:
        """The lane's first channel of a vector; lanes past the row repeat its last."""
        channel = cute.arch.lane_idx() * LANE_CHANNELS + v * WARP_CHANNELS
        return dsl_store.min_s32(channel, head_size - LANE_CHANNELS)

    def _factors(
        self, rotary: Rotary, norm: Norm, table: Int64, channel: Int32, head_size: Int32
    ) -> Factors:
        weights = table_values(norm.weight, norm.element, channel, head_size, norm.kind)
        first = channel - (head_size - 2 * rotary.pairs)
        places = []
        for k in range(0, LANE_CHANNELS, 2):
            pair = dsl_store.clamp_s32((first + k) >> 1, rotary.pairs - 1)
            places.append(table + Int64(pair) * rotary.element)
        sines = Int64(rotary.pairs) * rotary.element
        cos = [table_value(place, rotary.is_bf16) for place in places]
        sin = [table_value(place + sines, rotary.is_bf16) for place in places]
        return Factors(*weights, *cos, *sin)

    @cute.jit
    def _finish(
        self,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
        slot: Int32,
        compressed,
        factors,
        stored: Int32,
    ):
        """By one warp: from its lanes' channels to stored bytes."""
        lane = cute.arch.lane_idx()
        head_size = cache.row_values * (2 // self.quantizer.code_words)
        words = self._words(rotary, norm, head_size, compressed, factors)
        largest = [self._largest(chunk) for chunk in words]
        if const_expr(self.quantizer.row_scale):
            row = largest[0]
            for other in largest[1:]:
                row = dsl_store.max_bf16x2(row, other)
            largest = [largest_over_lanes(row, _WARP_MASKS)] * len(words)
        else:
            largest = [largest_over_lanes(one, _GROUP_MASKS) for one in largest]
        scale_codes = [self.quantizer.scale_codes(one) for one in largest]
        codes = [
            self.quantizer.codes(chunk, inverse_scales(one)[0])
            for chunk, one in zip(words, scale_codes, strict=True)
        ]
        block, row_of_block = divided(slot, cache.rows)
        data = cache.data + Int64(block) * cache.block
        values = data + Int64(row_of_block) * Int64(cache.row_values)
        scales = data + cache.scales + Int64(row_of_block) * Int64(cache.row_scales)
        if stored != 0:
            for v in cutlass.range_constexpr(self.config.vectors):
                channel = v * WARP_CHANNELS + lane * LANE_CHANNELS
                if channel < head_size:
                    self._store(cache, values, scales, channel, codes[v], scale_codes[v])

    def _words(self, rotary: Rotary, norm: Norm, head_size: Int32, compressed, factors):
        """The chunks of rounded pairs that a lane and its neighbour hold together; both get them.

        Lanes past the row have zeros.
        """
        lane = cute.arch.lane_idx()
        beyond = [
            head_size - 1 - lane * LANE_CHANNELS - v * WARP_CHANNELS
            for v in range(self.config.vectors)
        ]
        square = Float32(0.0)
        for v, values in enumerate(compressed):
            for x in values:
                x = dsl_store.where_negative(beyond[v], Float32(0.0), x)
                square = dsl.fma(x, x, square)
        for mask in (1, 2, 4, 8, 16):
            square = square + dsl.shuffle_xor_f32(square, Int32(mask))
        mean = dsl_store.mul_rn(square, norm.inverse_size)
        scale = dsl_store.rsqrt(dsl_store.add_rn(mean, norm.eps))
        # Even lanes have the first half of a chunk.
        odd = -(lane & 1)
        chunks = []
        for v, values in enumerate(compressed):
            normed = [
                dsl_store.mul_rn(dsl_store.mul_rn(x, scale), weight)
                for x, weight in zip(values, factors[v][:4], strict=True)
            ]
            first = self._channel(head_size, v) - (head_size - 2 * rotary.pairs)
            own = self._rotated(first, normed, factors[v])
            other = [dsl.shuffle_xor_b32(word, Int32(1)) for word in own]
            words = [dsl_store.where_negative(odd, b, a) for a, b in zip(own, other, strict=True)]
            words += [dsl_store.where_negative(odd, a, b) for a, b in zip(own, other, strict=True)]
            chunks.append([dsl_store.where_negative(beyond[v], Int32(0), w) for w in words])
        return chunks

    def _rotated(self, first: Int32, x, factors: Factors):
        """Words of bf16 pairs; ``first``: the first element's number among the rotated ones."""
        words = []
        for k, (cos, sin) in enumerate(zip(factors[4:6], factors[6:8], strict=True)):
            pair = x[2 * k : 2 * k + 2]
            turned = rotated_pair(*pair, cos, sin)
            words.append(dsl_store.where_negative(first + 2 * k, dsl.pack_bf16x2(*pair), turned))
        return words

    def _largest(self, words) -> Int32:
        """A chunk's amax in both halves."""
        largest = largest_of(words)
        return halves_joined(largest, largest)

    @cute.jit
    def _store(
        self,
        cache: Cache,
        values: Int64,
        scales: Int64,
        channel: Int32,
        codes,
        scale_codes: Int32,
    ):
        """A lane's part of the row: one word of codes, and a scale where it leads those of one."""
        if const_expr(self.quantizer.row_scale):
            # Of the chunk's two words an even lane has the first.
            word = dsl_store.where_negative(-(channel & LANE_CHANNELS), codes[1], codes[0])
            self._store_word(cache, values + channel, word)
            if channel == 0:
                self._store_word(cache, scales, (scale_codes & 0xFF) << 23)
        else:
            if channel % CHUNK == 0:
                self._store_word(cache, values + (channel >> 1), codes[0])
            if channel % 32 == 0:
                dsl_store.st_global_b8(scales + (channel >> 5), scale_codes)

    @cute.jit
    def _store_word(self, cache: Cache, at: Int64, word: Int32):
        if cache.aligned != 0:
            dsl.st_global_b32(at, word)
        else:
            for i in cutlass.range_constexpr(4):
                dsl_store.st_global_b8(at + i, word >> (8 * i))
