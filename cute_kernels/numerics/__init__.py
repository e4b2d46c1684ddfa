"""Bit-exact definitions of the element and scale formats, one module per format.

Every rounding that a store performs is one of these functions or a plain float32 operation, so the
torch reference and the kernels agree on every bit.
"""

from __future__ import annotations

import torch

# Bounds of what a number is as float32: the smallest that becomes infinite, half an ulp above the
# largest, and the largest that becomes 0, half the smallest.
FLOAT32_END = 2.0**128 - 2.0**103
FLOAT32_ZERO_UP_TO = 2.0**-150


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` as float32 without a rounding: float32, bfloat16 or float16.

    Raises:
        ValueError: another dtype; a float64 input would be rounded twice.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x: got {x.dtype}; accepted: float32, bfloat16, float16")
    return x.float()
