"""UE8M0, the power-of-two scale format of mxfp4 (OCP Microscaling Formats 1.0).

Code c stands for 2^(c - 127), and 255 for NaN. Exponents are read from and written to the bits of
float32: a float `log2` or `exp2` is off by one near powers of two.
"""

from __future__ import annotations

import torch

BIAS = 127
NAN_CODE = 255
_MANTISSA_BITS = 23
_MAX_EXPONENT = 127
_MIN_NORMAL_EXPONENT = -126


def ceil_exponent(r: torch.Tensor) -> torch.Tensor:
    """The least e with r <= 2^e, at most 127: exactly ceil(log2(r)).

    Args:
        r: float32, at least 2^-126; infinity and NaN are accepted and give 127.

    Returns:
        int32, r's shape.
    """
    bits = r.view(torch.int32)
    exponent = ((bits >> _MANTISSA_BITS) & 0xFF) - BIAS
    exponent = exponent + (bits & (1 << _MANTISSA_BITS) - 1 != 0)
    return exponent.clamp(max=_MAX_EXPONENT)


def power_of_two(e: torch.Tensor) -> torch.Tensor:
    """2^e as float32, exact for int32 e in [-149, 127], subnormal results included."""
    normal = e + BIAS << _MANTISSA_BITS
    # A negative shift count is undefined, also in the lanes that `where` drops.
    subnormal = 1 << (e + 149).clamp(0, _MANTISSA_BITS)
    return torch.where(e >= _MIN_NORMAL_EXPONENT, normal, subnormal).int().view(torch.float32)


def encode(e: torch.Tensor) -> torch.Tensor:
    """The uint8 codes of exponents in [-127, 127], int32."""
    return (e + BIAS).to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes, given as uint8 or float8_e8m0fnu."""
    codes = codes.view(torch.uint8)
    values = power_of_two(codes.int() - BIAS)
    return values.masked_fill(codes == NAN_CODE, torch.nan)
