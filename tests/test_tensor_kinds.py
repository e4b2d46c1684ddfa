"""Tensors that are not plain: subclasses that have memory, tensors made in inference mode, numpy's
numbers, tensors without strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels import (
    compress_norm_rope_insert,
    flash_attn_varlen_func,
    fused_indexer_q_rope_quant,
    merge_attn_states,
    quantize_mxfp4,
    quantize_nvfp4,
    reshape_and_cache,
)
from cute_kernels.calls import as_number
from tests.cases import AttentionCase, make_inputs


class Subclass(torch.Tensor):
    """As frameworks make them to carry a name or a loader with a weight."""


def store(key_cache, value_cache, dtype="fp8", scale=0.5):
    key = torch.arange(3 * 2 * 64).view(3, 2, 64).bfloat16()
    reshape_and_cache(key, key + 1, key_cache, value_cache, torch.arange(3), dtype, scale, scale)


def cache(row_bytes=64):
    return torch.zeros(2, 4, 2, row_bytes, dtype=torch.uint8)


def test_memory_of_subclasses_is_looked_at():
    shared = cache()
    with pytest.raises(ValueError, match="key_cache and value_cache: got the same memory"):
        store(shared.as_subclass(Subclass), shared.as_subclass(Subclass))
    key_cache, value_cache, right = cache(), cache(), (cache(), cache())
    store(key_cache.as_subclass(Subclass), value_cache.as_subclass(Subclass))
    store(*right)
    assert torch.equal(key_cache, right[0]) and torch.equal(value_cache, right[1])


def test_an_output_of_a_subclass_inside_the_keys_is_refused():
    inputs = make_inputs(AttentionCase(id="x", kv_lens=(64,), q_lens=(1,), num_q_heads=2), "cpu")
    bytes_of_k = inputs["k"].view(torch.uint8).flatten()
    out = bytes_of_k[: inputs["q"].numel() * 2].view(torch.bfloat16).view(inputs["q"].shape)
    with pytest.raises(ValueError, match="out"):
        flash_attn_varlen_func(**{**inputs, "out": out.as_subclass(Subclass)})


@pytest.mark.parametrize(("dtype", "row_bytes"), (("fp8", 64), ("nvfp4", 36)))
def test_caches_made_in_inference_mode_are_written_whole(dtype, row_bytes):
    with torch.inference_mode():
        made = cache(row_bytes), cache(row_bytes)
    right = cache(row_bytes), cache(row_bytes)
    with torch.no_grad():
        store(*made, dtype)
        store(*right, dtype)
    for one, other in zip(made, right, strict=True):
        assert torch.equal(one, other)


def test_outputs_made_in_inference_mode_are_written():
    inputs = make_inputs(AttentionCase(id="x", kv_lens=(70,), q_lens=(1,)), "cpu")
    with torch.inference_mode():
        out = torch.empty_like(inputs["q"])
    right = flash_attn_varlen_func(**inputs)[0]
    with torch.no_grad():
        flash_attn_varlen_func(**{**inputs, "out": out})
    assert torch.equal(out, right)


def test_merged_outputs_share_no_memory():
    room = torch.zeros(200)
    parts = [torch.randn(3, 4, 8), torch.randn(4, 3), torch.randn(3, 4, 8), torch.randn(4, 3)]
    with pytest.raises(ValueError, match="output_lse: .*apart from output's"):
        merge_attn_states(room[:96].view(3, 4, 8), *parts, room[90:102].view(4, 3))
    merge_attn_states(room[:96].view(3, 4, 8), *parts, room[96:108].view(4, 3))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", (np.float16, np.float32, np.float64, np.int32))
def test_numpy_scalars_are_numbers(kind):
    inputs = make_inputs(AttentionCase(id="x", kv_lens=(70,), q_lens=(1,)), "cpu")
    one = kind(1)
    right = flash_attn_varlen_func(**{**inputs, "softmax_scale": 1.0, "softcap": 1.0})[0]
    got = flash_attn_varlen_func(**{**inputs, "softmax_scale": one, "softcap": one})[0]
    assert torch.equal(got, right)
    pairs = (cache(), cache()), (cache(), cache())
    store(*pairs[0], scale=one)
    store(*pairs[1], scale=1.0)
    assert torch.equal(pairs[0][0], pairs[1][0])


def test_what_is_no_number():
    assert as_number(True) is None and as_number("1") is None and as_number(None) is None
    assert as_number(10**400) == float("inf")


def sparse(x: torch.Tensor) -> torch.Tensor:
    return (x.float() if x.element_size() < 2 else x).to_sparse()


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x.float(), x.float()])


def attention_call() -> dict[str, object]:
    case = AttentionCase(id="x", kv_lens=(70,), q_lens=(1,), sinks=True)
    inputs = make_inputs(case, "cpu")
    return {**inputs, "out": torch.empty_like(inputs["q"])}


def indexer_k_call() -> dict[str, object]:
    return {
        "state_cache": torch.zeros(1, 4, 256), "token_to_seq": torch.zeros(1, dtype=torch.int32),
        "positions": torch.tensor([3]), "slot_mapping": torch.tensor([0]),
        "state_block_table": torch.zeros(1, 1, dtype=torch.int32), "norm_weight": torch.ones(128),
        "norm_eps": 1e-6, "cos_sin_cache": torch.ones(4, 64), "compress_ratio": 4,
        "cache_format": "mxfp4",
        "k_cache": torch.zeros(1, 4, 68, dtype=torch.uint8),
    }  # fmt: skip


def indexer_q_call() -> dict[str, object]:
    return {
        "positions": torch.tensor([3]), "index_q": torch.zeros(1, 2, 128, dtype=torch.bfloat16),
        "cos_sin_cache": torch.ones(4, 64), "index_weights": torch.ones(1, 2), "softmax_scale": 1.0,
        "head_scale": 1.0, "use_fp4": True,
    }  # fmt: skip


def merge_call() -> dict[str, object]:
    o, lse = torch.zeros(3, 4, 8), torch.zeros(4, 3)
    return {
        "output": o.clone(), "prefix_output": o, "prefix_lse": lse, "suffix_output": o.clone(),
        "suffix_lse": lse.clone(), "output_lse": lse.clone(),
    }  # fmt: skip


def store_call() -> dict[str, object]:
    x = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    pair = [torch.zeros(2, 16, 2, 64, dtype=torch.uint8) for _ in "kv"]
    return {
        "key": x, "value": x.clone(), "key_cache": pair[0], "value_cache": pair[1],
        "slot_mapping": torch.tensor([0]), "kv_cache_dtype": "fp8_e4m3", "k_scale": 1.0,
        "v_scale": 1.0,
    }  # fmt: skip


CALLS = (
    (flash_attn_varlen_func, attention_call),
    (compress_norm_rope_insert, indexer_k_call),
    (fused_indexer_q_rope_quant, indexer_q_call),
    (merge_attn_states, merge_call),
    (reshape_and_cache, store_call),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", (sparse, nested))
@pytest.mark.parametrize(("function", "call"), CALLS, ids=lambda x: x.__name__)
def test_tensors_without_strides_are_refused_by_name(function, call, make):
    function(**call())
    for name, x in call().items():
        if isinstance(x, torch.Tensor):
            with pytest.raises(ValueError, match=f"{name}: got a .*; accepted: one with strides"):
                function(**{**call(), name: make(x)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", (sparse, nested))
def test_quantizing_refuses_tensors_without_strides(make):
    for function in (quantize_mxfp4, lambda x: quantize_nvfp4(x, 1.0)):
        with pytest.raises(ValueError, match="x: got a .*; accepted: one with strides"):
            function(make(torch.zeros(2, 32)))


def test_numpy_integers_are_integers():
    right, got = indexer_k_call(), indexer_k_call()
    right["state_cache"][:] = got["state_cache"][:] = torch.linspace(-3, 3, 256)
    compress_norm_rope_insert(**right)
    compress_norm_rope_insert(**{**got, "compress_ratio": np.int64(4)})
    assert right["k_cache"].any() and torch.equal(right["k_cache"], got["k_cache"])
