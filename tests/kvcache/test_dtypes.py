"""Dtype names, storage formats and their sizes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from cute_kernels import registry
from cute_kernels.reference.quantize import NVFP4_SCALE_SEARCH
from kvcache.dtypes import (
    KV_CACHE_DTYPES,
    STORAGE_FORMATS,
    QuantMode,
    ScaleLayout,
    ScaleSearch,
    bytes_per_token,
    check_same_cache_format,
    get_kv_cache_dtype,
    is_quantized_kv_cache,
    query_dtype_name,
    resolve_kv_cache_dtype,
)


@pytest.mark.parametrize(
    ("name", "storage", "search", "torch_dtype", "mode", "bits"),
    (
        ("bfloat16", "bf16", None, torch.bfloat16, QuantMode.NONE, 16),
        ("bf16", "bf16", None, torch.bfloat16, QuantMode.NONE, 16),
        ("float16", "fp16", None, torch.float16, QuantMode.NONE, 16),
        ("fp16", "fp16", None, torch.float16, QuantMode.NONE, 16),
        ("fp8", "fp8_e4m3", None, torch.float8_e4m3fn, QuantMode.SCALED, 8),
        ("fp8_e4m3", "fp8_e4m3", None, torch.float8_e4m3fn, QuantMode.SCALED, 8),
        ("nvfp4", "nvfp4", "DEFAULT", torch.uint8, QuantMode.BLOCK_SCALED, Fraction(9, 2)),
        ("nvfp4_4over6", "nvfp4", "FOUR_OVER_SIX", torch.uint8, None, Fraction(9, 2)),
        ("nvfp4_4over6_k", "nvfp4", "FOUR_OVER_SIX_K_ONLY", torch.uint8, None, Fraction(9, 2)),
        ("nvfp4_mse", "nvfp4", "MSE", torch.uint8, None, Fraction(9, 2)),
    ),
)
def test_table(name, storage, search, torch_dtype, mode, bits):
    dtype = get_kv_cache_dtype(name)
    assert (dtype.name, dtype.storage, dtype.torch_dtype) == (name, storage, torch_dtype)
    assert dtype.scale_search == (None if search is None else ScaleSearch[search])
    assert dtype.quant_mode is (mode or QuantMode.BLOCK_SCALED)
    assert dtype.bits_per_element == bits
    four_bits = storage == "nvfp4"
    assert (dtype.group, dtype.scale_type) == ((16, "e4m3") if four_bits else (0, None))
    assert dtype.scale_layout is (ScaleLayout.LINEAR if four_bits else None)
    assert is_quantized_kv_cache(name) == (bits < 16)


def test_the_table_is_whole():
    assert len(KV_CACHE_DTYPES) == 10
    assert {dtype.storage for dtype in KV_CACHE_DTYPES.values()} == set(STORAGE_FORMATS)
    used = {name for contract in registry.contracts() for name in contract.kv_cache_formats}
    assert used <= set(STORAGE_FORMATS)


@pytest.mark.parametrize("storage", STORAGE_FORMATS.values(), ids=STORAGE_FORMATS)
def test_formats_agree_with_torch(storage):
    per_element = torch.empty(0, dtype=storage.torch_dtype).element_size() * 8
    assert storage.element_bits in (per_element, per_element // 2)
    if storage.name == "fp8_e4m3":
        assert storage.max_magnitude == torch.finfo(torch.float8_e4m3fn).max
    if storage.name == "nvfp4":
        assert storage.max_magnitude == 6 * torch.finfo(torch.float8_e4m3fn).max


@pytest.mark.parametrize(
    ("name", "nearest"),
    (
        ("nvfp4_foo", "'nvfp4'"),
        ("nvfp4_4over6_", "'nvfp4_4over6'"),
        ("nvfp4_4_over_6", "'nvfp4_4over6'"),
        ("NVFP4", "'nvfp4'"),
        ("fp8 ", "'fp8'"),
        ("fp8_e5m2", "'fp8_e4m3'"),
        ("mxfp4", "'nvfp4'"),
    ),
)
def test_names_match_exactly_and_the_nearest_are_named(name, nearest):
    with pytest.raises(ValueError, match="^kv_cache_dtype: got ") as refused:
        get_kv_cache_dtype(name)
    given, listed, known = str(refused.value).split("; ")
    assert repr(name) in given
    assert listed.startswith("nearest: ") and nearest in listed.removeprefix("nearest: ").split(
        ", "
    )
    assert all(repr(each) in known for each in KV_CACHE_DTYPES)


@pytest.mark.parametrize("name", ("", "int8", None, torch.bfloat16, ("fp8",)))
def test_names_that_are_near_nothing(name):
    with pytest.raises(ValueError, match="known: 'auto', 'bfloat16'"):
        get_kv_cache_dtype(name)


def test_auto_is_the_models_dtype():
    assert resolve_kv_cache_dtype("auto", torch.float16).storage == "fp16"
    assert resolve_kv_cache_dtype("auto", "bfloat16").storage == "bf16"
    assert resolve_kv_cache_dtype("fp8", "bf16").storage == "fp8_e4m3"
    assert not is_quantized_kv_cache("auto")
    for ask in (get_kv_cache_dtype, lambda name: bytes_per_token(name, 1, 64)):
        with pytest.raises(ValueError, match="got 'auto', which is the model's own dtype"):
            ask("auto")
    with pytest.raises(ValueError, match="got 'auto' with query_dtype fp32"):
        resolve_kv_cache_dtype("auto", torch.float32)


def test_query_dtype_names():
    for given in ("fp16", "float16", "torch.float16", torch.float16):
        assert query_dtype_name(given) == "fp16"
    with pytest.raises(ValueError, match="query_dtype: got 'bf-16'; nearest: 'bf16'"):
        query_dtype_name("bf-16")


@pytest.mark.parametrize(
    ("name", "heads", "size", "expected"),
    (
        ("bf16", 8, 128, 4096),
        ("fp8", 4, 512, 4096),
        ("nvfp4", 4, 512, 2304),
        ("nvfp4_mse", 1, 16, 18),
        ("fp8", 1, 1, 2),
    ),
)
def test_bytes_per_token(name, heads, size, expected):
    assert bytes_per_token(name, heads, size) == expected


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_a_side_is_as_large_as_its_tensor(name):
    """K or V of one token: data as torch has it, and one byte a group of scales."""
    dtype = get_kv_cache_dtype(name)
    heads, size = 3, 80
    elements_per_item = dtype.torch_dtype.itemsize * 8 // dtype.format.element_bits
    data = torch.empty(heads, size // elements_per_item, dtype=dtype.torch_dtype)
    scales = heads * size // dtype.group if dtype.group else 0
    assert bytes_per_token(name, heads, size) == 2 * (data.nbytes + scales)


def test_bytes_per_token_refuses():
    with pytest.raises(ValueError, match="head_size: got 72; nvfp4 needs a multiple of 16"):
        bytes_per_token("nvfp4", 4, 72)
    with pytest.raises(ValueError, match="num_kv_heads: got 0"):
        bytes_per_token("fp8", 0, 64)
    with pytest.raises(ValueError, match="head_size: got -64"):
        bytes_per_token("fp8", 4, -64)


def test_the_reference_store_knows_the_same_searches():
    """By value: the reference has an enumeration of its own."""
    searches = {
        name: dtype.scale_search.value
        for name, dtype in KV_CACHE_DTYPES.items()
        if dtype.scale_search is not None
    }
    assert {name: search.value for name, search in NVFP4_SCALE_SEARCH.items()} == searches


def test_user_dtype_and_storage_stay_two_fields():
    """A plain nvfp4 reader reads what any search wrote; the store still knows which it is."""
    names = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
    dtypes = [get_kv_cache_dtype(name) for name in names]
    assert {dtype.storage for dtype in dtypes} == {"nvfp4"}
    assert len({dtype.scale_search for dtype in dtypes}) == 4
    for dtype in dtypes:
        check_same_cache_format((dtype, None), (dtypes[0], None))


def test_a_layout_mismatch_raises():
    """Both orders have the same size: only the tag can tell."""
    dtype = get_kv_cache_dtype("nvfp4")
    swizzled, linear = (dtype, ScaleLayout.SM100), (dtype, None)
    check_same_cache_format(swizzled, swizzled)
    check_same_cache_format(linear, (dtype, ScaleLayout.LINEAR))
    with pytest.raises(ValueError, match="written in sm100 order and read in linear order"):
        check_same_cache_format(swizzled, linear)
    with pytest.raises(ValueError, match="written in linear order and read in sm100 order"):
        check_same_cache_format(linear, swizzled)
    fp8 = get_kv_cache_dtype("fp8")
    check_same_cache_format((fp8, None), (get_kv_cache_dtype("fp8_e4m3"), None))
    with pytest.raises(ValueError, match="written as 'fp8' .* and read as 'nvfp4'"):
        check_same_cache_format((fp8, None), linear)


def test_entries_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_kv_cache_dtype("fp8").storage = "nvfp4"


def test_formats_is_a_leaf():
    code = (
        "import sys, cute_kernels.formats as f\n"
        "f.get_kv_cache_dtype('nvfp4').bits_per_element\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'cutlass', 'kvcache', 'numpy') or m.startswith('cute_kernels.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "['cute_kernels.formats']\n"), done.stderr
