"""`AttentionConfig`: what it takes, normalises and refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvcache.config import AttentionConfig, capability_of
from kvcache.dtypes import ScaleLayout
from tests.kvcache.helpers import config


def test_equal_configurations_are_equal_however_they_are_spelled():
    plain = config(query_dtype="bf16", capability=(9, 0))
    for dtype in ("bfloat16", torch.bfloat16):
        for capability in ("sm_90a", "sm_90", "sm90"):
            other = config(query_dtype=dtype, capability=capability)
            assert other == plain and hash(other) == hash(plain)


def test_derived_facts():
    full = config()
    assert (full.group, full.device_name, full.bytes_per_token) == (8, "sm_90", 4096)
    assert config(kv_cache_dtype="auto", query_dtype="fp16").dtype.storage == "fp16"
    assert config(kv_cache_dtype="auto").bytes_per_token == 8192


@pytest.mark.parametrize(
    ("name", "capability"),
    (("sm_90a", (9, 0)), ("sm_100a", (10, 0)), ("sm_103f", (10, 3)), ("sm120", (12, 0))),
)
def test_capability_of(name, capability):
    assert capability_of(name) == capability


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"head_size": 0}, "head_size: got 0"),
        ({"head_size": 64.0}, "head_size: got 64.0"),
        ({"num_kv_heads": True}, "num_kv_heads: got True"),
        (
            {"num_q_heads": 10, "num_kv_heads": 4},
            "num_q_heads: got 10; accepted: multiples of .* 4",
        ),
        ({"sliding_window": 0}, "sliding_window: got 0"),
        ({"page_size": -64}, "page_size: got -64"),
        ({"kv_cache_dtype": "nvfp4_foo"}, "kv_cache_dtype: got 'nvfp4_foo'; nearest: 'nvfp4'"),
        ({"kv_cache_dtype": "auto", "query_dtype": "fp32"}, "got 'auto' with query_dtype fp32"),
        ({"query_dtype": torch.int8}, "query_dtype: got torch.int8"),
        ({"capability": "hopper"}, "capability: got 'hopper'"),
        ({"capability": "sm_9"}, "capability: got 'sm_9'"),
        ({"capability": (9,)}, r"capability: got \(9,\)"),
        ({"capability": None}, "capability: got None"),
        ({"v_scale_layout": "sm100"}, "v_scale_layout: got 'sm100' with .* 'fp8'; accepted: None"),
        (
            {"kv_cache_dtype": "nvfp4", "v_scale_layout": "sm90"},
            "v_scale_layout: got 'sm90' .*; accepted: 'linear', 'sm100'",
        ),
    ),
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_the_scale_layout_is_a_tagged_field():
    tagged = config(kv_cache_dtype="nvfp4", v_scale_layout="sm100")
    assert tagged.v_scale_layout is ScaleLayout.SM100
    assert tagged != config(kv_cache_dtype="nvfp4")
    assert dataclasses.replace(tagged, head_size=128).v_scale_layout is ScaleLayout.SM100


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().head_size = 64
    assert dataclasses.is_dataclass(AttentionConfig)
