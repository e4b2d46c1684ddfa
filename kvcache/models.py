"""The kinds of attention layers in a model, read from its `config.json` in the Hugging Face format.

Field names are those that the files of published models have. What a file does not say is what
transformers takes it for (`kvcache.model_defaults`), or refused: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcache.checks import check_type
from kvcache.config import AttentionConfig
from kvcache.layer_fields import ATTENTION, field, layer_fields, optional
from kvcache.model_defaults import with_defaults
from kvcache.selection import can_run

# Facts about architectures that their files do not state.
_MODELS_WITH_SINKS = {"gpt_oss"}
# Every n-th layer is full, the others slide, where the file has no `layer_types` and no pattern.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
# All layers alike unless the file says otherwise; those of the second set slide where it has a
# `sliding_window`, which the others do not read.
_ALIKE = {"deepseek_v2", "deepseek_v3", "gemma", "granite", "llama"}
_ALIKE_WITH_WINDOW = {"mistral", "mixtral", "phi3", "starcoder2"}
# Windows only where the file has `use_sliding_window`: then the layers after `max_window_layers`
# slide. Mixtures of experts have other rules, so there the file must list the layers.
_WINDOW_ON_REQUEST = {"qwen2", "qwen3"}
_WINDOW_ON_REQUEST_LISTED = {"qwen2_moe", "qwen3_moe"}
_BIDIRECTIONAL = (None, False, True, "all", "vision")
_MAX_LAYERS = 10_000
_MODELS_WITH_BIDIRECTIONAL_IMAGES = {"gemma3", "paligemma"}
# There only in the layers that slide: the full ones are causal, also among an image's tokens.
_IMAGES_CAUSAL_IN_FULL_LAYERS = {
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
}
# Layers that keep a state of fixed size, no keys and values.
_WITHOUT_KV_CACHE = {"conv", "linear_attention", "mamba", "recurrent"}


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that are alike.

    name: the file's word for the type; with the first of the layers, as in "full_attention[5]",
    where layers of the type are not all alike. layers: their indices.
    config: what they need; None where no KV cache is kept, or where `note` says that this type is
    not known here. shared: how many of the layers read another layer's cache. images: the tokens of
    an image see each other, which they need only if images are sent.
    """

    name: str
    layers: tuple[int, ...]
    config: AttentionConfig | None
    shared: int = 0
    note: str = ""
    images: bool = False

    @property
    def has_kv_cache(self) -> bool:
        return self.name not in _WITHOUT_KV_CACHE

    def why_unserved(self, config: AttentionConfig | None = None) -> str | None:
        """Why no kernel serves these layers, or None: also for layers that need none.

        Args:
            config: in the place of their own, such as one device's share of it.
        """
        config = config or self.config
        if config is None:
            return self.note if self.has_kv_cache else None
        reason = can_run(config)
        if reason is None or not self.images:
            return reason
        if can_run(replace(config, bidirectional_spans=False)) is not None:
            return reason
        # Nothing else stands in the way, so what single kernels refuse and other dtypes are no
        # advice.
        return (
            "the tokens of an image see each other (bidirectional spans), which no kernel "
            "implements; served without images: --text-only, or text_only=True"
        )


def layer_kinds(
    model: Mapping[str, Any],
    kv_cache_dtype: str,
    capability: tuple[int, int] | str,
    *,
    text_only: bool = False,
    batch_invariant: bool = False,
) -> list[LayerKind]:
    """The kinds of layers of a model, in the order in which they first occur.

    Args:
        model: the parsed `config.json`. In multimodal ones the text model is looked at.
        kv_cache_dtype, capability: as in `AttentionConfig`, for all layers.
        text_only: no images are sent, so attention among an image's tokens does not matter.
        batch_invariant: as in `AttentionConfig`, for all layers.

    Raises:
        ValueError: a missing field, or one that cannot be right; the message names it.
    """
    check_type("model", model, Mapping, "a mapping, the parsed config.json")
    text = text_of(model)
    types = _layer_types(text)
    shared_from = len(types) - optional(text, "num_kv_shared_layers", 0, len(types))
    like: dict[tuple[str, frozenset[tuple[str, Any]]], list[int]] = {}
    for index, layer in enumerate(zip(types, layer_fields(text, types), strict=True)):
        like.setdefault((layer[0], frozenset(layer[1].items())), []).append(index)
    kinds = []
    for (name, fields), indices in like.items():
        layers, shared = tuple(indices), sum(index >= shared_from for index in indices)
        if name in ATTENTION:
            own = with_defaults({**text, **dict(fields)})
            config = _of_type(name, _full_attention(own, kv_cache_dtype, capability), own)
            config = replace(config, batch_invariant=batch_invariant)
            images = not (text_only or config.bidirectional_spans)
            images = images and _sees_images_both_ways(name, model, own)
            if images:
                config = replace(config, bidirectional_spans=True)
            if types.count(name) > len(layers):
                # A type of several geometries: each kind is named after its first layer.
                name = f"{name}[{layers[0]}]"
            kinds.append(LayerKind(name, layers, config, shared, images=images))
        elif name in _WITHOUT_KV_CACHE:
            kinds.append(LayerKind(name, layers, None, note="keeps no keys and values"))
        else:
            kinds.append(
                LayerKind(name, layers, None, shared, f"layers of type {name!r} are not known here")
            )
    return kinds


