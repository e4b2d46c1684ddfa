"""vLLM's CUSTOM attention backend: what our kernels accept, in the words of vLLM's planner."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from kvcache import blocks, contracts
from kvcache.config import AttentionConfig
from kvcache.dtypes import QUERY_DTYPES
from kvcache.integrations.vllm.dtypes import config_of_spec, refusal, stored_names


def _readers_have(feature: str) -> bool:
    return any(feature in contract.features for contract in contracts.readers())


def _all(field: str) -> list:
    """What any kernel has in a field of its contract, in order of first mention."""
    return [*dict.fromkeys(x for each in contracts.readers() for x in getattr(each, field))]


class CuteAttentionBackend(AttentionBackend):
    """K and V of a layer are the two halves of the last dim of its cache,
    (num_blocks, num_kv_heads, block_size, 2 * head_size), in whatever order of memory vLLM chose.
    Of the nvfp4 dtypes they are head slots: (num_blocks, 2 * num_kv_heads, block_size, row).
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        getattr(torch, name) for name, short in QUERY_DTYPES.items() if short in _all("q_dtypes")
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = stored_names(*_all("kv_cache_formats"))
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        from kvcache.integrations.vllm.attention import CuteAttentionImpl

        return CuteAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        from kvcache.integrations.vllm.metadata import CuteMetadataBuilder

        return CuteMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Blocks of nvfp4 have a slot of codes and block scales for each head of K and of V."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_nvfp4:
            return spec
        row = nvfp4_kv_cache_full_dim(spec.head_size)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=row)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return _all("head_sizes")

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, kv_cache_spec: KVCacheSpec | None = None
    ) -> list[int | MultipleOf]:
        """Of a layer's spec what its kernel advertises; without one, what all kernels do.

        Raises:
            NotImplementedError: these layers cannot serve the spec, with the reason.
        """
        if isinstance(kv_cache_spec, AttentionSpec):
            config = config_of_spec(kv_cache_spec)
            reason = refusal(config)
            if reason is not None:
                raise NotImplementedError(reason)
            advertised = blocks.get_supported_kernel_block_sizes_for_config(config)
            named = [size for size in advertised if isinstance(size, int)]
            bases = [size.base for size in advertised if not isinstance(size, int)]
            return [*named, *map(MultipleOf, bases)]
        sets = [contract.advertised_page_sizes for contract in contracts.readers()]
        named = sorted(set.intersection(*(set(pages.sizes) for pages in sets)))
        return [*named, MultipleOf(lcm(*(pages.multiple_of for pages in sets)))]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """`default_block_size` where every kernel reads such pages at one load a tile, else the
        largest of the sizes that the kernels prefer."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return max(contract.preferred_page_size for contract in contracts.readers())

    @classmethod
    def supports_sink(cls) -> bool:
        return _readers_have("sinks")

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return _readers_have("sliding_window")

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return _readers_have("bidirectional_spans")

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # A kernel's bits may depend on which query tokens of a sequence share a call, and vLLM cuts
        # prompts by what else is in the batch.
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # The launch covers max_query_len, which vLLM takes from the lengths on the host.
        return False

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return contracts.runs_on(tuple(_all("architectures")), tuple(capability))

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
        """The reason of `dtypes.refusal`; `block_size` is a manager block, so a kernel's page
        only has to divide it."""
        try:
            config = AttentionConfig(
                head_size=head_size,
                num_q_heads=1,
                num_kv_heads=1,
                kv_cache_dtype=kv_cache_dtype or "auto",
                query_dtype=dtype,
                capability=tuple(device_capability),
                sinks=has_sink,
                mla=use_mla,
                bidirectional_spans=use_mm_prefix,
            )
            reason = refusal(config)
            if reason is None and block_size is not None:
                blocks.select_common_block_size([config], block_size)
        except ValueError as error:
            return str(error)
        return reason
