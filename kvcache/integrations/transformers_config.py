"""What a paged cache must know of a model, read from its `transformers` config."""

from __future__ import annotations

import transformers

from kvcache.paged import check_rotatable
from kvcache.scales import KVScales


def refuse_latent(config: transformers.PreTrainedConfig) -> None:
    """
    Raises:
        NotImplementedError: a model with multi-head latent attention.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        raise NotImplementedError(
            f"kv_lora_rank: got {config.kv_lora_rank}; models with latent attention (MLA) are not "
            "supported: their keys and values have other head sizes than the pages"
        )


def read_layers(config: transformers.PreTrainedConfig) -> list[int]:
    """Per layer, whose pages it reads: its own, or, if it is among the last `num_kv_shared_layers`,
    those of the last layer of its type before them.

    Raises:
        ValueError: a number of shared layers that cannot be; no layer of a shared one's type.
        NotImplementedError: all layers, as in drafts that read their target's cache.
    """
    count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
    if type(shared) is not int or not 0 <= shared <= count:
        raise ValueError(f"num_kv_shared_layers: got {shared!r}; accepted: an int, 0 to {count}")
    if shared == count:
        raise NotImplementedError(
            f"num_kv_shared_layers: all {count} layers read the cache of another model"
        )
    types = getattr(config, "layer_types", None) or [None] * count
    last = {types[index]: index for index in range(count - shared)}
    if missing := set(types) - set(last):
        raise ValueError(
            f"num_kv_shared_layers: got {shared}; no layer before them is of type "
            f"{', '.join(sorted(missing))}"
        )
    return [*range(count - shared), *(last[types[index]] for index in range(count - shared, count))]


def sliding_windows(config: transformers.PreTrainedConfig) -> list[int | None]:
    """Per layer, the sliding window or None: how `transformers` reads a decoder's config."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := set(types) - set(known):
        raise NotImplementedError(
            f"layer_types: {', '.join(sorted(unknown))}; accepted: {', '.join(known)}"
        )
    return [known[name] for name in types]


def check_rotation(config: transformers.PreTrainedConfig, layers: int) -> None:
    """
    Raises:
        ValueError: one of the first `layers` layers has a head size that cannot be rotated.
    """
    for index, window in enumerate(sliding_windows(config)[:layers]):
        layer = _of_layer(config, index)
        # Gemma-4's full-attention layers may have heads of another size.
        size = getattr(layer, "global_head_dim", None) if window is None else None
        size = size or getattr(layer, "head_dim", None)
        check_rotatable(size or layer.hidden_size // layer.num_attention_heads)


def check_heads(config: transformers.PreTrainedConfig, index: int, scales: KVScales) -> None:
    """
    Raises:
        ValueError: scales for a number of heads that layer `index` cannot have.
    """
    names = ("num_key_value_heads", "num_global_key_value_heads")
    counts = [getattr(_of_layer(config, index), name, None) for name in names]
    counts = [count for count in counts if type(count) is int]
    given = max(len(scales.k), len(scales.v))
    # A tensor-parallel rank has an equal part of the config's heads; the first pass sees which.
    if counts and all(count % given for count in counts):
        raise ValueError(
            f"scales[{index}]: got those of {given} heads; accepted: 1 number, or "
            f"{' or '.join(map(str, counts))}, one a head"
        )


def _of_layer(config: transformers.PreTrainedConfig, index: int) -> transformers.PreTrainedConfig:
    """Where layers differ, some releases refuse to read from the config what differs."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[index]
