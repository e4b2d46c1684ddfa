"""Combine two attention results over disjoint sets of keys by their log-sum-exp.

With LSE_a, LSE_b the natural-log sums of exponentials of the two parts,

    LSE = log(exp(LSE_a) + exp(LSE_b)),   O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b

(section 2.2 of https://arxiv.org/abs/2501.01005). A sink belongs to one of the two parts.

Eager calls on plain tensors go straight to the implementation; traced calls (torch.compile,
export, fake tensors) go through the custom op ``torch.ops.cute_kernels.merge_attn_states``.
"""

from __future__ import annotations

import math

import torch

from cute_kernels.calls import check_tensor, is_traced, refuse_gradients, writing
from cute_kernels.memory import has_address, overlapping, shares_elements

_NAMES = (
    "output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse",
)  # fmt: skip
_OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """Write the attention over the keys of both parts to `output`, and its LSE to `output_lse`.

    Args:
        output: (total_q, Hq, D) bf16, fp16 or float32, written; may be one of the inputs.
        prefix_output, suffix_output: as `output`; not read in rows whose LSE is infinite.
        prefix_lse, suffix_lse: (Hq, total_q) float32, natural logarithm. Both infinities mean that
            the row saw no key; rows without keys in both parts get output 0 and LSE -inf.
        output_lse: (Hq, total_q) float32, written where given; may be one of the inputs.

    Computes in float32, on any device, without host synchronisation.

    Raises:
        ValueError: a wrong shape, dtype or device.
        NotImplementedError: in grad mode, a tensor that requires a gradient (no backward pass).
    """
    arguments = (output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
    _check(*arguments)
    refuse_gradients("merge_attn_states", dict(zip(_NAMES, arguments, strict=True)))
    if is_traced(output):
        torch.ops.cute_kernels.merge_attn_states(*arguments)
    else:
        _merge(*arguments)


def _merge(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    prefix_lse = torch.where(prefix_lse == math.inf, -math.inf, prefix_lse)
    suffix_lse = torch.where(suffix_lse == math.inf, -math.inf, suffix_lse)
    top = torch.maximum(prefix_lse, suffix_lse)
    top = torch.where(top == -math.inf, 0.0, top)  # exp(-inf - 0) = 0, where -inf - -inf is NaN
    prefix_weight, suffix_weight = torch.exp(prefix_lse - top), torch.exp(suffix_lse - top)
    total = prefix_weight + suffix_weight
    divisor = torch.where(total == 0.0, 1.0, total)

    def weighted(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = (weight / divisor).t().unsqueeze(-1)
        # An empty part may come as NaN from other kernels: 0 * NaN must not reach the sum.
        return torch.where(weight == 0.0, 0.0, part.to(torch.float32) * weight)

    merged = weighted(prefix_output, prefix_weight) + weighted(suffix_output, suffix_weight)
    with writing(output, output_lse):
        output.copy_(merged)
        if output_lse is not None:
            output_lse.copy_(top + torch.log(total))


def _check(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    parts = {"prefix_output": prefix_output, "suffix_output": suffix_output}
    lses = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}
    if output_lse is not None:
        lses["output_lse"] = output_lse
    for name, x in {"output": output, **parts, **lses}.items():
        check_tensor(f"merge_attn_states: {name}", x)
    if output.dim() != 3 or output.dtype not in _OUTPUT_DTYPES:
        _refuse("output", output, "a bfloat16, float16 or float32 (total_q, Hq, D) tensor")
    for name, part in parts.items():
        if (part.shape, part.dtype, part.device) != (output.shape, output.dtype, output.device):
            accepted = f"as output: {output.dtype} {tuple(output.shape)} on {output.device}"
            _refuse(name, part, accepted)
    shape = (output.shape[1], output.shape[0])
    for name, lse in lses.items():
        if (lse.shape, lse.dtype, lse.device) != (shape, torch.float32, output.device):
            _refuse(name, lse, f"float32 (Hq, total_q) = {shape} on {output.device}")
    for name, x in (("output", output), ("output_lse", output_lse)):
        if x is not None and has_address(x) and shares_elements(x):
            _refuse(name, x, "a tensor whose elements do not share memory")
    if output_lse is not None and overlapping({"output": output, "output_lse": output_lse}, {}):
        _refuse("output_lse", output_lse, "memory apart from output's")


def _refuse(name: str, x: torch.Tensor, accepted: str) -> None:
    given = f"{x.dtype} {tuple(x.shape)} on {x.device}"
    raise ValueError(f"merge_attn_states: {name}: got {given}; accepted: {accepted}")


# ---- traced calls ------------------------------------------------------------------------------


_LIBRARY = torch.library.Library("cute_kernels", "FRAGMENT")
_LIBRARY.define(
    "merge_attn_states(Tensor(a!) output, Tensor prefix_output, Tensor prefix_lse,"
    " Tensor suffix_output, Tensor suffix_lse, Tensor(b!)? output_lse) -> ()"
)


def _op(*arguments: torch.Tensor | None) -> None:
    # Again, because an exported graph may be fed other shapes than it was traced with.
    _check(*arguments)
    _merge(*arguments)


_LIBRARY.impl("merge_attn_states", _op, "CompositeExplicitAutograd")
torch.library.register_fake("cute_kernels::merge_attn_states", lambda *args: None, lib=_LIBRARY)
