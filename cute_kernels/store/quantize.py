"""What one thread does with its 16 elements: from 8 words of bf16 or fp16 pairs to stored words.

The torch definitions in ``reference/quantize.py`` and ``reference/store.py`` say what is computed,
in which order, and what is rounded; every operation here is one of theirs. Differences that cannot
show in the result: the error of a trial is computed from magnitudes (a stored element never has
the other sign), and is NaN where a block scale of 0 meets an infinite global scale (such a trial
never wins).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels import dsl, dsl_store
from cute_kernels.formats import ScaleSearch
from cute_kernels.numerics import e2m1_device, e4m3_device

_UNPACK = {"bf16": dsl_store.bf16x2_to_f32, "fp16": dsl_store.f16x2_to_f32}
_LARGEST = {"bf16": dsl_store.largest_abs_bf16x2, "fp16": dsl_store.largest_abs_f16x2}
# float32(1 / d), exact as Python floats.
_INVERSE_4 = 0.25
_INVERSE_6 = float.fromhex("0x1.555556p-3")
_INVERSE_7 = float.fromhex("0x1.24924ap-3")
_MSE_CANDIDATES = 8


class Stored(NamedTuple):
    """Words of a stored group: 4 of fp8; 2 of nvfp4, followed by the block scale's code and 0."""

    w0: Int32
    w1: Int32
    w2: Int32
    w3: Int32


class QuantizeFp8:
    """e4m3(x * (1 / scale))."""

    data_bytes = 16

    def __init__(self, x_dtype: str):
        self.unpack = _UNPACK[x_dtype]

    @cute.jit
    def __call__(self, words, scale: Float32) -> Stored:
        inverse = dsl_store.rcp_rn(scale)
        x = [dsl_store.mul_rn(v, inverse) for word in words for v in self.unpack(word)]
        return Stored(*(e4m3_device.encode_x4(*x[i : i + 4]) for i in (0, 4, 8, 12)))


class QuantizeNvfp4:
    """Block scale and codes of a group, under the scale search of its side."""

    data_bytes = 8

    def __init__(self, x_dtype: str, search: ScaleSearch, e2m1_instruction: bool):
        self.unpack = _UNPACK[x_dtype]
        self.largest = _LARGEST[x_dtype]
        self.search = search
        self.e2m1_instruction = e2m1_instruction

    @cute.jit
    def __call__(self, words, scale: Float32) -> Stored:
        inverse = dsl_store.rcp_rn(scale)
        largest = Int32(0)
        for word in words:
            largest = self.largest(largest, word)
        amax = dsl.fmax(*self.unpack(largest))
        x = [v for word in words for v in self.unpack(word)]
        code = self._scale_code(amax, _INVERSE_6, inverse)
        if const_expr(self.search is not ScaleSearch.DEFAULT):
            error = self._error(x, code, scale)
            four = self._scale_code(amax, _INVERSE_4, inverse)
            if const_expr(self.search is ScaleSearch.FOUR_OVER_SIX):
                if self._error(x, four, scale) < error:
                    code = four
            else:
                seven = self._scale_code(amax, _INVERSE_7, inverse)
                code = self._least_error(x, scale, code, error, four, seven)
        encode = self._reciprocals(code, scale)[1]
        q = [dsl_store.mul_rn(v, encode) for v in x]
        low = e2m1_device.pack_x8(q[:8], self.e2m1_instruction)
        high = e2m1_device.pack_x8(q[8:], self.e2m1_instruction)
        return Stored(low, high, code, Int32(0))

    def _scale_code(self, amax, inverse_d: float, inverse):
        scaled = dsl_store.mul_rn(dsl_store.mul_rn(amax, Float32(inverse_d)), inverse)
        return e4m3_device.encode(scaled)

    @cute.jit
    def _least_error(self, x, scale: Float32, code: Int32, error: Float32, four, seven) -> Int32:
        """Strictly smaller from the larger code down: ties stay with 6, then the larger code."""
        lowest = seven
        if lowest < 1:
            lowest = Int32(1)
        if lowest < four - (_MSE_CANDIDATES - 1):
            lowest = four - (_MSE_CANDIDATES - 1)
        # Not unrolled: eight copies of a trial would not fit the instruction cache.
        for k in cutlass.range(four - lowest + 1, unroll=1):
            trial = self._error(x, four - k, scale)
            if trial < error:
                code = four - k
                error = trial
        return code

    @cute.jit
    def _reciprocals(self, code: Int32, scale: Float32):
        """What an element is multiplied by to be read, and to be stored."""
        decode = dsl_store.mul_rn(e4m3_device.decode(code), scale)
        encode = dsl_store.rcp_rn(decode)
        if (code & 0x7F) == 0 or dsl_store.is_finite(encode) == 0:
            encode = Float32(0.0)
        return decode, encode

    def _error(self, x, code: Int32, scale: Float32) -> Float32:
        """The group's squared error under a block scale."""
        decode, encode = self._reciprocals(code, scale)
        halves = []
        for first in (0, 8):
            pairs = []
            for i in range(first, first + 8, 2):
                squares = []
                for v in x[i : i + 2]:
                    magnitude = e2m1_device.round_abs(dsl_store.mul_rn(v, encode))
                    delta = dsl_store.sub_abs_rn(dsl_store.mul_rn(magnitude, decode), v)
                    squares.append(dsl_store.mul_rn(delta, delta))
                pairs.append(dsl_store.add_rn(*squares))
            half = pairs[0]
            for pair in pairs[1:]:
                half = dsl_store.add_rn(half, pair)
            halves.append(half)
        return dsl_store.add_rn(*halves)
