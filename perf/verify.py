"""Correctness before time: a provider's output against the torch reference in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perf.inputs import InputSet
from perf.providers import Provider, varlen_arguments

# Elements of K that the reference is given: whole sequences, first and last among them.
MAX_REFERENCE_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Verdict:
    """relative_error: ||out - ref|| / ||ref|| over the checked sequences; NaN where not finite.
    problem: what is wrong, None if nothing is."""

    relative_error: float
    problem: str | None


def checked_sequences(inputs: InputSet) -> list[int]:
    """Sequences that are compared: all of a small batch, spread over a large one."""
    batch = inputs.block_table.shape[0]
    elements = inputs.max_seqlen_k * inputs.k.shape[2] * inputs.k.shape[3]
    count = min(batch, max(2, MAX_REFERENCE_ELEMENTS // elements))
    if count == 1:
        return [0]
    return sorted({i * (batch - 1) // (count - 1) for i in range(count)})


def reference_output(inputs: InputSet, indices: list[int]) -> torch.Tensor:
    """(rows of these sequences, Hq, D) float64, not rounded to the dtype of q."""
    from cute_kernels.attention.arguments import validate
    from cute_kernels.reference.attention import attention_reference

    problem = validate(**varlen_arguments(inputs.sequences(indices)))
    return attention_reference(problem, torch.float64)[0]


def relative_error(inputs: InputSet, indices: list[int], reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| over the rows of these sequences."""
    difference = inputs.out[inputs.rows_of(indices)].double() - reference
    norms = [torch.linalg.vector_norm(x) for x in (difference, reference)]
    return float(norms[0] / norms[1])


def verify(provider: Provider, inputs: InputSet) -> Verdict:
    """Run once into a poisoned output and compare; every row must have been written."""
    call = provider.bind(inputs)
    inputs.poison()
    call()
    finite = inputs.out.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        bad = int((~finite).sum())
        return Verdict(float("nan"), f"{bad} of {len(finite)} rows not finite or not written")
    indices = checked_sequences(inputs)
    error = relative_error(inputs, indices, reference_output(inputs, indices))
    if not error <= provider.max_relative_error:
        return Verdict(error, f"relative error {error:.1e} > {provider.max_relative_error:.1e}")
    return Verdict(error, None)
