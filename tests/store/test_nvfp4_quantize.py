"""nvfp4 quantization, bit for bit against the oracle: ordinary groups, corners, global scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels.reference.store import dequantize_nvfp4, quantize_nvfp4
from tests.compare import assert_bit_equal
from tests.store.helpers import SEARCHES, assert_is_the_definition, nibbles

ZEROS = [0.0] * 16
INF, NAN = math.inf, math.nan
ULP_UP, ULP_DOWN = (
    float(np.float32(1) + np.float32(2**-23)),
    float(np.float32(1) - np.float32(2**-24)),
)
# Elements at the ties of E2M1 under the scale 1, on both sides of zero.
TIES = [6.0, 0.25, -0.25, 0.75, 1.25, -1.25, 1.75, 2.5, -2.5, 3.5, -3.5, 5.0, -5.0, 0.0, -0.0, -0.1]
GROUPS = {
    "zero": ZEROS,
    "minus zero": [-0.0] * 16,
    "six and fours and a half": [6.0] + [4.5] * 15,
    "one element, error 0 under 6 and under 4": [6.0] + ZEROS[1:],
    "a tie of two MSE candidates": [7.0, 8.0] + ZEROS[2:],
    # 0.5625 is 7 codes below 1, the scale for 4.
    "the last MSE candidate": [3.9375] + [3.375, 2.25, 1.6875, 0.84375, 0.28125] * 3,
    "ties": TIES,
    "ties, one ulp up": [v * ULP_UP for v in TIES],
    "ties, one ulp down": [v * ULP_DOWN for v in TIES],
    "least subnormal": [2.0**-149, -(2.0**-149)] * 8,
    "half of the least scale": [6.0 * 2.0**-10] + [2.0**-10] * 15,
    "code 0 for 6, not for 4": [5.0 * 2.0**-10] + [2.0**-11] * 15,
    "the least scales": [0.02, 0.013, -0.0042] + [0.0007] * 13,
    "beyond the largest scale": [6.0 * 449.0, -6.0 * 500.0] + [1000.0] * 14,
    "error overflows": [3e38, -2e38] + [1e37] * 14,
    "NaN": [NAN, 6.0, 4.5] + [1.0] * 13,
    "NaN alone": [NAN] * 16,
    "infinity": [INF, 6.0, 4.5] + [1.0] * 13,
    "minus infinity and NaN": [-INF, NAN, 4.5] + [0.0] * 13,
}
# Under the global scale 0.1 the errors for 6 and for 4 differ by rounding only. A fused
# multiply-add in a difference or in a square, a sum from left to right, in halves from left to
# right, as a tree or in float64: each decides otherwise for one of the first two groups and for one
# of the last two.
TAKES_FOUR = (
    [1.203125, 0.2001953125, -1.1015625, -0.400390625, -0.42578125, -0.30078125, -0.94921875]
    + [-0.349609375, 0.30078125, 1.078125, 1.125, 0.125, -0.224609375, 0.30078125, -0.375]
    + [0.0751953125],
    [3.59375, 0.30078125, 2.40625, 1.6484375, -2.03125, 0.0, 1.046875, 1.2734375, 2.46875]
    + [0.5234375, 2.78125, -2.328125, -3.078125, -0.44921875, -1.2734375, 0.5234375],
)
TAKES_SIX = (
    [3.59375, -0.9765625, 3.59375, 1.125, -1.125, 0.0, 0.0751953125, -2.09375, 0.8984375]
    + [-0.82421875, -2.84375, -0.82421875, 1.6484375, -1.953125, 0.75, 2.171875],
    [3.59375, -1.2734375, 0.8984375, -2.84375, 2.171875, 1.6484375, -2.03125, 1.125, -0.375]
    + [-0.30078125, -1.7265625, -1.6484375, 1.953125, -0.30078125, 1.875, 1.578125],
)
GLOBALS = (1.0, 0.003, 2.0**-100, 2.0**100, 0.0, 2.0**-149, 2.0**-127, 3e38, INF, -INF, NAN, -0.5)


@pytest.mark.parametrize("scale", GLOBALS)
@pytest.mark.parametrize("dtype", SEARCHES)
def test_corners(dtype, scale):
    """Scales in tensors are not checked; whatever they are, the formula decides."""
    assert_is_the_definition(torch.tensor(list(GROUPS.values())), torch.tensor(scale), dtype)


@pytest.mark.parametrize("dtype", SEARCHES)
@pytest.mark.parametrize("input_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_random_groups(dtype, input_dtype):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 16, generator=generator)
    x *= torch.logspace(-5, 4, 256).unsqueeze(1)  # block scales from underflow to saturation
    x[::7] = x[::7].round()  # ties
    assert_is_the_definition(x.to(input_dtype), 0.37, dtype)


def quantized(group: list[float], dtype: str, scale: float = 1.0) -> tuple[int, list[int]]:
    data, block_scale = quantize_nvfp4(torch.tensor(group), scale, dtype)
    return block_scale.view(torch.uint8).item(), nibbles(data).tolist()


def test_four_and_a_half_under_six():
    group = torch.tensor([6.0] + [4.5] * 15)
    data, block_scale = quantize_nvfp4(group, 1.0)
    assert block_scale.tolist() == [1.0]
    assert dequantize_nvfp4(data, block_scale, 1.0).tolist() == [6.0] + [4.0] * 15
    for dtype in ("nvfp4_4over6", "nvfp4_mse"):
        data, block_scale = quantize_nvfp4(group, 1.0, dtype)
        assert block_scale.tolist() == [1.5]
        assert_bit_equal(dequantize_nvfp4(data, block_scale, 1.0), group, dtype)


def test_ties_go_to_six_then_to_the_larger_code():
    # 6 / 6 and 6 / 4 both store the group exactly.
    for dtype in SEARCHES:
        assert quantized(GROUPS["one element, error 0 under 6 and under 4"], dtype)[0] == 0x38
    # 8 / 6 gives code 59; codes 63 and 58 share the least error, 0.5.
    assert quantized(GROUPS["a tie of two MSE candidates"], "nvfp4_mse")[0] == 63


def test_the_order_of_the_error_sum_decides():
    for groups, divisor in ((TAKES_FOUR, 4), (TAKES_SIX, 6)):
        for group in groups:
            s32 = np.float32(max(group)) / divisor / np.float32(0.1)
            expected = torch.tensor(s32).to(torch.float8_e4m3fn).view(torch.uint8).item()
            assert quantized(group, "nvfp4_4over6", 0.1)[0] == expected, group
    for dtype in SEARCHES:
        assert_is_the_definition(torch.tensor([*TAKES_FOUR, *TAKES_SIX]), 0.1, dtype)


def test_the_search_reaches_seven():
    assert quantized(GROUPS["the last MSE candidate"], "nvfp4_mse")[0] == 0x38 - 7


@pytest.mark.parametrize("dtype", SEARCHES)
def test_special_elements(dtype):
    scale, codes = quantized(GROUPS["NaN"], dtype)
    assert codes[0] == 7
    assert 1.0 <= torch.tensor(scale, dtype=torch.uint8).view(torch.float8_e4m3fn).item() <= 1.5
    assert quantized(GROUPS["NaN alone"], dtype) == (0, [7] * 16)
    assert quantized(GROUPS["zero"], dtype) == (0, [0] * 16)
    assert quantized(GROUPS["minus zero"], dtype) == (0, [8] * 16)
    assert quantized(GROUPS["infinity"], dtype)[0] == 0x7E
    assert quantized(GROUPS["beyond the largest scale"], dtype)[0] == 0x7E


def test_keys_search_and_values_do_not():
    group = [6.0] + [4.5] * 15
    for side, like in (("k", "nvfp4_4over6"), ("v", "nvfp4")):
        parts = quantize_nvfp4(torch.tensor(group), 1.0, "nvfp4_4over6_k", side=side)
        expected = quantize_nvfp4(torch.tensor(group), 1.0, like)
        assert torch.equal(parts[0], expected[0])
        assert parts[1].item() == expected[1].item()
    with pytest.raises(ValueError, match=r"side: got None; 'nvfp4_4over6_k' needs"):
        quantize_nvfp4(torch.tensor(group), 1.0, "nvfp4_4over6_k")


def test_shapes_and_global_scales_per_head():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 3, 64, generator=generator, dtype=torch.bfloat16)
    scale = torch.tensor([1.0, 0.01, 3.0])
    data, block_scale = quantize_nvfp4(x, scale, "nvfp4_4over6")
    assert (data.shape, data.dtype) == ((5, 3, 32), torch.uint8)
    assert (block_scale.shape, block_scale.dtype) == ((5, 3, 4), torch.float8_e4m3fn)
    y = dequantize_nvfp4(data, block_scale, scale)
    for head in range(3):
        one = quantize_nvfp4(x[:, head], scale[head : head + 1], "nvfp4_4over6")
        assert torch.equal(data[:, head], one[0])
        assert_bit_equal(y[:, head], dequantize_nvfp4(*one, scale[head].item()), "head")
    empty = quantize_nvfp4(x[:0], scale)
    assert [tuple(part.shape) for part in empty] == [(0, 3, 32), (0, 3, 4)]
    assert dequantize_nvfp4(*empty, scale).shape == (0, 3, 64)


def test_dequantization_rounds_once():
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(0x7F, dtype=torch.uint8)
    data, block_scale = codes.repeat(127, 1), scales.repeat_interleave(32).reshape(127, 32)
    scale = 0.1
    single = np.float32(scale)
    exact = dequantize_nvfp4(data, block_scale, scale, torch.float64)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    by_code = block_scale.view(torch.float8_e4m3fn).double().numpy().repeat(16, axis=1)
    assert np.array_equal(exact.numpy(), e2m1[nibbles(data)] * by_code * np.float64(single))
    for dtype in (torch.float32, torch.bfloat16):
        rounded = exact.float().to(dtype)
        assert torch.equal(dequantize_nvfp4(data, block_scale, scale, dtype), rounded)


def test_a_global_scale_of_one_reaches_the_subnormal_block_scales():
    """Small values work without calibration, at the price of a scale known to half of 2^-9."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(10))
    x *= 0.02 / x.abs().max()
    assert (quantize_nvfp4(x, 1.0)[1].view(torch.uint8) < 8).all()
    error = {}
    for scale in (1.0, 0.02 / (6 * 448)):
        y = dequantize_nvfp4(*quantize_nvfp4(x, scale), scale)
        error[scale] = (y - x).abs().max().item()
    # The largest element is 6 scales of a group, each up to 2^-10 too small; the rounding of an
    # element costs one scale at most, which is less.
    assert error[1.0] <= 6 * 2.0**-10
    assert error[0.02 / (6 * 448)] <= 0.02 / 6 * (1 + 2.0**-4)
    assert error[1.0] > error[0.02 / (6 * 448)]


