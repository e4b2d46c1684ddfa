"""The torch reference where a float32 intermediate would leave its range, against the formula in
float64, and factors that only look like numbers as float32."""

from __future__ import annotations

import math

import pytest
import torch

from cute_kernels import flash_attn_varlen_func
from tests.cases import AttentionCase, make_inputs

BF16 = torch.bfloat16
CASE = AttentionCase(id="extreme", kv_lens=(40,), q_lens=(1,), page_size=None, scale_kind="none")


def call(q: float = 1.0, k: float = 1.0, kv_dtype=torch.float8_e4m3fn, **changes):
    """Keyword arguments with queries and keys of about these magnitudes."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 64, generator=generator)

    inputs = make_inputs(CASE)
    tensors = {
        "q": (normal(CASE.num_q_heads, 1) * q).to(BF16),
        "k": (normal(CASE.num_kv_heads, 40) * k).to(kv_dtype),
        "v": normal(CASE.num_kv_heads, 40).to(kv_dtype),
    }
    return inputs | tensors | {"causal": False} | changes


def in_float64(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (arguments[name].double() for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    factor = arguments["softmax_scale"] or 64**-0.5
    if arguments["k_descale"] is not None:
        factor = factor * arguments["k_descale"].double()
    scores = torch.einsum("thd,shd->hts", q, k) * factor
    if arguments["softcap"]:
        scores = arguments["softcap"] * torch.tanh(scores / arguments["softcap"])
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


EXTREMES = {
    "large queries": {"q": 1e37, "k": 4.0, "softmax_scale": 1e-37},
    "large queries, small descale": {"q": 1e37, "k": 4.0, "k_descale": torch.tensor(1e-37)},
    "large scale": {"softmax_scale": 1e38, "k_descale": torch.tensor(1e-38)},
    "small scale": {"softmax_scale": 1e-42, "k_descale": torch.tensor(1e38)},
    "large queries and keys": {"q": 1e19, "k": 1e19, "kv_dtype": BF16, "softmax_scale": 1e-38},
    "small queries and keys": {"q": 1e-25, "k": 1e-25, "kv_dtype": BF16, "softmax_scale": 3e38},
    "wide cap": {"softcap": 1e30},
    "narrow cap": {"softcap": 1e-30, "q": 1e30},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_what_is_finite_by_the_formula_is_finite(name):
    arguments = call(**EXTREMES[name])
    out, lse = flash_attn_varlen_func(**arguments)
    expected, expected_lse = in_float64(arguments)
    assert torch.equal(out, expected.to(BF16)) or (out - expected).norm() < 3e-3 * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def test_ordinary_scores_are_computed_in_float32(monkeypatch):
    """Twice the time is for extremes only."""
    dtypes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: dtypes.append(a.dtype) or bmm(a, b))
    flash_attn_varlen_func(**call(k_descale=torch.tensor(0.003), softmax_scale=1.0, q=1e5))
    assert dtypes == [torch.float32] * 2
    flash_attn_varlen_func(**call(**EXTREMES["large queries"]))
    assert dtypes[2:] == [torch.float64] * 2


@pytest.mark.parametrize(
    ("name", "values"),
    (
        ("softmax_scale", (1e-50, 2.0**-150, 2.0**128 - 2.0**103, 10**400)),
        ("softcap", (1e-46, 2.0**-101, 2.0**101, 10**400)),
    ),
)
def test_factors_are_checked_as_float32(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name}: got"):
            flash_attn_varlen_func(**call(**{name: value}))


def test_the_smallest_and_largest_factors_give_numbers():
    for change in ({"softcap": 2.0**-100}, {"softcap": 2.0**100}, {"softmax_scale": 2.0**-149}):
        out, lse = flash_attn_varlen_func(**call(q=0.0, **change))
        assert out.isfinite().all()
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(40)))


def test_keys_beyond_a_ragged_sequence_are_another_ones():
    arguments = call(seqused_k=torch.tensor([41], dtype=torch.int32))
    with pytest.raises(ValueError, match="sequence 0 has 41 keys; accepted: at most the 40 that"):
        flash_attn_varlen_func(**arguments)


def test_out_may_lie_in_packed_queries_keys_and_values():
    packed = torch.randn(10, 4 + 2 + 2 + 4, 64).to(BF16)
    starts = torch.tensor([0, 10], dtype=torch.int32)
    q, k, v, out = packed.split((4, 2, 2, 4), 1)
    expected = flash_attn_varlen_func(q, k, v, 10, starts, 10, starts, causal=True)
    for place in (out, q):
        flash_attn_varlen_func(q, k, v, 10, starts, 10, starts, causal=True, out=place)
        assert torch.equal(place, expected)
    shifted = packed[:, 3:7]
    with pytest.raises(ValueError, match="memory of k"):
        flash_attn_varlen_func(q, k, v, 10, starts, 10, starts, out=shifted)
