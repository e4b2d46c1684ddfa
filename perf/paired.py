"""Means over the tokens of a text, with standard errors that know that neighbours are alike.

What one rounding does to a token it often does to the next, so an error that takes tokens as
independent comes out too small. Here the text is cut into blocks of consecutive tokens, and the
error is that of the blocks' means: independent once a block is longer than the dependence.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Estimate(NamedTuple):
    """A mean and its standard error; None where one block is all there is."""

    value: float
    standard_error: float | None


def over_blocks(values: torch.Tensor, block: int) -> Estimate:
    """The mean of `values` (windows, tokens), and its error from blocks of `block` tokens.

    Blocks do not cross windows; the last one of a window may be shorter and weighs less.

    Raises:
        ValueError: no values, or a block of none.
    """
    if values.dim() != 2 or not values.numel() or block < 1:
        raise ValueError(
            f"values: got {tuple(values.shape)} in blocks of {block}; accepted: (windows, tokens), "
            "blocks of at least 1"
        )
    parts = [part for window in values.double() for part in window.split(block)]
    mean = values.double().mean().item()
    if len(parts) < 2:
        return Estimate(mean, None)
    weighted = sum((part.sum().item() - len(part) * mean) ** 2 for part in parts)
    unbiased = weighted * len(parts) / (len(parts) - 1)
    return Estimate(mean, math.sqrt(unbiased) / values.numel())


def relative_perplexity(difference: torch.Tensor, block: int) -> Estimate:
    """Relative change of a perplexity, from paired differences of log likelihoods.

    Args:
        difference: negative log likelihoods less the baseline's, (windows, tokens).
    """
    mean, error = over_blocks(difference, block)
    ratio = math.exp(mean)
    return Estimate(ratio - 1.0, None if error is None else ratio * error)
