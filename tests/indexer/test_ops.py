"""The public names, traced calls, gradients, and what CUDA tensors get where no kernel serves."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import cute_kernels
from cute_kernels import compress_norm_rope_insert, fused_indexer_q_rope_quant
from cute_kernels.indexer import interface
from cute_kernels.indexer.arguments import K_TENSORS, Q_TENSORS
from tests.indexer.helpers import BF16, SENTINEL, KCall, KCase, q_arguments

CASE = KCase("default", "fp8_e4m3", 4, 1, lengths=(21, 8))
USE_FP4 = pytest.mark.parametrize("use_fp4", (True, False))
K_ORDER = (*K_TENSORS[:6], "norm_eps", *K_TENSORS[6:], "compress_ratio", "cache_format")


def q_call(use_fp4: bool) -> dict:
    x = torch.randn(5, 3, 128, generator=torch.Generator().manual_seed(0))
    return q_arguments(x.to(BF16)) | {"use_fp4": use_fp4}


def same(got, expected) -> bool:
    return all(
        a is b if b is None else a.dtype is b.dtype and torch.equal(bytes_(a), bytes_(b))
        for a, b in zip(got, expected, strict=True)
    )


def bytes_(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def test_public_names():
    assert cute_kernels.fused_indexer_q_rope_quant is interface.fused_indexer_q_rope_quant
    assert cute_kernels.compress_norm_rope_insert is interface.compress_norm_rope_insert


# ---- traced calls ------------------------------------------------------------------------------


@USE_FP4
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_compiled_q_call_gives_the_same(backend, use_fp4, dynamic):
    arguments = q_call(use_fp4)
    torch._dynamo.reset()
    compiled = torch.compile(
        fused_indexer_q_rope_quant, backend=backend, fullgraph=True, dynamic=dynamic
    )
    for tokens in (5, 3):
        part = arguments | {
            name: arguments[name][:tokens] for name in ("positions", "index_q", "index_weights")
        }
        assert same(compiled(**part), fused_indexer_q_rope_quant(**part))


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_compiled_k_call_writes_the_same(backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        compress_norm_rope_insert, backend=backend, fullgraph=True, dynamic=dynamic
    )
    call, same_call = KCall(CASE), KCall(CASE)
    assert compiled(**call.arguments) is None
    np.testing.assert_array_equal(call.memory.numpy(), same_call.run())


@USE_FP4
def test_the_fake_q_is_like_the_real_one(use_fp4):
    arguments = q_call(use_fp4)
    real = fused_indexer_q_rope_quant(**arguments)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(x) if name in Q_TENSORS else x for name, x in arguments.items()
        }
        fake = fused_indexer_q_rope_quant(**fakes)
        with pytest.raises(ValueError, match="head_scale"):
            fused_indexer_q_rope_quant(**fakes | {"head_scale": float("nan")})
    for a, b in zip(fake, real, strict=True):
        if b is None:
            assert a is None
        else:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_the_fake_k_writes_nothing():
    call = KCall(CASE)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(x) if name in K_TENSORS else x
            for name, x in call.arguments.items()
        }
        assert compress_norm_rope_insert(**fakes) is None
        with pytest.raises(ValueError, match="cache_format"):
            compress_norm_rope_insert(**fakes | {"cache_format": "fp4"})
    assert (call.memory == SENTINEL).all()


@USE_FP4
def test_opcheck_of_q(use_fp4):
    op = torch.ops.cute_kernels.fused_indexer_q_rope_quant.default
    torch.library.opcheck(op, tuple(q_call(use_fp4).values()))


def test_opcheck_of_k():
    op = torch.ops.cute_kernels.compress_norm_rope_insert.default
    call = KCall(CASE)
    # opcheck compares whole tensors, NaN included: the state must be free of it.
    call.arguments["state_cache"].nan_to_num_(0.0)
    torch.library.opcheck(op, tuple(call.arguments[name] for name in K_ORDER))


def test_an_op_checks_its_arguments_again():
    arguments = q_call(True) | {"index_weights": torch.ones(5, 4)}
    with pytest.raises(ValueError, match="index_weights: got"):
        torch.ops.cute_kernels.fused_indexer_q_rope_quant(*arguments.values())
    call = KCall(CASE)
    call.arguments["compress_ratio"] = 0
    with pytest.raises(ValueError, match="compress_ratio: got 0"):
        torch.ops.cute_kernels.compress_norm_rope_insert(*(call.arguments[n] for n in K_ORDER))


# ---- gradients ---------------------------------------------------------------------------------


def test_gradients():
    """Refused where they would be lost, in eager and traced calls; parameters are tensors."""
    arguments = q_call(False)
    arguments["index_weights"] = torch.nn.Parameter(arguments["index_weights"])
    call = KCall(CASE)
    call.arguments["norm_weight"] = torch.nn.Parameter(call.arguments["norm_weight"])
    for function, values, name in (
        (fused_indexer_q_rope_quant, arguments, "index_weights"),
        (compress_norm_rope_insert, call.arguments, "norm_weight"),
    ):
        torch._dynamo.reset()
        for run in (function, torch.compile(function, backend="eager", fullgraph=True)):
            with pytest.raises(Exception, match=f"{name}: got requires_grad=True"):
                run(**values)
        torch._dynamo.reset()
        with torch.no_grad():
            function(**values)
            torch.compile(function, backend="eager", fullgraph=True)(**values)
    assert torch.equal(call.memory, torch.from_numpy(KCall(CASE).run()))


def test_a_query_that_is_a_parameter_is_no_traced_call(monkeypatch):
    monkeypatch.setattr(torch.ops.cute_kernels, "fused_indexer_q_rope_quant", None)
    arguments = q_call(True)
    plain = fused_indexer_q_rope_quant(**arguments)
    query = torch.nn.Parameter(arguments["index_q"], requires_grad=False)
    assert same(fused_indexer_q_rope_quant(**arguments | {"index_q": query}), plain)


# ---- CUDA tensors ------------------------------------------------------------------------------


@pytest.fixture
def called_with_cuda_tensors(monkeypatch):
    """What the functions do after their checks, as though the tensors were on a GPU that no kernel
    is for."""
    warn_or_refuse, cuda = interface._warn_or_refuse, torch.device("cuda")
    monkeypatch.setattr(
        interface,
        "_warn_or_refuse",
        lambda name, _, reason: warn_or_refuse(name, cuda, reason),
    )
    return monkeypatch


@pytest.mark.parametrize("name", ("fused_indexer_q_rope_quant", "compress_norm_rope_insert"))
def test_cuda_tensors(called_with_cuda_tensors, name, recwarn):
    call = KCall(CASE)
    arguments = q_call(True) if name.startswith("fused") else call.arguments
    function = getattr(cute_kernels, name)
    called_with_cuda_tensors.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = f"{name}: no kernel serves this call (tensors are on cpu, the kernels run on cuda), "
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        function(**arguments)
    assert (call.memory == SENTINEL).all() and not recwarn
    called_with_cuda_tensors.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.warns(UserWarning, match=f"{name} runs the slow torch definition: tensors are on"):
        result = function(**arguments)
    if name.startswith("fused"):
        assert same(result, fused_indexer_q_rope_quant(**q_call(True)))
    else:
        np.testing.assert_array_equal(call.memory.numpy(), KCall(CASE).run())


def test_the_warning_names_the_calling_line(monkeypatch):
    on_cuda = SimpleNamespace(device=torch.device("cuda"), numel=lambda: 1)
    call = SimpleNamespace(index_q=on_cuda, k_cache=on_cuda, slot_mapping=on_cuda)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(interface.op, "why_not", lambda call: "none is for it")
    for name in ("check_q", "check_k"):
        monkeypatch.setattr(interface, name, lambda *arguments: call)
    for name in ("indexer_q", "indexer_k"):
        monkeypatch.setattr(interface, name, lambda call: None)
    with pytest.warns(UserWarning, match="slow torch definition: none is for it") as caught:
        fused_indexer_q_rope_quant(**q_call(True))
        compress_norm_rope_insert(**KCall(CASE).arguments)
    assert [warning.filename for warning in caught] == [__file__] * 2


def test_cpu_tensors_get_no_warning(recwarn):
    fused_indexer_q_rope_quant(**q_call(False))
    KCall(CASE).run()
    assert not recwarn
