"""Every refusal of `flash_attn_varlen_func`, and everything unusual that it accepts."""

from __future__ import annotations

import math

import pytest
import torch

from cute_kernels.attention.arguments import validate
from tests.cases import AttentionCase, make_inputs

CASE = AttentionCase(
    id="arguments", kv_lens=(100, 3, 70), q_lens=(1, 2, 1), num_q_heads=8, num_kv_heads=2,
    head_size=64, scale_kind="none",
)  # fmt: skip
RAGGED = AttentionCase(
    id="ragged", kv_lens=(9, 3, 7), q_lens=(1, 2, 1), head_size=64, page_size=None
)
FP8 = torch.float8_e4m3fn


@pytest.fixture
def inputs() -> dict:
    return make_inputs(CASE)


def float32(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def paged(*shape: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(FP8).to(dtype)


INVALID = {
    "q-list": ("q", [1.0], r"q: got \[1.0\]; accepted: a bfloat16 or float16 \(total_q, Hq, D\)"),
    "q-float32": ("q", float32(4, 8, 64), r"q: got float32 \(4, 8, 64\)"),
    "q-rank": ("q", bf16(4, 512), r"q: got bfloat16 \(4, 512\)"),
    "q-stride": ("q", bf16(4, 8, 128)[..., ::2], r"q: .*strides \(1024, 128, 2\).*contiguous last"),
    "q-no-heads": ("q", bf16(4, 0, 64), "q: .*Hq >= 1"),
    "k-rank": ("k", paged(4, 2, 64), r"k: .*accepted: \(num_blocks, block_size, Hkv, D\) with"),
    "k-dtype": ("k", float32(9, 64, 2, 64), "k: got float32 .*torch.bfloat16.*float8_e4m3fn"),
    "k-fp16-with-bf16-q": ("k", paged(9, 64, 2, 64, dtype=torch.float16), "k: got float16"),
    "k-e5m2": ("k", paged(9, 64, 2, 64).to(torch.float8_e5m2), "k: got float8_e5m2"),
    "k-uint8": ("k", paged(9, 64, 2, 64).view(torch.uint8), r"k: .*\.view\(torch.float8_e4m3fn\)"),
    "k-stride": ("k", paged(9, 64, 2, 128)[..., ::2], "k: .*contiguous last dim"),
    "k-device": ("k", paged(9, 64, 2, 64).to("meta"), "k: .*on meta; accepted: .*q's device, cpu"),
    "k-head-size": ("k", paged(9, 64, 2, 128), "k: got head size 128; accepted: q's head size, 64"),
    "k-heads": ("k", paged(9, 64, 3, 64), "k: got 3 KV heads; accepted: a divisor .* 8"),
    "k-no-heads": ("k", paged(9, 64, 0, 64), "k: got 0 KV heads"),
    "k-block-size": ("k", paged(9, 0, 2, 64), "k: got block_size 0"),
    "v-shape": ("v", paged(7, 64, 2, 64), r"v: got .*\(7, 64, 2, 64\).*accepted: k's shape"),
    "v-head-size": ("v", paged(9, 64, 2, 128), "v: got .* k's shape and dtype"),
    "v-dtype": ("v", paged(9, 64, 2, 64, dtype=torch.bfloat16), "v: got bfloat16"),
    "cu-q-none": ("cu_seqlens_q", None, "cu_seqlens_q: got None; accepted: a one-dimensional"),
    "cu-q-int64": ("cu_seqlens_q", int32(4).long(), "cu_seqlens_q: got int64"),
    "cu-q-empty": ("cu_seqlens_q", int32(0), r"cu_seqlens_q: .*shape \(B \+ 1,\)"),
    "cu-q-rank": ("cu_seqlens_q", int32(4, 1), "cu_seqlens_q: .*one-dimensional"),
    "cu-q-device": ("cu_seqlens_q", int32(4).to("meta"), "cu_seqlens_q: .*q's device, cpu"),
    "cu-k-length": ("cu_seqlens_k", int32(3), r"cu_seqlens_k: .*shape \(4,\)"),
    "used-none": ("seqused_k", None, "seqused_k: got None"),
    "used-length": ("seqused_k", int32(4), r"seqused_k: .*shape \(3,\)"),
    "used-int64": ("seqused_k", int32(3).long(), "seqused_k: got int64"),
    "used-stride": ("seqused_k", int32(3, 2)[:, 0], "seqused_k: .*a contiguous tensor"),
    "table-int64": ("block_table", int32(3, 4).long(), r"block_table: .*int32 \(B, max_blocks\)"),
    "table-rank": ("block_table", int32(3), "block_table: got"),
    "table-rows": ("block_table", int32(2, 4), r"block_table: .*shape \(3, max_blocks\)"),
    "table-device": ("block_table", int32(3, 4).to("meta"), "block_table: .*q's device"),
    "table-stride": ("block_table", int32(3, 8)[:, ::2], "block_table: .*contiguous last dim"),
    "scale-number": ("k_descale", 0.5, "k_descale: got 0.5; accepted: None or a float32 tensor"),
    "scale-dtype": ("k_descale", float32(1).double(), "k_descale: got float64"),
    "scale-shape": ("v_descale", float32(3), r"v_descale: .*\(Hkv,\) = \(2,\) or \(B, Hkv\)"),
    "scale-transposed": ("k_descale", float32(2, 3), "k_descale: got .*shape"),
    "scale-device": ("v_descale", float32(1).to("meta"), "v_descale: .*q's device"),
    "sinks-shape": ("s_aux", float32(2), r"s_aux: .*shape \(Hq,\) = \(8,\)"),
    "sinks-dtype": ("s_aux", int32(8), "s_aux: got int32"),
    "sinks-device": ("s_aux", float32(8).to("meta"), "s_aux: .*q's device"),
    "out-shape": ("out", bf16(5, 8, 64), r"out: got .*accepted: q's shape.*\(4, 8, 64\)"),
    "out-dtype": ("out", bf16(4, 8, 64).half(), "out: got float16"),
    "out-device": ("out", bf16(4, 8, 64).to("meta"), "out: .*on meta"),
    "out-stride": ("out", bf16(4, 8, 128)[..., ::2], "out: .*contiguous last dim"),
    "k-tuple": (
        "k",
        (bf16(1, 2), bf16(3)),
        r"k: got a tuple of 2: bfloat16 \(1, 2\) .*; bfloat16 \(3,\) .*accepted: \(num_blocks",
    ),
    "version-real": ("fa_version", 4.0, "fa_version: got 4.0; accepted: None or 4, an int"),
    "version-text": ("fa_version", "4", "fa_version: got '4'; accepted: None or 4, an int"),
    "out-expanded": ("out", bf16(1, 8, 64).expand(4, 8, 64), "out: .*do not share memory"),
    "scale-nan": ("softmax_scale", math.nan, "softmax_scale: got nan; accepted: .*finite"),
    "scale-inf": ("softmax_scale", math.inf, "softmax_scale: got inf"),
    "scale-overflow": ("softmax_scale", 1e39, "softmax_scale: got 1e[+]39"),
    "scale-negative": ("softmax_scale", -1.0, "softmax_scale: got -1.0"),
    "scale-tensor": ("softmax_scale", torch.tensor(1.0), "softmax_scale: got float32"),
    "softcap-negative": ("softcap", -1.0, "softcap: got -1.0; accepted: 0 .none. or a .* 2.-100"),
    "softcap-nan": ("softcap", math.nan, "softcap: got nan"),
    "softcap-inf": ("softcap", math.inf, "softcap: got inf"),
    "window-int": ("window_size", 128, r"window_size: got 128; accepted: None or \(left, right\)"),
    "window-length": ("window_size", (1, 2, 3), "window_size: got"),
    "window-negative": ("window_size", (-2, 0), r"window_size: got \(-2, 0\)"),
    "window-float": ("window_size", (1.0, 0), r"window_size: got \(1.0, 0\)"),
    "splits-negative": ("num_splits", -1, "num_splits: got -1; accepted: an int >= 0"),
    "splits-float": ("num_splits", 2.0, "num_splits: got 2.0"),
    "max-q-negative": ("max_seqlen_q", -1, "max_seqlen_q: got -1"),
    "max-q-none": ("max_seqlen_q", None, "max_seqlen_q: got None"),
    "max-q-float": ("max_seqlen_q", torch.tensor(1.0), "max_seqlen_q: got float32"),
    "max-q-vector": ("max_seqlen_q", int32(1), r"max_seqlen_q: got int32 \(1,\).*0-d"),
    "max-k-float": ("max_seqlen_k", 3.5, "max_seqlen_k: got 3.5"),
    "k-block-scale": ("k_block_scale", float32(1), "k_block_scale: got .*accepted: None, as"),
    "v-block-scale": ("v_block_scale", float32(1), "v_block_scale: got .*accepted: None, as"),
    "scale-layout": ("v_scale_layout", "sm90", "v_scale_layout: got 'sm90'; accepted: 'linear'"),
    "version-2": ("fa_version", 2, "fa_version: got 2; accepted: None or 4"),
    "version-3": ("fa_version", 3, "fa_version: got 3"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid(inputs, name, value, message):
    for given in {"k": ("k", "v")}.get(name, (name,)):
        inputs[given] = value
    with pytest.raises(ValueError, match="^flash_attn_varlen_func: " + message):
        validate(**inputs)


@pytest.mark.parametrize("side", ("k", "v"))
def test_an_output_that_is_a_view_of_the_cache_is_refused(inputs, side):
    cache = bf16(9, 64, 2, 64)
    inputs["k"], inputs["v"] = bf16(9, 64, 2, 64), bf16(9, 64, 2, 64)
    inputs[side] = cache
    del inputs["k_descale"], inputs["v_descale"]
    for first in (0, 70):
        inputs["out"] = cache.view(-1, 8, 64)[first : first + 4]
        with pytest.raises(ValueError, match=f"out: got .*, memory of {side}; accepted: memory ap"):
            validate(**inputs)
    memory = bf16(4 * 8 * 64 + cache.numel())
    inputs["out"], rest = memory[: 4 * 8 * 64].view(4, 8, 64), memory[4 * 8 * 64 :]
    inputs[side] = rest.view(cache.shape)
    assert validate(**inputs).out is inputs["out"]


NOT_IMPLEMENTED = {
    "scale-layout": ("v_scale_layout", "sm100", "v_scale_layout: got 'sm100'; .* swizzled"),
    "q-descale": ("q_descale", float32(1), r"q_descale: got float32 \(1,\)"),
    "alibi": ("alibi_slopes", float32(8), "alibi_slopes: got"),
    "dropout": ("dropout_p", 0.1, "dropout_p: got 0.1; accepted: None, 0, False"),
    "mask-mod": ("mask_mod", len, "mask_mod: got <built-in"),
    "world-size": ("cp_world_size", 2, "cp_world_size: got 2; accepted: None, 0, False or 1"),
    "rank": ("cp_rank", 1, "cp_rank: got 1"),
    "attention-probabilities": ("return_attn_probs", True, "return_attn_probs: got True"),
    "zero-tensor": ("q_v", torch.zeros(()), "q_v: got float32"),
    "metadata": ("scheduler_metadata", int32(4), "scheduler_metadata: got int32"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"), NOT_IMPLEMENTED.values(), ids=NOT_IMPLEMENTED.keys()
)
def test_not_implemented(inputs, name, value, message):
    with pytest.raises(NotImplementedError, match="^flash_attn_varlen_func: " + message):
        validate(**inputs, **{name: value})


def test_neutral_values_of_other_engines_pass(inputs):
    neutral = {
        "q_v": None, "dropout_p": 0.0, "alibi_slopes": None, "return_attn_probs": False,
        "q_descale": None, "scheduler_metadata": None, "cp_world_size": 1, "cp_rank": 0,
        "cp_tot_seqused_k": None, "mask_mod": None, "output_scale": None, "sm_margin": 0,
    }  # fmt: skip
    plain, with_neutral = validate(**inputs), validate(**inputs, **neutral)
    assert all(a is b or a == b for a, b in zip(plain, with_neutral, strict=True))


def test_an_unknown_name_is_a_type_error(inputs):
    with pytest.raises(TypeError, match="unexpected keyword argument 'sofcap'"):
        validate(**inputs, sofcap=None)


@pytest.mark.parametrize("name", ("q", "k", "v", "s_aux", "out"))
def test_gradients_are_refused(name):
    case = AttentionCase(
        id="grad", kv_lens=(9,), q_lens=(1,), kv_dtype=torch.bfloat16, scale_kind="none", sinks=True
    )
    inputs = make_inputs(case)
    inputs["out"] = torch.empty_like(inputs["q"])
    inputs[name] = inputs[name].detach().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: got requires_grad=True"):
        validate(**inputs)
    with torch.no_grad():
        validate(**inputs)


@pytest.mark.parametrize("name", ("k_descale", "v_descale"))
def test_a_cache_without_scales_refuses_them(name):
    case = AttentionCase(
        id="bf16", kv_lens=(9,), q_lens=(1,), kv_dtype=torch.bfloat16, scale_kind="none"
    )
    with pytest.raises(
        ValueError, match=f"{name}: .*None, as a torch.bfloat16 cache has no scales"
    ):
        validate(**{**make_inputs(case), name: float32(1)})


def test_paged_and_ragged_are_not_mixed(inputs):
    with pytest.raises(ValueError, match=r"k: .*\(total_k, Hkv, D\) without block_table"):
        validate(**{**inputs, "block_table": None, "cu_seqlens_k": int32(4)})
    ragged = make_inputs(RAGGED)
    with pytest.raises(ValueError, match="cu_seqlens_k: got None"):
        validate(**{**ragged, "cu_seqlens_k": None})
    with pytest.raises(ValueError, match="cu_seqlens_k: got None"):
        validate(**{**ragged, "cu_seqlens_k": None, "seqused_k": int32(3)})
    with pytest.raises(
        ValueError, match=r"k: .*\(num_blocks, block_size, Hkv, D\) with block_table"
    ):
        validate(**{**ragged, "block_table": int32(3, 1)})


@pytest.mark.parametrize(
    ("shape", "strides"), (((), (0, 0)), ((1,), (0, 0)), ((2,), (0, 1)), ((3, 2), (2, 1)))
)
def test_descales_become_views(inputs, shape, strides):
    scale = torch.rand(shape)
    viewed = validate(**{**inputs, "k_descale": scale}).k_descale
    assert (viewed.shape, viewed.stride()) == ((3, 2), strides)
    assert viewed.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("base", ((1, 1), (3, 1), (1, 2)))
def test_expanded_descales_are_not_copied(inputs, base):
    scale = torch.rand(base).expand(3, 2)
    assert validate(**{**inputs, "v_descale": scale}).v_descale is scale


def test_a_descale_vector_is_per_head_where_batch_equals_heads():
    case = AttentionCase(id="equal", kv_lens=(9, 9), q_lens=(1, 1), scale_kind="none")
    scale = torch.tensor([1.0, 2.0])
    problem = validate(**{**make_inputs(case), "k_descale": scale})
    assert problem.k_descale.tolist() == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    (
        (None, False, (-1, -1)),
        (None, True, (-1, 0)),
        ((-1, -1), True, (-1, 0)),
        ((127, 5), True, (127, 0)),
        ([127, 5], False, (127, 5)),
        ((None, None), False, (-1, -1)),
        ((2**31 - 1, 2**40), False, (-1, -1)),
        ((0, 0), False, (0, 0)),
    ),
)
def test_windows(inputs, window, causal, expected):
    problem = validate(**{**inputs, "window_size": window, "causal": causal})
    assert (problem.window_left, problem.window_right) == expected


@pytest.mark.parametrize("given", (2, 99, torch.tensor(2), torch.tensor(99, dtype=torch.int32)))
def test_max_seqlen_q(inputs, given):
    problem = validate(**{**inputs, "max_seqlen_q": given, "max_seqlen_k": given})
    assert problem.max_seqlen_q == min(int(given), 4)
    assert type(problem.max_seqlen_q) is int


def test_max_seqlen_on_a_device_is_not_read(inputs):
    given = torch.tensor(2, device="meta")
    problem = validate(**{**inputs, "max_seqlen_q": given, "max_seqlen_k": given})
    assert problem.max_seqlen_q == 4


def test_defaults(inputs):
    names = ("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k")
    problem = validate(
        *(inputs[name] for name in names),
        None,
        inputs["seqused_k"],
        block_table=inputs["block_table"],
    )
    assert problem.softmax_scale == 64**-0.5
    assert problem.max_seqlen_k == inputs["max_seqlen_k"]
    scalars = (64**-0.5, -1, -1, 0.0, 0, False, None, False)
    assert problem[9:] == (None, None, None, *scalars, None, None)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_sinks_are_converted(inputs, dtype):
    sinks = torch.linspace(-2, 2, 16, dtype=dtype)[::2]
    problem = validate(**{**inputs, "s_aux": sinks})
    assert problem.sinks.dtype is torch.float32 and problem.sinks.is_contiguous()
    assert torch.equal(problem.sinks, sinks.float())


def test_degenerate_strides_of_unit_dims_pass():
    case = AttentionCase(
        id="one", kv_lens=(40,), q_lens=(1,), num_q_heads=1, num_kv_heads=1, head_size=1
    )
    inputs = make_inputs(case)
    for name, shape in (("q", (1, 1, 1)), ("k", tuple(inputs["k"].shape))):
        strides = tuple(7 if size == 1 else size for size in shape)
        wide = torch.zeros(100_000, dtype=torch.bfloat16)
        inputs[name] = wide.as_strided(shape, strides)
    inputs["v"] = inputs["k"]
    for name in ("block_table", "seqused_k"):
        inputs[name] = inputs[name][:, :1] if name == "block_table" else inputs[name]
        inputs[name] = inputs[name].as_strided(inputs[name].shape, (5,) * inputs[name].dim())
    inputs |= {"k_descale": None, "v_descale": None}
    assert validate(**inputs).max_seqlen_q == 1


def test_empty_batches_pass(inputs):
    empty = {
        "q": inputs["q"][:0], "cu_seqlens_q": int32(1), "seqused_k": int32(0),
        "block_table": int32(0, 4), "k_descale": float32(0, 2), "out": inputs["q"][:0],
    }  # fmt: skip
    problem = validate(**{**inputs, **empty})
    assert (problem.max_seqlen_q, problem.k_descale.shape) == (0, (0, 2))
    assert validate(**{**inputs, "q": inputs["q"][:0], "cu_seqlens_q": int32(4)}).max_seqlen_q == 0
