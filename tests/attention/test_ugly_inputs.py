"""Inputs that have burnt users of comparable kernels, on CPU tensors and on the GPU.

The bodies are the same for both devices; sizes shrink on the CPU, where the reference answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels import flash_attn_varlen_func
from tests.attention.helpers import Inputs, attend, check, exact
from tests.cases import CACHES, AttentionCase, make_inputs, spread, with_cache, write_pages
from tests.compare import assert_bit_equal, assert_lse_close, assert_output_close, relative_error


def assert_same(inputs: Inputs, expected: tuple[torch.Tensor, torch.Tensor], what: str) -> None:
    out, lse = attend(inputs)
    assert_bit_equal(out, expected[0], f"out, {what}")
    assert_bit_equal(lse, expected[1], f"LSE, {what}")


def case_of(name: str, *kv_lens: int, q_len: int = 1, **fields: object) -> AttentionCase:
    return AttentionCase(id=name, kv_lens=kv_lens, q_lens=(q_len,) * len(kv_lens), **fields)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("q_len", (1, 4))
@pytest.mark.parametrize("window", ((-1, -1), (100, 0)))
@pytest.mark.parametrize("layout", ("NHD", "HND", "interleaved"))
@pytest.mark.parametrize(("head_size", "page_size"), ((64, 16), (128, 64), (256, 32), (512, 128)))
def test_unused_memory_never_reaches_the_output(
    device, head_size, page_size, layout, window, q_len, cache
):
    case = case_of(
        "poison", 1, 65, 700, 0, 129, q_len=q_len, window=window, layout=layout,
        head_size=head_size, page_size=page_size,
    )  # fmt: skip
    case = with_cache(case, cache)
    out, lse = check(make_inputs(case, device, fill="poison"))
    assert_same(make_inputs(case, device, fill="zero"), (out, lse), "unused memory zero")


@pytest.mark.parametrize("first", (-1, 2**31 - 1, -(2**31)))
def test_table_tails_hold_anything(device, first):
    inputs = make_inputs(case_of("tail", 64, 1, 300), device)
    expected = check(inputs)
    width = inputs["block_table"].shape[1]
    wide = torch.full((3, 4096), first, dtype=torch.int32, device=device)
    for row, pages in enumerate((1, 1, 5)):
        wide[row, :pages] = inputs["block_table"][row, :pages]
    check({**inputs, "block_table": wide})
    # A slice of a wider table, as engines pass it: the row stride is not the width.
    assert_same({**inputs, "block_table": wide[:, :width]}, expected, f"tail {first}")


@pytest.mark.parametrize("cache", CACHES[:2])
@pytest.mark.parametrize("num_splits", (0, 1, 32))
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize(
    ("kv_lens", "q_lens"),
    (
        ((0, 0, 0), (1, 1, 1)),
        ((0, 500, 0, 70), (1, 1, 1, 1)),
        ((500, 70, 0), (0, 2, 0)),
        ((500, 0), (0, 0)),
        ((0, 0), (0, 0)),
        ((), ()),
    ),
)
def test_nothing_to_attend(device, kv_lens, q_lens, sinks, num_splits, cache):
    case = AttentionCase(
        id="empty", kv_lens=kv_lens, q_lens=q_lens, sinks=sinks, num_splits=num_splits
    )
    inputs = make_inputs(with_cache(case, cache), device)
    out, lse = check(inputs)
    row = 0
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        if kv_len == 0:
            assert (out[row : row + q_len] == 0).all()
            expected = inputs["s_aux"] if sinks else torch.full((8,), -math.inf, device=device)
            for rows in lse[:, row : row + q_len].unbind(1):
                torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)
        row += q_len


def test_no_sequences_without_out(device):
    inputs = make_inputs(AttentionCase(id="none", kv_lens=(), q_lens=()), device)
    del inputs["return_softmax_lse"]
    out = flash_attn_varlen_func(**inputs)
    assert (out.shape, out.dtype) == ((0, 8, 128), torch.bfloat16)


@pytest.mark.parametrize("live", (0, 1, 3))
def test_out_longer_than_the_queries(device, live):
    inputs = make_inputs(case_of("longer", *(300, 70, 5)[:live]), device)
    padded = torch.full((8, 8, 128), math.nan, dtype=torch.bfloat16, device=device)
    padded[:live] = inputs["q"]
    out = torch.full_like(padded, 7.0)
    got, lse = attend({**inputs, "q": padded, "out": out})
    expected, expected_lse = exact(inputs)
    assert (got[live:] == 7.0).all(), "rows beyond cu_seqlens_q[-1] were written"
    assert lse.shape == (8, 8)
    assert_output_close(got[:live], expected)
    assert_lse_close(lse[:, :live], expected_lse)


@pytest.mark.parametrize("cache", CACHES[:2])
@pytest.mark.parametrize("num_splits", (0, 32))
def test_growing_sequences(device, num_splits, cache):
    step = 1 if device == "cuda" else 61
    case = case_of("grow", 2000, 2000, num_splits=num_splits)
    inputs = make_inputs(with_cache(case, cache), device)
    for kv_len in range(1, 2001, step):
        inputs["seqused_k"] = torch.tensor([kv_len, 2000 - kv_len], device=device).int()
        out, lse = attend(inputs)
        reference, reference_lse = exact(inputs)
        assert_output_close(out, reference)
        assert_lse_close(lse, reference_lse)


@pytest.mark.parametrize("scale_kind", ("none", "full"))
@pytest.mark.parametrize("window", (127, 1024))
@pytest.mark.parametrize("num_splits", (0, 1, 32))
def test_window_with_splits_and_sinks(device, window, num_splits, scale_kind):
    case = case_of(
        "window", 28000, 27001, 100, window=(window, 0), num_splits=num_splits, sinks=True,
        num_kv_heads=1, head_size=64, scale_kind=scale_kind,
    )  # fmt: skip
    # Codes without a descale are 60 times larger: keep the scores where they are.
    scale = 64**-0.5 / (60.0 if scale_kind == "none" else 1.0)
    inputs = {**make_inputs(case, device), "softmax_scale": scale}
    _, lse = check(inputs)
    _, without_sinks = exact({**inputs, "s_aux": None})
    expected = torch.logaddexp(without_sinks, inputs["s_aux"].double()[:, None])
    assert_lse_close(lse, expected)


@pytest.mark.parametrize("cache", CACHES[:2])
@pytest.mark.parametrize("head_size", (64, 256))
def test_two_softcaps_in_a_row(device, head_size, cache):
    case = case_of("softcap", 500, 70, q_magnitude=12.0, head_size=head_size)
    inputs = make_inputs(with_cache(case, cache), device)
    outs = [check({**inputs, "softcap": softcap})[0] for softcap in (30.0, 5.0, 0.0, 30.0)]
    assert_bit_equal(outs[3], outs[0], "the first softcap again")
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert relative_error(outs[a], outs[b]) > 0.02


def test_softcap_mask_and_descale_in_order(device):
    """With the cap before the descale, or after the mask, the answer is far off."""
    case = case_of("order", 500, 70, q_magnitude=12.0, softcap=4.0, window=(100, 0), q_len=3)
    inputs = make_inputs(case, device)
    out, _ = check(inputs)
    one = torch.ones((), device=device)
    before = {**inputs, "softcap": 4.0 * 60.0, "k_descale": one, "softmax_scale": 128**-0.5}
    assert relative_error(exact(before)[0], out) > 0.1


@pytest.mark.parametrize("scale_kind", ("expanded", "batch", "head", "full"))
@pytest.mark.parametrize("head_size", (128, 512))
def test_queries_beyond_fp16_range(device, head_size, scale_kind):
    case = case_of(
        "large-q", 300, 64, 1000, q_len=2, head_size=head_size, softmax_scale=1.0,
        scale_kind=scale_kind, k_scale=0.003, v_scale=30.0,
    )  # fmt: skip
    inputs = make_inputs(case, device)
    magnitude = torch.logspace(-3, 5, inputs["q"].shape[0] * 8, device=device).view(-1, 8, 1)
    q = inputs["q"].float()
    inputs["q"] = (q / q.abs().amax(-1, keepdim=True) * magnitude).to(torch.bfloat16)
    assert inputs["q"].abs().max() > 9e4
    out, _ = check(inputs)
    assert out.abs().max() > 1e3


@pytest.mark.parametrize("head_size", (64, 128, 256, 512))
def test_queries_and_keys_beyond_fp16_range(device, head_size):
    """In a bf16 cache: neither they nor the values are ever fp16."""
    case = case_of(
        "large", 300, 64, 1000, q_len=2, head_size=head_size, q_magnitude=1e6, softmax_scale=1e-12
    )
    inputs = make_inputs(with_cache(case, "bf16"), device)
    for name in "kv":
        inputs[name].mul_(1e6)
    out, _ = check(inputs)
    assert out.abs().max() > 1e5


@pytest.mark.parametrize("scale_kind", ("scalar", "one", "per_head", "expanded", "batch", "head"))
def test_descale_strides(device, scale_kind):
    case = case_of("strides", 300, 70, 129, scale_kind=scale_kind, num_q_heads=6)
    inputs = make_inputs(case, device)
    expected = check(inputs)
    full = {n: inputs[n].broadcast_to(3, 2).contiguous() for n in ("k_descale", "v_descale")}
    assert_same({**inputs, **full}, expected, "descales materialised")


def test_one_sequence_with_expanded_scales_then_more(device):
    for batch in (1, 3, 1):
        kv_lens = spread(batch, 10, 400)
        for kind in ("expanded", "full"):
            check(make_inputs(case_of("b1", *kv_lens, scale_kind=kind), device))


def test_max_seqlen_forms(device):
    inputs = make_inputs(case_of("max", 300, 70, 129, q_len=2), device)
    expected = check(inputs)
    for maximum in (torch.tensor(2), torch.tensor(2, dtype=torch.int32)):
        assert_same({**inputs, "max_seqlen_q": maximum}, expected, f"max_seqlen_q={maximum!r}")
    # Looser bounds, that of an unread device tensor among them, may take another kernel variant.
    for maximum in (torch.tensor(2, dtype=torch.int32, device=device), 6, 10**6):
        check({**inputs, "max_seqlen_q": maximum})
    for maximum in (torch.tensor(300, device=device), 300, 10**6):
        assert_same({**inputs, "max_seqlen_k": maximum}, expected, f"max_seqlen_k={maximum!r}")


@pytest.mark.parametrize("cache", CACHES[:2])
@pytest.mark.parametrize("head_size", (64, 512))
def test_strides_may_change_between_calls(device, head_size, cache):
    """The same values in four layouts, one after another: equal bits."""
    base = with_cache(case_of("strides", 300, 70, 129, q_len=2, head_size=head_size), cache)
    inputs = make_inputs(base, device)
    expected = check(inputs)
    for layout in ("HND", "interleaved", "NHD"):
        other = make_inputs(replace(base, layout=layout), device)
        assert other["k"].stride() != inputs["k"].stride() or layout == "NHD"
        assert_same(other, expected, layout)
    wide = torch.full((6, 20, head_size), math.nan, dtype=torch.bfloat16, device=device)
    wide[:, 5:13] = inputs["q"]
    assert_same({**inputs, "q": wide[:, 5:13]}, expected, "q from a wider projection")
    head_major = inputs["q"].transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.full_like(wide, 7.0)
    assert_same({**inputs, "q": head_major, "out": out[:, 2:10]}, expected, "head-major q")
    assert (out[:, :2] == 7.0).all() and (out[:, 10:] == 7.0).all()


def test_cross_layer_pool_with_an_offset(device):
    """K and V are slices of one pool of all layers; neither starts at its beginning."""
    inputs = make_inputs(case_of("layers", 300, 70, 129), device)
    expected = check(inputs)
    pages, page_size, heads, dim = inputs["k"].shape
    pool = torch.full(
        (pages, 3, 2, page_size, heads, dim), 0x7F, dtype=torch.uint8, device=device
    ).view(torch.float8_e4m3fn)
    for side, name in enumerate("kv"):
        view = pool[:, 1, side]
        for page in range(pages):
            write_pages(view, [page], inputs[name][page])
        inputs[name] = view
        assert view.storage_offset() > 0 and view.stride(0) == 6 * page_size * heads * dim
    assert_same(inputs, expected, "cross-layer strides")


def test_a_neighbour_does_not_change_a_repeated_call(device):
    """Another problem between two equal calls leaves no trace in workspaces or caches."""
    inputs = make_inputs(case_of("first", 700, 70, q_len=2), device)
    expected = check(inputs)
    for kv_lens in ((5000,), spread(40, 1, 300), (0,)):
        attend(make_inputs(case_of("between", *kv_lens, q_len=2), device))
        assert_same(inputs, expected, "after another problem")


def test_without_lse_the_output_alone_is_returned(device):
    inputs = make_inputs(case_of("alone", 300, 70), device)
    out = flash_attn_varlen_func(**{**inputs, "return_softmax_lse": False})
    assert isinstance(out, torch.Tensor)
    assert_output_close(out, exact(inputs)[0])


def test_refusals_come_before_any_work(device):
    inputs = make_inputs(case_of("refused", 70), device)
    with pytest.raises(ValueError, match="fa_version"):
        flash_attn_varlen_func(**inputs, fa_version=3)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn_varlen_func(**inputs, dropout_p=0.5)
