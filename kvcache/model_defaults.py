"""What a field means that a model's config.json leaves out, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The defaults of the configuration classes of transformers 5.17 to 5.24 (for Gemma-3 that of the
# text model, `Gemma3TextConfig`), for the fields that `kvcache.models` reads. None for
# `num_key_value_heads` is `num_attention_heads`, for `head_dim` hidden_size / num_attention_heads,
# for `sliding_window` no window.
_HEADS = {"num_key_value_heads": None, "head_dim": None}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_GEMMA_3 = _GEMMA | {"attn_logit_softcapping": None}
_GEMMA_4 = _GEMMA | {"sliding_window": 512}
_MLA = _HEADS | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0},
    "gemma3": _GEMMA_3,
    "gemma3_text": _GEMMA_3,
    "gemma4": _GEMMA_4,
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": _GEMMA_4 | {"sliding_window": 1024},
    "gemma4_unified_text": _GEMMA_4 | {"sliding_window": 1024},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "granite": _HEADS,
    "llama": _HEADS,
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": None},
    "phi3": _HEADS | {"sliding_window": None},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None} | _QWEN_WINDOW,
    "qwen2_moe": {"num_key_value_heads": 16, "head_dim": None} | _QWEN_WINDOW,
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128} | _QWEN_WINDOW,
    "qwen3_moe": {"num_key_value_heads": 4, "head_dim": None} | _QWEN_WINDOW,
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256},
    "starcoder2": {"num_key_value_heads": 2, "head_dim": None, "sliding_window": None},
}


def with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    """`text`, a text model's fields, with the defaults of its `model_type` where one is missing.

    A field that is there stays, null too, where the default may be null; where it is a number,
    null is refused, as transformers does.

    Raises:
        ValueError: a null that stands for nothing; the message names the field.
    """
    defaults = _DEFAULTS.get(text.get("model_type"), {})
    for name in ("num_key_value_heads", "head_dim", "kv_lora_rank"):
        if defaults.get(name) is not None and text.get(name, 0) is None:
            raise ValueError(
                f"{name}: got None for model_type {text['model_type']!r}; accepted: an int > 0, or "
                f"no such field, which means {defaults[name]}"
            )
    return {**defaults, **text}
