"""Long queries over an nvfp4 cache, without a GPU: which kernels, with which arguments, from what
was compiled before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.attention.common.operands import UNLIMITED
from cute_kernels.attention.route_sm90 import Route, route
from cute_kernels.attention.widen_sm90 import config as widen_sm90
from cute_kernels.compile.plans import AttentionWorkload, units_for
from tests.attention.test_prefill_route import SM_COUNT, bounds_of, launched
from tests.cases import AttentionCase
from tests.nvfp4_cases import make_nvfp4_inputs


def test_few_rows_over_nvfp4_take_the_decode_kernel_alone():
    for fields in (
        {"max_seqlen_q": 1},
        {"max_seqlen_q": 32, "group": 8, "total_q": 128},
        {"batch": 1, "total_q": 512, "max_seqlen_q": 512, "kv_heads": 1},  # few items
        {"deterministic": True},
        {"keys": 1 << 17},  # too much memory
    ):
        found = route(bounds_of(kv_format="nvfp4", **fields), SM_COUNT)
        assert found == Route(True, False, UNLIMITED, 0), fields


@pytest.mark.parametrize("head_size", widen_sm90.head_sizes("nvfp4"))
def test_long_queries_over_nvfp4_read_widened_keys(head_size):
    bounds = bounds_of(kv_format="nvfp4", head_size=head_size)
    assert route(bounds, SM_COUNT) == Route(False, True, 0, 8192)
    least = widen_sm90.min_rows("nvfp4", head_size)
    mixed = route(bounds._replace(batch=5), SM_COUNT)
    assert mixed == Route(True, True, least - 1, 8192)
    # One prompt beside many decoding sequences: room for what can be long.
    serving = bounds._replace(batch=64, total_q=1087, max_seqlen_q=1024)
    assert route(serving, SM_COUNT) == Route(True, True, least - 1, 8192)
    few = bounds._replace(batch=8, total_q=256, keys=2048, max_seqlen_q=least // 8)
    assert route(few, SM_COUNT).rows == least - 1
    assert route(few._replace(max_seqlen_q=least // 8 - 1), SM_COUNT).rows == UNLIMITED


def test_launch_arguments_of_a_call_with_widened_nvfp4_keys(monkeypatch):
    case = AttentionCase(id="wide", kv_lens=(70, 300), q_lens=(3, 200), layout="HND")
    inputs = make_nvfp4_inputs(case)
    ((name, _, addresses, strides, _, scalars, target),) = launched(monkeypatch, inputs, 511, 320)
    assert name == "prefill_sm90_fp16_d128_r128_bf16_box64_from_nvfp4"
    assert target[3:] == (320, 1), "812 rows are one sequence of 512 at most"
    assert addresses[6] == inputs["k_descale"].data_ptr(), "global scales are not in the copies"
    assert addresses[11:] == tuple(inputs[f"{side}_block_scale"].data_ptr() for side in "kv")
    assert strides[15:18] == inputs["k_block_scale"].stride()[:3]
    assert scalars[2:5] == (2**30, 0, 511)


def test_what_a_model_with_long_queries_needs_compiled():
    workload = AttentionWorkload(128, 32, 4, "bf16", "nvfp4_4over6", (64, 16), 1024)
    names = {unit.config.name for unit in units_for(workload, "sm_90a")}
    assert "prefill_sm90_fp16_d128_r128_bf16_box64_from_nvfp4" in names
    assert not any(name.startswith("prefill_sm90_fp8") for name in names)
    few = replace(workload, max_query_tokens=widen_sm90.min_rows("nvfp4", 128) // 8 - 1)
    assert "prefill_sm90" not in {unit.kernel for unit in units_for(few, "sm_90a")}
