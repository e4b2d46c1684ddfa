"""KV cache dtypes between vLLM's names and ours."""

from __future__ import annotations

import torch
from vllm.config.cache import KV_CACHE_DTYPES as VLLM_DTYPES
from vllm.config.cache import register_kv_cache_dtype
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from cute_kernels.registry import store_contract
from kvcache.config import AttentionConfig
from kvcache.dtypes import KV_CACHE_DTYPES, query_dtype_name
from kvcache.selection import can_run

# Ours that vLLM does not have. Their mode must not be KVQuantMode.CUSTOM: in 0.33 that is an alias
# of another format's mode, and generic code sizes pages by it.
EXTRA_DTYPES = ("nvfp4_4over6_k", "nvfp4_mse")
_QUANTIZED = {KVQuantMode.FP8_PER_TENSOR: "fp8", KVQuantMode.NVFP4: "nvfp4"}
# Where there is no GPU the torch reference runs, planned as for this one.
_REFERENCE_CAPABILITY = (9, 0)


def register_kv_cache_dtypes() -> None:
    """Make `--kv-cache-dtype` take the names of `EXTRA_DTYPES`."""
    for name in EXTRA_DTYPES:
        if name not in VLLM_DTYPES:
            register_kv_cache_dtype(name)(_handler(name))


def _handler(dtype_name: str) -> type:
    class Handler:
        name = dtype_name

        def torch_dtype(self) -> torch.dtype:
            return KV_CACHE_DTYPES[dtype_name].torch_dtype

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.NVFP4

    return Handler


def names_of(*storage_formats: str) -> list[str]:
    """The dtype names that users can give for these storage formats."""
    return [name for name, dtype in KV_CACHE_DTYPES.items() if dtype.storage in storage_formats]


def stored_names(*storage_formats: str) -> list[str]:
    """Of `names_of` those that our store writes, as these layers need on every step."""
    stored = store_contract().kv_cache_dtypes
    return [name for name in names_of(*storage_formats) if name in stored]


def refusal(config: AttentionConfig) -> str | None:
    """Why our layers cannot serve this configuration, or None: `kvcache.can_run`, and our store.

    A cache of 16 bits is one that our store does not write.
    """
    reason = can_run(config)
    if reason is not None or config.dtype.name in stored_names(config.dtype.storage):
        return reason
    return (
        f"kv_cache_dtype {config.kv_cache_dtype!r}: the store is missing "
        f"(cute_kernels.reshape_and_cache does not write {config.dtype.storage} caches); vLLM's "
        "own backends serve them"
    )


def device_capability() -> tuple[int, int]:
    """(major, minor) of the device that vLLM runs on; Hopper's where it has none."""
    found = current_platform.get_device_capability()
    return _REFERENCE_CAPABILITY if found is None else (found.major, found.minor)


def config_of_spec(spec: AttentionSpec) -> AttentionConfig:
    """What a layer's cache spec says of it.

    A spec has no query heads: the configuration has one per KV head. fp8_e5m2 looks like fp8 here;
    `supports_kv_cache_dtype` has refused it before there is a spec.

    Raises:
        NotImplementedError: a quantization that is not known here.
    """
    name = _QUANTIZED.get(spec.kv_quant_mode)
    if spec.kv_quant_mode is KVQuantMode.NONE:
        name = query_dtype_name(spec.dtype)
    if name is None:
        raise NotImplementedError(f"KV cache quantization {spec.kv_quant_mode!r}")
    return AttentionConfig(
        head_size=spec.head_size,
        num_q_heads=spec.num_kv_heads,
        num_kv_heads=spec.num_kv_heads,
        kv_cache_dtype=name,
        capability=device_capability(),
        sliding_window=getattr(spec, "sliding_window", None),
    )
