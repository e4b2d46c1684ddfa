"""`flash_attn_varlen_func` on NVFP4 caches: the kernel on a GPU, the torch reference elsewhere.

What the formats share (schedule, masks, epilogue) is tested with FP8 in more detail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels import (
    dequantize_nvfp4,
    flash_attn_varlen_func,
    quantize_nvfp4,
    reshape_and_cache,
    split_nvfp4,
)
from tests.attention.helpers import attend, check, exact
from tests.cases import AttentionCase, cumulative
from tests.compare import assert_bit_equal, assert_lse_close, assert_output_close
from tests.nvfp4_cases import NAN_SCALES, NVFP4_CASES, make_nvfp4_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEAD_SIZES = (64, 128, 256, 512)


def simple(**fields) -> AttentionCase:
    fields = {"kv_lens": (300, 70, 129), "q_lens": (2, 2, 2), "head_size": 128, **fields}
    return AttentionCase(id="simple", **fields)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", NVFP4_CASES, ids=lambda case: case.id)
def test_against_the_float64_reference(device, case):
    check(make_nvfp4_inputs(case, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_as_a_dequantized_cache(device, head_size):
    """Codes times block scales are bf16 numbers, so a bf16 cache holds the same keys and values."""
    case = simple(head_size=head_size, scale_kind="none", softmax_scale=1e-4)
    inputs = make_nvfp4_inputs(case, device)
    out, lse = attend(inputs)
    plain = {name: x for name, x in inputs.items() if not name.endswith("block_scale")}
    for name in "kv":
        scale = inputs[f"{name}_block_scale"].view(torch.uint8)
        x = dequantize_nvfp4(inputs[name].contiguous(), scale.contiguous(), 1.0)
        plain[name] = x.to(torch.bfloat16)
        assert torch.equal(plain[name].float().nan_to_num(), x.nan_to_num())
    reference, reference_lse = exact(plain)
    assert_output_close(out, reference)
    assert_lse_close(lse, reference_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_code_and_every_scale(device, head_size):
    """One key a sequence, so that the output is that value: the conversion is exact."""
    groups = head_size // 16
    scales = torch.arange(256).repeat_interleave(16)
    scales = scales[(scales & 0x7F) != 0x7F].to(torch.uint8)  # no NaN
    codes = torch.arange(16).repeat(254).to(torch.uint8)
    tokens = len(codes) // groups
    codes, scales = (x[: tokens * groups].view(tokens, 1, groups) for x in (codes, scales))
    data = (codes | codes << 4).repeat_interleave(8, dim=-1).to(device)
    q = torch.ones((tokens, 1, head_size), dtype=torch.bfloat16, device=device)
    at = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    scales = scales.contiguous().to(device)
    arguments = (q, data, data, 1, at, 1, at)
    out = flash_attn_varlen_func(*arguments, k_block_scale=scales, v_block_scale=scales)
    expected = dequantize_nvfp4(data, scales, 1.0)
    assert torch.equal(out.float(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ("nvfp4", "nvfp4_4over6"))
@pytest.mark.parametrize("order", ("NHD", "HND"))
def test_what_our_store_writes(device, name, order):
    tokens, heads, head_size, page = 200, 2, 128, 64
    key, value = torch.randn((2, tokens, heads, head_size), device=device).to(torch.bfloat16)
    shape = (5, 2, page, heads, head_size // 16 * 9)
    if order == "HND":
        shape = (5, 2, heads, page, head_size // 16 * 9)
    cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
    sides = [cache[:, i] if order == "NHD" else cache[:, i].transpose(1, 2) for i in range(2)]
    table = torch.tensor([[4, 0, 3, 1]], device=device)
    position = torch.arange(tokens, device=device)
    slots = table[0, position // page] * page + position % page
    scales = [torch.tensor([s], device=device) for s in (0.01, 0.02)]
    reshape_and_cache(key, value, *sides, slots, name, *scales)
    (k, k_scale), (v, v_scale) = map(split_nvfp4, sides)
    arguments = {
        "q": torch.randn((1, 8, head_size), device=device).to(torch.bfloat16),
        "max_seqlen_q": 1,
        "cu_seqlens_q": cumulative((1,), device),
        "max_seqlen_k": tokens,
    }
    out, lse = flash_attn_varlen_func(
        **arguments, k=k, v=v, k_block_scale=k_scale, v_block_scale=v_scale,
        seqused_k=torch.tensor([tokens], dtype=torch.int32, device=device),
        block_table=table.to(torch.int32), k_descale=scales[0], v_descale=scales[1],
        return_softmax_lse=True,
    )  # fmt: skip
    rounded = [
        dequantize_nvfp4(*quantize_nvfp4(x, s, name, side=side), s)
        for x, s, side in ((key, scales[0], "k"), (value, scales[1], "v"))
    ]
    q = arguments["q"].double().view(heads, 4, head_size)
    k, v = (x.double().transpose(0, 1) for x in rounded)
    scores = q @ k.transpose(1, 2) * head_size**-0.5
    assert_output_close(out, (scores.softmax(-1) @ v).view(1, 8, head_size))
    assert_lse_close(lse, scores.logsumexp(-1).view(8, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("code", NAN_SCALES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_scales_of_other_tokens_never_reach_the_output(device, code, head_size):
    """Past the end and before the window, in pages of 16 and 64: NaN or zero, the same bits."""
    for page_size in (16, 64):
        case = simple(head_size=head_size, page_size=page_size, window=(90, 0), sinks=True)
        inputs = make_nvfp4_inputs(case, device)
        expected = attend(inputs)
        assert expected[0].isfinite().all() and expected[1].isfinite().all()
        for other in (code, 0):
            for name in ("k_block_scale", "v_block_scale"):
                scale = inputs[name].view(torch.uint8)
                scale[(scale & 0x7F) == 0x7F] = other
            for got, want in zip(attend(inputs), expected, strict=True):
                assert_bit_equal(got, want, f"page {page_size}, byte {other:#x}")


@pytest.mark.parametrize("device", DEVICES)
def test_strides_do_not_change_the_bits(device):
    for head_size in HEAD_SIZES:
        case = simple(head_size=head_size, num_q_heads=16, num_kv_heads=4)
        expected = attend(make_nvfp4_inputs(case, device))
        for layout in ("HND", "interleaved"):
            inputs = make_nvfp4_inputs(replace(case, layout=layout), device)
            for got, want in zip(attend(inputs), expected, strict=True):
                assert_bit_equal(got, want, layout)


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_call_takes_new_scales(device):
    """The second call is a prepared one: addresses are the call's own."""
    first = make_nvfp4_inputs(simple(), device)
    attend(first)
    second = make_nvfp4_inputs(simple(seed=1), device)
    out, lse = attend(second)
    reference, reference_lse = exact(second)
    assert_output_close(out, reference)
    assert_lse_close(lse, reference_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_captured_call_serves_other_lengths(head_size):
    case = simple(head_size=head_size, kv_lens=(900, 900, 900))
    inputs = make_nvfp4_inputs(case, "cuda")
    out = torch.empty_like(inputs["q"])
    call = {**inputs, "out": out}
    flash_attn_varlen_func(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = flash_attn_varlen_func(**call)
    for lengths in ((900, 900, 900), (1, 0, 64), (500, 899, 130)):
        inputs["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        reference, reference_lse = exact(inputs)
        assert_output_close(out, reference)
        assert_lse_close(lse, reference_lse)


@pytest.mark.gpu
def test_unaligned_scales_take_the_reference_and_say_so():
    inputs = make_nvfp4_inputs(simple(head_size=512), "cuda")
    scale = inputs["k_block_scale"]
    moved = torch.zeros((*scale.shape[:-1], scale.shape[-1] + 8), dtype=torch.uint8, device="cuda")
    moved[..., 8:] = scale.view(torch.uint8)
    inputs["k_block_scale"] = moved[..., 8:]
    with pytest.warns(UserWarning, match="k_block_scale at offset 8"):
        out, _ = attend(inputs)
    assert_output_close(out, exact(inputs)[0])


REFUSALS = (
    ({"k_block_scale": None}, ValueError, "k_block_scale: got None; accepted: float8_e4m3fn or"),
    ({"v_block_scale": torch.zeros(3)}, ValueError, r"v_block_scale: got float32 \(3,\)"),
    ({"k_block_scale": None, "v_block_scale": None}, ValueError, "k: got uint8 .*block scales"),
    ({"v_scale_layout": "sm100"}, NotImplementedError, "v_scale_layout: got 'sm100'"),
    ({"q": torch.zeros((6, 8, 120)).bfloat16()}, ValueError, "q: got head size 120; .* of 16"),
    ({"q": torch.zeros((6, 8, 64)).bfloat16()}, ValueError, "k: got head size 64; .* 32 bytes"),
)


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_refusals(change, error, message):
    inputs = make_nvfp4_inputs(simple())
    with pytest.raises(error, match="^flash_attn_varlen_func: " + message):
        flash_attn_varlen_func(**(inputs | change))
