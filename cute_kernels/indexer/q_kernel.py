"""The indexer's Q kernel: RoPE, codes, scales and head weights.

Shapes: q (tokens, heads, D) bf16, D a multiple of 32 up to 512, rows of 16-byte aligned chunks;
positions (tokens,) int64; cos_sin (max_position, 2 * pairs) and weights (tokens, heads) float32 or
bf16 of any strides. Out, dense: codes (tokens, heads, bytes), scales (tokens, heads, D / 32),
weights (tokens, heads) float32.

A team of lanes has a head. Each lane has two chunks of 8 elements: chunk i of the first and of the
second half of the head's groups, so that with DeepSeek-V4's sizes (D 128, 64 rotated) every lane
has 8 elements to rotate and 8 to leave, and no lane waits for another. Their two amax share a word
in the reduction over lanes. A thread takes `heads_per_thread` heads of one token, which have one
rotation, and loads the elements of all of them before it uses any.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.config import (
    CHUNK,
    FIXED_HEAD_SIZE,
    FIXED_PAIRS,
    Q_THREADS,
    IndexerQConfig,
)
from cute_kernels.indexer.formats import HEAD_MULTIPLE
from cute_kernels.indexer.quantize import (
    halves_joined,
    inverse_scales,
    largest_of,
    largest_over_lanes,
    outside,
    pairs_of_equals,
    quantizer,
    rotated_pair,
    scale_value,
    table_value,
    table_values,
)

_PAIRS = CHUNK // 2
_CHUNK_BYTES = 2 * CHUNK
_GROUP_CHUNKS = 4
# What brings a group, or a row of any size, together.
_GROUP_MASKS, _WARP_MASKS = (1, 2), (1, 2, 4, 8, 16)
_SIGNS, _MAGNITUDES = -(1 << 31) | 1 << 15, 0x7FFF7FFF


class Addresses(NamedTuple):
    positions: Int64
    q: Int64
    cos_sin: Int64
    weights: Int64
    codes: Int64
    scales: Int64


class Strides(NamedTuple):
    """In bytes."""

    position: Int64
    q_token: Int64
    q_head: Int64
    table_row: Int64
    table_element: Int64
    weight_token: Int64
    weight_head: Int64


class Sizes(NamedTuple):
    """groups: of 32 elements, of a head. pairs: rotated ones of a head. team: log2 of the lanes of
    a head. parts: CTAs of a token. early: 1 where the first half has rotated elements too; partly:
    where the second has others. table: a `Table`."""

    tokens: Int32
    heads: Int32
    groups: Int32
    pairs: Int32
    team: Int32
    parts: Int32
    early: Int32
    partly: Int32
    last_position: Int64
    table: Int32
    weights_bf16: Int32


class Factors(NamedTuple):
    softmax: Float32
    head: Float32


class Lane(NamedTuple):
    """A lane's place among those of its head, the numbers of its two chunks within the head, and
    whether they are its own (else they repeat another lane's, and are not stored)."""

    lane: Int32
    first: Int32
    second: Int32
    owns_first: Int32
    owns_second: Int32


class Places(NamedTuple):
    """Addresses of a lane's codes and scales, were its head the token's first."""

    first: Int64
    second: Int64
    first_scale: Int64
    second_scale: Int64


class IndexerQ:
    def __init__(self, config: IndexerQConfig):
        self.config = config
        self.quantizer = quantizer(config.cache_format, config.e2m1_instruction)

    @cute.jit
    def __call__(
        self,
        mWeights: cute.Tensor,
        at: Addresses,
        strides: Strides,
        sizes: Sizes,
        factors: Factors,
        stream,
    ):
        """mWeights: (tokens, heads), written; the other addresses and sizes come as numbers."""
        self.kernel(mWeights, at, strides, sizes, factors).launch(
            grid=(sizes.tokens, sizes.parts, 1),
            block=(Q_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(
        self,
        mWeights: cute.Tensor,
        at: Addresses,
        strides: Strides,
        sizes: Sizes,
        factors: Factors,
    ):
        # In this order: what is launched now may read what the kernels before this one wrote.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        sizes = self._with_constants(sizes)
        tid, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        lane = self._lane(tid & ((Int32(1) << sizes.team) - 1), sizes)
        teams, count = Int32(Q_THREADS) >> sizes.team, self.config.heads_per_thread
        first_head = part * count * teams + (tid >> sizes.team)
        heads = [first_head + i * teams for i in range(count)]
        words = [self._load(at, strides, sizes, lane, token, head) for head in heads]
        # Lane i of a team has the weight of its thread's head i.
        own = first_head + lane.lane * teams
        weight = self._weight(at, strides, sizes, token, own)
        table = self._table_row(at, strides, sizes, token)
        second = self._rotation(table, strides, sizes, lane.second)
        places = self._places(at, sizes, token, first_head, lane)
        scale, unusual = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(count):
            first_words = self._rotated_early(words[i][:4], table, strides, sizes, lane)
            second_words = self._rotated_late(words[i][4:], second, sizes, lane)
            stored = heads[i] < sizes.heads
            own_places = self._advanced(places, sizes, teams, Int32(i))
            if const_expr(self.quantizer.short):
                codes = self._shortly(first_words, second_words)
                unusual = unusual | codes[3]
            else:
                codes = self._exactly(first_words, second_words, sizes)
                if const_expr(self.quantizer.row_scale):
                    scale = dsl_store.where_negative(lane.lane - i, scale, codes[2])
            self._store(own_places, stored, lane, *codes[:3])
        if const_expr(self.quantizer.short):
            if cute.arch.vote_any_sync((unusual & _SIGNS) != 0):
                for i in cutlass.range(count, unroll=1):
                    self._again(at, strides, sizes, lane, token, first_head, i, table, places)
        if const_expr(self.quantizer.row_scale):
            weight = dsl_store.mul_rn(weight, scale_value(scale))
        if lane.lane < count and own < sizes.heads:
            weight = dsl_store.mul_rn(dsl_store.mul_rn(weight, factors.softmax), factors.head)
            mWeights[token, own] = weight

    @cute.jit
    def _again(
        self,
        at: Addresses,
        strides: Strides,
        sizes: Sizes,
        lane: Lane,
        token: Int32,
        first_head: Int32,
        i: Int32,
        table: Int64,
        places: Places,
    ):
        """Head i of a thread by the way that takes every number, over what the short one stored."""
        teams = Int32(Q_THREADS) >> sizes.team
        head = first_head + i * teams
        words = self._load(at, strides, sizes, lane, token, head)
        first_words = self._rotated_early(words[:4], table, strides, sizes, lane)
        rotation = self._rotation(table, strides, sizes, lane.second)
        second_words = self._rotated_late(words[4:], rotation, sizes, lane)
        codes = self._exactly(first_words, second_words, sizes)
        self._store(self._advanced(places, sizes, teams, i), head < sizes.heads, lane, *codes)

    def _with_constants(self, sizes: Sizes) -> Sizes:
        if not self.config.fixed_sizes:
            return sizes
        groups, pairs = FIXED_HEAD_SIZE // HEAD_MULTIPLE, FIXED_PAIRS
        half = FIXED_HEAD_SIZE // 2
        assert 2 * pairs == half
        team = (half // CHUNK - 1).bit_length()
        fixed = {"groups": groups, "pairs": pairs, "team": team, "early": 0, "partly": 0}
        return sizes._replace(**{name: Int32(value) for name, value in fixed.items()})

    def _lane(self, lane: Int32, sizes: Sizes) -> Lane:
        first_chunks = _GROUP_CHUNKS * ((sizes.groups + 1) >> 1)
        if self.config.fixed_sizes:
            return Lane(lane, lane, lane + first_chunks, Int32(1), Int32(1))
        chunks = _GROUP_CHUNKS * sizes.groups
        return Lane(
            lane,
            dsl_store.min_s32(lane, first_chunks - 1),
            dsl_store.min_s32(lane + first_chunks, chunks - 1),
            Int32(lane < first_chunks),
            Int32(lane + first_chunks < chunks),
        )

    def _load(
        self, at: Addresses, strides: Strides, sizes: Sizes, lane: Lane, token: Int32, head: Int32
    ):
        """The words of both chunks; of the last head where there are not as many."""
        head = dsl_store.min_s32(head, sizes.heads - 1)
        row = at.q + Int64(token) * strides.q_token + Int64(head) * strides.q_head
        row = row + lane.first * _CHUNK_BYTES
        second = row + (lane.second - lane.first) * _CHUNK_BYTES
        return [*dsl_store.ld_global_b32x4(row), *dsl_store.ld_global_b32x4(second)]

    def _weight(
        self, at: Addresses, strides: Strides, sizes: Sizes, token: Int32, head: Int32
    ) -> Float32:
        place = at.weights + Int64(token) * strides.weight_token
        head = dsl_store.min_s32(head, sizes.heads - 1)
        return table_value(place + Int64(head) * strides.weight_head, sizes.weights_bf16)

    def _places(self, at: Addresses, sizes: Sizes, token: Int32, head: Int32, lane: Lane) -> Places:
        rows = Int64(token) * Int64(sizes.heads) + Int64(head)
        chunk = 4 * self.quantizer.code_words
        codes = at.codes + rows * Int64(sizes.groups * (_GROUP_CHUNKS * chunk)) + lane.first * chunk
        scales = at.scales + rows * Int64(sizes.groups) + (lane.first >> 2)
        return Places(
            codes,
            codes + (lane.second - lane.first) * chunk,
            scales,
            scales + ((lane.second >> 2) - (lane.first >> 2)),
        )

    def _advanced(self, places: Places, sizes: Sizes, teams: Int32, i: Int32) -> Places:
        """The places of a thread's head i."""
        groups = i * teams * sizes.groups
        codes = Int64(groups * (_GROUP_CHUNKS * 4 * self.quantizer.code_words))
        scales = Int64(groups)
        return Places(
            places.first + codes,
            places.second + codes,
            places.first_scale + scales,
            places.second_scale + scales,
        )

    def _table_row(self, at: Addresses, strides: Strides, sizes: Sizes, token: Int32) -> Int64:
        """cos and sin of the token; a position outside the table takes the nearest inside."""
        position = dsl_store.ld_global_b64(at.positions + Int64(token) * strides.position)
        position = dsl_store.clamp_s64(position, sizes.last_position)
        return at.cos_sin + position * strides.table_row

    def _first_pair(self, sizes: Sizes, chunk: Int32) -> Int32:
        """The chunk's first pair among the rotated ones: negative where rotation has not begun."""
        return chunk * _PAIRS - (sizes.groups * (_GROUP_CHUNKS * _PAIRS) - sizes.pairs)

    def _rotation(self, table: Int64, strides: Strides, sizes: Sizes, chunk: Int32):
        """(cos, sin) of the chunk's pairs; anything for those that are not rotated."""
        first = self._first_pair(sizes, chunk)
        element = strides.table_element
        cos = table_values(table, element, first, sizes.pairs, sizes.table)
        sines = table + Int64(sizes.pairs) * element
        return cos, table_values(sines, element, first, sizes.pairs, sizes.table)

    def _rotated(self, words, rotation):
        return [
            rotated_pair(*dsl_store.bf16x2_to_f32(word), cos, sin)
            for word, cos, sin in zip(words, *rotation, strict=True)
        ]

    def _where_rotated(self, words, turned, sizes: Sizes, chunk: Int32):
        """The pairs of a chunk as they are before rotation begins."""
        first = self._first_pair(sizes, chunk)
        pairs = enumerate(zip(words, turned, strict=True))
        return [dsl_store.where_negative(first + k, old, new) for k, (old, new) in pairs]

    @cute.jit
    def _rotated_late(self, words, rotation, sizes: Sizes, lane: Lane):
        """The second chunk, which most calls rotate whole."""
        w0, w1, w2, w3 = self._rotated(words, rotation)
        if sizes.partly != 0:
            w0, w1, w2, w3 = self._where_rotated(words, [w0, w1, w2, w3], sizes, lane.second)
        return [w0, w1, w2, w3]

    @cute.jit
    def _rotated_early(self, words, table: Int64, strides: Strides, sizes: Sizes, lane: Lane):
        """The first chunk, which most calls leave as it is."""
        w0, w1, w2, w3 = words
        if sizes.early != 0:
            rotation = self._rotation(table, strides, sizes, lane.first)
            turned = self._rotated([w0, w1, w2, w3], rotation)
            w0, w1, w2, w3 = self._where_rotated([w0, w1, w2, w3], turned, sizes, lane.first)
        return [w0, w1, w2, w3]

    def _exactly(self, first_words, second_words, sizes: Sizes):
        """Codes of both chunks, and the codes of their scales in the halves of a word."""
        largest = halves_joined(largest_of(first_words), largest_of(second_words))
        if self.quantizer.row_scale:
            lanes = Int32(1) << sizes.team
            masks = [dsl_store.below(Int32(mask), lanes) for mask in _WARP_MASKS]
            if self.config.fixed_sizes:
                masks = [mask for mask in _WARP_MASKS if mask < FIXED_HEAD_SIZE // 2 // CHUNK]
            largest = halves_joined(largest, largest)
        else:
            masks = _GROUP_MASKS
        scale_codes = self.quantizer.scale_codes(largest_over_lanes(largest, masks))
        inverse = inverse_scales(scale_codes)
        first = self.quantizer.codes(first_words, inverse[0])
        return first, self.quantizer.codes(second_words, inverse[1]), scale_codes

    def _shortly(self, first_words, second_words):
        """As `_exactly`, and bits of `_SIGNS` where that is not so."""
        larger = dsl_store.max_or_nan_bf16x2
        magnitudes, largest = [], []
        for words in (first_words, second_words):
            magnitudes.append([word & _MAGNITUDES for word in words])
            a, b, c, d = magnitudes[-1]
            largest.append(larger(larger(larger(a, b), c), d))
        amax = largest_over_lanes(halves_joined(*largest, larger), _GROUP_MASKS, larger)
        scale_codes, inverse = self.quantizer.short_scales(amax)
        codes = [
            self.quantizer.short_codes(words, own, scale)
            for words, own, scale in zip(
                (first_words, second_words), magnitudes, pairs_of_equals(inverse), strict=True
            )
        ]
        return codes[0], codes[1], scale_codes, outside(amax)

    @cute.jit
    def _store(self, places: Places, stored, lane: Lane, first, second, scale_codes: Int32):
        """Store one head's chunks, where it is one."""
        if stored:
            if lane.owns_first != 0:
                self._store_codes(places.first, first)
            if lane.owns_second != 0:
                self._store_codes(places.second, second)
            if const_expr(not self.quantizer.row_scale):
                leads = lane.lane % _GROUP_CHUNKS == 0
                # One byte a group.
                if leads and lane.owns_first != 0:
                    dsl_store.st_global_b8(places.first_scale, scale_codes)
                if leads and lane.owns_second != 0:
                    dsl_store.st_global_b8(places.second_scale, scale_codes >> 16)

    def _store_codes(self, place: Int64, words):
        if len(words) == 1:
            dsl.st_global_b32(place, words[0])
        else:
            dsl.st_global_b32x2(place, *words)
