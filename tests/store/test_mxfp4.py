"""mxfp4 quantization, bit for bit against the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels.reference.store import dequantize_mxfp4, quantize_mxfp4
from tests.store import oracle
from tests.store.helpers import nibbles


def assert_is_the_definition(x: torch.Tensor) -> None:
    data, scale = quantize_mxfp4(x)
    assert (data.dtype, scale.dtype) == (torch.uint8, torch.uint8)
    codes = nibbles(data).tolist()
    for i, block in enumerate(x.float().numpy()):
        assert (scale[i].item(), codes[i]) == oracle.mxfp4_block(block), block.tolist()


def test_next_to_every_power_of_two():
    """6 * 2^e is the last amax of its exponent, as float32 products have it."""
    largest = torch.tensor([6.0 * math.ldexp(1.0, e) for e in range(-128, 126)])
    bits = largest.view(torch.int32).unsqueeze(1) + torch.arange(-2, 3, dtype=torch.int32)
    amax = bits.view(torch.float32).reshape(-1, 1)
    assert_is_the_definition(amax * torch.linspace(-1.0, 1.0, 32))


def test_the_last_amax_of_an_exponent():
    x = torch.zeros(2, 32)
    x[:, 0] = torch.tensor([6.0, np.nextafter(np.float32(6.0), np.float32(7.0)) + 2**-20])
    data, scale = quantize_mxfp4(x)
    assert scale.flatten().tolist() == [127, 128]
    assert dequantize_mxfp4(data, scale)[:, 0].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_random_blocks(dtype):
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(9))
    assert_is_the_definition((x * torch.logspace(-30, 30, 256).unsqueeze(1)).to(dtype))


def test_corners():
    inf, nan = math.inf, math.nan
    starts = ([0.0], [-0.0], [2.0**-149], [6.0 * 2.0**-126], [3.4e38, -1.0], [inf, 3.4e38])
    starts += ([-inf, nan], [nan, 6.0], [nan] * 32, [2.0**-126, -(2.0**-127)])
    x = torch.tensor([start + [0.0] * (32 - len(start)) for start in starts])
    assert_is_the_definition(x)
    scale = quantize_mxfp4(x)[1].flatten().tolist()
    assert scale == [1, 1, 1, 1, 253, 254, 254, 127, 1, 1]


def test_dequantization():
    data = torch.tensor([[0x21] + [0xF7] * 15], dtype=torch.uint8)
    for code in (0, 1, 127, 252):
        scale = torch.tensor([[code]], dtype=torch.uint8)
        expected = np.array([0.5, 1.0] + [6.0, -6.0] * 15) * math.ldexp(1.0, code - 127)
        for dtype in (torch.float64, torch.float32):
            for form in (scale, scale.view(torch.float8_e8m0fnu)):
                assert dequantize_mxfp4(data, form, dtype).flatten().tolist() == expected.tolist()
    assert dequantize_mxfp4(data, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(
    ("message", "call"),
    (
        (r"a multiple of 32", lambda: quantize_mxfp4(torch.zeros(2, 48))),
        (r"float64; accepted", lambda: quantize_mxfp4(torch.zeros(32).double())),
        (r"belong", lambda: dequantize_mxfp4(torch.zeros(16).byte(), torch.zeros(2).byte())),
        (r"scale_ue8m0: got", lambda: dequantize_mxfp4(torch.zeros(16).byte(), torch.zeros(1))),
    ),
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message):
        call()
