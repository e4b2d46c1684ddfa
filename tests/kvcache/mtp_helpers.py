"""What the tests of draft models share."""

from __future__ import annotations

import torch

BASES = ("_k_scale", "_v_scale")


def assert_copied(draft, target) -> None:
    for base in BASES:
        for attribute in (base, base + "_cpu"):
            ours, theirs = getattr(draft, attribute), getattr(target, attribute)
            assert torch.equal(ours.detach(), theirs.detach())
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        assert getattr(draft, base + "_float") == getattr(target, base + "_float")


def without(attribute):
    return lambda layer: delattr(layer, attribute)


def with_value(attribute, value):
    def change(layer):
        if isinstance(value, torch.Tensor) or not isinstance(
            getattr(layer, attribute), torch.Tensor
        ):
            setattr(layer, attribute, value)
        else:
            getattr(layer, attribute).fill_(value)

    return change
