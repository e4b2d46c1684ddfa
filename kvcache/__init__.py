"""What an inference framework needs to know about the kernels, without a GPU and without the DSL.

This package imports `cute_kernels`; `cute_kernels` never imports this one. Public names resolve on
first use; only those that handle tensors import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cute_kernels import __version__

if TYPE_CHECKING:
    from .blocks import (
        MultipleOf,
        get_preferred_block_size_for_config,
        get_supported_kernel_block_sizes_for_config,
        largest_kernel_block_within,
        select_common_block_size,
        split_block_table,
    )
    from .calibration import apply_kv_scales, load_kv_scales, save_kv_scales
    from .config import AttentionConfig, capability_of
    from .draft_map import map_draft_to_target
    from .dtypes import (
        KV_CACHE_DTYPES,
        KVCacheDType,
        QuantMode,
        ScaleLayout,
        ScaleSearch,
        bytes_per_token,
        check_same_cache_format,
        get_kv_cache_dtype,
        is_quantized_kv_cache,
        resolve_kv_cache_dtype,
    )
    from .hybrid import HybridPlan, LayerGroup, plan_pages
    from .layer_scales import restore_scales, save_scales, sync_host_copies
    from .mtp import (
        StaleScalesError,
        check_mtp_scales,
        copy_target_kv_scales,
        propagate_mtp_scales,
    )
    from .scales import KVScales, suggest_scales
    from .selection import (
        can_run,
        can_share_cache,
        classify_batch,
        explain,
        nearest_kv_cache_dtype,
        select_kernel,
        select_kernels,
        supports_quant_query_input,
    )

__all__ = [
    "__version__",
    "AttentionConfig",
    "HybridPlan",
    "KVCacheDType",
    "KVScales",
    "KV_CACHE_DTYPES",
    "LayerGroup",
    "MultipleOf",
    "QuantMode",
    "ScaleLayout",
    "ScaleSearch",
    "StaleScalesError",
    "apply_kv_scales",
    "bytes_per_token",
    "can_run",
    "can_share_cache",
    "capability_of",
    "check_mtp_scales",
    "check_same_cache_format",
    "classify_batch",
    "copy_target_kv_scales",
    "explain",
    "get_kv_cache_dtype",
    "get_preferred_block_size_for_config",
    "get_supported_kernel_block_sizes_for_config",
    "is_quantized_kv_cache",
    "largest_kernel_block_within",
    "load_kv_scales",
    "map_draft_to_target",
    "nearest_kv_cache_dtype",
    "plan_pages",
    "propagate_mtp_scales",
    "resolve_kv_cache_dtype",
    "restore_scales",
    "save_kv_scales",
    "save_scales",
    "select_common_block_size",
    "select_kernel",
    "select_kernels",
    "split_block_table",
    "suggest_scales",
    "supports_quant_query_input",
    "sync_host_copies",
]

_NAMES = {
    ".blocks": (
        "MultipleOf",
        "get_preferred_block_size_for_config",
        "get_supported_kernel_block_sizes_for_config",
        "largest_kernel_block_within",
        "select_common_block_size",
        "split_block_table",
    ),
    ".calibration": ("apply_kv_scales", "load_kv_scales", "save_kv_scales"),
    ".config": ("AttentionConfig", "capability_of"),
    ".draft_map": ("map_draft_to_target",),
    ".dtypes": (
        "KV_CACHE_DTYPES",
        "KVCacheDType",
        "QuantMode",
        "ScaleLayout",
        "ScaleSearch",
        "bytes_per_token",
        "check_same_cache_format",
        "get_kv_cache_dtype",
        "is_quantized_kv_cache",
        "resolve_kv_cache_dtype",
    ),
    ".hybrid": ("HybridPlan", "LayerGroup", "plan_pages"),
    ".layer_scales": ("restore_scales", "save_scales", "sync_host_copies"),
    ".mtp": (
        "StaleScalesError",
        "check_mtp_scales",
        "copy_target_kv_scales",
        "propagate_mtp_scales",
    ),
    ".scales": ("KVScales", "suggest_scales"),
    ".selection": (
        "can_run",
        "can_share_cache",
        "classify_batch",
        "explain",
        "nearest_kv_cache_dtype",
        "select_kernel",
        "select_kernels",
        "supports_quant_query_input",
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value  # later uses skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
