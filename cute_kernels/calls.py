"""How a call is made, traced or eager, with gradients or without: one answer for every op."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` has memory of its own and no other behaviour: parameters, but no fake tensors
    and no other subclasses."""
    return type(x) is torch.Tensor or issubclass(type(x), torch.nn.Parameter)


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
        ValueError: no tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: got a {type(x).__name__}; accepted: a tensor")
