"""Wrong types in the formats' functions: a refusal that names the argument and what it got."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels.reference.indexer import gather_indexer_k
from cute_kernels.reference.quantize import as_scale
from cute_kernels.reference.store import gather_kv

U8 = torch.uint8
X = torch.zeros(2, 32)
DATA, NVFP4_SCALES, MXFP4_SCALES = (torch.zeros(2, n, dtype=U8) for n in (16, 2, 1))
SIDE, ROWS, SLOTS = (
    torch.zeros(4, 8, 2, 36, dtype=U8),
    torch.zeros(3, 4, 34, dtype=U8),
    torch.arange(3),
)
FUNCTIONS = {
    "quantize_mxfp4": (ck.quantize_mxfp4, {"x": X}),
    "quantize_nvfp4": (ck.quantize_nvfp4, {"x": X, "global_scale": 1.0}),
    "dequantize_mxfp4": (ck.dequantize_mxfp4, {"data": DATA, "scale_ue8m0": MXFP4_SCALES}),
    "dequantize_nvfp4": (
        ck.dequantize_nvfp4,
        {"data": DATA, "block_scale": NVFP4_SCALES, "global_scale": 1.0},
    ),
    "split_nvfp4": (ck.split_nvfp4, {"side": SIDE}),
    "gather_kv": (gather_kv, {"cache": SIDE, "slots": SLOTS, "storage": "nvfp4", "scale": 1.0}),
    "gather_indexer_k": (
        gather_indexer_k,
        {"k_cache": ROWS, "slots": SLOTS, "cache_format": "mxfp4", "head_size": 64},
    ),
}
TENSORS = [
    (name, argument)
    for name, (_, arguments) in FUNCTIONS.items()
    for argument, value in arguments.items()
    if isinstance(value, torch.Tensor)
]


@pytest.mark.parametrize(("name", "argument"), TENSORS)
@pytest.mark.parametrize("bad", (None, [0.0] * 32, np.zeros((2, 32), dtype=np.float32)))
def test_what_is_no_tensor_is_named(name, argument, bad):
    function, arguments = FUNCTIONS[name]
    function(**arguments)
    with pytest.raises(ValueError, match=f"^{argument}: got a {type(bad).__name__}; accepted: a t"):
        function(**arguments | {argument: bad})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith(("deq", "gather"))])
@pytest.mark.parametrize("dtype", ("float32", torch.int32, None))
def test_values_are_read_in_a_floating_point_dtype(name, dtype):
    function, arguments = FUNCTIONS[name]
    with pytest.raises(ValueError, match="^dtype: got .*; accepted: a torch dtype of floating"):
        function(**arguments, dtype=dtype)


def test_scales_are_checked_as_float32():
    cpu = torch.device("cpu")
    for scale, single in (
        (2.0**-100 - 2.0**-125, 2.0**-100),
        (2.0**100 + 2.0**76, 2.0**100),
        (0.1, torch.tensor(0.1).item()),
    ):
        assert as_scale(scale, "k_scale", cpu).item() == single
    for scale in (np.nextafter(2.0**-100 - 2.0**-125, 0), np.nextafter(2.0**100 + 2.0**76, 1e300)):
        assert not 2.0**-100 <= np.float32(scale) <= 2.0**100
        with pytest.raises(ValueError, match="^k_scale: got .* as float32; accepted: 7.888"):
            as_scale(scale.item(), "k_scale", cpu)


@pytest.mark.parametrize("scale", (10**400, -(10**400)))
def test_scales_too_large_for_a_float(scale):
    with pytest.raises(ValueError, match="^global_scale: got an int too large"):
        ck.quantize_nvfp4(X, scale)


def test_gradients_are_refused_where_codes_would_lose_them():
    x = X.clone().requires_grad_()
    for quantize in (ck.quantize_mxfp4, lambda x: ck.quantize_nvfp4(x, 1.0)):
        with pytest.raises(NotImplementedError, match="x: got requires_grad=True"):
            quantize(x)
        with torch.no_grad():
            quantize(x)


def test_scales_on_another_device_are_named():
    for name, argument in (
        ("dequantize_mxfp4", "scale_ue8m0"),
        ("dequantize_nvfp4", "block_scale"),
    ):
        function, arguments = FUNCTIONS[name]
        elsewhere = {argument: arguments[argument].to("meta")}
        with pytest.raises(ValueError, match=f"^{argument}: got meta; accepted: cpu, as data"):
            function(**arguments | elsewhere)


def test_a_head_size_is_an_int():
    with pytest.raises(ValueError, match="got head size 64.0"):
        gather_indexer_k(ROWS, SLOTS, "mxfp4", 64.0)


def test_scales_of_fp8_have_no_order():
    cache = torch.zeros(4, 8, 2, 64, dtype=U8)
    with pytest.raises(ValueError, match="scale_layout: got 'sm100'; fp8_e4m3 accepts 'linear'"):
        gather_kv(cache, SLOTS, "fp8_e4m3", 1.0, scale_layout="sm100")
