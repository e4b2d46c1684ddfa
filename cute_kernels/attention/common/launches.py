"""What is launched for a call, but for the addresses: that depends on shapes and scalars alone.

Addresses of operands are passed in this order: q, k, v, out, lse, sinks, k_descale, v_descale,
seqused_k, cu_seqlens_k, block_table; 0 for what is absent. Those of block scales, K's and V's,
follow where the cache has any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cute_kernels.arch import current_stream, on_device
from cute_kernels.counters import counters_for, workspace_for


class Launch(Protocol):
    def go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        """Launch on cu_q's device and its current stream; cu_q is (B + 1,) int32."""


@dataclass(frozen=True)
class KernelLaunch:
    """The launch function of a kernel and its arguments past the addresses."""

    function: Callable
    device: torch.device
    arguments: tuple

    def go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        on_device(self.device, self._go, cu_q, operands)

    def _go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        # The tensor tells TVM-FFI on which device's stream to launch.
        self.function(cu_q, operands, *self.arguments)


@dataclass(frozen=True)
class SplitKvLaunch(KernelLaunch):
    """Of a kernel whose CTAs combine partial results.

    workspace: float32 elements for them; counters: how many the CTAs wait on.
    """

    workspace: int
    counters: int

    def _go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        stream = current_stream(self.device.index)
        counters = counters_for(self.device, stream, self.counters).data_ptr()
        self.function(
            workspace_for(self.device, stream, self.workspace),
            (*operands[:8], cu_q.data_ptr(), *operands[8:], counters),
            *self.arguments,
        )


@dataclass(frozen=True)
class WidenedLaunch(KernelLaunch):
    """Of the kernel that makes fp16 copies of K and V and reads them.

    copy_bytes: of each of K and V; counters: that its warps wait on. room: the fields of
    ``widen_sm90.copier.Target`` past the addresses.
    """

    copy_bytes: int
    counters: int
    room: tuple[int, int]

    def _go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        stream = current_stream(self.device.index)
        k = workspace_for(self.device, stream, 2 * self.copy_bytes // 4).data_ptr()
        counters = counters_for(self.device, stream, self.counters).data_ptr()
        target = (k, k + self.copy_bytes, counters, *self.room)
        self.function(cu_q, operands, *self.arguments, target)


@dataclass(frozen=True)
class Launches:
    """Several for one call, in order."""

    launches: tuple[Launch, ...]

    def go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        for launch in self.launches:
            launch.go(cu_q, operands)


def together(launches: list[Launch | None]) -> Launch | None:
    """One launch for a call's; None where one of them serves no other addresses."""
    if None in launches:
        return None
    return launches[0] if len(launches) == 1 else Launches(tuple(launches))


def packed(*groups: tuple) -> tuple:
    """Groups of numbers in the form that a launch function takes without converting them."""
    import tvm_ffi

    return tuple(map(tvm_ffi.convert, groups))
