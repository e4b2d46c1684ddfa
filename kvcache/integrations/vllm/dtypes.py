"""KV cache dtypes between vLLM's names and ours."""

from __future__ import annotations

import torch
from vllm.config.cache import KV_CACHE_DTYPES as VLLM_DTYPES
from vllm.config.cache import register_kv_cache_dtype
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from kvcache.config import AttentionConfig
from kvcache.dtypes import KV_CACHE_DTYPES, query_dtype_name

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
