"""The store kernels under test: the one of this device, and SM100's retargeted to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_kernels import reshape_and_cache
from cute_kernels.arch import DeviceArch
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.prepared import PreparedCalls
from cute_kernels.reference import store as reference
from cute_kernels.store import interface, op
from tests.store import retarget
from tests.store.pools import Pool

DTYPES = ("fp8", "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
NVFP4_DTYPES = DTYPES[1:]

_RETARGETED: dict[object, Callable[..., None]] = {}


@pytest.fixture(params=("sm90", "sm100 retargeted"))
def kernel(request, monkeypatch, tmp_path_factory) -> str:
    """Which kernel `reshape_and_cache` launches in this test."""
    if request.param == "sm90":
        return request.param

    def stand_in(unit: CompileUnit) -> Callable[..., None]:
        if unit.kernel == "store_claim":
            return launcher(CompileUnit("store_claim", unit.config, "sm_90a"))
        assert (unit.kernel, unit.target) == ("store_sm100", "sm_100a")
        if unit.config not in _RETARGETED:
            folder = tmp_path_factory.mktemp("ptx")
            _RETARGETED[unit.config] = retarget.launch_function(unit.config, folder)
        return _RETARGETED[unit.config]

    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((10, 0), "sm_100a", 132))
    monkeypatch.setattr(op, "launcher", stand_in)
    monkeypatch.setattr(interface, "PREPARED", PreparedCalls())
    return request.param


def allocate(pool: Pool) -> torch.Tensor:
    return pool.allocate().cuda()


def store_both(pool: Pool, key, value, slots, dtype, scales, layout="linear") -> None:
    """Store by the kernel and then by the reference, and compare the whole allocations."""
    slots = torch.as_tensor(slots, dtype=torch.int64, device="cuda")
    memory = allocate(pool)
    arguments = (slots, dtype, *scales, layout)
    sides = [pool.side(memory, side) for side in (0, 1)]
    assert reshape_and_cache(key, value, *sides, *arguments) is None
    expected = allocate(pool)
    sides = [pool.side(expected, side) for side in (0, 1)]
    reference.reshape_and_cache(key, value, *sides, *arguments)
    assert torch.equal(memory, expected)


def dense_pool(dtype: str, capacity: int, heads: int, head_size: int) -> Pool:
    """One allocation of pages of 64 tokens."""
    storage = "fp8" if dtype == "fp8" else "nvfp4"
    together = storage == "nvfp4"
    return Pool(storage, "NHD", together, -(-capacity // 64), 64, heads, head_size)
