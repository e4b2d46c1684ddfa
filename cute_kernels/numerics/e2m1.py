"""E2M1, the 4-bit element format of nvfp4 and mxfp4 (OCP Microscaling Formats 1.0).

A code is `sign << 3 | magnitude`, the magnitudes 0..7 being 0, 0.5, 1, 1.5, 2, 3, 4 and 6. There
is neither infinity nor NaN. Rounding is to nearest, ties to the even code, saturating to 6, and
NaN gives +6: the results of `cvt.rn.satfinite.e2m1x2.f32` in the PTX ISA.
"""

from __future__ import annotations

import torch

from cute_kernels.numerics import widened

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0
_NAN_CODE = 7


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1.

    Args:
        x: float32, bfloat16 or float16 of any shape. The last two widen without loss.

    Returns:
        Codes 0..15, uint8, x's shape. The sign survives rounding to zero: -0.1 gives 8.

    Raises:
        ValueError: another dtype.
    """
    x = widened(x)
    a = x.abs()
    # The boundary of a tie to even belongs to the code below it (>) or above it (>=).
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    code |= torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(x.isnan(), _NAN_CODE)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes 0..15 (uint8); code 8 is -0.0."""
    signed = [*VALUES, *(-v for v in VALUES)]
    values = torch.tensor(signed, dtype=torch.float32, device=codes.device)
    return values[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: (..., D) to (..., D / 2), element 2i in the low nibble of byte i.

    Raises:
        ValueError: an odd D.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: the last dim is {codes.shape[-1]}; accepted: an even number")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: (..., D / 2) uint8 to (..., D) codes."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
