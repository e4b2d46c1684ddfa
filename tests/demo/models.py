"""Tiny models with random weights, large enough that a wrong key shows in the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from kvcache.integrations.transformers import PagedKVCache

VOCABULARY = 97
WINDOW = 24
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**_SIZES, num_hidden_layers=2, num_key_value_heads=2)
    return LlamaForCausalLM(config).eval()


def gemma(window: int = WINDOW) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **_SIZES,
        num_hidden_layers=3,
        num_key_value_heads=1,
        query_pre_attn_scalar=64,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return Gemma3ForCausalLM(config).eval()


def gemma4(num_kv_shared_layers: int = 2, **fields: Any) -> Gemma4ForCausalLM:
    """The last layers read the keys and values of the first two, which have other head sizes."""
    torch.manual_seed(0)
    given = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "global_head_dim": 128,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": num_kv_shared_layers,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
    }
    model = Gemma4ForCausalLM(Gemma4TextConfig(**_SIZES | given | fields)).eval()
    for layer in model.model.layers:  # whose scores are not scaled otherwise
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
    return model


MODELS = {"llama": llama, "gemma": gemma}


def loaded(make: Callable[[], torch.nn.Module] = llama) -> torch.nn.Module:
    """A model that attends by ``cute_kv``, once that is registered."""
    model = make()
    model.set_attn_implementation("cute_kv")
    return model


def lengths(cache: PagedKVCache) -> list[int]:
    """Of a paged cache, the tokens that each layer holds."""
    return [layer.length for layer in cache.layers]


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


def reference(*args, **kwargs) -> torch.Tensor:
    """`flash_attn_varlen_func` in plain torch."""
    return attention_reference(validate(*args, **kwargs))[0]
