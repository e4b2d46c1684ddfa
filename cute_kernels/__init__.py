"""CuTe DSL kernels for attention over quantized, paged KV caches.

Public names resolve on first use: importing this package imports neither torch nor the DSL and
touches no CUDA driver, so a host process may import it and fork.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.interface import flash_attn_varlen_func
    from .attention.merge import merge_attn_states

__all__ = ["__version__", "flash_attn_varlen_func", "merge_attn_states"]
__version__ = "0.1.0"

_HOME = {
    "flash_attn_varlen_func": ".attention.interface",
    "merge_attn_states": ".attention.merge",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value  # later uses skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
