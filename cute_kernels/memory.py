"""Whether tensors share memory, from shapes, strides and addresses alone: no data is read."""

from __future__ import annotations

import torch

Steps = tuple[tuple[int, int], ...]  # (bytes, how many) of each dimension, the largest first


def extent(x: torch.Tensor) -> int:
    """Bytes from the first element to past the last one; strides are not negative in torch."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def shares_elements(x: torch.Tensor) -> bool:
    """Whether two indices of ``x`` may be one element: an expanded dimension, a sliding view."""
    span = 1
    # Dimensions by stride: each must step over all that the smaller ones span.
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span = max(span, stride * (size - 1) + span)
    return False


def common_steps(a: torch.Tensor, b: torch.Tensor) -> Steps:
    """How two tensors of one shape and item size, neither of which ``shares_elements``, lie.

    Their dimensions from the largest stride on, as far as they agree; what is left of each counts
    as a run of bytes without gaps.
    """
    size, left = a.element_size(), max(extent(a), extent(b))
    steps = []
    dims = zip(a.stride(), b.stride(), a.shape, strict=True)
    for stride, other, count in sorted(dims, reverse=True):
        if count > 1:
            if stride != other:
                break
            steps.append((stride * size, count))
            left -= stride * size * (count - 1)
    return (*steps, (1, left))


def meet(offset: int, steps: Steps) -> bool:
    """Whether two tensors that lie as ``steps`` say, ``offset`` bytes apart, share a byte."""
    if not steps:
        return offset == 0
    (stride, count), *others = steps
    # The smaller dimensions reach less far than one step, to either side.
    nearest = offset // stride
    return any(
        abs(turn) < count and meet(offset - turn * stride, tuple(others))
        for turn in (nearest, nearest + 1)
    )


def have_addresses(*tensors: torch.Tensor) -> bool:
    """Whether addresses say something: not of tensors in a trace, fake ones and those on meta."""
    return not torch.compiler.is_compiling() and all(
        type(x) is torch.Tensor and not x.is_meta for x in tensors
    )


def reach_into(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the extents of two tensors with addresses overlap."""
    start, other = a.data_ptr(), b.data_ptr()
    end, other_end = start + extent(a), other + extent(b)
    return max(start, other) < min(end, other_end)
