"""What torch's global settings must not change: its default dtype and device are the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import cute_kernels as ck
from tests.cases import DEFAULT_CASES, make_inputs
from tests.indexer.helpers import KCall, KCase, q_arguments
from tests.nvfp4_cases import make_nvfp4_inputs

BF16 = torch.bfloat16


def inputs() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {
        "groups": torch.randn(20_000, 16, generator=generator).to(BF16),
        "kv": torch.randn(2, 3, 2, 64, generator=generator).to(BF16),
        "slots": torch.arange(3),
        "memory": torch.zeros(2, 4, 8, 2, 36, dtype=torch.uint8),
        "q": q_arguments(torch.randn(3, 2, 128, generator=generator).to(BF16)),
        "k": KCall(KCase("default", "mxfp4", 4, 1, lengths=(9,))),
        "fp8": make_inputs(DEFAULT_CASES[0]),
        "nvfp4": make_nvfp4_inputs(DEFAULT_CASES[0]),
    }


def results(given: dict[str, object]) -> list[torch.Tensor]:
    """Of every public op, with scales that are numbers."""
    found = []
    for name in ("nvfp4", "nvfp4_4over6", "nvfp4_mse"):
        data, scale = ck.quantize_nvfp4(given["groups"], 0.01, name)
        found += [data, scale, ck.dequantize_nvfp4(data, scale, 0.01)]
    data, scale = ck.quantize_mxfp4(given["groups"].view(-1, 32))
    found += [data, scale, ck.dequantize_mxfp4(data, scale)]
    for use_fp4 in (True, False):
        q = ck.fused_indexer_q_rope_quant(**given["q"], use_fp4=use_fp4)
        found += [x for x in q if x is not None]
    given["k"].run()
    sides = given["memory"].unbind(0)
    ck.reshape_and_cache(*given["kv"], *sides, given["slots"], "nvfp4_mse", 0.01, 0.01, "sm100")
    found += [given["k"].memory, given["memory"]]
    for name in ("fp8", "nvfp4"):
        out, lse = ck.flash_attn_varlen_func(**given[name])
        ck.merge_attn_states(merged := out.clone(), out, lse, out, lse)
        found += [out, lse, merged]
    return found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting",
    (
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(BF16),
        lambda: torch.device("meta"),
        torch.inference_mode,
    ),
    ids=("float64", "bfloat16", "meta", "inference"),
)
def test_results_do_not_depend_on_global_settings(setting):
    expected, given = results(inputs()), inputs()
    with setting():
        found = results(given)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and a.device == b.device
        a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b)
