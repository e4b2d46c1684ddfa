"""A field that a config.json leaves out is what the installed transformers takes it for."""

from __future__ import annotations

import json

import pytest

from tests.kvcache.helpers import CONFIGS
from tests.requires import requires_module

transformers = requires_module("transformers")

from kvcache.models import layer_kinds  # noqa: E402 - after transformers

NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
ONE_SIZE = {
    "num_hidden_layers": 32,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def load(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def without() -> list[tuple[str, str]]:
    fields = []
    for name in NAMES:
        model = load(name)
        fields += [(name, field) for field in model.get("text_config", model)]
    return fields


def ours(model: dict) -> list[tuple] | None:
    """What each layer is, or None where the file is refused."""
    try:
        kinds = layer_kinds(model, "fp8", "sm_90a", text_only=True)
    except ValueError:
        return None
    found = {}
    for kind in kinds:
        c = kind.config
        facts = c and (c.head_size, c.num_kv_heads, c.sliding_window, c.softcap, c.mla)
        found |= dict.fromkeys(kind.layers, (kind.name, facts))
    return [found[index] for index in sorted(found)]


def theirs(model: dict) -> list[tuple]:
    config = transformers.CONFIG_MAPPING[model["model_type"]].from_dict(model)
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "per_layer_config", [text] * text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    types = getattr(text, "layer_types", None) or [kind] * len(layers)
    attention = ("full_attention", "sliding_attention")
    return [
        (kind, layer_facts(layer, kind) if kind in attention else None)
        for kind, layer in zip(types, layers, strict=True)
    ]


def layer_facts(layer, kind: str) -> tuple:
    heads = layer.num_attention_heads
    latent = getattr(layer, "kv_lora_rank", None)
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    kv_heads = layer.num_key_value_heads or heads
    if latent is not None:
        size, kv_heads = latent + layer.qk_rope_head_dim, 1
    window = layer.sliding_window if kind == "sliding_attention" else None
    softcap = bool(getattr(layer, "attn_logit_softcapping", None))
    return size, kv_heads, window, softcap, latent is not None


@pytest.mark.parametrize("name", NAMES)
def test_whole_files_are_read_as_transformers_reads_them(name):
    assert ours(load(name)) == theirs(load(name))


@pytest.mark.parametrize(("name", "field"), without())
def test_a_missing_field_is_transformers_default_or_refused(name, field):
    model = load(name)
    del model.get("text_config", model)[field]
    found = ours(model)
    if found is not None:
        assert found == theirs(model)
    if field in ("num_key_value_heads", "head_dim", "sliding_window", "kv_lora_rank"):
        assert found is not None  # a default that transformers has is no reason to refuse


@pytest.mark.parametrize(
    "fields",
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20},
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 1024},
        {"model_type": "qwen3_moe"},
        {"model_type": "qwen2_moe"},
        {"model_type": "mixtral"},
        {"model_type": "phi3"},
        {"model_type": "starcoder2"},
        {"model_type": "granite"},
        {"model_type": "gemma"},
        {"model_type": "deepseek_v2"},
        {"model_type": "gemma2"},
        {"model_type": "gemma3_text", "sliding_window_pattern": 4},
        {"model_type": "phi3", "num_key_value_heads": None},
        {"model_type": "gemma4_unified_text", "layer_types": ["full_attention"] * 32},
    ),
    ids=str,
)
def test_short_files_are_read_as_transformers_reads_them(fields):
    model = {**ONE_SIZE, **fields}
    assert ours(model) == theirs(model)
