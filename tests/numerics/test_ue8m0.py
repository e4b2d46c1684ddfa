"""UE8M0 exponents, from the bits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from cute_kernels.numerics import ue8m0


def ceil_log2(r: float) -> int:
    """Exact, by comparing rationals."""
    e = math.frexp(r)[1]
    while Fraction(2) ** (e - 1) >= Fraction(r):
        e -= 1
    while Fraction(2) ** e < Fraction(r):
        e += 1
    return e


def test_next_to_every_power_of_two():
    powers = torch.tensor([math.ldexp(1.0, e) for e in range(-125, 128)])
    bits = powers.view(torch.int32).unsqueeze(1) + torch.arange(-2, 3, dtype=torch.int32)
    r = bits.view(torch.float32).flatten()
    e = ue8m0.ceil_exponent(r)
    assert e.dtype is torch.int32
    assert e.tolist() == [min(ceil_log2(v), 127) for v in r.tolist()]
    # What the definition avoids: a float logarithm misses exponents here.
    assert (r.log2().ceil().int() != e).any()


def test_the_ends_of_the_range():
    r = torch.tensor([2.0**-126, 3.4e38, math.inf, math.nan])
    assert ue8m0.ceil_exponent(r).tolist() == [-126, 127, 127, 127]


def test_powers_of_two_are_exact_down_to_the_least_subnormal():
    e = torch.arange(-149, 128, dtype=torch.int32)
    values = ue8m0.power_of_two(e)
    assert values.dtype is torch.float32
    assert values.tolist() == [math.ldexp(1.0, int(i)) for i in e]
    assert ue8m0.power_of_two(torch.tensor([-127], dtype=torch.int32)).view(torch.int32) == 0x400000


def test_codes():
    e = torch.arange(-127, 128, dtype=torch.int32)
    codes = ue8m0.encode(e)
    assert codes.tolist() == list(range(255))
    assert torch.equal(ue8m0.decode(codes), ue8m0.power_of_two(e))


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float8_e8m0fnu), ids=str)
def test_decode_takes_both_dtypes(dtype):
    codes = torch.tensor([0, 126, 127, 254, 255], dtype=torch.uint8).view(dtype)
    expected = np.array([2.0**-127, 0.5, 1.0, 2.0**127, math.nan])
    assert np.array_equal(ue8m0.decode(codes).double().numpy(), expected, equal_nan=True)
