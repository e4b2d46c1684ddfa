"""The kinds of attention layers in a model, read from its `config.json` in the Hugging Face format.

Field names and defaults are those that the files of published models have. What a file does not
say and cannot be derived is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcache.config import AttentionConfig

# Facts about architectures that their files do not state.
_MODELS_WITH_SINKS = {"gpt_oss"}
_MODELS_WITH_BIDIRECTIONAL_IMAGES = {"gemma3", "paligemma"}
# Layers that keep a state of fixed size, no keys and values.
_WITHOUT_KV_CACHE = {"conv", "linear_attention", "mamba", "recurrent"}
_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that are alike.

    name: the file's word for the type. layers: their indices.
    config: what they need; None where no KV cache is kept, or where `note` says that this type is
    not known here. shared: how many of the layers read another layer's cache.
    """

    name: str
    layers: tuple[int, ...]
    config: AttentionConfig | None
    shared: int = 0
    note: str = ""

    @property
    def has_kv_cache(self) -> bool:
        return self.name not in _WITHOUT_KV_CACHE


def layer_kinds(
    model: Mapping[str, Any],
    kv_cache_dtype: str,
    capability: tuple[int, int] | str,
    *,
    text_only: bool = False,
) -> list[LayerKind]:
    """The kinds of layers of a model, in the order in which they first occur.

    Args:
        model: the parsed `config.json`. In multimodal ones the text model is looked at.
        kv_cache_dtype, capability: as in `AttentionConfig`, for all layers.
        text_only: no images are sent, so attention among an image's tokens does not matter.

    Raises:
        ValueError: a missing field, or one that cannot be right; the message names it.
    """
    text = {**model, **(model.get("text_config") or {})}
    types = _layer_types(text)
    shared_from = len(types) - int(text.get("num_kv_shared_layers") or 0)
    base = _full_attention(model, text, kv_cache_dtype, capability, text_only)
    kinds = []
    for name in dict.fromkeys(types):
        layers = tuple(index for index, kind in enumerate(types) if kind == name)
        shared = sum(index >= shared_from for index in layers)
        if name in _ATTENTION:
            kinds.append(LayerKind(name, layers, _of_type(name, base, text), shared))
        elif name in _WITHOUT_KV_CACHE:
            kinds.append(LayerKind(name, layers, None, note="keeps no keys and values"))
        else:
            kinds.append(
                LayerKind(name, layers, None, shared, f"layers of type {name!r} are not known here")
            )
    return kinds


def _full_attention(
    model: Mapping[str, Any],
    text: Mapping[str, Any],
    kv_cache_dtype: str,
    capability: tuple[int, int] | str,
    text_only: bool,
) -> AttentionConfig:
    heads = _field(text, "num_attention_heads")
    mla = text.get("kv_lora_rank") is not None
    head_size = text.get("head_dim") or _field(text, "hidden_size") // heads
    if mla:
        # What an MLA cache holds: one latent vector and one rotary key for all heads.
        head_size = _field(text, "kv_lora_rank") + _field(text, "qk_rope_head_dim")
    bidirectional = text.get("use_bidirectional_attention")
    images = bidirectional == "vision" or (
        model.get("model_type") in _MODELS_WITH_BIDIRECTIONAL_IMAGES and "vision_config" in model
    )
    dtype = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    return AttentionConfig(
        head_size=head_size,
        num_q_heads=heads,
        num_kv_heads=1 if mla else text.get("num_key_value_heads") or heads,
        kv_cache_dtype=kv_cache_dtype,
        # A checkpoint in float32 is served in 16 bits.
        query_dtype="bfloat16" if dtype == "float32" else dtype,
        capability=capability,
        softcap=bool(text.get("attn_logit_softcapping")),
        sinks=text.get("model_type") in _MODELS_WITH_SINKS,
        mla=mla,
        bidirectional_spans=bidirectional in ("all", True) or (images and not text_only),
    )


def _of_type(name: str, full: AttentionConfig, text: Mapping[str, Any]) -> AttentionConfig:
    if name == "sliding_attention":
        return replace(full, sliding_window=_field(text, "sliding_window"))
    if name == "chunked_attention":
        return replace(full, chunked=True)
    # Gemma-4 gives its full layers another geometry.
    head_size = text.get("global_head_dim") or full.head_size
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v", True) else None
    return replace(full, head_size=head_size, num_kv_heads=heads or full.num_kv_heads)


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """One type a layer: as the file says, else as its older fields imply."""
    count = _field(text, "num_hidden_layers")
    if text.get("layer_types"):
        types = list(text["layer_types"])
        if len(types) != count:
            raise ValueError(f"layer_types: {len(types)} entries for {count} layers")
        return types
    full, sliding = "full_attention", "sliding_attention"
    interval = text.get("full_attention_interval")
    if interval:
        return ["linear_attention" if (index + 1) % interval else full for index in range(count)]
    # Every n-th layer is full. Gemma-2's files have no field for it.
    pattern = text.get("sliding_window_pattern") or (
        2 if text.get("model_type") == "gemma2" else None
    )
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return [full] * count
    if pattern:
        return [sliding if (index + 1) % pattern else full for index in range(count)]
    first = text.get("max_window_layers", 0) if text.get("use_sliding_window") else 0
    return [full if index < first else sliding for index in range(count)]


def _field(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name}: got {value!r}; accepted: an int > 0")
    return value
