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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

import cute_kernels
from kvcache.checks import check_type
from kvcache.paged import PAGE_FORMATS, Pages, PageTable, Step, hadamard
from kvcache.scales import KVScales, suggest_scales

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


class _CachedKV(NamedTuple):
    """What `PagedKVLayer.update` hands to the attention function in the place of K and of V."""

    pages: Pages
    step: Step
    sliding_window: int | None
    rotation: torch.Tensor | None  # float32 (D, D), for the queries: the keys have had it

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle look for hooks that need not be there
            raise AttributeError(name)
        raise TypeError(  # attention that takes it for a tensor
            "a PagedKVCache needs register() and a model with attn_implementation='cute_kv' "
            f"(set_attn_implementation); the model's own asked its keys for .{name}"
        )


class PagedKVLayer(CacheLayerMixin):
    """K and V of one attention layer, in pages.

    Args:
        table: the block table, shared with the other layers that see the same tokens.
        kv_cache_dtype: see `PagedKVCache`.
        scales: of a quantized dtype, and made for it.
        sliding_window: how many keys a query sees, itself included; None for all before it.
        rotate_keys: see `PagedKVCache`.
    """

    is_croppable = True

    def __init__(
        self,
        table: PageTable,
        kv_cache_dtype: str,
        scales: KVScales | None = None,
        sliding_window: int | None = None,
        rotate_keys: bool = False,
    ) -> None:
        super().__init__()
        if scales is not None:
            check_type("scales", scales, KVScales, "KVScales").check_dtype(kv_cache_dtype)
        self.table = table
        self.kv_cache_dtype = kv_cache_dtype
        self.scales = scales
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.rotate_keys = rotate_keys
        self.length = 0
        self.pages: Pages | None = None
        self._rotation: torch.Tensor | None = None
        self._step: Step | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if value_states.shape != key_states.shape:
            raise NotImplementedError(
                f"value_states: shape {tuple(value_states.shape)}; accepted: that of the keys, "
                f"{tuple(key_states.shape)}"
            )
        make = PAGE_FORMATS[self.kv_cache_dtype]
        self.pages = make(key_states, self.table.page_size, self.scales)
        if self.rotate_keys:
            self._rotation = hadamard(key_states.shape[-1], key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[_CachedKV, _CachedKV]:
        """Append (B, Hkv, q_len, D) keys and values; return all that is held, for K and for V."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, q_len, _ = key_states.shape
        step = self.table.advance(self.length, q_len, batch, key_states.device)
        if self._rotation is not None:
            key_states = key_states.float() @ self._rotation
        self.pages.grow(self.table.num_pages)
        self.pages.write(key_states, value_states, step.slots)
        self.length, self._step = step.kv_len, step
        cached = _CachedKV(self.pages, step, self.sliding_window, self._rotation)
        return cached, cached

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated, if keys are) and V: float32 (B, n, Hkv, D), scales applied.

        n is the length, less the tokens whose pages a sliding window has freed.
        """
        if self._step is None:
            raise ValueError("the cache is empty")
        first = self.table.first_page
        held = self.length - first * self.table.page_size
        return self.pages.read(self._step.block_table[:, first:], held)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that hold tokens; pages kept for growth are not counted."""
        return self.table.pages_in_use * self.pages.page_bytes if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; their pages stay with the sequence.

        Raises:
            ValueError: more than there are, or, in a sliding-window layer, so many that the next
                token's window has been freed. Up to `page_size` tokens are always possible.
        """
        self.check_crop(tokens_to_remove)
        self.length += tokens_to_remove

    def check_crop(self, tokens_to_remove: int) -> None:
        """What `crop` raises, without cropping."""
        if not -self.length <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove: got {tokens_to_remove}; accepted: {-self.length} to 0"
            )
        self.table.check_start(self.length + tokens_to_remove)

    def reset(self) -> None:
        self.table.reset()
        self.length, self._step = 0, None

    def _refuse_shared_pages(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "a page belongs to one sequence: beam search and other reordering of the batch are "
            "not supported"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_shared_pages


class PagedKVCache(Cache):
    """KV cache of a decoder, to be passed to `forward` or `generate` with `attn_implementation`
    "cute_kv".

    Args:
        config: the model's.
        kv_cache_dtype: "fp8", "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse", "bf16", or
            "auto" (the model's dtype; bf16 for a float32 model).
        scales: one `KVScales` per layer, for quantized dtypes; `calibrate_scales` measures them.
        page_size: tokens in a page.
        rotate_keys: multiply keys, and in attention queries, by a Hadamard matrix. The scores are
            the same; what changes is where rounding to fp8 hurts. Worth it for models with few
            large key elements. Perplexity of fp8 against bf16 KV on 4,096 tokens of docstrings,
            standard error 0.2 to 0.4 %: SmolLM2-135M +2.1 % without, +0.8 % with; Gemma-3 270M
            +0.8 % without, +1.5 % with (perf/results/2026-11-30_perplexity_kv_cpu.json).

    Raises:
        ValueError: unknown dtype; scales missing, superfluous, for another dtype, not one a layer.
        NotImplementedError: layers that are neither full nor sliding-window attention.
    """

    def __init__(
        self,
        config: transformers.PreTrainedConfig,
        kv_cache_dtype: str = "auto",
        scales: Sequence[KVScales] | None = None,
        page_size: int = 64,
        rotate_keys: bool = False,
    ) -> None:
        if kv_cache_dtype not in PAGE_FORMATS:
            raise ValueError(
                f"kv_cache_dtype: got {kv_cache_dtype!r}; accepted: {', '.join(PAGE_FORMATS)}"
            )
        windows = _sliding_windows(config.get_text_config(decoder=True))
        if (scales is not None) != PAGE_FORMATS[kv_cache_dtype].needs_scales:
            given = "none" if scales is None else "some"
            raise ValueError(
                f"scales: got {given} for kv_cache_dtype {kv_cache_dtype!r}; quantized dtypes need "
                "one per layer (calibrate_scales measures them), other dtypes have none"
            )
        if scales is not None and len(scales) != len(windows):
            raise ValueError(f"scales: got {len(scales)}; the model has {len(windows)} layers")
        tables = {window: PageTable(page_size, window) for window in set(windows)}
        super().__init__(
            layers=[
                PagedKVLayer(
                    tables[window], kv_cache_dtype, scales and scales[index], window, rotate_keys
                )
                for index, window in enumerate(windows)
            ]
        )

    def crop(self, tokens_to_remove: int) -> None:
        """`PagedKVLayer.crop` for every layer, or for none where one of them raises."""
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V pages that hold tokens, over all layers."""
        return sum(layer.nbytes for layer in self.layers)


def _sliding_windows(config: transformers.PreTrainedConfig) -> list[int | None]:
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


def _attention(
    kernel: Callable[..., torch.Tensor] | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: _CachedKV,
    value: _CachedKV,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `transformers`: query (B, Hq, q_len, D) to (B, q_len, Hq, D)."""
    if not isinstance(key, _CachedKV):
        raise TypeError(
            "attn_implementation 'cute_kv' reads keys and values from a PagedKVCache; "
            "pass one as past_key_values (`cache` in later releases)"
        )
    if attention_mask is not None:
        _refuse_mask()
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("attention that is not causal")
    if kwargs.get("dropout") or kwargs.get("output_attentions"):
        raise NotImplementedError("dropout and output_attentions")
    if sliding_window != key.sliding_window:
        raise ValueError(
            f"sliding_window: the layer attends with {sliding_window}, its cache was made for "
            f"{key.sliding_window}"
        )
    pages, step = key.pages, key.step
    if key.rotation is not None:
        query = (query.float() @ key.rotation).to(query.dtype)
    attended = {name: x for name, x in pages.attended()._asdict().items() if x is not None}
    out = (kernel or cute_kernels.flash_attn_varlen_func)(
        query.to(pages.query_dtype).transpose(1, 2).flatten(0, 1),
        max_seqlen_q=step.q_len,
        cu_seqlens_q=step.cu_seqlens_q,
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
    return out.unflatten(0, (-1, step.q_len)).to(query.dtype), None


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
    rotate_keys: bool = False,
    kv_cache_dtype: str = "fp8",
    *,
    per_head: bool = False,
) -> list[KVScales]:
    """Scales that use a format's whole range for the largest |K| and |V| on `input_ids` (B, L).

    For fp8 the largest becomes 448, for the nvfp4 dtypes 6 * 448: see `kvcache.suggest_scales`.

    Args:
        model: runs with an `attn_implementation` that `register` made.
        rotate_keys: as in the cache that the scales are for.
        kv_cache_dtype: a quantized dtype.
        per_head: one scale per KV head, not one per layer.

    Returns:
        One `KVScales` per layer. Where K or V is all zero the scale is 1.
    """
    cache = PagedKVCache(model.config, "auto", rotate_keys=rotate_keys)
    forward(model, input_ids, cache, logits_to_keep=1)
    found = []
    for layer in cache.layers:
        # (B, L, Hkv, D)
        k, v = (x.abs().amax((0, 1, 3)) if per_head else x.abs().max() for x in layer.read())
        found.append(suggest_scales(k, v, kv_cache_dtype))
    return found
