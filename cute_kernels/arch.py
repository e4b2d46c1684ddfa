"""The device a call runs on, against the architecture a kernel is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

_T = TypeVar("_T")


class DeviceArch(NamedTuple):
    """capability: (major, minor); target: the compiler's name for it; sm_count: SMs."""

    capability: tuple[int, int]
    target: str
    sm_count: int


# Architecture-specific targets ("a"): TMA descriptors aside, wgmma and setmaxnreg need them.
TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}


@cache
def device_arch(index: int) -> DeviceArch:
    """Facts about CUDA device ``index``; they do not change while the process lives."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    target = TARGETS.get(capability, f"sm_{properties.major}{properties.minor}")
    return DeviceArch(capability, target, properties.multi_processor_count)


def current_device() -> int:
    """Index of the current CUDA device."""
    return torch._C._cuda_getDevice()


def on_device(device: torch.device, call: Callable[..., _T], *arguments: Any) -> _T:
    """``call(*arguments)`` while a CUDA device is the current one."""
    if device.index == current_device():
        return call(*arguments)
    with torch.cuda.device(device):
        return call(*arguments)


def current_stream(index: int) -> int:
    """Raw handle of device ``index``'s current stream.

    ``torch.cuda.current_stream`` builds a Stream object for it: 40 us of a call on one host.
    """
    return torch._C._cuda_getCurrentRawStream(index)
