"""vLLM plugin: our attention as its CUSTOM backend, our store for NVFP4 on SM100, our cache dtypes.

vLLM loads `register` through the entry point group `vllm.general_plugins` in each of its processes.
What it registers is passive: a model runs on it when it is asked for,

    vllm serve MODEL --kv-cache-dtype fp8 --attention-backend CUSTOM
    vllm serve MODEL --kv-cache-dtype nvfp4_mse --attention-backend CUTE_NVFP4_SM100

The switch back that needs no other command line is CUTE_KERNELS_VLLM=native: CUSTOM is then vLLM's
own FlashAttention, and nothing reads a file of scales. Importing this package imports no vLLM.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from cute_kernels.env import vllm_backend

__all__ = ["BACKEND", "NATIVE_BACKEND", "NVFP4_BACKEND", "NVFP4_NAME", "VLLM_VERSION", "register"]

BACKEND = "kvcache.integrations.vllm.backend.CuteAttentionBackend"
NATIVE_BACKEND = "kvcache.integrations.vllm.native.NativeAttentionBackend"
NVFP4_BACKEND = "kvcache.integrations.vllm.nvfp4_sm100.CuteNVFP4Backend"
NVFP4_NAME = "CUTE_NVFP4_SM100"
VLLM_VERSION = "0.33"  # the one these classes were written for and are tested with

# A child of vLLM's logger: it has handlers in every one of its processes, others have none.
logger = logging.getLogger("vllm.cute_kernels")


def register() -> str | None:
    """Register backends and cache dtypes with vLLM; may be called any number of times.

    Returns:
        Why nothing was registered, also in the log as a warning, or None. Never raises: vLLM does
        not catch what its plugins raise, and a plugin must not take its host down.
    """
    reason = _other_version() or _unknown_switch()
    if reason is None:
        try:
            _register()
        except Exception as error:
            reason = f"vllm has another interface: {type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("cute_kernels: unavailable: %s", reason)
    return reason


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvcache.integrations.vllm.dtypes import register_kv_cache_dtypes

    register_kv_cache_dtypes()
    custom, native = AttentionBackendEnum.CUSTOM, vllm_backend() == "native"
    taken = custom.get_path() if custom.is_overridden() else None
    if taken in (None, BACKEND, NATIVE_BACKEND):
        register_backend(custom, NATIVE_BACKEND if native else BACKEND)
        logger.info("cute_kernels: CUSTOM is %s", NATIVE_BACKEND if native else BACKEND)
    else:
        logger.warning("cute_kernels: CUSTOM is %s already and stays so", taken)
    if NVFP4_NAME not in AttentionBackendEnum.__members__:
        register_backend(NVFP4_NAME, NVFP4_BACKEND)


def _unknown_switch() -> str | None:
    """A misspelt "native" must not be ours: without CUSTOM vLLM does not start on it."""
    if vllm_backend() in ("", "native"):
        return None
    return f"CUTE_KERNELS_VLLM: got {vllm_backend()!r}; accepted: native, or not set"


def _other_version() -> str | None:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return "vllm is not installed"
    if found.split(".")[:2] == VLLM_VERSION.split("."):
        return None
    return f"vllm {found} is installed, this integration is for {VLLM_VERSION}"
