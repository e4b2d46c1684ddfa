"""The environment variables of this package, read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path


def bundle_directories() -> list[Path]:
    """``CUTE_KERNELS_BUNDLE``: directories of kernels built ahead of time, first one first."""
    value = os.environ.get("CUTE_KERNELS_BUNDLE", "")
    return [Path(part) for part in value.split(os.pathsep) if part]


def cache_directory() -> Path | None:
    """``CUTE_KERNELS_CACHE_DIR``: where kernels compiled on this machine are kept.

    Without it, ``cute_kernels/kernels`` in the user's cache directory (XDG); None for a user who
    has no home directory.
    """
    value = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    if value:
        return Path(value)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        base = base.expanduser()
    except RuntimeError:
        return None
    return base / "cute_kernels" / "kernels" if base.is_absolute() else None


def c_compiler() -> str:
    """``CC``: the compiler driver that links kernels into libraries."""
    return os.environ.get("CC") or "cc"


def vllm_backend() -> str:
    """``CUTE_KERNELS_VLLM``: "native" makes vLLM's CUSTOM backend vLLM's own, else it is ours."""
    return os.environ.get("CUTE_KERNELS_VLLM", "").strip().lower()
