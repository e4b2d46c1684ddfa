"""``flash_attn_varlen_func`` again, at other addresses: see ``cute_kernels/prepared.py``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from cute_kernels.attention.arguments import OTHER_ARGUMENTS
from cute_kernels.attention.common.launches import Launch
from cute_kernels.attention.widen_sm90.config import rounded_keys
from cute_kernels.prepared import PreparedCalls

PREPARED = PreparedCalls()


def say_nothing(others: dict[str, Any]) -> bool:
    """Whether all of them are known names with the value None, as engines pass them."""
    return OTHER_ARGUMENTS.issuperset(others) and all(x is None for x in others.values())


def find_launch(
    tensors: tuple[torch.Tensor | None, ...], bounds: tuple[Any, Any], scalars: tuple
) -> tuple[Hashable | None, Launch | None]:
    """(key, launch) as of ``PreparedCalls.find``.

    bounds: max_seqlen_q and max_seqlen_k. The latter grows with every step, so what it chooses
    depends on it in steps, and in calls with short queries not at all.
    """
    max_q, max_k = bounds
    if type(max_q) is not int or not (max_k is None or (type(max_k) is int and max_k >= 0)):
        return None, None
    return PREPARED.find(tensors, (max_q, rounded_keys(max_q, max_k or 0), *scalars))


def launch_again(
    launch: Launch, tensors: tuple[torch.Tensor | None, ...], return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Make a prepared call with these tensors; None where their addresses are not aligned, or out
    begins where k or v does.

    tensors: q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, k_descale, v_descale,
    s_aux, out, k_block_scale, v_block_scale.
    """
    q, k, v, cu_q, cu_k, used_k, table, k_descale, v_descale, sinks, out, *block_scales = tensors
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (at_q | at_k | at_v) & 15:
        return None
    if out is None:
        out = new_output(q)
    at_out = out.data_ptr()
    # Views of the cache are refused where a call of this kind is made first; here those that begin
    # as it does, which takes no size.
    if at_out & 7 or at_out == at_k or at_out == at_v:
        return None
    scales = ()
    if block_scales[0] is not None:
        scales = tuple(x.data_ptr() for x in block_scales)
        if (scales[0] | scales[1]) & 15:
            return None
    lse = new_lse(q) if return_lse else None
    # Written out: a loop over the operands, as in `run_planned`, makes a call 0.6 us dearer.
    launch.go(
        cu_q,
        (
            at_q,
            at_k,
            at_v,
            at_out,
            0 if lse is None else lse.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if k_descale is None else k_descale.data_ptr(),
            0 if v_descale is None else v_descale.data_ptr(),
            0 if used_k is None else used_k.data_ptr(),
            0 if cu_k is None else cu_k.data_ptr(),
            0 if table is None else table.data_ptr(),
            *scales,
        ),
    )
    return out if lse is None else (out, lse)


def new_output(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised, of q's shape and dtype, contiguous."""
    # Half the time of torch.empty, whose arguments are parsed one by one.
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised (Hq, total_q) float32."""
    tokens, heads, _ = q.shape
    return torch.empty_strided((heads, tokens), (tokens, 1), dtype=torch.float32, device=q.device)
