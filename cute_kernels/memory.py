"""Whether tensors share memory, from shapes, strides and addresses alone: no data is read.

Two elements are one where a sum of steps, each taken a bounded number of times, is the distance
between the tensors: `Lattice`. Whether there is such a sum is decided exactly, from the largest
step down, in time that hardly depends on sizes where dimensions nest, as those of caches do. Where
they do not, the number of steps tried is limited, and beyond it the answer is "shared": layouts
nobody allocates, such as two pools of thousands of blocks inside each other whose strides differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import NamedTuple

import torch

from cute_kernels.calls import has_memory

# What is tried before a question counts as answered with "shared", 1 us each.
_MOST_TRIALS = 4096


Steps = tuple[tuple[int, int, int, int, bool], ...]


class Lattice(NamedTuple):
    """The sums that `steps` make, shifted.

    steps: (size, most, reach, unit, dense), the largest size first: taken 0 to `most` times. This
    step and the smaller ones make multiples of `unit` up to `reach`; dense: all of those.
    shift: what to add to the distance of two tensors, in bytes, before looking for it.
    """

    steps: Steps
    shift: int


def extent(x: torch.Tensor) -> int:
    """Bytes from the first element to past the last one; strides are not negative in torch."""
    if x.is_contiguous():
        return x.numel() * x.element_size()
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def shares_elements(x: torch.Tensor) -> bool:
    """Whether two indices of ``x`` are one element: an expanded dimension, a sliding view."""
    if x.is_contiguous() or x.numel() == 0:
        return False
    dims = sorted((n, size) for n, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    span = 1
    # Dimensions by stride: where each steps over all that the smaller ones span, none is shared.
    for stride, size in dims:
        if stride < span:
            return stride == 0 or _sum_is_zero(dims)
        span = stride * (size - 1) + span
    return False


def _sum_is_zero(dims: list[tuple[int, int]]) -> bool:
    """Whether two different indices have one address.

    Their difference has a first dimension that is not 0, and may be taken as positive there; in
    each later one it lies between -(size - 1) and size - 1.
    """
    for first, (stride, size) in enumerate(dims):
        later = dims[first + 1 :]
        steps = _steps([(stride, size - 2), *((n, 2 * (count - 1)) for n, count in later)])
        if _has_sum(sum(n * (count - 1) for n, count in later) - stride, steps):
            return True
    return False


def lattice(a: torch.Tensor, b: torch.Tensor) -> Lattice:
    """How bytes of two tensors, neither of them empty, can lie to each other: for `meet`."""
    dims = [(1, a.element_size() - 1), (1, b.element_size() - 1)]
    for x in (a, b):
        size = x.element_size()
        dims += [(n * size, count - 1) for n, count in zip(x.stride(), x.shape, strict=True)]
    return Lattice(_steps(dims), extent(b) - 1)


def _steps(dims: Iterable[tuple[int, int]]) -> Steps:
    """`Lattice.steps` of steps and how often each may be taken; equal ones become one."""
    most: dict[int, int] = {}
    for size, times in dims:
        if size and times > 0:
            most[size] = most.get(size, 0) + times
    steps, reach, unit, dense = [], 0, 0, True
    for size in sorted(most):
        unit = unit or size
        dense = dense and size % unit == 0 and size <= reach + unit
        unit = gcd(unit, size)
        reach += size * most[size]
        steps.append((size, most[size], reach, unit, dense))
    return tuple(reversed(steps))


def meet(distance: int, a_to_b: Lattice) -> bool:
    """Whether two tensors, b ``distance`` bytes behind a, share a byte.

    A byte at i in a and one at j in b are the same where i - j = distance; with j' = reach - j that
    is a sum of steps: i + j' = distance + reach.
    """
    return _has_sum(distance + a_to_b.shift, a_to_b.steps)


def _has_sum(wanted: int, steps: Steps) -> bool:
    """Whether steps make this sum, or so many trials were made that it counts as made."""
    trials = 0
    open_ends = [(wanted, 0)]
    while open_ends:
        rest, level = open_ends.pop()
        if rest == 0:
            return True
        if rest < 0 or level == len(steps):
            continue
        size, most, reach, unit, dense = steps[level]
        if rest > reach or rest % unit:
            continue
        if dense:
            return True
        smaller = reach - size * most
        fewest, mostly = max(0, -((smaller - rest) // size)), min(most, rest // size)
        trials += mostly - fewest + 1
        if trials > _MOST_TRIALS:
            return True
        open_ends += [(rest - size * n, level + 1) for n in range(fewest, mostly + 1)]
    return False


def overlapping(
    written: Mapping[str, torch.Tensor], read: Mapping[str, object]
) -> tuple[str, str] | None:
    """The names of two tensors that have a byte in common, one of them written; None without such.

    What is no tensor (None, a number) has no bytes, and what has no address none that are known.
    """
    if torch.compiler.is_compiling():
        return None
    targets = _spans(written)
    others = targets + _spans(read)
    for i, (name, x, start, end) in enumerate(targets):
        for other, y, begin, stop in others[i + 1 :]:
            # Most are elsewhere, which their extents show.
            if begin < end and start < stop and meet(begin - start, lattice(x, y)):
                return name, other
    return None


def _spans(tensors: Mapping[str, object]) -> list[tuple[str, torch.Tensor, int, int]]:
    """(name, tensor, address of its first byte, address behind its last)."""
    spans = []
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and has_memory(x):
            start = x.data_ptr()
            spans.append((name, x, start, start + extent(x)))
    return spans


def has_address(x: torch.Tensor) -> bool:
    """Not tensors in a trace, fake ones and those on meta."""
    return not torch.compiler.is_compiling() and has_memory(x)
