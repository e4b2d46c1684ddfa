"""Calls that were made before with other addresses: validated and planned once.

A serving engine makes one call per layer and step, and most are alike in all but the addresses.
Validation, the choice of a kernel and its launch arguments depend on shapes, strides, dtypes,
devices and scalars alone, so the second such call finds them here. They took 27 of the 73 us of an
eager call (H200 host, 2026-11-30); what is left has not been measured.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from cute_kernels.attention.arguments import OTHER_ARGUMENTS
from cute_kernels.attention.common.operands import address_of

# Batch sizes times block-table widths times variants; a trace of growing shapes starts anew.
_MAX_CALLS = 4096


def _facts(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def say_nothing(others: dict[str, Any]) -> bool:
    """Whether all of them are known names with the value None, as engines pass them."""
    return OTHER_ARGUMENTS.issuperset(others) and all(x is None for x in others.values())


def call_key(
    tensors: tuple[torch.Tensor | None, ...], bounds: tuple[Any, Any], scalars: tuple
) -> Hashable | None:
    """What a call's plan depends on, or None for a call that has to be looked at.

    tensors: q first. bounds: max_seqlen_q and max_seqlen_k. The latter does not choose anything, so
    it is checked here and left out: it grows with every step.
    """
    if type(tensors[0]) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None
    max_q, max_k = bounds
    if type(max_q) is not int or not (max_k is None or (type(max_k) is int and max_k >= 0)):
        return None
    return (max_q, *map(_facts, tensors), *map(type, scalars), *scalars)


class PreparedCalls:
    """Launches by call key; what is not hashable or no tensor has no key."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Any] = {}

    def find(self, *call: Any) -> tuple[Hashable | None, Any]:
        """(key, launch) of a call; see ``call_key``. No key: not to be kept either."""
        try:
            key = call_key(*call)
            return key, None if key is None else self._launches.get(key)
        except (AttributeError, TypeError):
            return None, None

    def keep(self, key: Hashable | None, launch: Any) -> None:
        if key is None or launch is None:
            return
        if len(self._launches) >= _MAX_CALLS:
            self._launches.clear()
        self._launches[key] = launch


PREPARED = PreparedCalls()


def launch_again(
    launch: Any, tensors: tuple[torch.Tensor | None, ...], return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Make a prepared call with these tensors; None where their addresses are not aligned.

    tensors: q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, k_descale, v_descale,
    s_aux, out, k_block_scale, v_block_scale.
    """
    q, k, v, cu_q, cu_k, used_k, table, k_descale, v_descale, sinks, out, *block_scales = tensors
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (at_q | at_k | at_v) & 15:
        return None
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    at_out = out.data_ptr()
    if at_out & 7:
        return None
    scales = ()
    if block_scales[0] is not None:
        scales = tuple(x.data_ptr() for x in block_scales)
        if (scales[0] | scales[1]) & 15:
            return None
    lse = None
    if return_lse:
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    launch.go(
        at_q,
        at_k,
        at_v,
        at_out,
        address_of(lse),
        address_of(sinks),
        address_of(k_descale),
        address_of(v_descale),
        cu_q.data_ptr(),
        address_of(used_k),
        address_of(cu_k),
        address_of(table),
        *scales,
    )
    return (out, lse) if return_lse else out