@pytest.mark.parametrize("scale", (1e-50, 1e300, 0.0, INF, NAN, -1.0, 2.0**-101, 2.0**101, True))
def test_float_scales_are_checked_after_the_cast(scale):
    with pytest.raises(ValueError, match=r"global_scale: got"):
        quantize_nvfp4(torch.zeros(16), scale)
    with pytest.raises(ValueError, match=r"global_scale: got"):
        dequantize_nvfp4(torch.zeros(8, dtype=torch.uint8), torch.zeros(1).byte(), scale)


def test_float_scales_at_the_ends_of_their_range():
    for scale in (2.0**-100, 2.0**100, 1, 2.0**-100 * (1 - 2.0**-30)):  # the last rounds up to it
        quantize_nvfp4(torch.zeros(16), scale)


@pytest.mark.parametrize(
    ("message", "call"),
    (
        (r"float64; accepted", lambda: quantize_nvfp4(torch.zeros(16).double(), 1.0)),
        (r"a multiple of 16", lambda: quantize_nvfp4(torch.zeros(2, 24), 1.0)),
        (r"a multiple of 16", lambda: quantize_nvfp4(torch.zeros(2, 0), 1.0)),
        (
            r"'nvfp4_foo'; accepted: .*mean",
            lambda: quantize_nvfp4(torch.zeros(16), 1.0, "nvfp4_foo"),
        ),
        (r"'NVFP4'; accepted", lambda: quantize_nvfp4(torch.zeros(16), 1.0, "NVFP4")),
        (r"side: got 'key'", lambda: quantize_nvfp4(torch.zeros(16), 1.0, side="key")),
        (r"accepted: float32", lambda: quantize_nvfp4(torch.zeros(16), torch.ones(1).double())),
        (r"broadcast", lambda: quantize_nvfp4(torch.zeros(2, 16), torch.ones(3))),
        (r"broadcast", lambda: quantize_nvfp4(torch.zeros(2, 16), torch.ones(5, 2))),
        (
            r"does not belong",
            lambda: dequantize_nvfp4(torch.zeros(16).byte(), torch.zeros(1).byte(), 1.0),
        ),
        (r"data: got", lambda: dequantize_nvfp4(torch.zeros(8), torch.zeros(1).byte(), 1.0)),
        (r"block_scale: got", lambda: dequantize_nvfp4(torch.zeros(8).byte(), torch.zeros(1), 1.0)),
    ),
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message):
        call()
