"""The layers of the CUSTOM backend: our store on write, our attention on read."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import cute_kernels
from cute_kernels.formats import QuantMode
from kvcache.config import AttentionConfig
from kvcache.integrations.vllm.arguments import flash_attn_varlen_func
from kvcache.integrations.vllm.counters import COUNTERS, REFERENCE
from kvcache.integrations.vllm.dtypes import device_capability, refusal
from kvcache.integrations.vllm.metadata import CuteAttentionMetadata
from kvcache.integrations.vllm.pages import halves, nvfp4_sides
from kvcache.selection import describe, select_kernels


class CuteAttentionImpl(AttentionImpl[CuteAttentionMetadata]):
    """One layer. CPU tensors take the torch reference.

    Raises:
        NotImplementedError: what no kernel here does, with the reason that the selector gives.
    """

    # Queries stay in 16 bits: K and V are dequantized in the kernel.
    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        unknown = [name for name, value in others.items() if value is not None]
        if alibi_slopes is not None:
            unknown.append("alibi_slopes")
        if attn_type != AttentionType.DECODER:
            unknown.append(f"attn_type {attn_type!r}")
        if unknown:
            raise NotImplementedError(f"{', '.join(unknown)}: not implemented by this backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or 0.0
        # vLLM counts the query's own key in the window, `window_size` does not.
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.sinks, self._loaded_sinks = sinks, sinks
        self.config = AttentionConfig(
            head_size=head_size,
            num_q_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            query_dtype=torch.get_default_dtype(),  # vLLM builds layers under the model's
            capability=device_capability(),
            sliding_window=sliding_window,
            softcap=bool(logits_soft_cap),
            sinks=sinks is not None,
        )
        reason = refusal(self.config)
        if reason is not None:
            raise NotImplementedError(reason)
        self.block_scaled = self.config.dtype.quant_mode is QuantMode.BLOCK_SCALED
        self.kernel = " and ".join(kernel.name for kernel in select_kernels(self.config))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks become float32 once, into the same tensor after a reload: graphs hold it."""
        if self._loaded_sinks is None:
            return
        if self.sinks is self._loaded_sinks:
            self.sinks = self._loaded_sinks.detach().float().clone()
        else:
            self.sinks.copy_(self._loaded_sinks)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CuteAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the cache, which holds this batch's keys and values already.

        Args:
            query, output: (tokens, Hq, D). Rows from num_actual_tokens on are padding.
            key, value: not read; None in layers that read another layer's cache.
            kv_cache: (num_blocks, Hkv, block_size, 2 D), uint8 for fp8; nvfp4: see `pages`.

        Raises:
            ValueError: a cache in blocks of another size than the block table's, or a layer without
                keys that reads no other layer's cache.
            NotImplementedError: fused output quantization.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization")
        name = getattr(layer, "layer_name", "a layer without a name")
        COUNTERS.chosen(name, self.kernel if query.is_cuda else REFERENCE)
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        if key is None and getattr(layer, "kv_sharing_target_layer_name", None) is None:
            raise ValueError(
                f"{name}: has no keys of its own and shares no layer's cache "
                f"(kv_sharing_target_layer_name is None); {describe(self.config)}"
            )
        k, v = self._sides(kv_cache)
        block_scales = {}
        if self.block_scaled:
            (k, k_scale), (v, v_scale) = map(cute_kernels.split_nvfp4, (k, v))
            block_scales = {"k_block_scale": k_scale, "v_block_scale": v_scale}
        if k.shape[1] != attn_metadata.block_size:
            raise ValueError(
                f"{name}: kv_cache has blocks of {k.shape[1]} tokens, the block table counts "
                f"blocks of {attn_metadata.block_size}"
            )
        tokens = attn_metadata.num_actual_tokens
        flash_attn_varlen_func(
            query[:tokens],
            k,
            v,
            attn_metadata.max_query_len,
            attn_metadata.query_start_loc,
            attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table,
            softmax_scale=self.scale,
            causal=True,
            window_size=self.window,
            softcap=self.softcap,
            k_descale=layer._k_scale,
            v_descale=layer._v_scale,
            s_aux=self.sinks,
            out=output[:tokens],
            **block_scales,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store (tokens, Hkv, D) keys and values; layers that share a cache do not write it."""
        if self.kv_sharing_target_layer_name is None:
            k, v = self._sides(kv_cache)
            cute_kernels.reshape_and_cache(
                key,
                value,
                k,
                v,
                slot_mapping,
                self.kv_cache_dtype,
                layer._k_scale,
                layer._v_scale,
            )

    def _sides(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as (num_blocks, block_size, Hkv, row) views."""
        if self.block_scaled:
            return nvfp4_sides(kv_cache, self.num_kv_heads)
        return halves(kv_cache, self.config.dtype.torch_dtype)
