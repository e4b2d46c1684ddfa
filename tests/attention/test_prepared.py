"""Calls that are made again with other addresses: what they share, and what must not be shared."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import prepared as prepared_calls
from cute_kernels.attention import interface, prepared
from cute_kernels.attention.common.launches import Launches
from cute_kernels.attention.interface import flash_attn_varlen_func
from cute_kernels.prepared import PreparedCalls, call_key


def arguments(seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 4, 64, generator=generator).to(torch.bfloat16)
    cache = torch.randn(2, 5, 64, 2, 64, generator=generator).to(torch.float8_e4m3fn)
    return {
        "q": q,
        "k": cache[0],
        "v": cache[1],
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(4, dtype=torch.int32),
        "max_seqlen_k": 70,
        "seqused_k": torch.tensor([1, 64, 70], dtype=torch.int32),
        "block_table": torch.tensor([[0, 1], [2, 3], [4, 0]], dtype=torch.int32),
        "k_descale": torch.ones(1),
        "v_descale": torch.ones(3, 2),
        "s_aux": torch.zeros(4),
        "out": torch.empty_like(q),
    }


class Launch:
    def __init__(self) -> None:
        self.calls = []

    def go(self, cu_q: torch.Tensor, operands: tuple[int, ...]) -> None:
        self.calls.append((cu_q, operands))


@pytest.fixture
def kernels(monkeypatch):
    """The SM90 route without a GPU: (problems that were validated and run, prepared launch)."""
    problems, launch = [], Launch()

    def run(problem, out, lse):
        problems.append(problem)
        return launch

    route = interface.route_sm90
    monkeypatch.setattr(route, "can_run", lambda problem: None)
    monkeypatch.setattr(route, "run", run)
    calls = PreparedCalls()
    monkeypatch.setattr(interface, "PREPARED", calls)
    monkeypatch.setattr(prepared, "PREPARED", calls)
    return problems, launch


@torch.no_grad()
def test_the_second_call_launches_at_its_own_addresses(kernels):
    problems, launch = kernels
    flash_attn_varlen_func(**arguments())
    again = arguments(1) | {"max_seqlen_k": 128}
    out, lse = None, None
    for _ in range(2):
        out = flash_attn_varlen_func(**again)
    assert len(problems) == 1 and out is again["out"] and lse is None
    names = ("q", "k", "v", "out", None, "s_aux", "k_descale", "v_descale", "seqused_k", None)
    names += ("block_table",)
    wanted = tuple(0 if name is None else again[name].data_ptr() for name in names)
    assert [operands for _, operands in launch.calls] == [wanted, wanted]
    assert all(cu_q is again["cu_seqlens_q"] for cu_q, _ in launch.calls)


@torch.no_grad()
def test_results_are_allocated_as_asked(kernels):
    call = arguments() | {"out": None, "return_softmax_lse": True}
    flash_attn_varlen_func(**call)
    out, lse = flash_attn_varlen_func(**call)
    assert out.shape == (3, 4, 64) and out.dtype is torch.bfloat16 and out.is_contiguous()
    assert lse.shape == (4, 3) and lse.dtype is torch.float32
    ((_, addresses),) = kernels[1].calls
    assert addresses[3:5] == (out.data_ptr(), lse.data_ptr())


OTHER_FACTS = {
    "q": lambda x: torch.cat((x, x))[::2],
    "k": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "v": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "max_seqlen_q": lambda x: 2,
    "block_table": lambda x: torch.cat((x, x), dim=1),
    "seqused_k": lambda x: None,
    "k_descale": lambda x: torch.ones(2),
    "v_descale": lambda x: None,
    "s_aux": lambda x: None,
    "out": lambda x: None,
}


@torch.no_grad()
@pytest.mark.parametrize("name", OTHER_FACTS)
def test_a_call_that_differs_is_looked_at(kernels, name):
    problems, launch = kernels
    flash_attn_varlen_func(**arguments())
    call = arguments()
    call[name] = OTHER_FACTS[name](call[name])
    if name == "seqused_k":
        call["cu_seqlens_k"] = torch.arange(4, dtype=torch.int32)
    flash_attn_varlen_func(**call)
    assert len(problems) == 2 and not launch.calls


@torch.no_grad()
@pytest.mark.parametrize(
    "option",
    (
        {"softmax_scale": 0.5},
        {"causal": True},
        {"window_size": (5, 0)},
        {"softcap": 1.0},
        {"return_softmax_lse": True},
        {"deterministic": True},
        {"num_splits": 1},
        {"fa_version": None},
    ),
    ids=lambda option: next(iter(option)),
)
def test_an_option_that_differs_is_looked_at(kernels, option):
    problems, launch = kernels
    flash_attn_varlen_func(**arguments())
    flash_attn_varlen_func(**arguments(), **option)
    assert len(problems) == 2 and not launch.calls


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "error"),
    (
        ({"causal": "yes"}, ValueError),
        ({"max_seqlen_k": -1}, ValueError),
        ({"max_seqlen_q": True}, ValueError),
        ({"block_table": [[0, 1]]}, ValueError),
        ({"window_size": [1, 0, 0]}, ValueError),
        ({"cu_seqlens_q": torch.arange(4)}, ValueError),
        ({"k_block_scale": torch.ones(1)}, ValueError),
        ({"v_scale_layout": "sm100"}, NotImplementedError),
        ({"no_such_argument": None}, TypeError),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError),
    ),
)
def test_bad_calls_are_refused_after_a_good_one(kernels, change, error):
    good = arguments() | {"causal": True}
    for _ in range(2):
        flash_attn_varlen_func(**good)
    with pytest.raises(error):
        flash_attn_varlen_func(**(good | change))


def test_gradients_are_refused_after_a_good_call(kernels):
    for _ in range(2):
        flash_attn_varlen_func(**arguments())
    assert len(kernels[1].calls) == 1, "grad mode alone is no reason to look again"
    call = arguments()
    call["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="requires_grad"):
        flash_attn_varlen_func(**call)


@torch.no_grad()
@pytest.mark.parametrize("name", ("q", "k", "v", "out"))
def test_an_unaligned_address_is_looked_at(kernels, name):
    problems, launch = kernels
    flash_attn_varlen_func(**arguments())
    call = arguments()
    x = call[name]
    shifted = torch.zeros(x.numel() + 1, dtype=torch.uint8).to(x.dtype)[1:].view(x.shape)
    if name == "v":  # k and v of `arguments` lie in one tensor, with these strides
        assert shifted.stride() == x.stride()
    call[name] = shifted
    flash_attn_varlen_func(**call)
    assert len(problems) == 2 and not launch.calls


@torch.no_grad()
@pytest.mark.parametrize("name", ("k", "v"))
def test_an_output_where_the_cache_begins_is_looked_at(kernels, name):
    _, launch = kernels
    call = arguments()
    for side, scale in (("k", "k_descale"), ("v", "v_descale")):
        call[side], call[scale] = torch.zeros(5, 64, 2, 64, dtype=torch.bfloat16), None
    flash_attn_varlen_func(**call)
    call["out"] = call[name].view(-1, 4, 64)[:3]
    with pytest.raises(ValueError, match=f"out: got .*memory of {name}"):
        flash_attn_varlen_func(**call)
    assert not launch.calls


@torch.no_grad()
def test_neutral_arguments_of_engines_change_nothing(kernels):
    problems, launch = kernels
    flash_attn_varlen_func(**arguments())
    flash_attn_varlen_func(**arguments(), scheduler_metadata=None, q_descale=None)
    assert len(problems) == 1 and len(launch.calls) == 1


@torch.no_grad()
def test_sinks_that_are_converted_are_converted_each_time(kernels):
    problems, launch = kernels
    for _ in range(2):
        flash_attn_varlen_func(**(arguments() | {"s_aux": torch.zeros(4, dtype=torch.float16)}))
    assert len(problems) == 2 and not launch.calls


def test_what_has_no_key():
    q, none = torch.zeros(1, 1, 64), (None, None)
    find = prepared.find_launch
    assert find((q, None), (1, None), (None, False))[0] is not None
    assert find((torch.nn.Parameter(q),), (1, 1), ()) == none
    assert find((q,), (torch.tensor(1), 1), ()) == none
    assert find((q,), (1, torch.tensor(1)), ()) == none
    assert find((q, "no tensor"), (1, 1), ()) == none
    assert find((q,), (1, 1), ([1, 0],)) == none


def test_equal_numbers_of_other_types_are_other_calls():
    keys = {call_key((), (x,)) for x in (1, 1.0, True)}
    assert len(keys) == 3


def test_a_long_list_starts_anew(monkeypatch):
    monkeypatch.setattr(prepared_calls, "_MAX_CALLS", 2)
    calls = PreparedCalls()
    for key in "abc":
        calls.keep(key, key.upper())
    assert calls._launches == {"c": "C"}
    calls.keep(None, "D")
    calls.keep("d", None)
    assert calls._launches == {"c": "C"}


def test_launches_of_one_call_run_in_order():
    launches = Launch(), Launch()
    cu_q, operands = torch.zeros(2, dtype=torch.int32), tuple(range(11))
    Launches(launches).go(cu_q, operands)
    assert [launch.calls for launch in launches] == [[(cu_q, operands)]] * 2
