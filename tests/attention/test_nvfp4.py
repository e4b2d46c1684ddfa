"""`flash_attn_varlen_func` on NVFP4 caches: the kernel on a GPU, the torch reference elsewhere.

The float64 reference works on the dequantized cache. What FP8 shares (schedule, masks, epilogue) is
tested there in more detail.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels import dequantize_nvfp4, flash_attn_varlen_func
from tests.attention.helpers import attend, check
from tests.cases import AttentionCase, spread
from tests.compare import assert_bit_equal, assert_lse_close, assert_output_close
from tests.nvfp4_cases import NVFP4_CASES, make_nvfp4_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALES = ("k_block_scale", "v_block_scale")


def simple(**fields) -> AttentionCase:
    fields = {"kv_lens": (300, 70, 129), "q_lens": (2, 2, 2), "head_size": 128, **fields}
    return AttentionCase(id="simple", **fields)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", NVFP4_CASES, ids=lambda case: case.id)
def test_against_the_float64_reference(device, case):
    check(make_nvfp4_inputs(case, device))
