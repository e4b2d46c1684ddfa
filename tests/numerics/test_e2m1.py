"""E2M1 against the rounding table, at its boundaries and for every 16-bit float."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels.numerics import e2m1

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EVEN_FIRST = np.array([0, 2, 4, 6, 1, 3, 5, 7])
# (upper end, whether it belongs to the row, the code): the table of the format's definition.
TABLE = (
    (0.25, True, 0),
    (0.75, False, 1),
    (1.25, True, 2),
    (1.75, False, 3),
    (2.5, True, 4),
    (3.5, False, 5),
    (5.0, True, 6),
    (math.inf, True, 7),
)


def by_table(x: float) -> int:
    """The code of a float that is not NaN."""
    row = next(code for end, own, code in TABLE if abs(x) < end or (own and abs(x) == end))
    return row | (8 if math.copysign(1.0, x) < 0 else 0)


def by_distance(x: torch.Tensor) -> np.ndarray:
    """The codes of nearest even rounding, from exact float64 distances."""
    wide = x.double().numpy()
    distance = np.abs(np.minimum(np.abs(wide), 6.0)[:, None] - MAGNITUDES[EVEN_FIRST])
    codes = EVEN_FIRST[distance.argmin(1)] | np.signbit(wide) << 3
    return np.where(np.isnan(wide), 7, codes)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("sign", (1.0, -1.0))
@pytest.mark.parametrize("boundary", [end for end, _, _ in TABLE[:-1]])
def test_within_four_ulp_of_a_boundary(boundary, sign):
    middle = np.float32(boundary).view(np.int32)
    values = (np.arange(-4, 5, dtype=np.int32) + middle).view(np.float32) * np.float32(sign)
    codes = e2m1.encode(torch.from_numpy(values))
    assert codes.dtype is torch.uint8
    assert codes.tolist() == [by_table(float(v)) for v in values]
    assert len(set(codes.tolist())) == 2  # both sides of the boundary were seen


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_16_bit_float(dtype):
    x = every_pattern(dtype)
    expected = by_distance(x)
    assert np.array_equal(e2m1.encode(x).numpy(), expected)
    assert np.array_equal(e2m1.encode(x.float()).numpy(), expected)
    assert expected.tolist() == [7 if math.isnan(v) else by_table(v) for v in x.tolist()]


@pytest.mark.parametrize(
    ("value", "code"),
    (
        (-0.1, 8),
        (-0.0, 8),
        (2.0**-149, 0),
        (-(2.0**-149), 8),
        (3e38, 7),
        (math.inf, 7),
        (-math.inf, 15),
        (math.nan, 7),
    ),
)
def test_corners(value, code):
    assert e2m1.encode(torch.tensor([value])).tolist() == [code]


def test_nan_is_plus_six_whatever_its_bits():
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    nans = torch.cat((bits, bits | -(2**31))).view(torch.float32)
    assert nans.isnan().all()
    assert e2m1.encode(nans).tolist() == [7] * 6


def test_decode_inverts_encode():
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes)
    assert values.dtype is torch.float32
    assert values.tolist() == [*MAGNITUDES, *-MAGNITUDES]
    assert torch.equal(e2m1.encode(values), codes)  # -0.0 included


def test_the_first_element_is_in_the_low_nibble():
    assert e2m1.pack(torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)).tolist() == [[0x21, 0xF3]]
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    assert torch.equal(e2m1.pack(e2m1.unpack(every_byte)), every_byte)


def test_refusals():
    with pytest.raises(ValueError, match=r"float64; accepted: float32"):
        e2m1.encode(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"last dim is 3"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
