"""What a lane of a copying warp reads and converts: a policy for each cache format.

A policy takes ``VECTOR`` neighbouring elements of a token's head. ``planes``: how many byte planes
the cache has (codes, block scales), each with strides of its own.
"""

from __future__ import annotations

from cutlass import Int32, Int64

from cute_kernels import dsl, dsl_nvfp4, dsl_store

# 64 as f16x2.
_SIXTY_FOUR = 0x54005400


class Fp8Rows:
    """fp8_e4m3: every code is an fp16 value."""

    planes = 1

    def load(self, rows: tuple[Int64, ...], vector: Int32):
        """rows: addresses of the token's row in each plane; vector: which elements of it."""
        return dsl_store.ld_global_b32x2(rows[0] + 8 * vector)

    def convert(self, loaded) -> tuple[Int32, ...]:
        """Four f16x2, the elements in their order."""
        low, high = (dsl.e4m3x4_to_f16x4(word) for word in loaded)
        return (*low, *high)


class Nvfp4Rows:
    """nvfp4: a code times its block scale has 6 significant bits and is at most 6 * 448, so the
    product is an fp16 value too. The codes come as their value * 2^-6, the scales are multiplied
    by 2^6, and so both products are exact."""

    planes = 2

    def load(self, rows: tuple[Int64, ...], vector: Int32):
        codes = dsl_store.ld_global_b32(rows[0] + 4 * vector)
        return codes, dsl_nvfp4.ld_global_u8(rows[1] + vector // 2)

    def convert(self, loaded) -> tuple[Int32, ...]:
        even, odd = dsl_nvfp4.e2m1x8_to_e4m3x8(loaded[0])
        scale = dsl_nvfp4.mul_f16x2(dsl_nvfp4.e4m3x2_to_f16x2(loaded[1]), Int32(_SIXTY_FOUR))
        pairs = []
        for order in (0x5140, 0x7362):
            pairs += dsl.e4m3x4_to_f16x4(dsl_nvfp4.permute_bytes(even, odd, Int32(order)))
        return tuple(dsl_nvfp4.mul_f16x2_by_low(pair, scale) for pair in pairs)


ROWS = {"fp8_e4m3": Fp8Rows, "nvfp4": Nvfp4Rows}
