"""Layer kinds of published models, read from the fields that their config.json files have."""

from __future__ import annotations

import json

import pytest

from kvcache.models import layer_kinds
from kvcache.selection import can_run
from tests.kvcache.helpers import CONFIGS


def load(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def kinds(name: str, **fields):
    found = layer_kinds({**load(name), **fields}, "fp8", "sm_90a")
    return {kind.name: kind for kind in found}


def facts(kind):
    config = kind.config
    return (
        len(kind.layers),
        config.head_size,
        config.num_q_heads,
        config.num_kv_heads,
        config.sliding_window,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    (
        ("llama-3.1-8b", {"full_attention": (32, 128, 32, 8, None)}),
        ("mistral-7b-v0.1", {"sliding_attention": (32, 128, 32, 8, 4096)}),
        (
            "gemma-2-9b",
            {
                "sliding_attention": (21, 256, 16, 8, 4096),
                "full_attention": (21, 256, 16, 8, None),
            },
        ),
        (
            "gemma-3-270m",
            {"sliding_attention": (15, 256, 4, 1, 512), "full_attention": (3, 256, 4, 1, None)},
        ),
        (
            "gemma-3-4b",
            {"sliding_attention": (29, 256, 8, 4, 1024), "full_attention": (5, 256, 8, 4, None)},
        ),
        (
            "gemma-4-defaults",
            {"sliding_attention": (25, 256, 8, 4, 512), "full_attention": (5, 512, 8, 4, None)},
        ),
        (
            "gpt-oss-20b",
            {"sliding_attention": (12, 64, 64, 8, 128), "full_attention": (12, 64, 64, 8, None)},
        ),
        ("deepseek-v3", {"full_attention": (61, 576, 128, 1, None)}),
    ),
)
def test_published_models(name, expected):
    assert {name: facts(kind) for name, kind in kinds(name).items()} == expected


def test_gemma_3_lists_its_layers():
    found = kinds("gemma-3-270m")
    assert list(found) == ["sliding_attention", "full_attention"]
    assert found["full_attention"].layers == (5, 11, 17)
    assert kinds("gemma-3-4b")["full_attention"].layers == (5, 11, 17, 23, 29)


def test_what_the_layers_need():
    assert kinds("gpt-oss-20b")["full_attention"].config.sinks
    assert kinds("gemma-2-9b")["full_attention"].config.softcap
    assert kinds("deepseek-v3")["full_attention"].config.mla
    plain = kinds("llama-3.1-8b")["full_attention"].config
    assert not (plain.sinks or plain.softcap or plain.mla or plain.bidirectional_spans)
    assert plain.capability == (9, 0) and plain.kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    ("name", "served"),
    (
        ("llama-3.1-8b", True),
        ("mistral-7b-v0.1", True),
        ("gemma-2-9b", True),
        ("gemma-3-270m", True),
        ("gemma-4-defaults", True),
        ("gpt-oss-20b", True),
        ("gemma-3-4b", False),
        ("deepseek-v3", False),
    ),
)
def test_served_on_hopper_with_fp8(name, served):
    for kind in kinds(name).values():
        assert (can_run(kind.config) is None) == served


def test_images_are_bidirectional_unless_none_are_sent():
    """Never silently causal."""
    (reason,) = {can_run(kind.config) for kind in kinds("gemma-3-4b").values()}
    assert "bidirectional spans" in reason
    gemma_4 = load("gemma-4-defaults")
    gemma_4["text_config"]["use_bidirectional_attention"] = "vision"
    # Gemma-4's full layers are causal among an image's tokens too.
    for model, types in (
        (gemma_4, {"sliding_attention"}),
        (load("gemma-3-4b"), {"sliding_attention", "full_attention"}),
    ):
        with_images, text_only = (
            {kind.name for kind in found if kind.config.bidirectional_spans}
            for found in (
                layer_kinds(model, "fp8", "sm_90a"),
                layer_kinds(model, "fp8", "sm_90a", text_only=True),
            )
        )
        assert with_images == types and not text_only
    gemma_4["text_config"]["use_bidirectional_attention"] = "all"
    found = layer_kinds(gemma_4, "fp8", "sm_90a", text_only=True)
    assert all(kind.config.bidirectional_spans for kind in found)


