"""nvfp4 and mxfp4 in numpy scalars, one group at a time: the definition read out loud.

Independent of the code under test on purpose: nothing from `cute_kernels` is imported.
"""

from __future__ import annotations

import bisect
import math

import numpy as np

F = np.float32
INVERSE = {d: F(1) / F(d) for d in (4, 6, 7)}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = [
    math.ldexp(c & 7, -9) if c < 8 else math.ldexp(8 + (c & 7), (c >> 3) - 10) for c in range(127)
]


def _nearest_even(magnitude: float, values) -> int:
    """The code of the nearest of ascending values, exact in float64, ties to the even code."""
    if magnitude >= values[-1]:
        return len(values) - 1
    above = bisect.bisect_right(values, magnitude)
    low, high = magnitude - values[above - 1], values[above] - magnitude
    if low == high:
        return above - 1 if above % 2 else above
    return above - 1 if low < high else above


def e2m1_code(x: F) -> int:
    if np.isnan(x):
        return 7
    return _nearest_even(abs(float(x)), E2M1) | (8 if np.signbit(x) else 0)


def e4m3_code(x: F) -> int:
    if np.isnan(x):
        return 0x7F
    return _nearest_even(abs(float(x)), E4M3) | (0x80 if np.signbit(x) else 0)


def e2m1_value(code: int) -> F:
    return F(math.copysign(E2M1[code & 7], -1.0 if code & 8 else 1.0))


def e4m3_value(code: int) -> F:
    magnitude = math.nan if code & 0x7F == 0x7F else E4M3[code & 0x7F]
    return F(math.copysign(magnitude, -1.0 if code & 0x80 else 1.0))


def group_error(x: np.ndarray, codes: list[int], sf_code: int, scale: F) -> F:
    """The squared error of a stored group of 16, in the order of the definition."""
    sf = e4m3_value(sf_code)
    with np.errstate(all="ignore"):
        dec = sf * F(scale)
        delta = [x[i] if sf == 0 else e2m1_value(codes[i]) * dec - x[i] for i in range(16)]
        pairs = [delta[i] * delta[i] + delta[i + 1] * delta[i + 1] for i in range(0, 16, 2)]
        first = ((pairs[0] + pairs[1]) + pairs[2]) + pairs[3]
        return first + (((pairs[4] + pairs[5]) + pairs[6]) + pairs[7])


def _trial(x: np.ndarray, sf_code: int, scale: F) -> tuple[F, list[int]]:
    sf = e4m3_value(sf_code)
    with np.errstate(all="ignore"):
        inv = F(1) / (sf * scale)
        enc = inv if sf != 0 and np.isfinite(inv) else F(0)
        codes = [e2m1_code(v * enc) for v in x]
    return group_error(x, codes, sf_code, scale), codes


def nvfp4_group(x: np.ndarray, scale: F, dtype: str) -> tuple[int, list[int]]:
    """The E4M3 scale code and the E2M1 codes of 16 float32 values."""
    scale = F(scale)
    amax = max((abs(v) for v in x if not np.isnan(v)), default=F(0))
    with np.errstate(all="ignore"):
        inv_scale = F(1) / scale
        c4, c6, c7 = (e4m3_code((amax * INVERSE[d]) * inv_scale) for d in (4, 6, 7))
    if dtype == "nvfp4":
        return c6, _trial(x, c6, scale)[1]
    if dtype == "nvfp4_4over6":
        (error4, codes4), (error6, codes6) = _trial(x, c4, scale), _trial(x, c6, scale)
        return (c4, codes4) if error4 < error6 else (c6, codes6)
    assert dtype == "nvfp4_mse"
    order = [c6, *range(c4, max(c7, c4 - 7, 1) - 1, -1)]
    trials = [_trial(x, c, scale) for c in order]
    winner = 0
    for i in range(1, len(order)):
        if trials[i][0] < trials[winner][0]:
            winner = i
    return order[winner], trials[winner][1]


def mxfp4_block(x: np.ndarray) -> tuple[int, list[int]]:
    """The UE8M0 code and the E2M1 codes of 32 float32 values."""
    amax = max((abs(v) for v in x if not np.isnan(v)), default=F(0))
    with np.errstate(all="ignore"):
        r = max(amax, F(6.0 * 2.0**-126)) * INVERSE[6]
        if np.isinf(r):
            e = 127
        else:
            mantissa, exponent = math.frexp(float(r))
            e = exponent - 1 if mantissa == 0.5 else exponent
        codes = [e2m1_code(v * F(math.ldexp(1.0, -e))) for v in x]
    return e + 127, codes
