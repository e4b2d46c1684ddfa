"""The paged KV cache that attention of `kvcache.integrations.transformers` reads."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcache.checks import check_type, described
from kvcache.integrations.transformers_config import (
    check_heads,
    check_rotation,
    read_layers,
    refuse_latent,
    sliding_windows,
)
from kvcache.paged import PAGE_FORMATS, Pages, PageTable, Step, hadamard
from kvcache.scales import KVScales


class CachedKV(NamedTuple):
    """What `PagedKVLayer.update` hands to the attention function in the place of K and of V."""

    layer: PagedKVLayer  # which wrote them
    step: Step
    restore: Callable[[], None]  # makes the layers what they were before the pass

    def take_back(self) -> None:
        """Forget the pass's tokens, in all layers that have them: it has been refused."""
        if self.layer.ends_with(self.step):
            self.restore()

    def to(self, device: torch.device, *args: Any, **kwargs: Any) -> CachedKV:
        """Itself: models move what a layer reads of another layer to their own device."""
        held = self.layer.pages.k.device
        if torch.device(device) != held:
            raise NotImplementedError(
                f"layers on {device} that read the cache of a layer on {held}; accepted: the same "
                "device"
            )
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle look for hooks that need not be there
            raise AttributeError(name)
        self.take_back()
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
        check_type("rotate_keys", rotate_keys, bool, "True or False")
        if scales is not None:
            check_type("scales", scales, KVScales, "KVScales").check_dtype(kv_cache_dtype)
            scales.check_rotation(rotate_keys)
        self.table = table
        self.kv_cache_dtype = kv_cache_dtype
        self.scales = scales
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.rotate_keys = rotate_keys
        self.length = 0
        self.pages: Pages | None = None
        self.rotation: torch.Tensor | None = None  # float32 (D, D), for keys and queries
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
            self.rotation = hadamard(key_states.shape[-1], key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedKV, CachedKV]:
        """Append (B, Hkv, q_len, D) keys and values; return all that is held, for K and for V.

        Raises:
            NotImplementedError: keys or values with gradients, which pages do not keep.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise NotImplementedError(
                "keys and values with requires_grad=True: a PagedKVCache has no backward pass; "
                "accepted under torch.no_grad()"
            )
        before = self.state()
        try:
            step = self._write(key_states, value_states)
        except BaseException:
            self.restore(before)
            raise
        cached = CachedKV(self, step, functools.partial(self.restore, before))
        return cached, cached

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Step:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, q_len, _ = key_states.shape
        step = self.table.advance(self.length, q_len, batch, key_states.device)
        if self.rotation is not None:
            key_states = key_states.float() @ self.rotation
        self.pages.grow(self.table.num_pages)
        self.pages.write(key_states, value_states, step.slots)
        self.length, self._step = step.kv_len, step
        return step

    def ends_with(self, step: Step) -> bool:
        """Whether the last tokens are those of this step."""
        return self._step is step and self.length == step.kv_len

    def state(self) -> tuple[Any, ...]:
        """What `restore` needs to undo the update that follows; the pages' table included, as a
        sliding window frees pages in an update."""
        return self.length, self._step, self.table.state()

    def restore(self, state: tuple[Any, ...]) -> None:
        self.length, self._step, table = state
        self.table.restore(table)

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

        Args:
            tokens_to_remove: an int, or what can stand for one, as a 0-d integer tensor can.

        Raises:
            ValueError: more than there are, or, in a sliding-window layer, so many that the next
                token's window has been freed. Up to `page_size` tokens are always possible.
            TypeError: no integer.
        """
        self.length = self.length_after_crop(tokens_to_remove)

    def length_after_crop(self, tokens_to_remove: int) -> int:
        """The length that `crop` would leave; raises what it raises."""
        # Lengths are Python ints: layers share a step, and a tensor in it would be one for all.
        count = operator.index(tokens_to_remove)
        if not -self.length <= count <= 0:
            raise ValueError(f"tokens_to_remove: got {count}; accepted: {-self.length} to 0")
        self.table.check_start(self.length + count)
        return self.length + count

    def reset(self) -> None:
        self.table.reset()
        self.length, self._step = 0, None

    def _refuse_shared_pages(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "a page belongs to one sequence: beam search and other reordering of the batch are "
            "not supported"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_shared_pages

    def offload(self) -> NoReturn:
        _refuse_offloading()

    def prefetch(self) -> NoReturn:
        _refuse_offloading()


class PagedKVCache(Cache):
    """KV cache of a decoder, to be passed to `forward` or `generate` with `attn_implementation`
    "cute_kv".

    Args:
        config: the model's.
        kv_cache_dtype: "fp8", "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse", "bf16", or
            "auto" (the model's dtype; bf16 for a float32 model).
        scales: one `KVScales` per layer, for quantized dtypes; `calibrate_scales` measures them.
            Those of a layer that reads another layer's pages are not used.
        page_size: tokens in a page.
        rotate_keys: multiply keys, and in attention queries, by a Hadamard matrix. The scores are
            the same; what changes is where rounding to fp8 hurts. Worth it for models with few
            large key elements. Perplexity of fp8 against bf16 KV on 4,096 tokens of docstrings,
            standard error 0.2 to 0.4 %: SmolLM2-135M +2.1 % without, +0.8 % with; Gemma-3 270M
            +0.8 % without, +1.5 % with (perf/results/2026-11-30_perplexity_kv_cpu.json).

    Raises:
        ValueError: unknown dtype; a page_size that is no int > 0; scales missing, superfluous, for
            another dtype, another number of heads or for keys that are otherwise rotated, not one a
            layer; rotate_keys with a head size that is no power of two.
        TypeError: an argument of another type.
        NotImplementedError: layers that are neither full nor sliding-window attention; latent
            attention (MLA); a model none of whose layers has keys of its own.
    """

    def __init__(
        self,
        config: transformers.PreTrainedConfig,
        kv_cache_dtype: str = "auto",
        scales: Sequence[KVScales] | None = None,
        *,
        page_size: int = 64,
        rotate_keys: bool = False,
    ) -> None:
        check_type("kv_cache_dtype", kv_cache_dtype, str, "the name of a dtype")
        check_type("rotate_keys", rotate_keys, bool, "True or False")
        if kv_cache_dtype not in PAGE_FORMATS:
            raise ValueError(
                f"kv_cache_dtype: got {kv_cache_dtype!r}; accepted: {', '.join(PAGE_FORMATS)}"
            )
        text = config.get_text_config(decoder=True)
        refuse_latent(text)
        windows = sliding_windows(text)
        held = sum(index == read for index, read in enumerate(read_layers(text)))
        if (scales is not None) != PAGE_FORMATS[kv_cache_dtype].needs_scales:
            given = "none" if scales is None else "some"
            raise ValueError(
                f"scales: got {given} for kv_cache_dtype {kv_cache_dtype!r}; quantized dtypes need "
                "one per layer (calibrate_scales measures them), other dtypes have none"
            )
        if scales is not None:
            _check_scales(scales, text)
        if rotate_keys:
            check_rotation(text, held)
        tables = {window: PageTable(page_size, window) for window in set(windows[:held])}
        super().__init__(
            layers=[
                PagedKVLayer(
                    tables[window], kv_cache_dtype, scales and scales[index], window, rotate_keys
                )
                for index, window in enumerate(windows[:held])
            ]
        )
        self._before: list[tuple[Any, ...]] = []  # per layer, its state before the last pass

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[CachedKV, CachedKV]:
        """`PagedKVLayer.update` of one layer. If it raises, or the attention that is given its
        result does, no layer has the pass's tokens.

        Raises:
            ValueError: at the first layer, a cache whose layers hold unequal numbers of tokens.
        """
        if layer_idx == 0:
            self._check_lengths()
            self._before = [layer.state() for layer in self.layers]
        try:
            cached, _ = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            self._restore()
            raise
        cached = cached._replace(restore=self._restore)
        return cached, cached

    def _restore(self) -> None:
        for layer, before in zip(self.layers, self._before, strict=True):
            layer.restore(before)

    def _check_lengths(self) -> None:
        lengths = [layer.length for layer in self.layers]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the layers of this cache hold {', '.join(map(str, lengths))} tokens: a forward "
                "pass ended between two of them; accepted after reset()"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """`PagedKVLayer.crop` for every layer, or for none where one of them raises."""
        lengths = [layer.length_after_crop(tokens_to_remove) for layer in self.layers]
        for layer, length in zip(self.layers, lengths, strict=True):
            layer.length = length

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_offloading()

    def prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_offloading()

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V pages that hold tokens, over all layers."""
        return sum(layer.nbytes for layer in self.layers)


def _check_scales(scales: Sequence[KVScales], config: transformers.PreTrainedConfig) -> None:
    words = "one KVScales per layer, in order; of load_kv_scales' dict: list(d.values())"
    if isinstance(scales, (str, bytes)) or not isinstance(scales, Sequence):
        raise TypeError(f"scales: got {described(scales)}; accepted: {words}")
    if len(scales) != config.num_hidden_layers:
        raise ValueError(
            f"scales: got {len(scales)}; the model has {config.num_hidden_layers} layers"
        )
    for index, scale in enumerate(scales):
        check_heads(config, index, check_type(f"scales[{index}]", scale, KVScales, words))


def _refuse_offloading() -> NoReturn:
    raise NotImplementedError("the pages of a PagedKVCache stay on their device: no offloading")