@pytest.mark.parametrize("kv_cache_dtype", ("fp8", "nvfp4"))
def test_where_images_are_all_that_stands_in_the_way_nothing_else_is_said(kv_cache_dtype):
    """Its full layers have head size 512, which one of the nvfp4 readers lacks: no matter."""
    model = load("gemma-4-31b")
    found = layer_kinds(model, kv_cache_dtype, "sm_90a")
    assert {kind.config.head_size for kind in found} == {256, 512}
    assert {kind.name: kind.why_unserved() for kind in found} == {
        "sliding_attention": "the tokens of an image see each other (bidirectional spans), which "
        "no kernel implements; served without images: --text-only, or text_only=True",
        "full_attention": None,
    }
    text = layer_kinds(model, kv_cache_dtype, "sm_90a", text_only=True)
    assert {kind.why_unserved() for kind in text} == {None}
    for kind in layer_kinds(model, kv_cache_dtype, "sm_100a"):
        assert kind.why_unserved() == can_run(kind.config)


def test_gemma_4_full_layers_may_have_other_kv_heads():
    text = {**load("gemma-4-defaults")["text_config"], "num_global_key_value_heads": 2}
    assert facts(kinds("gemma-4-defaults", text_config=text)["full_attention"])[3] == 4
    text["attention_k_eq_v"] = True
    found = kinds("gemma-4-defaults", text_config=text)
    assert [facts(kind)[3] for kind in found.values()] == [4, 2]


def test_layers_that_share_a_cache_are_counted():
    text = {**load("gemma-4-defaults")["text_config"], "num_kv_shared_layers": 10}
    found = kinds("gemma-4-defaults", text_config=text)
    # The last 10 of 30: layers 23 and 29 are full.
    assert found["sliding_attention"].shared == 8 and found["full_attention"].shared == 2
    text["num_kv_shared_layers"] = 6
    found = kinds("gemma-4-defaults", text_config=text)
    assert found["sliding_attention"].shared == 5 and found["full_attention"].shared == 1


def test_layers_without_keys_and_values():
    found = kinds("qwen3-next-80b")
    assert facts(found["full_attention"]) == (12, 256, 16, 2, None)
    linear = found["linear_attention"]
    assert (len(linear.layers), linear.config, linear.has_kv_cache) == (36, None, False)


def test_layer_types_that_are_not_known_are_not_guessed():
    (kind,) = kinds("llama-3.1-8b", layer_types=["indexed_attention"] * 32).values()
    assert kind.config is None and kind.has_kv_cache
    assert kind.note == "layers of type 'indexed_attention' are not known here"
    (kind,) = kinds("llama-3.1-8b", layer_types=["chunked_attention"] * 32).values()
    assert "chunked attention" in can_run(kind.config)


def test_windows_that_older_files_describe_otherwise():
    qwen = {"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 1024}
    qwen["model_type"] = "qwen2"
    found = kinds("llama-3.1-8b", **qwen)
    assert found["full_attention"].layers == tuple(range(28))
    assert found["sliding_attention"].layers == (28, 29, 30, 31)
    assert list(kinds("llama-3.1-8b", **{**qwen, "use_sliding_window": False})) == [
        "full_attention"
    ]
    assert list(kinds("mistral-7b-v0.1", sliding_window=None)) == ["full_attention"]


def test_query_dtypes():
    dtypes = {
        given: kinds("llama-3.1-8b", torch_dtype=given)["full_attention"].config.query_dtype
        for given in ("float16", "bfloat16", "float32", None)
    }
    assert dtypes == {"float16": "fp16", "bfloat16": "bf16", "float32": "bf16", None: "bf16"}
    newer = kinds("llama-3.1-8b", torch_dtype=None, dtype="float16")
    assert newer["full_attention"].config.query_dtype == "fp16"


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"num_hidden_layers": None}, "num_hidden_layers: got None"),
        ({"num_attention_heads": "32"}, "num_attention_heads: got '32'"),
        ({"hidden_size": None}, "hidden_size: got None"),
        ({"num_key_value_heads": 5}, "num_attention_heads: got 32; .* num_key_value_heads, 5"),
        ({"layer_types": ["full_attention"]}, "layer_types: 1 entries for 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window: got None"),
        ({"torch_dtype": "float64"}, "torch_dtype: got 'float64'; accepted: bfloat16"),
    ),
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        kinds("llama-3.1-8b", **fields)
