"""E4M3FN against its definition, for every 16-bit float and near every rounding boundary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels.numerics import e4m3

NAN = 0x7F


def value_of(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (
        math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    )
    return math.copysign(magnitude, -1.0 if code & 0x80 else 1.0)


MAGNITUDES = np.array([value_of(code) for code in range(NAN)])
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2  # exact in float32, and in float64


def nearest_even(x: np.ndarray) -> np.ndarray:
    """Codes of float64 values, which hold every narrower float exactly."""
    magnitude = np.minimum(np.abs(x), 448.0)
    below = np.searchsorted(MIDPOINTS, magnitude, side="left")  # a tie stays with the lower code
    tie = (below < len(MIDPOINTS)) & (MIDPOINTS[np.minimum(below, 125)] == magnitude)
    codes = below + (tie & (below % 2 == 1)) + (np.signbit(x) << 7)
    return np.where(np.isnan(x), NAN, codes)


def test_the_oracle_knows_the_format():
    assert MAGNITUDES[0x01] == 2.0**-9
    assert MAGNITUDES[0x08] == 2.0**-6
    assert MAGNITUDES[0x38] == 1.0
    assert MAGNITUDES[0x7E] == 448.0
    assert (np.diff(MAGNITUDES) > 0).all()
    assert nearest_even(np.array([1.0625, 1.1875, 464.0, -1e9])).tolist() == [56, 58, 126, 254]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_16_bit_float(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    codes = e4m3.encode(x)
    assert codes.dtype is torch.uint8
    assert np.array_equal(codes.numpy(), nearest_even(x.double().numpy()))


@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_within_four_ulp_of_every_boundary_and_value(sign):
    centres = np.concatenate((MIDPOINTS, MAGNITUDES[1:], [464.0, 480.0])).astype(np.float32)
    steps = np.arange(-4, 5, dtype=np.int32)
    values = (centres.view(np.int32)[:, None] + steps).view(np.float32).ravel() * np.float32(sign)
    codes = e4m3.encode(torch.from_numpy(values)).numpy()
    assert np.array_equal(codes, nearest_even(values.astype(np.float64)))


def test_it_saturates_and_canonicalises_nan():
    x = torch.tensor([448.0, 464.0, 465.0, 3e38, math.inf, -464.1, -math.inf])
    assert e4m3.encode(x).tolist() == [0x7E] * 5 + [0xFE] * 2
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    nans = torch.cat((bits, bits | -(2**31))).view(torch.float32)
    assert e4m3.encode(nans).tolist() == [NAN] * 6


def test_subnormals_of_float32_keep_their_sign():
    assert e4m3.encode(torch.tensor([2.0**-149, -(2.0**-149), -0.0])).tolist() == [0, 0x80, 0x80]


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float8_e4m3fn), ids=str)
def test_decode(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    values = e4m3.decode(codes.view(dtype))
    assert values.dtype is torch.float32
    number = torch.tensor([code & NAN != NAN for code in range(256)])
    assert values[~number].isnan().all()
    assert values[number].tolist() == [value_of(c) for c in range(256) if c & NAN != NAN]
    assert torch.equal(e4m3.encode(values)[number], codes[number])  # -0.0 included


def test_float64_is_refused():
    with pytest.raises(ValueError, match=r"float64; accepted: float32"):
        e4m3.encode(torch.zeros(2, dtype=torch.float64))
