"""`cute_kernels` attention over a paged, quantized KV cache, for `transformers` models.

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cute_kv")
    scales = calibrate_scales(model, input_ids)
    model.generate(input_ids, past_key_values=PagedKVCache(model.config, "fp8", scales))

Every attention call, prefill and decode alike, first writes its own tokens to the pages and then
reads all keys and values back from them through a block table; no unquantized copy is kept. Layers
that see the same tokens share a block table: one for the full-attention layers, one for the
sliding-window layers, whose pages are freed when the window has left them.

Pages of every dtype are read as they are, by whatever serves the call: the kernels of
`cute_kernels`, or on other devices its torch reference.

The sequences of a batch have equal lengths. Padding, bidirectional spans and beam search are
refused: the kernels mask by length only, and a page belongs to one sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

import cute_kernels
from kvcache.integrations.transformers_cache import (
    CachedKV,
    PagedKVCache,
    PagedKVLayer,
)
from kvcache.integrations.transformers_config import read_layers, refuse_latent
from kvcache.scales import KVScales, check_has_scales, suggest_scales

__all__ = [
    "PagedKVCache",
    "PagedKVLayer",
    "cache_keyword",
    "calibrate_scales",
    "forward",
    "register",
]

_MIN_TRANSFORMERS = "5.17"  # the oldest release that these functions were tested with
if Version(transformers.__version__) < Version(_MIN_TRANSFORMERS):
    raise ImportError(
        f"transformers >= {_MIN_TRANSFORMERS} is needed; installed: {transformers.__version__}"
    )


def _attention(
    kernel: Callable[..., torch.Tensor] | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: CachedKV,
    value: CachedKV,
    attention_mask: None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `transformers`: query (B, Hq, q_len, D) to (B, q_len, Hq, D)."""
    if not isinstance(key, CachedKV):
        refuse_latent(module.config)
        raise TypeError(
            "attn_implementation 'cute_kv' reads keys and values from a PagedKVCache, and this "
            "call has none: pass one as past_key_values (`cache` in later releases). Where "
            "generate makes caches of its own it cannot be used: guidance_scale, assistant models"
        )
    try:
        _check_supported(module, key, attention_mask, **kwargs)
        return _attend(kernel, query, key, **kwargs), None
    except BaseException:
        # This layer and those before it have the pass's tokens: a second try would add them again.
        key.take_back()
        raise


def _check_supported(
    module: torch.nn.Module,
    key: CachedKV,
    attention_mask: None,
    *,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> None:
    if attention_mask is not None:
        _refuse_mask()
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("attention that is not causal")
    if kwargs.get("dropout") or kwargs.get("output_attentions"):
        raise NotImplementedError("dropout and output_attentions")
    if kwargs.get("cu_seq_lens_q") is not None or _packed(module, kwargs.get("position_ids")):
        _refuse_mask()
    if sliding_window != key.layer.sliding_window:
        raise ValueError(
            f"sliding_window: the layer attends with {sliding_window}, its cache was made for "
            f"{key.layer.sliding_window}"
        )


def _packed(module: torch.nn.Module, position_ids: torch.Tensor | None) -> bool:
    """Whether a row of (B, q_len) positions holds more than one sequence.

    transformers looks for this only where there is no cache. Here the first layer does, for all of
    them, as on a device reading the answer waits for it.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
        return False
    return not getattr(module, "layer_idx", 0) and bool((position_ids.diff() != 1).any())


def _attend(
    kernel: Callable[..., torch.Tensor] | None,
    query: torch.Tensor,
    key: CachedKV,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    pages, step, rotation = key.layer.pages, key.step, key.layer.rotation
    cu_seqlens_q, q_len = step.cu_seqlens_q, query.shape[2]
    if q_len != step.q_len:
        # Layers that read another layer's pages may be asked for the last tokens only: queries are
        # counted from the end of the keys, so these need no more than their number.
        cu_seqlens_q = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device) * q_len
    rotated = query if rotation is None else (query.float() @ rotation).to(query.dtype)
    attended = {name: x for name, x in pages.attended()._asdict().items() if x is not None}
    out = (kernel or cute_kernels.flash_attn_varlen_func)(
        rotated.to(pages.query_dtype).transpose(1, 2).flatten(0, 1),
        max_seqlen_q=q_len,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_k=step.kv_len,
        seqused_k=step.seqused_k,
        block_table=step.block_table,
        softmax_scale=scaling,
        causal=True,
        # `transformers` counts the query's own key in the window, `window_size` does not.
        window_size=None if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
        s_aux=s_aux,
        **attended,
    )
    return out.unflatten(0, (-1, q_len)).to(query.dtype)


def _mask(
    *,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> None:
    """The mask function of `transformers`: no mask, as the kernels mask by length, or a refusal."""
    if not allow_is_causal_skip:  # how `transformers` says that causal masking is not enough
        _refuse_mask()
    if attention_mask is not None and not attention_mask[:, -kv_length:].all():
        _refuse_mask()


def _refuse_mask() -> NoReturn:
    raise NotImplementedError(
        "attn_implementation 'cute_kv' masks causally and by sliding window only; padding, packed "
        "sequences, bidirectional spans and masks of your own are not supported"
    )


def register(name: str = "cute_kv", kernel: Callable[..., torch.Tensor] | None = None) -> str:
    """Make attention over a `PagedKVCache` selectable as `attn_implementation=name`.

    `kernel` has the signature of `cute_kernels.flash_attn_varlen_func`, which is the default.
    Returns `name`. Registering a name again replaces what it stood for.
    """
    AttentionInterface.register(name, functools.partial(_attention, kernel))
    AttentionMaskInterface.register(name, _mask)
    return name


def cache_keyword(model: transformers.PreTrainedModel) -> str:
    """The name that this release of `transformers` gives the cache in `forward` and `generate`."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def forward(
    model: transformers.PreTrainedModel, input_ids: torch.Tensor, cache: Cache, **kwargs: Any
) -> Any:
    """`model(input_ids)` behind the tokens in `cache`, to which these are appended."""
    cached = {cache_keyword(model): cache}
    return model(input_ids=input_ids, use_cache=True, **cached, **kwargs)


@torch.inference_mode()
def calibrate_scales(
    model: transformers.PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    kv_cache_dtype: str = "fp8",
    rotate_keys: bool = False,
    per_head: bool = False,
) -> list[KVScales]:
    """Scales that use a format's whole range for the largest |K| and |V| on `input_ids` (B, L).

    For fp8 the largest becomes 448, for the nvfp4 dtypes 6 * 448: see `kvcache.suggest_scales`.

    Args:
        model: runs with an `attn_implementation` that `register` made.
        kv_cache_dtype: a quantized dtype.
        rotate_keys: as in the cache that the scales are for; they say so, and others are refused.
        per_head: one scale per KV head, not one per layer.

    Returns:
        One `KVScales` per layer. Where K or V is all zero the scale is 1. A layer that reads the
        pages of another has that one's.
    """
    check_has_scales(kv_cache_dtype)
    cache = PagedKVCache(model.config, "auto", rotate_keys=rotate_keys)
    forward(model, input_ids, cache, logits_to_keep=1)
    found = []
    for layer in cache.layers:
        # (B, L, Hkv, D)
        k, v = (x.abs().amax((0, 1, 3)) if per_head else x.abs().max() for x in layer.read())
        found.append(suggest_scales(k, v, kv_cache_dtype, rotated_keys=rotate_keys))
    return [found[index] for index in read_layers(model.config.get_text_config(decoder=True))]
