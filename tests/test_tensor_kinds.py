"""Tensors that are not plain: subclasses that have memory, tensors made in inference mode, numpy's
numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels import flash_attn_varlen_func, merge_attn_states, reshape_and_cache
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
