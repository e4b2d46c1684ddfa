"""Comparisons with the named bounds of the attention tests."""

from __future__ import annotations

import torch

# ||o - ref|| / ||ref|| of a 16-bit output against the float64 reference. Rounding the output to
# bf16 alone costs 1.7e-3.
MAX_RELATIVE_ERROR = 3e-3
# The same for each (row, head), so that one wrong row cannot hide in a large batch.
MAX_ROW_ERROR = 1e-2
# |LSE - ref| <= LSE_ABSOLUTE + LSE_PER_SCORE * max|score|: float32 scores carry a relative error.
LSE_ABSOLUTE = 1e-3
LSE_PER_SCORE = 2e-6


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """||actual - reference|| / ||reference|| in float64; 0 where both are zero or empty."""
    difference = torch.linalg.vector_norm(actual.double() - reference.double()).item()
    norm = torch.linalg.vector_norm(reference.double()).item()
    return difference / norm if norm > 0.0 else difference


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Where and how two tensors first differ, NaNs being equal; None where they do not."""
    if actual.shape != expected.shape:
        return f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    unequal = (actual != expected) & ~(actual.isnan() & expected.isnan())
    count = int(unequal.sum())
    if count == 0:
        return None
    index = tuple(unequal.nonzero()[0].tolist())
    return (
        f"{count} of {actual.numel()} elements differ, first at {index}: "
        f"{actual[index].item()!r} and {expected[index].item()!r}"
    )


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal dtype and bits; 0.0 and -0.0 differ."""
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} and {expected.dtype}"
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    if not torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits)):
        where = first_difference(actual, expected) or "NaN payloads or signs of zeros differ"
        raise AssertionError(f"{what}: {where}")


def assert_output_close(
    actual: torch.Tensor, reference: torch.Tensor, bound: float = MAX_RELATIVE_ERROR
) -> None:
    """Compare (rows, Hq, D) with its float64 reference; rows that are zero there must be zero."""
    assert actual.shape == reference.shape, f"out: {actual.shape}, reference {reference.shape}"
    finite = actual.isfinite().flatten(1).all(1) if actual.numel() else actual.new_ones(0).bool()
    assert finite.all(), f"out: row {int((~finite).nonzero()[0])} is not finite"
    zero = (reference == 0).all(-1)
    if zero.any():
        where = first_difference(actual[zero], torch.zeros_like(actual[zero]))
        assert where is None, f"out: rows without keys must be 0: {where}"
    error = relative_error(actual, reference)
    assert error <= bound, f"out: relative error {error:.3e} > {bound:.1e}"
    difference = torch.linalg.vector_norm(actual.double() - reference, dim=-1)
    norm = torch.linalg.vector_norm(reference, dim=-1)
    rows = torch.where(norm > 0, difference / norm, 0.0)
    if rows.numel():
        row_bound = bound * (MAX_ROW_ERROR / MAX_RELATIVE_ERROR)
        worst = int(rows.argmax())
        where = divmod(worst, rows.shape[1])
        assert rows.max() <= row_bound, (
            f"out: (row, head) {where} has relative error {rows.max():.3e} > {row_bound:.1e}"
        )


def assert_lse_close(
    actual: torch.Tensor, reference: torch.Tensor, max_score: float | None = None
) -> None:
    """Compare LSEs (Hq, rows); -inf must be -inf.

    `max_score` is max|score|; None takes the largest |LSE|, which is about the largest score.
    """
    assert actual.shape == reference.shape, f"lse: {actual.shape}, reference {reference.shape}"
    assert actual.dtype in (torch.float32, torch.float64), f"lse: {actual.dtype}"
    empty = reference == -torch.inf
    where = first_difference((actual == -torch.inf).int(), empty.int())
    assert where is None, f"lse: is -inf: {where}"
    if empty.all():
        return
    difference = (actual.double() - reference.double()).masked_fill(empty, 0.0).abs()
    assert difference.isfinite().all(), "lse: not finite"
    if max_score is None:
        max_score = reference[~empty].abs().max().item()
    bound = LSE_ABSOLUTE + LSE_PER_SCORE * max_score
    worst = divmod(int(difference.argmax()), reference.shape[1])
    assert difference.max() <= bound, (
        f"lse: (head, row) {worst} differs by {difference.max():.3e} > {bound:.3e}: "
        f"{actual[worst].item()!r} and {reference[worst].item()!r}"
    )
