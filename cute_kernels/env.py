"""The environment variables of this package, read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path


def bundle_directories() -> list[Path]:
    """``CUTE_KERNELS_BUNDLE``: directories of kernels built ahead of time, first one first."""
    value = os.environ.get("CUTE_KERNELS_BUNDLE", "")
    return [Path(part) for part in value.split(os.pathsep) if part]


def c_compiler() -> str:
    """``CC``: the compiler driver that links ahead-of-time libraries."""
    return os.environ.get("CC") or "cc"
