"""The environment variables of this package, read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path


def bundle_directories() -> list[Path]:
    """``CUTE_KERNELS_BUNDLE``: directories of kernels built ahead of time, first one first."""
    value = os.environ.get("CUTE_KERNELS_BUNDLE", "")
    return [_path(part) for part in value.split(os.pathsep) if part]


def _path(value: str) -> Path:
    """A path whose `~` no shell has replaced, as in files of variables; kept where it has none."""
    return Path(os.path.expanduser(value))


def cache_directory() -> Path | None:
    """``CUTE_KERNELS_CACHE_DIR``: where kernels compiled on this machine are kept.

    Without it, ``cute_kernels/kernels`` in the user's cache directory (XDG, which has relative
    paths ignored); None for a user who has no home directory.
    """
    value = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    if value:
        return _path(value)
    candidates = (_path(os.environ.get("XDG_CACHE_HOME", "")), _path("~/.cache"))
    base = next((path for path in candidates if path.is_absolute()), None)
    return None if base is None else base / "cute_kernels" / "kernels"


def c_compiler() -> str:
    """``CC``: the compiler driver that links kernels into libraries."""
    return os.environ.get("CC") or "cc"


def vllm_backend() -> str:
    """``CUTE_KERNELS_VLLM``: "native" makes vLLM's CUSTOM backend vLLM's own, else it is ours."""
    return os.environ.get("CUTE_KERNELS_VLLM", "").strip().lower()
