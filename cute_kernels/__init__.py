"""CuTe DSL kernels for attention over quantized, paged KV caches.

Public names resolve on first use: importing this package imports neither torch nor the DSL and
touches no CUDA driver, so a host process may import it and fork.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .attention.interface import flash_attn_varlen_func
    from .attention.merge import merge_attn_states

__all__ = ["__version__", "flash_attn_varlen_func", "merge_attn_states"]
__version__ = "0.1.0"

_HOME = {
    "flash_attn_varlen_func": ".attention.interface",
    "merge_attn_states": ".attention.merge",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
