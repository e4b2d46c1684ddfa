"""Call the public function the way the attention tests need it, and check what it returns."""

from __future__ import annotations

import math

import torch

from cute_kernels import flash_attn_varlen_func
from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from tests.compare import assert_bit_equal, assert_lse_close, assert_output_close

Inputs = dict[str, object]


def attend(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; the output is written over NaNs."""
    out = torch.full_like(inputs["q"], math.nan)
    returned, lse = flash_attn_varlen_func(**{"out": out, **inputs, "return_softmax_lse": True})
    assert returned.data_ptr() == inputs.get("out", out).data_ptr()
    return returned, lse


def exact(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the float64 reference."""
    return attention_reference(validate(**inputs), torch.float64)


def check(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run twice for equal bits, then compare with the float64 reference; return output and LSE.

    The function runs before the reference, whose correct values could otherwise be left in the
    memory that the function's outputs get.
    """
    out, lse = attend(inputs)
    again, lse_again = attend(inputs)
    assert_bit_equal(again, out, "out of a second call")
    assert_bit_equal(lse_again, lse, "LSE of a second call")
    reference, reference_lse = exact(inputs)
    assert_output_close(out, reference)
    assert_lse_close(lse, reference_lse)
    return out, lse
