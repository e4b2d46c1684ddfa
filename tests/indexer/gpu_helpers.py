"""The indexer's kernels under test: those of this device, and SM100's retargeted to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cute_kernels.arch import DeviceArch
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.indexer import interface, op
from cute_kernels.indexer.config import Q_THREADS, IndexerKConfig, IndexerQConfig
from cute_kernels.prepared import PreparedCalls
from tests.indexer.helpers import KCall
from tests.store import retarget

_RETARGETED: dict[object, Callable[..., None]] = {}


@pytest.fixture(params=("sm90", "sm100 retargeted"))
def kernel(request, monkeypatch, tmp_path_factory) -> Iterator[str]:
    """Which kernels the functions launch in this test."""
    if request.param == "sm90":
        yield request.param
        return

    def stand_in(unit: CompileUnit) -> Callable[..., None]:
        assert unit.target == "sm_100a" and unit.kernel.endswith("_sm100")
        if unit.config not in _RETARGETED:
            _RETARGETED[unit.config] = launch_function(unit.config, tmp_path_factory.mktemp("ptx"))
        return _RETARGETED[unit.config]

    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((10, 0), "sm_100a", 132))
    monkeypatch.setattr(op, "launcher", stand_in)
    for name in ("_PREPARED_Q", "_PREPARED_K"):
        monkeypatch.setattr(interface, name, PreparedCalls())
    yield request.param


def launch_function(config: IndexerQConfig | IndexerKConfig, folder: Path) -> Callable[..., None]:
    """A stand-in for the compiled launch function of an SM100 variant."""
    from cute_kernels.indexer import build

    is_q = isinstance(config, IndexerQConfig)
    ptx = retarget.compiled_ptx(build.compile_q if is_q else build.compile_k, config, folder)
    ptx, count = retarget.retargeted(ptx)
    assert (count > 0) == config.e2m1_instruction
    kernel = retarget.DriverKernel(ptx)

    def launch_q(weights: torch.Tensor, *groups: tuple) -> None:
        tokens, heads = weights.shape
        sizes = groups[2]
        tensor = (weights.data_ptr(), tokens | heads << 32, heads)
        kernel((tokens, sizes[5], 1), tensor, retarget.flat(groups), Q_THREADS)

    def launch_k(slots: torch.Tensor, *groups: tuple) -> None:
        count, span = groups[0][:2]
        tensor = (slots.data_ptr(), slots.shape[0])
        grid = (math.ceil(count / span), 1, 1)
        kernel(grid, tensor, retarget.flat(groups), config.threads, config.shared_bytes)

    return launch_q if is_q else launch_k


def on_gpu(arguments: dict) -> dict:
    """Tensors copied to the GPU with their strides and what lies between their elements."""
    return {
        name: strided_copy(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }


def strided_copy(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0 or 0 in x.stride():
        return x.cuda()
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    span = x.as_strided((x.storage_offset() + size,), (1,), 0).cuda()
    return span.as_strided(x.shape, x.stride(), x.storage_offset())


class GpuCall:
    """A K call on the GPU, with a copy of the cache's whole memory."""

    def __init__(self, call: KCall):
        self.call = call
        cache = call.arguments["k_cache"]
        self.memory = call.memory.cuda()
        self.arguments = on_gpu({k: v for k, v in call.arguments.items() if k != "k_cache"})
        self.arguments["k_cache"] = self.memory.as_strided(
            cache.shape, cache.stride(), cache.storage_offset()
        )
