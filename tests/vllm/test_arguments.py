"""vLLM's call of `flash_attn_varlen_func`, as it stands in its sources, served by ours."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import cute_kernels
from kvcache.integrations.vllm.arguments import flash_attn_varlen_func

NEUTRAL = {"dropout_p": 0.0, "causal": True, "softcap": 0.0, "deterministic": False}
NEUTRAL |= {"return_attn_probs": False, "return_softmax_lse": False, "num_splits": 0}
NEUTRAL |= {"cp_world_size": 1, "cp_rank": 0}


def vllm_parameters() -> list[str]:
    """The parameters of vLLM's function, from its source: importing it needs its CUDA library."""
    folder = Path(find_spec("vllm").submodule_search_locations[0])
    source = folder / "vllm_flash_attn" / "flash_attn_interface.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
    )
    return [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]


@pytest.fixture
def call():
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 64, 2, 64, generator=generator, dtype=torch.float32).to(
        torch.float8_e4m3fn
    )
    return {
        "q": torch.randn(2, 8, 64, generator=generator, dtype=torch.float32).bfloat16(),
        "k": k,
        "v": v,
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "max_seqlen_k": 100,
        "seqused_k": torch.tensor([100, 9], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
    }


def test_every_argument_of_vllms_function_passes_with_what_flash_attention_gives(call):
    want = cute_kernels.flash_attn_varlen_func(**call, causal=True)
    given = dict.fromkeys(vllm_parameters()) | NEUTRAL | call
    given |= {
        "fa_version": 3,
        "scheduler_metadata": torch.zeros(5, dtype=torch.int32),
        "q_descale": torch.ones(()).float().expand(2, 2),
        "window_size": [-1, -1],
    }
    assert set(vllm_parameters()) == set(given)
    assert torch.equal(flash_attn_varlen_func(**given), want)


def test_our_own_function_refuses_what_is_translated(call):
    for name, value in (("fa_version", 3), ("scheduler_metadata", 1), ("q_descale", 1.0)):
        with pytest.raises((ValueError, NotImplementedError), match=name):
            cute_kernels.flash_attn_varlen_func(**call, causal=True, **{name: value})


def test_a_window_list_becomes_a_tuple(call):
    window = flash_attn_varlen_func(**call, causal=True, window_size=[7, 0])
    assert torch.equal(
        window, cute_kernels.flash_attn_varlen_func(**call, causal=True, window_size=(7, 0))
    )
    assert not torch.equal(window, flash_attn_varlen_func(**call, causal=True))


@pytest.mark.parametrize("name", ("dynamic_causal", "gather_kv_indices", "mask_mod"))
def test_what_changes_the_result_is_refused_not_dropped(call, name):
    with pytest.raises(NotImplementedError, match=name):
        flash_attn_varlen_func(**call, causal=True, **{name: torch.ones(2)})


def test_quantized_queries_are_refused(call):
    call["q"] = call["q"].to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="q: got torch.float8_e4m3fn"):
        flash_attn_varlen_func(**call, q_descale=torch.ones(2, 2).float())
