"""The output of an attention kernel: final rows, partial rows, and how a row is closed."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cute_kernels import dsl


class Output(NamedTuple):
    """mO (total_q, heads, head_size) in Q's dtype; mLse (heads, total_q) float32, natural log.

    mLse and mSink (heads,) float32 may have address 0: no LSE wanted, no sinks.
    """

    mO: cute.Tensor
    mLse: cute.Tensor
    mSink: cute.Tensor


class Partial(NamedTuple):
    """mO (slots, rows, head_size) float32: a part's sums of p * v, descaled.

    mState (slots, rows, 2) float32: the reference of its exponentials (log2 units), and their sum.

    Which slots are whose: parts.py. mCounter (ctas,) int32: arrivals and departures of the CTAs
    that share the item which CTA c begins; 0 between launches.
    """

    mO: cute.Tensor
    mState: cute.Tensor
    mCounter: cute.Tensor


class Fold(NamedTuple):
    """How to add a part to what was folded before: the new reference, and the factors of both."""

    top: Float32
    keep: Float32
    weight: Float32


@cute.jit
def fold_of(top: Float32, part_top: Float32) -> Fold:
    """Sums then become ``dsl.fma(part, weight, sum * keep)``: wherever a fold happens, its bits are
    the same. References are -inf where no key has been seen."""
    new_top = dsl.fmax(top, part_top)
    reference = cutlass.select_(new_top == dsl.NEG_INF, Float32(0.0), new_top)
    return Fold(new_top, dsl.exp2(top - reference), dsl.exp2(part_top - reference))


class FinalRow(NamedTuple):
    """One row's normalisation: the factor for its accumulator, and its LSE (natural log)."""

    factor: Float32
    lse: Float32


@cute.jit
def finish_row(row_max: Float32, row_sum: Float32, sink: Float32, v_scale: Float32) -> FinalRow:
    """Close the softmax of a row: ``row_max`` and ``sink`` in log2 units, -inf where there is none.

    Without any visible key and without a sink the factor is 0 and the LSE -inf.
    """
    top = dsl.fmax(row_max, sink)
    reference = top
    if top == dsl.NEG_INF:
        reference = Float32(0.0)
    weight = dsl.exp2(row_max - reference)
    total = row_sum * weight + dsl.exp2(sink - reference)
    factor = Float32(0.0)
    lse = Float32(dsl.NEG_INF)
    if total != 0.0:
        # total is at least about 1: the largest term has weight 1
        factor = weight * v_scale * cute.arch.rcp_approx(total)
        lse = (reference + dsl.log2(total)) * dsl.LN_2
    return FinalRow(factor, lse)


@cute.jit
def sink_of_head(output: Output, query_head: Int32) -> Float32:
    """The head's sink in log2 units, -inf without sinks."""
    sink = Float32(dsl.NEG_INF)
    if output.mSink.iterator.toint() != 0:
        sink = output.mSink[query_head] * dsl.LOG2_E
    return sink


def pack_output(mO: cute.Tensor, low: Float32, high: Float32) -> Int32:
    if mO.element_type is BFloat16:
        return dsl.pack_bf16x2(low, high)
    return dsl.pack_f16x2(low, high)


def output_address(output: Output, token: Int32, query_head: Int32, element) -> Int64:
    index = cute.crd2idx((token, query_head, element), output.mO.layout)
    return output.mO.iterator.toint() + Int64(index) * 2


@cute.jit
def store_lse(output: Output, token: Int32, query_head: Int32, lse: Float32):
    if output.mLse.iterator.toint() != 0:
        output.mLse[query_head, token] = lse
