"""The indexer's K kernel: windows of compressor states to rows of a block-planar cache.

Shapes: state (blocks, block_size, 2 W) float32, W = D or 2 D, D a multiple of 32 up to 512;
positions, slots (tokens,) int64; token_to_seq (tokens,) int32; table (B, columns) int32; cache
blocks as docs/formats.md has them. All strides are free.

A warp looks through a span of tokens for those that complete a row, and takes one after the other;
where windows are long all warps of a CTA look, and share each window (`window.py`). One warp then
finishes the row: RMSNorm, rotation, quantization, and the store.

Positions, sequences and blocks outside their tables are moved inside: nothing outside of the
tensors is read, and the row is then of no use. Of rows with one slot one is stored: in short calls
the last, in longer ones that which `tokens.ClaimRows`, launched before, let win.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_store
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
from cute_kernels.indexer.tokens import Tokens, completes, position_of, sequence_of
from cute_kernels.indexer.window import Compressor, Row, State
from cute_kernels.store.kernel import Divisor, divided, owns

# Tokens whose slots a lane has in flight while its warp looks for repeated ones.
_BATCH = 8
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

    @cute.jit
    def __call__(
        self,
        mSlots: cute.Tensor,
        tokens: Tokens,
        state: State,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
        stream,
    ):
        spans = cute.ceil_div(tokens.tokens, tokens.span)
        self.kernel(mSlots, tokens, state, rotary, norm, cache).launch(
            grid=(cute.ceil_div(spans, self.config.independent_warps), 1, 1),
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
        state: State,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
    ):
        shared = self.allocate()
        # Behind `ClaimRows`, the kernels that wrote the inputs have ended: `owns` waits for it.
        if tokens.owner == 0:
            cute.arch.griddepcontrol_wait()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = tid >> 5, tid & 31
        if const_expr(self.config.warps == 1):
            first = (cta * self.config.independent_warps + warp) * tokens.span
            end = dsl_store.min_s32(first + tokens.span, tokens.tokens)
            for start in cutlass.range(first, end, 32, unroll=1):
                left = self._complete(mSlots, tokens, start + lane, end)
                while left != 0:
                    token, left = start + _lowest(left), left & (left - 1)
                    self._row(mSlots, tokens, state, rotary, norm, cache, shared, token)
        else:
            first = cta * tokens.span
            end = dsl_store.min_s32(first + tokens.span, tokens.tokens)
            words = shared + 4 * (self.config.join_floats + self.config.warps)
            for start in cutlass.range(first, end, self.config.threads, unroll=1):
                # All warps look, each at tokens of its own, and learn what the others found.
                own = self._complete(mSlots, tokens, start + tid, end)
                if lane == 0:
                    dsl.st_shared_b32(words + 4 * warp, own)
                cute.arch.sync_threads()
                found = dsl.ld_shared_b32(words + 4 * (lane % self.config.warps))
                some = found != 0 and lane < self.config.warps
                groups = Int32(cute.arch.vote_ballot_sync(some))
                while groups != 0:
                    group, groups = _lowest(groups), groups & (groups - 1)
                    left = dsl.shuffle_from_lane(found, group)
                    while left != 0:
                        token, left = start + 32 * group + _lowest(left), left & (left - 1)
                        self._row(mSlots, tokens, state, rotary, norm, cache, shared, token)
                # Not before all warps have read the words.
                cute.arch.sync_threads()

    @cute.jit
    def _complete(self, mSlots: cute.Tensor, tokens: Tokens, token: Int32, end: Int32) -> Int32:
        """Bits of the lanes whose token, one below `end`, completes a row."""
        near = dsl_store.min_s32(token, end - 1)
        slot, position = mSlots[near], position_of(tokens, near)
        live = completes(tokens, slot, position) & Int32(token < end)
        return Int32(cute.arch.vote_ballot_sync(live != 0))

    @cute.jit
    def _row(
        self,
        mSlots: cute.Tensor,
        tokens: Tokens,
        state: State,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
        shared: Int32,
        token: Int32,
    ):
        """Compress and insert the row that a token completes; all lanes take part."""
        # What was just read is read again, from the cache, instead of being kept in registers.
        # Factors come before they are needed: with the window, or, where many warps leave fewer
        # registers, while those are waited for.
        row = Row(position_of(tokens, token), sequence_of(tokens, token))
        look = partial(self._is_repeated, mSlots, tokens, token)
        if const_expr(self.config.warps == 1):
            factors = self._factors_of(tokens, rotary, norm, row.position, state.head_size)
            channels, repeated = self.window(state, row, look)
        else:
            channels, repeated = self.window(state, row, look)
            position = position_of(tokens, token)
            factors = self._factors_of(tokens, rotary, norm, position, state.head_size)
        compressed, repeated = self.compressed(shared, channels, repeated)
        if self.warp() == 0:
            self._finish(mSlots, tokens, rotary, norm, cache, token, compressed, factors, repeated)

    def _factors_of(
        self, tokens: Tokens, rotary: Rotary, norm: Norm, position: Int64, head_size: Int32
    ):
        """By vector."""
        # (position // ratio) * ratio of a token that completes a row.
        first = position + 1 - Int64(tokens.ratio.divisor)
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
        mSlots: cute.Tensor,
        tokens: Tokens,
        rotary: Rotary,
        norm: Norm,
        cache: Cache,
        token: Int32,
        compressed,
        factors,
        repeated: Int32,
    ):
        """By one warp: from its lanes' channels to stored bytes."""
        lane, slot = cute.arch.lane_idx(), mSlots[token]
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
        block, row_of_block = divided(Int32(slot), cache.rows)
        data = cache.data + Int64(block) * cache.block
        values = data + Int64(row_of_block) * Int64(cache.row_values)
        scales = data + cache.scales + Int64(row_of_block) * Int64(cache.row_scales)
        if repeated == 0:
            if owns(tokens.owner, token, slot):
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

    @cute.jit
    def _is_repeated(self, mSlots: cute.Tensor, tokens: Tokens, token: Int32) -> Int32:
        """In a short call: 1 where a later token completes a row for this token's slot; of warps
        that share a window, where the warp finds it."""
        found = Int32(0)
        if tokens.owner == 0:
            slot, last = mSlots[token], tokens.tokens - 1
            lane, batch = cute.arch.lane_idx(), 32 * _BATCH
            first = token + 1 + self.warp() * batch
            step = self.config.warps * batch
            slots = mSlots.iterator.toint()
            for start in cutlass.range(first, tokens.tokens, step, unroll=1):
                places = [dsl_store.min_s32(start + lane + 32 * k, last) for k in range(_BATCH)]
                # Low halves first: slots that exist have nothing in the others.
                halves = [dsl_store.ld_global_b32(slots + Int64(place) * 8) for place in places]
                for k in cutlass.range_constexpr(_BATCH):
                    if halves[k] == Int32(slot) and places[k] > token:
                        if mSlots[places[k]] == slot:
                            position = position_of(tokens, places[k])
                            found = found | completes(tokens, slot, position)
            found = dsl.warp_max_b32(found)
        return found


def _lowest(bits: Int32) -> Int32:
    """The number of the lowest bit."""
    return Int32(cute.arch.popc((bits & -bits) - 1))
