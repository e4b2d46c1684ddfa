"""E4M3FN: the element format of fp8_e4m3 and the block-scale format of nvfp4.

1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinity; 0x7F and 0xFF are NaN (OCP 8-bit
Floating Point Specification 1.0). Rounding is to nearest even, saturating to +-448 (infinities
too), and every NaN becomes 0x7F: the results of `cvt.rn.satfinite.e4m3x2.f32` in the PTX ISA.
"""

from __future__ import annotations

import torch

from cute_kernels.numerics import widened

MAX = 448.0
NAN_CODE = 0x7F


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3FN.

    Args:
        x: float32, bfloat16 or float16 of any shape. The last two widen without loss.

    Returns:
        Codes, uint8, x's shape. The sign survives rounding to zero; a NaN loses its sign.

    Raises:
        ValueError: another dtype.
    """
    x = widened(x)
    # torch versions differ in what the cast does beyond 448, and they keep the sign of a NaN.
    codes = x.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), NAN_CODE)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes, given as uint8 or float8_e4m3fn."""
    return codes.view(torch.float8_e4m3fn).float()
