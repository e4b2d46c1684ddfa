"""How the operands of a call reach a kernel: strides, sizes, and copies of what is unaligned.

Host code, torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.attention.common.launches import Launch
from cute_kernels.attention.decode_sm90.config import box_tokens_for_page

_INT32_MAX = 2**31 - 1
# Stands for "no limit" in a window.
UNLIMITED = 1 << 30

_L = TypeVar("_L", bound=Launch)


def run_planned(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tile_tokens: int,
    plan: Callable[..., _L],
) -> _L | None:
    """Launch what ``plan(q, k, v, out)`` gives, with copies of operands that no kernel can take.

    Returns:
        The launch, which serves other addresses as well; None where operands were copied.
    """
    p = problem
    q, target = aligned_queries(p.q), aligned_output(out)
    k, v = some_keys(p, tile_tokens)
    launch = plan(q, k, v, target)
    operands = [q, k, v, target, lse, p.sinks, p.k_descale, p.v_descale, p.seqused_k,
                p.cu_seqlens_k, p.block_table]  # fmt: skip
    if p.k_block_scale is not None:
        operands += [p.k_block_scale, p.v_block_scale]
    launch.go(p.cu_seqlens_q, tuple(0 if x is None else x.data_ptr() for x in operands))
    if target is not out:
        out.copy_(target)
    return launch if q is p.q and k is p.k and target is out else None


def score_scalars(problem: AttentionProblem) -> tuple[float, float, int, int]:
    """softmax_scale, softcap and the window's sides."""
    left, right = problem.window_left, problem.window_right
    return (
        problem.softmax_scale,
        problem.softcap,
        UNLIMITED if left < 0 else left,
        UNLIMITED if right < 0 else right,
    )


def cache_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """(page, token, head) strides in bytes; a dimension of size 1 gets one that TMA accepts."""
    sizes, strides, itemsize = cache.shape, cache.stride(), cache.element_size()
    if len(sizes) == 3:
        sizes, strides = (1, *sizes), (16, *strides)
    return tuple(16 if sizes[i] == 1 else strides[i] * itemsize for i in range(3))


def operand_strides(problem: AttentionProblem, q, k, v, out) -> tuple[int, ...]:
    """The fields of ``launch.Strides``."""
    table = problem.block_table
    return (
        *q.stride()[:2],
        *cache_strides(k),
        *cache_strides(v),
        *out.stride()[:2],
        *((0, 0) if problem.k_descale is None else problem.k_descale.stride()),
        *((0, 0) if problem.v_descale is None else problem.v_descale.stride()),
        1 if table is None else table.stride(0),
        *block_scale_strides(problem),
    )


def block_scale_strides(problem: AttentionProblem) -> tuple[int, ...]:
    """What ``launch.ScaledStrides`` has beyond ``launch.Strides``; nothing without block scales."""
    if problem.k_block_scale is None:
        return ()
    return (*cache_strides(problem.k_block_scale), *cache_strides(problem.v_block_scale))


def operand_sizes(problem: AttentionProblem, k: torch.Tensor) -> tuple[int, ...]:
    """The fields of ``launch.Sizes``."""
    total_q, heads, _ = problem.q.shape
    group = heads // k.shape[-2]
    table = problem.block_table
    pages, page_size, width = (
        (1, k.shape[0], 1) if table is None else (*k.shape[:2], table.shape[1])
    )
    return (
        problem.cu_seqlens_q.shape[0] - 1,
        total_q,
        k.shape[-2],
        group,
        -(-(1 << 32) // group),
        pages,
        page_size,
        width,
        int(table is not None),
        int(problem.seqused_k is not None),
    )


def some_keys(problem: AttentionProblem, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v; zeros in place of a cache without any token, which TMA cannot describe."""
    k = problem.k
    if k.numel():
        return k, problem.v
    empty = torch.zeros((1, tokens, *k.shape[-2:]), dtype=k.dtype, device=k.device)
    empty = empty if problem.block_table is not None else empty[0]
    return empty, empty


def cache_obstacle(problem: AttentionProblem) -> str | None:
    """Why TMA cannot read k and v as they lie, or None."""
    k = problem.k
    if problem.block_table is not None and box_tokens_for_page(k.shape[1]) is None:
        return f"block size {k.shape[1]}, the kernel reads multiples of 16"
    for name, side in (("k", k), ("v", problem.v)):
        if side.data_ptr() % 16:
            return f"{name} at an address that is no multiple of 16"
        for size, stride in zip(side.shape[:-1], side.stride()[:-1], strict=True):
            if size > 1 and not stride:
                return f"{name} expanded, with strides {side.stride()}: the kernel needs its bytes"
            if size > 1 and stride * side.element_size() % 16:
                return (
                    f"{name} with strides {side.stride()}, the kernel needs multiples of 16 bytes"
                )
    return None if problem.k_block_scale is None else _block_scale_obstacle(problem)


def _block_scale_obstacle(problem: AttentionProblem) -> str | None:
    """Why the block scales cannot be copied in pieces of a row (at most 16 bytes), or None."""
    for name, scale in (("k", problem.k_block_scale), ("v", problem.v_block_scale)):
        piece = min(scale.shape[-1], 16)
        strides = [
            stride
            for size, stride in zip(scale.shape[:-1], scale.stride()[:-1], strict=True)
            if size > 1
        ]
        if scale.stride(-3) > _INT32_MAX:
            return f"{name}_block_scale with strides {scale.stride()}, too far apart for 32 bits"
        if scale.data_ptr() % piece or any(stride % piece for stride in strides):
            return (
                f"{name}_block_scale at offset {scale.data_ptr() % piece} with strides "
                f"{scale.stride()}, the kernel needs multiples of {piece} bytes"
            )
    return None


def aligned_queries(q: torch.Tensor) -> torch.Tensor:
    """``q``, copied where its rows do not allow 16-byte loads."""
    return q if _aligned(q, 8, 16) else q.clone(memory_format=torch.contiguous_format)


def aligned_output(out: torch.Tensor) -> torch.Tensor:
    """``out``, or a copy where its rows do not allow 8-byte stores.

    A copy, not an empty tensor: rows past cu_seqlens_q[-1] must survive the way back.
    """
    return out if _aligned(out, 4, 8) else out.clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor, elements: int, address: int) -> bool:
    """Rows of ``x`` start at multiples of ``address`` bytes (strides: of ``elements``)."""
    return (
        x.data_ptr() % address == 0 and x.stride(0) % elements == 0 and x.stride(1) % elements == 0
    )
