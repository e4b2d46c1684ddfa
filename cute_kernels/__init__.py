"""CuTe DSL kernels for attention over quantized, paged KV caches.

Public names resolve on first use: importing this package imports neither torch nor the DSL and
touches no CUDA driver, so a host process may import it and fork.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import compile_cache
    from .attention.interface import flash_attn_varlen_func
    from .attention.merge import merge_attn_states
    from .compile_cache import warmup
    from .indexer.interface import compress_norm_rope_insert, fused_indexer_q_rope_quant
    from .reference.store import (
        dequantize_mxfp4,
        dequantize_nvfp4,
        quantize_mxfp4,
        quantize_nvfp4,
        split_nvfp4,
    )
    from .store.interface import reshape_and_cache

__all__ = [
    "__version__",
    "compile_cache",
    "compress_norm_rope_insert",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "flash_attn_varlen_func",
    "fused_indexer_q_rope_quant",
    "merge_attn_states",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "reshape_and_cache",
    "split_nvfp4",
    "warmup",
]
__version__ = "0.1.0"

_HOME = {
    "compress_norm_rope_insert": ".indexer.interface",
    "fused_indexer_q_rope_quant": ".indexer.interface",
    "flash_attn_varlen_func": ".attention.interface",
    "merge_attn_states": ".attention.merge",
    "quantize_mxfp4": ".reference.store",
    "quantize_nvfp4": ".reference.store",
    "dequantize_mxfp4": ".reference.store",
    "dequantize_nvfp4": ".reference.store",
    "reshape_and_cache": ".store.interface",
    "split_nvfp4": ".reference.store",
    "warmup": ".compile_cache",
}


def __getattr__(name: str) -> Any:
    if name == "compile_cache":
        return import_module(".compile_cache", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value  # later uses skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
