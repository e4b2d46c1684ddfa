"""NVFP4 caches on SM100: our store writes, vLLM's FlashInfer trtllm-gen path reads.

The dtype that the user chose (nvfp4, nvfp4_4over6, nvfp4_4over6_k, nvfp4_mse) decides the bytes and
goes to the store only. The reader knows one format, nvfp4, and gets no other name. Both go through
the layer as two fields.

A block of a layer is `[K data | K scales | V data | V scales]`, the V scales in the swizzled order
that the reader wants. Needs FlashInfer. Proved on CPU tensors: selection, page bytes, the way of
both dtypes, and the bytes written. Nothing here has run on a Blackwell GPU.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

import cute_kernels
from kvcache import contracts
from kvcache.config import AttentionConfig
from kvcache.dtypes import ScaleLayout, get_kv_cache_dtype
from kvcache.integrations.vllm import NVFP4_NAME
from kvcache.integrations.vllm.counters import COUNTERS
from kvcache.integrations.vllm.dtypes import names_of
from kvcache.integrations.vllm.scales import GroupScales
from kvcache.selection import mla_refusal

STORAGE = "nvfp4"
READER = "FlashInfer trtllm-gen"
LAYOUT = ScaleLayout.SM100
# The swizzle moves scales within 4 tokens and quarters of a head's D / 16 scales.
_HEAD_MULTIPLE, _TOKEN_MULTIPLE = 64, 4


class CuteNVFP4Impl(FlashInferImpl):
    """user_dtype: for the store. kv_cache_dtype: for the reader, always "nvfp4"."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if get_kv_cache_dtype(kv_cache_dtype).storage != STORAGE:
            raise NotImplementedError(
                f"kv_cache_dtype: got {kv_cache_dtype!r}; {NVFP4_NAME} stores "
                f"{', '.join(names_of(STORAGE))}"
            )
        self.user_dtype = kv_cache_dtype
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            STORAGE,
            *args,
            **kwargs,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self.forget_scales()

    def forget_scales(self) -> None:
        """Take the layer's scales anew: the reader keeps products of them from its first call on.

        CUDA graphs have the old ones inside and must be captured again.
        """
        self.bmm1_scale = self.bmm2_scale = None

    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = getattr(layer, "layer_name", "a layer without a name")
        COUNTERS.chosen(name, f"{READER} with our {self.user_dtype} store")
        return super().forward(layer, *args, **kwargs)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """`kv_cache` is (num_blocks, 2 Hkv, block_size, 9 D / 16), K's heads before V's."""
        if self.kv_sharing_target_layer_name is not None:
            return
        k, v = kv_cache.transpose(1, 2).split(self.num_kv_heads, dim=-2)
        cute_kernels.reshape_and_cache(
            key,
            value,
            k,
            v,
            slot_mapping,
            self.user_dtype,
            layer._k_scale,
            layer._v_scale,
            LAYOUT.value,
        )


class CuteNVFP4MetadataBuilder(FlashInferMetadataBuilder):
    """FlashInfer's, and layers that read another layer's cache get its scales."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        layers = vllm_config.compilation_config.static_forward_context

        def forget(written: list[str]) -> None:
            for name in written:
                layers[name].impl.forget_scales()

        self._scales = GroupScales(vllm_config, layer_names, forget)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        self._scales.refresh()
        COUNTERS.batch()
        return super().build(*args, **kwargs)


class CuteNVFP4Backend(FlashInferBackend):
    """See the module."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = names_of(STORAGE)

    @staticmethod
    def get_name() -> str:
        return NVFP4_NAME

    @staticmethod
    def get_impl_cls() -> type[CuteNVFP4Impl]:
        return CuteNVFP4Impl

    @staticmethod
    def get_builder_cls() -> type[CuteNVFP4MetadataBuilder]:
        return CuteNVFP4MetadataBuilder

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        # Exactly these names: a prefix would let other layouts in, nvfp4_ds_mla among them.
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major == 10

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why this cannot be served; of the two halves, store and reader, what is missing."""
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            return f"kv_cache_dtype {kv_cache_dtype!r}: {NVFP4_NAME} has {names_of(STORAGE)}"
        config = AttentionConfig(
            head_size=head_size,
            num_q_heads=1,
            num_kv_heads=1,
            kv_cache_dtype=kv_cache_dtype,
            query_dtype=dtype,
            capability=tuple(device_capability),
            v_scale_layout=LAYOUT,
            mla=use_mla,
        )
        refused = mla_refusal(config)
        if refused is not None:
            return refused
        if head_size % _HEAD_MULTIPLE or (block_size or 0) % _TOKEN_MULTIPLE:
            return (
                f"head size {head_size}, block size {block_size}: swizzled V scales need multiples "
                f"of {_HEAD_MULTIPLE} and {_TOKEN_MULTIPLE}"
            )
        halves = []
        if not contracts.writers_for(config):
            halves.append(f"the store is missing (nothing here writes it on {config.device_name})")
        if not super().supports_kv_cache_dtype("nvfp4"):
            halves.append(f"the reader is missing ({READER})")
        if halves:
            return f"kv_cache_dtype {kv_cache_dtype!r}: {' and '.join(halves)}"
        return super().supports_combination(
            head_size,
            dtype,
            "nvfp4",
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            use_mm_prefix,
            device_capability,
        )
