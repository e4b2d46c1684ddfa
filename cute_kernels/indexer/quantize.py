"""Rotation and quantization of a chunk: 8 consecutive elements of a row, four words of bf16 pairs.

Queries and compressed keys are both bf16 once they are rotated, and their scales are powers of
two. So scales are computed from the bits of bf16 by integer additions, for two amax in the halves
of a word at once, and scaling is an exact product of bf16 pairs. `reference/indexer.py` says what
is computed; that these short cuts give the same bits is tested for every bf16 number.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import dsl, dsl_store
from cute_kernels.indexer.config import Table
from cute_kernels.numerics import e2m1_device, e4m3_device

# 2^-119 as bf16: 67 times the inverse scale is then finite.
_LEAST = 8 << 7


class Quantizer:
    """What the formats share: 2^(code - 127) is the least power of two that keeps amax in range.

    amax = 1.m * 2^E exceeds `limit` * 2^e, the format's largest value having the mantissa 1.5 or
    1.75, iff m is larger: adding `carry`, 0x7F less that mantissa's bits, then moves it into the
    exponent, which is `bias` above the code. Not below the code of `floor`; infinity has 254.
    """

    floor: int
    carry: int
    bias: int
    # Whether there is a short way for amax from `_LEAST` to the largest finite number.
    short: bool = False

    def scale_codes(self, largest: Int32) -> Int32:
        """Codes of both halves of a pair of amax."""
        amax = dsl_store.max_u16x2(largest, Int32(_both(self.floor)))
        code = ((amax + _both(self.carry)) >> 7) & _both(0xFF)
        infinite = ((amax + _both(0x80)) >> 15) & _both(1)
        # The largest code that is not clamped is that of infinity, 255 - bias.
        return code - _both(self.bias) + infinite * (self.bias - 1)


class QuantizeMxfp4(Quantizer):
    """A scale for 32 elements, four chunks; 4 bytes of codes a chunk."""

    floor, carry, bias = 0x01C0, 0x3F, 2
    code_words, row_scale = 1, False

    def __init__(self, e2m1_instruction: bool):
        self.e2m1_instruction = e2m1_instruction
        self.short = not e2m1_instruction

    def short_scales(self, largest: Int32) -> tuple[Int32, Int32]:
        """Codes of both halves, and 2^(127 - code) of both, of amax that `outside` lets pass."""
        offset = _both(self.carry) - _both(self.bias << 7)
        exponents = (largest + offset) & _both(0x7F80)
        return exponents >> 7, _both(254 << 7) - exponents

    def short_codes(self, words, magnitudes, inverse: Int32):
        """inverse: a pair of equal powers of two."""
        return [e2m1_device.pack_bf16x8_in_range(words, magnitudes, inverse)]

    def codes(self, words, inverse: Int32):
        return [e2m1_device.pack_bf16x8(words, inverse, self.e2m1_instruction)]


class QuantizeFp8(Quantizer):
    """A scale for a row, not below 2^-22; 8 bytes of codes a chunk."""

    floor, carry, bias = 105 + 8 << 7, 0x1F, 8
    code_words, row_scale = 2, True

    def codes(self, words, inverse: Int32):
        scaled = [dsl_store.mul_bf16x2(word, inverse) for word in words]
        x = [v for word in scaled for v in dsl_store.bf16x2_to_f32(word)]
        return [e4m3_device.encode_x4(*x[:4]), e4m3_device.encode_x4(*x[4:])]


def quantizer(cache_format: str, e2m1_instruction: bool) -> QuantizeMxfp4 | QuantizeFp8:
    return QuantizeMxfp4(e2m1_instruction) if cache_format == "mxfp4" else QuantizeFp8()


def outside(largest: Int32) -> Int32:
    """Bits 15 and 31: where a half of a pair of amax is not finite, or less than `_LEAST`."""
    return (largest + _both(0x80)) | ~(largest + _both(0x8000 - _LEAST))


def _both(half: int) -> int:
    """A word with `half` in both halves."""
    return half << 16 | half


def inverse_scales(codes: Int32) -> tuple[Int32, Int32]:
    """2^(127 - code) as bf16, of the low and of the high half, each as a pair of equal numbers."""
    exponents = (_both(254) - codes) << 7
    # 2^-127, for the code 254, is subnormal.
    inverse = dsl_store.max_u16x2(exponents, Int32(_both(0x40)))
    return pairs_of_equals(inverse)


def scale_value(code: Int32) -> Float32:
    """2^(code - 127), for a code from 1 to 254 in the low half."""
    return dsl.bits_to_f32((code & 0xFF) << 23)


def pairs_of_equals(inverse: Int32) -> tuple[Int32, Int32]:
    """The low and the high half, each twice."""
    return dsl_store.permute(inverse, inverse, 0x1010), dsl_store.permute(inverse, inverse, 0x3232)


def largest_of(words) -> Int32:
    """The largest magnitudes of a chunk's even and of its odd elements; NaN does not count."""
    largest = Int32(0)
    for word in words:
        largest = dsl_store.largest_abs_bf16x2(largest, word)
    return largest


def halves_joined(low: Int32, high: Int32, larger=dsl_store.max_bf16x2) -> Int32:
    """The larger half of `low` in the low half, that of `high` in the high half."""
    firsts = dsl_store.permute(low, high, 0x5410)
    return larger(firsts, dsl_store.permute(low, high, 0x7632))


def largest_over_lanes(largest: Int32, masks, larger=dsl_store.max_bf16x2) -> Int32:
    """Halves apart, over the lanes whose number differs in the bits of `masks`."""
    for mask in masks:
        largest = larger(largest, dsl.shuffle_xor_b32(largest, Int32(mask)))
    return largest


def rotated_pair(even: Float32, odd: Float32, cos: Float32, sin: Float32) -> Int32:
    """One pair by RoPE, rounded to bf16; no product is contracted."""
    first = dsl_store.sub_rn(dsl_store.mul_rn(even, cos), dsl_store.mul_rn(odd, sin))
    second = dsl_store.add_rn(dsl_store.mul_rn(odd, cos), dsl_store.mul_rn(even, sin))
    return dsl.pack_bf16x2(first, second)


@cute.jit
def table_value(address, is_bf16: Int32) -> Float32:
    """A float32 or bf16 number of global memory."""
    value = Float32(0.0)
    if is_bf16 != 0:
        value = dsl_store.ld_global_bf16(address)
    else:
        value = dsl_store.ld_global_f32(address)
    return value


@cute.jit
def table_values(row: Int64, element: Int64, first: Int32, size: Int32, kind: Int32):
    """Four numbers of a row from its number `first` on; those outside [0, size) are anything.

    kind: a `Table`. At once: size and first are multiples of 4.
    """
    a, b, c, d = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    if kind >= Table.FLOAT32_AT_ONCE:
        near = Int64(dsl_store.clamp_s32(first, size - 4))
        if kind == Table.FLOAT32_AT_ONCE:
            a, b, c, d = dsl_store.ld_global_f32x4(row + near * 4)
        else:
            low, high = dsl_store.ld_global_b32x2(row + near * 2)
            a, b = dsl_store.bf16x2_to_f32(low)
            c, d = dsl_store.bf16x2_to_f32(high)
    else:
        places = [dsl_store.clamp_s32(first + k, size - 1) for k in range(4)]
        a, b, c, d = [table_value(row + Int64(at) * element, kind) for at in places]
    return a, b, c, d
