"""Writing attributes of layers so that either all of it happens or none of it.

A write keeps what the attribute is: a Parameter stays one (frozen), a buffer stays a buffer, and a
tensor that can hold the new value stays the same tensor, so that captured CUDA graphs and held
references see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class _Write(NamedTuple):
    do: Callable[[], object]
    undo: Callable[[], object]  # reverses a finished `do`


class Transaction:
    """Writes that are planned one by one and then done together.

    Args:
        foreign: tensors whose memory no attribute may share after the write: where one does, it
            gets memory of its own. Without `unshare` they are not looked at.
        unshare: also give attributes memory of their own that share it among themselves (layers
            often start with one tensor of 1.0 for everything): the second write would change the
            first.
    """

    def __init__(self, foreign: Iterable[torch.Tensor] = (), *, unshare: bool = True) -> None:
        self._writes: list[_Write] = []
        self._done: list[_Write] = []
        self._unshare = unshare
        self._taken: dict[tuple[str, int], list[range]] = {}
        for tensor in foreign:
            self._take(tensor)

    def set(self, layer: Any, attribute: str, value: Any, *, resize: bool = False) -> None:
        """Plan `layer.attribute = value`; allocates what that needs, changes nothing.

        Args:
            layer: an `nn.Module`, or any object that takes attributes.
            value: a tensor, whose shape, dtype and bytes the attribute gets, on the device where
                it is now; or anything else, which is assigned.
            resize: keep the tensor object even where its shape changes, if its memory is its own.

        Raises:
            ValueError: the attribute is on the meta device, which holds nothing.
        """
        existed, old = hasattr(layer, attribute), getattr(layer, attribute, None)
        new = value
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if isinstance(old, torch.Tensor):
                if old.is_meta:
                    raise ValueError(f"{attribute}: is on the meta device; load the model first")
                if _can_hold(old, value, resize) and not self._is_taken(old):
                    self._take(old)
                    self._writes.append(_in_place(old, value.to(old.device, copy=True)))
                    return
                value = value.to(old.device)
            new = value.clone(memory_format=torch.contiguous_format)
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=False)
        self._writes.append(
            _Write(
                lambda: setattr(layer, attribute, new),
                lambda: setattr(layer, attribute, old) if existed else _remove(layer, attribute),
            )
        )

    def commit(self) -> None:
        """Do all writes, or, where one raises, undo those done and raise."""
        try:
            for write in self._writes:
                write.do()
                self._done.append(write)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Take back what `commit` has done."""
        while self._done:
            self._done.pop().undo()

    def _take(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            self._taken.setdefault(_allocation(tensor), []).append(_addresses(tensor))

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        taken = self._taken.get(_allocation(tensor), ()) if self._unshare else ()
        return any(_meet(_addresses(tensor), each) for each in taken)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory; those on the meta device have none."""
    if a.is_meta or b.is_meta:
        return False
    return _allocation(a) == _allocation(b) and _meet(_addresses(a), _addresses(b))


def _allocation(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _addresses(tensor: torch.Tensor) -> range:
    """From the first byte to the last; gaps between strided elements count."""
    if not tensor.numel():
        return range(0)
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def _meet(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def _can_hold(old: torch.Tensor, value: torch.Tensor, resize: bool) -> bool:
    # An expanded tensor has several elements in one place and cannot be written.
    expanded = any(
        size > 1 and stride == 0 for size, stride in zip(old.shape, old.stride(), strict=True)
    )
    if expanded or old.dtype != value.dtype:
        return False
    # Growing a view would run over its neighbours in the allocation.
    owns_memory = old.untyped_storage().nbytes() == old.numel() * old.element_size()
    return old.shape == value.shape or (resize and owns_memory)


def _in_place(target: torch.Tensor, value: torch.Tensor) -> _Write:
    before, required_grad = target.detach().clone(), target.requires_grad

    def do() -> None:
        if required_grad:
            target.requires_grad_(False)
        _copy(target, value)

    def undo() -> None:
        _copy(target, before)
        if required_grad:
            target.requires_grad_(True)

    return _Write(do, undo)


def _remove(layer: Any, attribute: str) -> None:
    if hasattr(layer, attribute):  # one layer may be written under two names
        delattr(layer, attribute)


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    # Weights that were loaded under inference_mode can only be written under it.
    with torch.inference_mode():
        if target.shape != value.shape:
            target.resize_(value.shape)
        target.copy_(value)
