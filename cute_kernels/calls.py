"""How a call is made, traced or eager, with gradients or without: one answer for every op."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Mapping

import torch


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` has memory of its own and no other behaviour: parameters, but no fake tensors
    and no other subclasses."""
    return type(x) is torch.Tensor or issubclass(type(x), torch.nn.Parameter)


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` has an address: not on meta, and plain or of a subclass that leaves it to torch
    what operators do (fake tensors and wrappers do not)."""
    if x.is_meta:
        return False
    return is_plain(x) or type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def writing(*targets: torch.Tensor | None) -> contextlib.AbstractContextManager[object]:
    """Where torch code writes to ``targets``: what was made in inference mode can be written to in
    inference mode only, and torch says so when half of it is written. Kernels do not ask."""
    if any(x is not None and x.is_inference() for x in targets):
        return torch.inference_mode()
    return contextlib.nullcontext()


def as_number(value: object) -> float | None:
    """A host number, numpy's among them, as a Python float (infinite where it is too large for
    one); None for what is no number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_int(value: object) -> bool:
    """A host integer, numpy's among them, and no bool."""
    return type(value) is int or (
        isinstance(value, numbers.Integral) and not isinstance(value, bool)
    )


def is_traced(x: torch.Tensor) -> bool:
    """Whether a call with ``x`` becomes part of a graph (torch.compile, export, fake tensors)."""
    return torch.compiler.is_compiling() or not is_plain(x)


def refuse_gradients(op: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """No op here has a backward pass, and a result that has silently lost its gradient is worse
    than none: what asks for one is refused wherever autograd records, in eager and traced calls.

    Raises:
        NotImplementedError: one of the tensors requires a gradient, and grad mode is on.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{op}: {name}: got requires_grad=True (no backward pass); accepted: tensors "
                "without gradients, or a call under torch.no_grad() or torch.inference_mode()"
            )


def check_tensor(name: str, x: object) -> None:
    """
    Raises:
        ValueError: no tensor, or one that has no strides (sparse, nested, oneDNN's).
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: got a {type(x).__name__}; accepted: a tensor")
    if not has_strides(x):
        kind = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name}: got a {kind} tensor; accepted: one with strides")


def has_strides(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def check_not_meta(name: str, x: torch.Tensor) -> None:
    """Of tensors in a trace, which may be on meta, nothing is asked.

    Raises:
        ValueError: a plain tensor without memory, which nothing can be read from.
    """
    if x.is_meta and is_plain(x):
        raise ValueError(f"{name}: got meta; accepted: a tensor that has memory")
