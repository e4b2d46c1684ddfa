"""`merge_attn_states` against attention over all keys at once."""

from __future__ import annotations

import math

import pytest
import torch

from cute_kernels import merge_attn_states
from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from tests.cases import AttentionCase, make_inputs
from tests.compare import assert_lse_close, assert_output_close

HEADS, DIM = 8, 128


def random_parts(rows: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(rows)
    shape = (rows, HEADS, DIM)
    outputs = torch.randn((2, *shape), generator=generator, device=device).to(dtype)
    lses = torch.randn((2, HEADS, rows), generator=generator, device=device) * 3
    return outputs[0], lses[0], outputs[1], lses[1]


@pytest.mark.parametrize("sinks_in", (None, "prefix", "suffix"))
@pytest.mark.parametrize("cut", (0, 1, 64, 100, 299, 300))
def test_two_parts_of_the_keys_equal_the_whole(cut, sinks_in):
    case = AttentionCase(
        id="merge", kv_lens=(300,), q_lens=(5,), page_size=None, kv_dtype=torch.bfloat16,
        scale_kind="none", causal=False, sinks=sinks_in is not None,
    )  # fmt: skip
    inputs = make_inputs(case)
    whole, whole_lse = attention_reference(validate(**inputs), torch.float64)
    parts = []
    for name, keys in (("prefix", slice(0, cut)), ("suffix", slice(cut, 300))):
        part = {**inputs, "k": inputs["k"][keys], "v": inputs["v"][keys]}
        part["cu_seqlens_k"] = torch.tensor([0, len(part["k"])], dtype=torch.int32)
        part["s_aux"] = inputs["s_aux"] if name == sinks_in else None
        out, lse = attention_reference(validate(**part), torch.float64)
        parts += [out.float(), lse.float()]
    merged, merged_lse = torch.full_like(parts[0], math.nan), torch.full_like(parts[1], math.nan)
    assert merge_attn_states(merged, *parts, merged_lse) is None
    assert_output_close(merged, whole, bound=1e-6)
    torch.testing.assert_close(merged_lse, whole_lse.float(), rtol=1e-6, atol=1e-6)
    assert_lse_close(merged_lse, whole_lse)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_dtypes(device, dtype):
    parts = random_parts(7, device, dtype)
    out = torch.full_like(parts[0], math.nan)
    merge_attn_states(out, *parts)
    weights = torch.softmax(torch.stack([parts[1], parts[3]]).double(), 0).transpose(1, 2)[
        ..., None
    ]
    expected = weights[0] * parts[0].double() + weights[1] * parts[2].double()
    bound = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[dtype]
    assert_output_close(out, expected, bound=bound)


def test_empty_parts(device):
    """Rows: both live; prefix only; suffix only; none; the same with +inf for an empty part."""
    prefix, prefix_lse, suffix, suffix_lse = random_parts(7, device, torch.bfloat16)
    for row, infinity in ((1, -math.inf), (3, -math.inf), (4, math.inf), (6, math.inf)):
        suffix_lse[:, row], suffix[row] = infinity, math.nan
    for row, infinity in ((2, -math.inf), (3, math.inf), (5, math.inf), (6, math.inf)):
        prefix_lse[:, row], prefix[row] = infinity, math.nan
    out, lse = torch.full_like(prefix, math.nan), torch.full_like(prefix_lse, math.nan)
    merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert out[0].isfinite().all() and lse[:, 0].isfinite().all()
    for row in (1, 4):
        assert torch.equal(out[row], prefix[row]) and torch.equal(lse[:, row], prefix_lse[:, row])
    for row in (2, 5):
        assert torch.equal(out[row], suffix[row]) and torch.equal(lse[:, row], suffix_lse[:, row])
    for row in (3, 6):
        assert (out[row] == 0).all() and (lse[:, row] == -math.inf).all()


def test_lses_far_apart_and_large(device):
    prefix, prefix_lse, suffix, suffix_lse = random_parts(3, device, torch.float32)
    prefix_lse.copy_(torch.tensor([5e4, -5e4, 1e30], device=device).expand(HEADS, 3))
    suffix_lse.copy_(torch.tensor([-5e4, 5e4, 1e30], device=device).expand(HEADS, 3))
    out, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert torch.equal(out[0], prefix[0]) and torch.equal(out[1], suffix[1])
    torch.testing.assert_close(out[2], (prefix[2] + suffix[2]) / 2)
    assert (lse[:, :2] == 5e4).all() and lse.isfinite().all()


def test_in_place(device):
    parts = random_parts(5, device, torch.bfloat16)
    out, lse = torch.empty_like(parts[0]), torch.empty_like(parts[1])
    merge_attn_states(out, *parts, lse)
    for index in (0, 2):
        copies = [part.clone() for part in parts]
        merge_attn_states(copies[index], *copies, copies[index + 1])
        assert torch.equal(copies[index], out) and torch.equal(copies[index + 1], lse)


def test_no_rows(device):
    parts = random_parts(0, device, torch.bfloat16)
    merge_attn_states(torch.empty_like(parts[0]), *parts, torch.empty_like(parts[1]))


def test_strided_output():
    parts = random_parts(5, "cpu", torch.bfloat16)
    expected = torch.empty_like(parts[0])
    merge_attn_states(expected, *parts)
    wide = torch.full((5, HEADS + 2, DIM), 7.0, dtype=torch.bfloat16)
    merge_attn_states(wide[:, 1:-1], *parts)
    assert torch.equal(wide[:, 1:-1], expected) and (wide[:, ::9] == 7.0).all()


@pytest.mark.parametrize(
    ("index", "change", "message"),
    (
        (0, lambda x: x.double(), "output: got torch.float64"),
        (0, lambda x: x[0], r"output: got .*accepted: a bfloat16, float16 or float32 \(total_q"),
        (1, lambda x: x.half(), "prefix_output: got torch.float16 .*accepted: as output"),
        (2, lambda x: x.t(), r"prefix_lse: got .*\(4, 8\).*accepted: float32 .* \(8, 4\)"),
        (2, lambda x: x.bfloat16(), "prefix_lse: got torch.bfloat16"),
        (3, lambda x: x[:3], "suffix_output: got"),
        (4, lambda x: x[:, :3], "suffix_lse: got"),
        (5, lambda x: x.to("meta"), "output_lse: got .* on meta"),
    ),
)
def test_refusals(index, change, message):
    parts = random_parts(4, "cpu", torch.bfloat16)
    arguments = [torch.empty_like(parts[0]), *parts, torch.empty_like(parts[1])]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match="^merge_attn_states: " + message):
        merge_attn_states(*arguments)
