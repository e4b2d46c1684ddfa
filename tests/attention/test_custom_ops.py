"""The public functions in traced code: torch.compile, torch.export, fake tensors.

Everything runs on CPU tensors, where the ops run the torch reference; what is tested is the way
through the dispatcher, which the kernels share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cute_kernels import flash_attn_varlen_func, merge_attn_states
from tests.cases import AttentionCase, make_inputs
from tests.compare import assert_bit_equal
from tests.nvfp4_cases import make_nvfp4_inputs

Tensors = tuple[torch.Tensor, ...]
ATTENTION = torch.ops.cute_kernels.flash_attn_varlen.default
MERGE = torch.ops.cute_kernels.merge_attn_states.default
HEADS, DIM = 8, 64


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def attention_inputs(
    kv_lens=(70, 200, 0), q_lens=(2, 3, 1), num_q_heads=4, **fields
) -> dict[str, object]:
    shape = {"num_q_heads": num_q_heads, "head_size": DIM}
    case = AttentionCase(id="traced", kv_lens=kv_lens, q_lens=q_lens, **shape, **fields)
    return make_inputs(case)


def split(inputs: dict[str, object]) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """(tensors, everything else)"""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    return tensors, {name: x for name, x in inputs.items() if name not in tensors}


class Attention(torch.nn.Module):
    """The function over the tensors of a call, its other arguments fixed."""

    def __init__(self, others: dict[str, object]) -> None:
        super().__init__()
        self.others = others

    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | Tensors:
        return flash_attn_varlen_func(**tensors, **self.others)


def assert_same(got: torch.Tensor | Tensors, expected: torch.Tensor | Tensors) -> None:
    assert type(got) is type(expected)
    pairs = [(got, expected)] if isinstance(got, torch.Tensor) else zip(got, expected, strict=True)
    for x, y in pairs:
        assert_bit_equal(x, y, "traced against eager")


def calls(module: torch.fx.GraphModule, op: torch._ops.OpOverload) -> int:
    """How often a graph calls an op: Dynamo records its packet, export the overload."""
    return sum(node.target in (op, op.overloadpacket) for node in module.graph.nodes)


CALLS = {
    "plain": {},
    "everything": {"window": (100, 0), "softcap": 20.0, "sinks": True, "scale_kind": "full"},
    "non-causal-window": {"causal": False, "window": (100, 2), "scale_kind": "head"},
    "scalar-descales": {"scale_kind": "scalar"},
    "no-descales": {"scale_kind": "none", "softmax_scale": 0.5},
    "ragged": {"page_size": None},
    "bf16-cache": {"kv_dtype": torch.bfloat16, "scale_kind": "none"},
    "fp16": {"q_dtype": torch.float16, "layout": "interleaved"},
    "q-strided": {"q_strided": True},
}
each_call = pytest.mark.parametrize("fields", CALLS.values(), ids=CALLS)


@each_call
@pytest.mark.parametrize("with_lse", (False, True))
def test_compiled_attention_equals_eager(fields, with_lse):
    inputs = {**attention_inputs(**fields), "return_softmax_lse": with_lse}
    expected = flash_attn_varlen_func(**inputs)
    tensors, others = split(inputs)
    assert_same(compiled(Attention(others))(tensors), expected)


@each_call
@pytest.mark.parametrize("strict", (False, True))
def test_exported_attention_equals_eager(fields, strict):
    inputs = attention_inputs(**fields)
    tensors, others = split(inputs)
    program = torch.export.export(Attention(others), (tensors,), strict=strict)
    assert calls(program.graph_module, ATTENTION) == 1
    assert_same(program.module()(tensors), flash_attn_varlen_func(**inputs))


@pytest.mark.parametrize(
    "change",
    (
        {"window_size": [100, -1]},
        {"window_size": (None, 0)},
        {"window_size": None},
        {"softcap": None},
        {"softmax_scale": 1},
        {"max_seqlen_q": torch.tensor(3)},
        {"max_seqlen_k": torch.tensor(200)},
        {"max_seqlen_k": None},
        {"num_splits": 3},
        {"deterministic": True},
        {"fa_version": None},
        {"alibi_slopes": None, "dropout_p": 0.0, "cp_world_size": 1},
        {"s_aux": torch.ones(4, dtype=torch.bfloat16)},
    ),
    ids=str,
)
def test_compiled_attention_accepts_every_form_of_an_argument(change):
    inputs = {**attention_inputs(sinks=True), **change}
    expected = flash_attn_varlen_func(**inputs)
    assert_same(compiled(lambda: flash_attn_varlen_func(**inputs))(), expected)


@pytest.mark.parametrize("with_lse", (False, True))
def test_compiled_attention_writes_out(with_lse):
    """An `out` of the caller's, one of the graph's own; rows without queries stay as they are."""
    inputs = {**attention_inputs(), "return_softmax_lse": with_lse}
    inputs["q"] = torch.cat([inputs["q"], torch.ones_like(inputs["q"][:2])])
    out = torch.full_like(inputs["q"], 7.0)
    expected = flash_attn_varlen_func(**inputs, out=out)
    tensors, others = split(inputs)

    def given(tensors: dict, out: torch.Tensor):
        return flash_attn_varlen_func(**tensors, **others, out=out)

    def made(tensors: dict):
        return given(tensors, torch.full_like(tensors["q"], 7.0))

    mine = torch.full_like(out, 7.0)
    returned = compiled(given)(tensors, mine)
    assert_same(returned, expected)
    assert (mine[-2:] == 7.0).all() and torch.equal(mine, out)
    assert (returned[0] if with_lse else returned).data_ptr() == mine.data_ptr()
    assert_same(compiled(made)(tensors), expected)


def test_one_graph_serves_other_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(flash_attn_varlen_func, fullgraph=True, backend=counter, dynamic=True)
    # Sizes of the first call that are equal stay so: batch 5 differs from every other size.
    for lengths in range(5, 12):
        q_lens = tuple(range(2, 2 + lengths))
        inputs = attention_inputs(kv_lens=(60 * lengths,) * lengths, q_lens=q_lens, sinks=True)
        inputs["max_seqlen_q"], inputs["max_seqlen_k"] = 16, 1024
        assert_same(function(**inputs), flash_attn_varlen_func(**inputs))
    assert sum(calls(graph, ATTENTION) for graph in counter.graphs) == 1


@pytest.mark.parametrize("strict", (False, True))
def test_exported_for_any_lengths(strict):
    """One program for any batch, query tokens, pages and table width, fewer queries included."""
    tensors, others = split(attention_inputs(sinks=True, num_q_heads=8))
    total_q, batch, pages, width = map(torch.export.Dim, ("total_q", "batch", "pages", "width"))
    sizes = {
        "q": {0: total_q}, "k": {0: pages}, "v": {0: pages}, "block_table": {0: batch, 1: width},
        "seqused_k": {0: batch}, "cu_seqlens_q": {0: batch + 1}, "k_descale": {0: batch},
        "v_descale": {0: batch}, "s_aux": None,
    }  # fmt: skip
    program = torch.export.export(
        Attention(others), (tensors,), dynamic_shapes=(sizes,), strict=strict
    )
    for kv_lens, q_lens in (((5, 6, 7, 900), (1, 1, 1, 3)), ((65,), (1,)), ((3, 300), (1, 0))):
        call, _ = split(attention_inputs(kv_lens, q_lens, sinks=True, num_q_heads=8))
        assert_same(program.module()(call), flash_attn_varlen_func(**call, **others))


@pytest.mark.parametrize("with_lse", (False, True))
@pytest.mark.parametrize("page_size", (None, 64))
def test_attention_on_fake_tensors(page_size, with_lse):
    inputs = {**attention_inputs(page_size=page_size), "return_softmax_lse": with_lse}
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes, others = split(inputs)
        fakes = {name: mode.from_tensor(x) for name, x in fakes.items()}
        result = flash_attn_varlen_func(**fakes, **others)
    out, lse = result if with_lse else (result, None)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype, out.stride()) == ((6, 4, DIM), torch.bfloat16, (4 * DIM, DIM, 1))
    assert lse is None or (lse.shape, lse.dtype) == ((4, 6), torch.float32)


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


REFUSALS = (
    ("q", lambda x: x[0], "q: got bfloat16 (4, 64)"),
    ("q", with_gradient, "q: got requires_grad=True (no backward pass)"),
    ("k", lambda x: x.view(torch.uint8), "k: got uint8"),
    ("cu_seqlens_q", lambda x: x.long(), "cu_seqlens_q: got int64"),
    ("cu_seqlens_q", lambda x: x[1:], "block_table: got int32 (3, 6)"),
    ("v_descale", lambda x: x[:2], "v_descale: got float32 (2, 2)"),
    ("max_seqlen_q", lambda x: -1, "max_seqlen_q: got -1"),
    ("max_seqlen_q", lambda x: torch.tensor(1.5), "max_seqlen_q: got float32 ()"),
    ("window_size", lambda x: (1, 2, 3), "window_size: got (1, 2, 3)"),
    ("softmax_scale", lambda x: torch.tensor(1.0), "softmax_scale: got float32 ()"),
    ("softmax_scale", lambda x: -1.0, "softmax_scale: got -1.0"),
    ("softcap", lambda x: -1.0, "softcap: got -1.0"),
    ("fa_version", lambda x: 3, "fa_version: got 3"),
    ("k_block_scale", lambda x: torch.ones(1), "k_block_scale: got float32 (1,)"),
    ("alibi_slopes", lambda x: torch.ones(4), "alibi_slopes: got float32 (4,)"),
)


@pytest.mark.parametrize(
    ("name", "change", "message"), REFUSALS, ids=[f"{row[0]}-{i}" for i, row in enumerate(REFUSALS)]
)
def test_attention_refusals_keep_their_message(name, change, message):
    """Eager, compiled, exported and on fake tensors; before anything runs."""
    inputs = attention_inputs()
    inputs[name] = change(inputs.get(name))
    tensors, others = split(inputs)
    expected = re.escape(f"flash_attn_varlen_func: {message}")
    with pytest.raises((ValueError, NotImplementedError), match=expected):
        flash_attn_varlen_func(**inputs)
    with pytest.raises(Exception, match=expected):
        compiled(Attention(others))(tensors)
    with pytest.raises(Exception, match=expected):
        torch.export.export(Attention(others), (tensors,), strict=False)
    with FakeTensorMode() as mode, pytest.raises(Exception, match=expected):
        flash_attn_varlen_func(**{key: mode.from_tensor(x) for key, x in tensors.items()}, **others)


def attention_op_arguments(inputs: dict[str, object]) -> tuple[object, ...]:
    q = inputs["q"]
    lse = torch.empty(q.shape[1], q.shape[0])
    names = "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k"
    first = [inputs[name] for name in names]
    return (
        *first, inputs.get("cu_seqlens_k"), inputs.get("seqused_k"), torch.zeros_like(q), lse, 0.5,
        True, 100, -1, 20.0, inputs.get("block_table"), inputs["k_descale"], inputs["v_descale"], 0,
        inputs["s_aux"], False, inputs.get("k_block_scale"), inputs.get("v_block_scale"),
    )  # fmt: skip


def test_attention_opcheck():
    fields = {"kv_dtype": torch.bfloat16, "scale_kind": "none", "sinks": True}
    torch.library.opcheck(ATTENTION, attention_op_arguments(attention_inputs(**fields)))
    # The schema check compares its inputs with allclose, which torch does not have for fp8.
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = attention_op_arguments(attention_inputs(sinks=True))
    torch.library.opcheck(ATTENTION, arguments, test_utils=others)
    inputs = make_nvfp4_inputs(AttentionCase(id="nvfp4", kv_lens=(70, 3), q_lens=(1, 2)))
    inputs["s_aux"] = None
    torch.library.opcheck(ATTENTION, attention_op_arguments(inputs), test_utils=others)


# ---- merge_attn_states -------------------------------------------------------------------------


def parts(rows: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(rows)
    outputs = torch.randn((2, rows, HEADS, DIM), generator=generator).to(dtype)
    lses = torch.randn((2, HEADS, rows), generator=generator) * 3
    lses[:, 0, 0] = torch.tensor([-math.inf, math.inf])
    return outputs[0], lses[0], outputs[1], lses[1]


def merged(*inputs: torch.Tensor) -> Tensors:
    out, lse = torch.full_like(inputs[0], math.nan), torch.full_like(inputs[1], math.nan)
    merge_attn_states(out, *inputs, lse)
    return out, lse


class Merge(torch.nn.Module):
    def forward(self, *inputs: torch.Tensor) -> Tensors:
        return merged(*inputs)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_compiled_merge_equals_eager(dtype):
    assert_same(compiled(merged)(*parts(dtype=dtype)), merged(*parts(dtype=dtype)))


def test_compiled_merge_without_lse():
    def without(*inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        assert merge_attn_states(out, *inputs) is None
        return out

    assert_same(compiled(without)(*parts()), merged(*parts())[0])


@pytest.mark.parametrize("index", (0, 2))
def test_compiled_merge_in_place(index):
    def in_place(*inputs: torch.Tensor) -> None:
        merge_attn_states(inputs[index], *inputs, inputs[index + 1])

    inputs = parts()
    compiled(in_place)(*inputs)
    assert_same(inputs[index : index + 2], merged(*parts()))


@pytest.mark.parametrize("strict", (False, True))
def test_exported_merge_serves_other_lengths(strict):
    rows = torch.export.Dim("rows")
    shapes = (({0: rows}, {1: rows}, {0: rows}, {1: rows}),)
    program = torch.export.export(Merge(), parts(), dynamic_shapes=shapes, strict=strict)
    assert calls(program.graph_module, MERGE) == 1
    for count in (5, 1, 17):
        assert_same(program.module()(*parts(count)), merged(*parts(count)))


def test_merge_on_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        out, lse = merged(*map(mode.from_tensor, parts()))
    assert isinstance(out, FakeTensor) and isinstance(lse, FakeTensor)
    assert (out.shape, out.dtype) == ((5, HEADS, DIM), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((HEADS, 5), torch.float32)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    (
        (0, lambda x: x.half(), "suffix_output: got torch.bfloat16"),
        (1, lambda x: x.bfloat16(), "prefix_lse: got torch.bfloat16"),
        (3, lambda x: x[:3], "suffix_lse: got torch.float32"),
    ),
)
def test_merge_refusals_keep_their_message(index, change, message):
    inputs = list(parts())
    out = torch.empty_like(inputs[0]) if index else torch.empty_like(inputs[0].half())
    inputs[index] = change(inputs[index])
    expected = re.escape(f"merge_attn_states: {message}")
    for run in (merge_attn_states, compiled(merge_attn_states), MERGE):
        with pytest.raises(Exception, match=expected):
            run(out, *inputs, None)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=expected):
        merge_attn_states(*map(mode.from_tensor, (out, *inputs)))


def test_merge_refuses_gradients():
    first, *others = parts(dtype=torch.float32)
    for run in (compiled(merged), merged):
        with pytest.raises(
            Exception, match="merge_attn_states: prefix_output: got requires_grad=True"
        ):
            run(first.clone().requires_grad_(), *others)
    with torch.no_grad():
        compiled(merged)(first.clone().requires_grad_(), *others)


@pytest.mark.parametrize("with_lse", (False, True))
def test_merge_opcheck(with_lse):
    inputs = parts()
    lse = torch.zeros_like(inputs[1]) if with_lse else None
    torch.library.opcheck(MERGE, (torch.zeros_like(inputs[0]), *inputs, lse))
