"""The one place where tests are skipped."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch


def requires(
    *,
    sm90: bool = False,
    gpus: int = 0,
    gpu_gib: float = 0.0,
    dsl: str = "",
    package: str = "",
    no_gpu: bool = False,
) -> None:
    """Skip the running test where this machine lacks what it needs.

    Args:
        sm90: a CUDA device of compute capability 9.0.
        gpus: this many CUDA devices.
        gpu_gib: GiB of free memory on that device.
        dsl: this release of nvidia-cutlass-dsl.
        package: a package that is read, not imported, by the name it would be imported as.
        no_gpu: a machine without one: a framework whose device the test pretends would find it.
    """
    if no_gpu and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    if package and find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    if dsl and version("nvidia-cutlass-dsl") != dsl:
        pytest.skip(f"needs nvidia-cutlass-dsl {dsl}, {version('nvidia-cutlass-dsl')} is installed")
    if (sm90 or gpu_gib) and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if sm90 and torch.cuda.get_device_capability() != (9, 0):
        major, minor = torch.cuda.get_device_capability()
        pytest.skip(f"needs compute capability 9.0, this device has {major}.{minor}")
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices, there are {torch.cuda.device_count()}")
    if gpu_gib:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gpu_gib:
            pytest.skip(f"needs {gpu_gib} GiB of free device memory, {free:.1f} are left")


def requires_module(name: str) -> ModuleType:
    """Import a module of the `dev` extra, or skip the test file that asks for it.

    An offline GPU host runs the GPU tests with what it has; collecting the others must not fail.
    """
    return pytest.importorskip(name, reason=f"needs the module {name}")
