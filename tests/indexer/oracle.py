"""The indexer's formulas in float64 and lookup tables, by numpy: the definition read out loud.

Independent of the code under test on purpose: nothing from `cute_kernels` is imported. Where
float32 roundings are part of the definition, an operation is done in float64 and rounded once more,
which gives the same bits, since 53 >= 2 * 24 + 2.
"""

from __future__ import annotations

import math

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array([m / 512 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)
][:-1])  # fmt: skip
POWERS = np.array([math.ldexp(1.0, e) for e in range(-149, 128)])
SIXTH = float(np.float32(1 / 6))
FLOOR_FP8 = float(np.float32(1e-4))


def single(x: np.ndarray) -> np.ndarray:
    """Rounded to float32, held in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to float32 and then to bfloat16, held in float64; by integers."""
    bits = single(x).astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    values = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isnan(x), np.nan, values)


def _codes(x: np.ndarray, values: np.ndarray, sign_bit: int, nan_code: int) -> np.ndarray:
    """The nearest of ascending values, ties to the even code, saturating."""
    middles = (values[1:] + values[:-1]) / 2
    below = np.searchsorted(middles, abs(x), "left")
    above = np.searchsorted(middles, abs(x), "right")
    codes = np.where(below % 2 == 0, below, above) | np.signbit(x) << sign_bit
    return np.where(np.isnan(x), nan_code, codes).astype(np.uint8)


def _ceil_power(r: np.ndarray) -> np.ndarray:
    """The exponent of the first power of two that is not below r, at most 127."""
    return np.minimum(np.searchsorted(POWERS, r, "left") - 149, 127)


def _amax(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0.0, abs(x)).max(-1, keepdims=True)


def mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(..., D) to bytes (..., D / 2) and scale codes (..., D / 32)."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    e = _ceil_power(single(np.maximum(_amax(groups), 6 * 2.0**-126) * SIXTH))
    codes = _codes(groups / np.exp2(e), E2M1, 3, 7).reshape(x.shape)
    return codes[..., 0::2] + 16 * codes[..., 1::2], (e[..., 0] + 127).astype(np.uint8)


def fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(..., D) to codes (..., D) and scales (...,), float64."""
    e = _ceil_power(single(np.maximum(_amax(x), FLOOR_FP8) / 448))
    return _codes(x / np.exp2(e), E4M3, 7, 0x7F), np.exp2(e[..., 0])


def rope(x: np.ndarray, cos_sin: np.ndarray, rounded) -> np.ndarray:
    """Interleaved RoPE of the last elements of one row (D,), each operation `rounded`."""
    out = x.copy()
    half = len(cos_sin) // 2
    first = len(x) - 2 * half
    with np.errstate(all="ignore"):
        for i in range(half):
            a, b = x[first + 2 * i], x[first + 2 * i + 1]
            cos, sin = cos_sin[i], cos_sin[half + i]
            out[first + 2 * i] = rounded(rounded(a * cos) - rounded(b * sin))
            out[first + 2 * i + 1] = rounded(rounded(b * cos) + rounded(a * sin))
    out[first:] = bf16(out[first:])
    return out


def indexer_q(positions, index_q, cos_sin, weights, softmax_scale, head_scale, use_fp4):
    """Arrays of float64 (positions: integers) to codes, scales or None, and weights."""
    rows = np.empty_like(index_q)
    for t, position in enumerate(positions):
        # One call for all heads: the last axis is the one that `rope` walks.
        rows[t] = rope(index_q[t].T, cos_sin[position], single).T
    with np.errstate(all="ignore"):
        if use_fp4:
            codes, scales = mxfp4(rows)
        else:
            codes, scale = fp8(rows)
            weights, scales = single(weights * scale), None
        for factor in (softmax_scale, head_scale):
            weights = single(weights * float(np.float32(factor)))
    return codes, scales, weights


def k_row(state, pages, position, ratio, norm_weight, eps, cos_sin) -> np.ndarray:
    """The row (D,) that the token at `position` completes: float64 throughout, bf16 at the end.

    state: (blocks, block_size, 2 W). pages: its sequence's blocks.
    """
    head_size = len(norm_weight)
    width = state.shape[2] // 2
    entries, scores = [], []
    for age in range(width // head_size * ratio):  # from the newest
        at = position - age
        if at >= 0:
            row = state[pages[at // state.shape[1]], at % state.shape[1]]
            first = width - head_size if age < ratio else 0
            entries.append(row[first : first + head_size])
            scores.append(row[width + first : width + first + head_size])
    entries, scores = np.array(entries), np.array(scores)
    with np.errstate(all="ignore"):
        power = np.exp(scores - scores.max(0))
        compressed = (entries * power).sum(0) / power.sum(0)
        normed = compressed / np.sqrt((compressed**2).mean() + eps) * norm_weight
        row = rope(normed, cos_sin[position - position % ratio], lambda x: x)
    return bf16(row)


def cache_row(row: np.ndarray, cache_format: str) -> tuple[bytes, bytes]:
    """The bytes of a row's values and of its scales."""
    if cache_format == "mxfp4":
        codes, scales = mxfp4(row)
        return codes.tobytes(), scales.tobytes()
    codes, scale = fp8(row)
    return codes.tobytes(), np.array(scale, dtype="<f4").tobytes()


def read_row(values: bytes, scales: bytes, cache_format: str) -> tuple[np.ndarray, np.ndarray]:
    """The dequantized row (D,), and the scale of each element, from a row's bytes."""
    data = np.frombuffer(values, np.uint8)
    if cache_format == "mxfp4":
        codes = np.stack((data % 16, data // 16), -1).reshape(-1)
        magnitude, negative = E2M1[codes % 8], codes // 8
        scale = np.exp2(np.frombuffer(scales, np.uint8).astype(np.float64) - 127).repeat(32)
    else:
        magnitude, negative = np.append(E4M3, np.nan)[data % 128], data // 128
        scale = np.frombuffer(scales, "<f4").astype(np.float64).repeat(len(data))
    return np.where(negative, -magnitude, magnitude) * scale, scale
