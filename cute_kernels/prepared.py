"""Calls that were made before with other addresses: validated and planned once.

A serving engine makes one call per layer and step, and most are alike in all but the addresses.
Validation, the choice of a kernel and its launch arguments depend on shapes, strides, dtypes,
devices and scalars alone, so the second such call finds its launch by them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

# Batch sizes times block-table widths times variants; a trace of growing shapes starts anew.
_MAX_CALLS = 4096


def call_key(tensors: Sequence[torch.Tensor | None], scalars: tuple) -> tuple:
    """What a call's plan depends on; not hashable where a scalar is not.

    Raises:
        AttributeError: something among ``tensors`` is no tensor.
    """
    facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    return (*facts, *map(type, scalars), *scalars)  # types: True equals 1, which equals 1.0


def can_be_kept(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a call is one of plain tensors, the first of all: traced ones and those that ask for
    gradients have to be looked at."""
    if type(tensors[0]) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return False
    return True


class PreparedCalls:
    """Launches by call key."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Any] = {}

    def find(
        self, tensors: Sequence[torch.Tensor | None], scalars: tuple
    ) -> tuple[Hashable | None, Any]:
        """(key, launch) of a call, None where there is none. No key: not to be kept either."""
        try:
            if not can_be_kept(tensors):
                return None, None
            key = call_key(tensors, scalars)
            return key, self._launches.get(key)
        # no tensors or nested ones, or a scalar that is not hashable
        except (AttributeError, TypeError, RuntimeError):
            return None, None

    def keep(self, key: Hashable | None, launch: Any) -> None:
        if key is None or launch is None:
            return
        if len(self._launches) >= _MAX_CALLS:
            self._launches.clear()
        self._launches[key] = launch