def text_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model of a multimodal one, or the model's, with what is missing.

    Raises:
        ValueError: a field that cannot be right.
    """
    inner = model.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"text_config: got a {type(inner).__name__}; accepted: an object")
    text = {**model, **inner}
    for name in ("model_type", "dtype", "torch_dtype"):
        if not isinstance(text.get(name), str | None):
            raise ValueError(f"{name}: got {text[name]!r}; accepted: a name")
    if text.get("model_type") is None:
        raise ValueError("model_type: got None; accepted: the architecture's name")
    return with_defaults(text)


def dtype_of(text: Mapping[str, Any]) -> str:
    """What the model computes in, "bf16" or "fp16".

    Raises:
        ValueError: another dtype.
    """
    name = "dtype" if text.get("dtype") else "torch_dtype"
    # A checkpoint in float32 is served in 16 bits.
    known = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16"}
    dtype = text.get(name) or "bfloat16"
    if dtype not in known:
        raise ValueError(f"{name}: got {dtype!r}; accepted: {', '.join(known)}")
    return known[dtype]


def _full_attention(
    text: Mapping[str, Any], kv_cache_dtype: str, capability: tuple[int, int] | str
) -> AttentionConfig:
    heads = field(text, "num_attention_heads")
    mla = text.get("kv_lora_rank") is not None
    if mla:
        # What an MLA cache holds: one latent vector and one rotary key for all heads.
        head_size = field(text, "kv_lora_rank") + field(text, "qk_rope_head_dim")
    else:
        head_size = _head_dim(text, heads)
        _known(text, "num_key_value_heads")
        if optional(text, "v_head_dim", head_size) != head_size:
            raise ValueError(
                f"v_head_dim: got {text['v_head_dim']}; accepted: head_dim, {head_size}"
            )
    bidirectional = text.get("use_bidirectional_attention")
    if bidirectional not in _BIDIRECTIONAL:
        raise ValueError(
            f"use_bidirectional_attention: got {bidirectional!r}; accepted: null, false, true, "
            "'all', 'vision'"
        )
    kv_heads = 1 if mla else optional(text, "num_key_value_heads", heads) or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads: got {heads}; accepted: multiples of num_key_value_heads, "
            f"{kv_heads}"
        )
    return AttentionConfig(
        head_size=head_size,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        kv_cache_dtype=kv_cache_dtype,
        query_dtype=dtype_of(text),
        capability=capability,
        softcap=bool(text.get("attn_logit_softcapping")),
        sinks=text.get("model_type") in _MODELS_WITH_SINKS,
        mla=mla,
        bidirectional_spans=bidirectional in ("all", True),
    )


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    """As the file or the model type says, else, where that is the model type's rule, a share."""
    given = optional(text, "head_dim", None)
    if given is not None:
        return given
    _known(text, "head_dim")
    hidden_size = field(text, "hidden_size")
    if hidden_size % heads:
        raise ValueError(
            f"hidden_size: got {hidden_size}; accepted without head_dim: multiples of "
            f"num_attention_heads, {heads}"
        )
    return hidden_size // heads


def _known(text: Mapping[str, Any], name: str) -> None:
    """Refuse a field that neither the file has nor the table of defaults."""
    if name not in text:
        raise ValueError(
            f"{name}: missing, and its default for model_type {text.get('model_type')!r} is not "
            "known here: add it to the file"
        )


def _sees_images_both_ways(name: str, model: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether the tokens of an image see each other in layers of this type."""
    if name != "sliding_attention" and text.get("model_type") in _IMAGES_CAUSAL_IN_FULL_LAYERS:
        return False
    return text.get("use_bidirectional_attention") == "vision" or (
        model.get("model_type") in _MODELS_WITH_BIDIRECTIONAL_IMAGES and "vision_config" in model
    )


def _of_type(name: str, full: AttentionConfig, text: Mapping[str, Any]) -> AttentionConfig:
    if name == "sliding_attention":
        return replace(full, sliding_window=field(text, "sliding_window"))
    if name == "chunked_attention":
        return replace(full, chunked=True)
    return full


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """One type a layer: as the file says, else as its older fields and its model type imply."""
    count = field(text, "num_hidden_layers")
    if count > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers: got {count}; accepted: at most {_MAX_LAYERS}")
    types = text.get("layer_types")
    if types:
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise ValueError("layer_types: accepted: a list of names")
        if len(types) != count:
            raise ValueError(f"layer_types: {len(types)} entries for {count} layers")
        return types
    full, sliding = "full_attention", "sliding_attention"
    model_type = text.get("model_type")
    interval = optional(text, "full_attention_interval", 0)
    if interval:
        return ["linear_attention" if (index + 1) % interval else full for index in range(count)]
    pattern = optional(text, "sliding_window_pattern", _FULL_EVERY.get(model_type, 0))
    if pattern:
        return [sliding if (index + 1) % pattern else full for index in range(count)]
    window = text.get("sliding_window")
    if model_type in _WINDOW_ON_REQUEST | _WINDOW_ON_REQUEST_LISTED:
        if window is None or not _flag(text, "use_sliding_window"):
            return [full] * count
    elif model_type in _ALIKE | _ALIKE_WITH_WINDOW and window is None:
        return [full] * count
    if model_type in _ALIKE_WITH_WINDOW:
        return [sliding] * count
    if model_type in _WINDOW_ON_REQUEST:
        first = field(text, "max_window_layers", least=0)
        return [full if index < first else sliding for index in range(count)]
    if model_type in _ALIKE:
        raise ValueError(
            f"sliding_window: got {window!r}; layers of model_type {model_type!r} do not slide: "
            "add layer_types to the file, one a layer, or take sliding_window out"
        )
    raise ValueError(
        f"layer_types: missing, and what the layers of model_type {model_type!r} are is not known "
        "here: add the list to the file, one of full_attention, sliding_attention, ... a layer"
    )


def _flag(text: Mapping[str, Any], name: str) -> bool:
    """False where it is missing or null."""
    value = text.get(name)
    if value not in (None, False, True):
        raise ValueError(f"{name}: got {value!r}; accepted: true, false")
    return bool(value)
