"""Peers: calls that fit the installed libraries' signatures, and torch's own, which is right."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from perf import bench_decode, peers, providers, report
from perf.inputs import CODE_RMS, KVPool, make_input_sets
from perf.providers import PROVIDERS, Provider
from perf.verify import verify
from tests.perf.helpers import SMALL, requires_module

WINDOWED = replace(SMALL, window=70)
ALONE = replace(SMALL, q_len=1)
BY_NAME = {provider.name: provider for provider in PROVIDERS}


def inputs_of(case):
    return make_input_sets(case, KVPool([case], "cpu"), count=1)[0]


WIDE = [
    replace(SMALL, kv_cache_dtype=short, q_dtype=long)
    for short, long in (("bf16", "bfloat16"), ("fp16", "float16"))
]


@pytest.mark.parametrize("case", (SMALL, WINDOWED, ALONE, *WIDE), ids=lambda case: case.name)
def test_torch_is_right(case):
    verdict = verify(BY_NAME["torch_sdpa"], inputs_of(case))
    assert verdict.problem is None and verdict.relative_error > 1e-4


def test_a_window_off_by_one_is_seen():
    def call(inputs):
        return peers.torch_sdpa(replace(inputs, window_left=inputs.window_left + 1))

    wrong = Provider("wrong", "torch", call, BY_NAME["torch_sdpa"].max_relative_error)
    assert "relative error" in verify(wrong, inputs_of(WINDOWED)).problem


def test_one_scale_is_one_and_belongs_to_the_workload():
    case = replace(SMALL, one_scale=True)
    inputs = inputs_of(case)
    assert inputs.k_descale.shape == (case.batch, case.num_kv_heads)
    assert peers.one_scale(inputs.k_descale) == pytest.approx(1 / CODE_RMS)
    assert case.name != SMALL.name
    differing = {k for k, v in case.workload().items() if v != SMALL.workload()[k]}
    assert differing == {"scales"}


def test_scales_that_differ_are_refused_by_peers_that_read_one():
    reason = "takes one scale, this workload has 6: use --one-scale"
    with pytest.raises(peers.Refusal, match=reason):
        peers.one_scale(inputs_of(SMALL).k_descale)

    def bind(inputs):
        peers.one_scale(inputs.k_descale)

    (result,) = bench_decode.check(
        SMALL, [Provider("a_peer", "torch", bind)], KVPool([SMALL], "cpu")
    ).values()
    assert result.status == f"refuses: {reason}"


def test_who_wants_to_be_named():
    usual = [provider.name for provider in providers.select_providers(())]
    assert "torch_sdpa" not in usual and {"vllm_triton", "flashinfer_fa2"} <= set(usual)
    assert [p.name for p in providers.select_providers(("torch_sdpa",))] == ["torch_sdpa"]


def test_vllms_fa4_takes_what_it_is_given():
    """From its source: without a GPU it does not import."""
    requires_module("vllm")
    folder = Path(find_spec("vllm").origin).parent / "vllm_flash_attn"
    source = (folder / "flash_attn_interface.py").read_text(encoding="utf-8")
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
    )
    taken = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    given = providers.varlen_arguments(inputs_of(SMALL))
    assert {*given, "fa_version", "out"} <= taken


def test_constants_of_vllms_triton_backend_are_its_own():
    """From its source: the module imports all of vLLM, which a GPU host need not have."""
    requires_module("vllm")
    folder = Path(find_spec("vllm").origin).parent / "v1/attention/backends"
    tree = ast.parse((folder / "triton_attn.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    found = {node.targets[0].id: node.value for node in assigned}
    for name, value in peers.VLLM_TRITON.items():
        assert ast.literal_eval(found[name]) == value


def refusals(provider):
    """What a bench says of a provider on a small case."""
    case = replace(SMALL, kv_cache_dtype="bf16")
    (result,) = bench_decode.check(case, [provider], KVPool([case], "cpu")).values()
    return result.status


def test_a_part_that_is_missing_is_not_installed():
    """As where only vLLM's Triton kernel is there: no failure of ours or theirs."""

    def bind(inputs):
        raise ModuleNotFoundError("No module named 'vllm.vllm_flash_attn'")

    status = refusals(Provider("a_peer", "torch", bind, kv_cache_dtypes=("bf16",)))
    assert status == "not installed: No module named 'vllm.vllm_flash_attn'"
    rows = [{"provider": "a_peer", "status": status}]
    assert report.absent_providers(rows) == {"a_peer": status}


def test_what_torch_compile_needs_is_looked_for(monkeypatch):
    flex = BY_NAME["torch_flex_attention"]
    monkeypatch.setattr(providers, "find_spec", lambda name: None if name == "triton" else object())
    assert refusals(flex) == "not installed: torch.compile needs triton"
    monkeypatch.setattr(providers, "find_spec", lambda name: object())
    monkeypatch.setattr(providers, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    compiler = "not installed: torch.compile needs a C compiler, found no "
    assert refusals(flex) == f"{compiler}cc, gcc or clang"
    monkeypatch.setenv("CC", "icx")
    assert refusals(flex) == f"{compiler}icx"
    monkeypatch.setattr(providers, "which", lambda name: name == "icx")
    assert flex.why_not("bf16") is None


@pytest.mark.parametrize("name", ("vllm_triton", "flashinfer_xqa"))
def test_calls_fit_the_installed_signatures(name):
    """What a GPU would compute is not known here; that the call is one, is."""
    requires_module(BY_NAME[name].module)
    try:
        call = BY_NAME[name].bind(inputs_of(replace(SMALL, one_scale=True)))
    except ImportError as error:
        pytest.skip(f"{name} does not import without a GPU: {error}")
    assert isinstance(call, partial)
    inspect.signature(call.func).bind(*call.args, **call.keywords)


def test_the_arguments_of_flashinfers_plan_are_its_own():
    requires_module("flashinfer")
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Wrapper
    except ImportError as error:
        pytest.skip(f"flashinfer does not import without a GPU: {error}")
    names = {"causal", "sm_scale", "window_left", "q_data_type", "kv_data_type"}
    assert names <= set(inspect.signature(Wrapper.plan).parameters)


def test_scratch_of_the_triton_peer_has_room_for_every_query():
    requires_module("vllm")
    case = replace(SMALL, one_scale=True, head_size=96)
    try:
        call = peers.vllm_triton(inputs_of(case))
    except ImportError as error:
        pytest.skip(f"vllm does not import without a GPU: {error}")
    tokens = case.batch * case.q_len
    assert call.keywords["softmax_segm_output"].shape == (tokens, case.num_q_heads, 16, 128)
    assert torch.equal(call.keywords["k_descale"][0, 0], call.keywords["v_descale"][0, 0])
