"""E2M1 on the device, bit for bit as ``e2m1.encode``; imports the DSL.

Two ways to the same codes: the conversion instruction of SM100 and later, and for SM90 a rounding
by float32 additions. A GPU test holds both against the definition, the second one for every float.
"""

from __future__ import annotations

from cute_kernels import dsl_e2m1, dsl_store

# |x| rounded to a magnitude of E2M1, as a float32.
round_abs = dsl_e2m1.round_abs_to_e2m1


def pack_x8(x, instruction: bool):
    """Eight float32 (a Python sequence) to one word of codes, the first in the lowest nibble."""
    pack = dsl_e2m1.pack_e2m1x8_sm100 if instruction else dsl_e2m1.pack_e2m1x8
    return pack(*x)


def pack_bf16x8(words, scale, instruction: bool):
    """Eight bf16 (four words of pairs in order) times a power of two (a pair of equal bf16) to one
    word of codes.

    Exact for every scale that bf16 holds, subnormal 2^-127 included: what underflows on the way
    rounds to zero as E2M1 too.
    """
    if not instruction:
        return dsl_e2m1.pack_e2m1x8_of_bf16(*words, scale)
    scaled = [dsl_store.mul_bf16x2(word, scale) for word in words]
    return pack_x8([x for word in scaled for x in dsl_store.bf16x2_to_f32(word)], True)


def pack_bf16x8_in_range(words, magnitudes, scale):
    """As ``pack_bf16x8`` without the instruction, where no product exceeds 6. magnitudes: the words
    without their signs. scale: at most 2^121."""
    # 67 is 1.046875 * 2^6.
    scale67 = scale + (6 << 23 | 6 << 16 | 6 << 7 | 6)
    return dsl_e2m1.pack_e2m1x8_in_range(*words, *magnitudes, scale, scale67)
