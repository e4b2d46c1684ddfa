"""Refusals that a newcomer missed: each was accepted silently, or failed without a name."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import merge_attn_states
from cute_kernels.attention.arguments import validate
from tests.cases import AttentionCase, make_inputs


@pytest.mark.parametrize("flag", ("no", float("nan"), [0], torch.tensor([1, 0]), 2))
@pytest.mark.parametrize("name", ("causal", "return_softmax_lse", "deterministic"))
def test_a_flag_is_a_boolean(name, flag):
    with pytest.raises(ValueError, match=name):
        validate(
            **{**make_inputs(AttentionCase(id="flag", kv_lens=(70,), q_lens=(1,))), name: flag}
        )


def test_out_must_not_overlap_itself():
    inputs = make_inputs(AttentionCase(id="out", kv_lens=(70, 70), q_lens=(1, 1)))
    shape = inputs["q"].shape
    out = torch.zeros(6000).bfloat16().as_strided(shape, (64, 64, 1))
    with pytest.raises(ValueError, match="share memory"):
        validate(**inputs, out=out)
    apart = torch.zeros(2 * shape.numel()).bfloat16().as_strided(shape, (shape[2], 2 * shape[2], 1))
    validate(**inputs, out=apart)


def test_long_values_are_cut_in_messages():
    inputs = make_inputs(AttentionCase(id="list", kv_lens=(70,), q_lens=(1,)))
    with pytest.raises(ValueError, match="q:") as refusal:
        validate(**{**inputs, "q": [0.0] * 10_000})
    assert len(str(refusal.value)) < 500


def test_meta_tensors_are_refused():
    inputs = make_inputs(AttentionCase(id="meta", kv_lens=(70,), q_lens=(1,)))
    with pytest.raises(ValueError, match="cpu or cuda"):
        validate(**{**inputs, "q": inputs["q"].to("meta")})


@pytest.mark.parametrize("given", ([0.0], None, "x"))
@pytest.mark.parametrize("index", range(5))
def test_merge_names_what_is_no_tensor(index, given):
    names = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
    o, lse = torch.zeros(2, 3, 4), torch.zeros(3, 2)
    arguments = [o, o.clone(), lse, o.clone(), lse.clone()]
    arguments[index] = given
    with pytest.raises(ValueError, match=f"{names[index]}: got a {type(given).__name__}"):
        merge_attn_states(*arguments)
