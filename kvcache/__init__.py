"""What an inference framework needs to know about the kernels, without a GPU and without the DSL.

This package imports `cute_kernels`; `cute_kernels` never imports this one.
"""

from __future__ import annotations

from cute_kernels import __version__

__all__ = ["__version__"]
