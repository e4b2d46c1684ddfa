"""Refusals that a newcomer missed: each was accepted silently, or failed without a name."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import merge_attn_states
from cute_kernels.attention.arguments import validate
from tests.cases import AttentionCase, make_inputs
from tests.nvfp4_cases import make_nvfp4_inputs


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


@pytest.mark.parametrize("name", ("k", "v", "k_block_scale", "v_block_scale", "block_table"))
def test_out_must_not_be_memory_that_is_read(name):
    case = AttentionCase(id="out", kv_lens=(70, 70), q_lens=(1, 1))
    inputs = make_nvfp4_inputs(case)
    given, q = inputs[name], inputs["q"]
    size = given.numel() * given.element_size()
    memory = torch.zeros(max(size, 2 * q.numel()), dtype=torch.uint8)
    inputs[name] = memory[:size].view(given.dtype).view(given.shape)
    out = memory[: 2 * q.numel()].view(q.dtype).view(q.shape)
    with pytest.raises(ValueError, match=f"out: got .*memory of {name}; accepted: memory apart"):
        validate(**inputs, out=out)


def test_out_is_all_of_q_or_apart_from_it():
    inputs = make_inputs(AttentionCase(id="out", kv_lens=(70, 70), q_lens=(1, 2)))
    rows = torch.zeros(8, *inputs["q"].shape[1:], dtype=torch.bfloat16)
    for out in (rows[:3], rows[3:6], rows[5:8]):
        validate(**{**inputs, "q": rows[:3]}, out=out)
    interleaved = rows[:6].view(3, 2, *rows.shape[1:])
    validate(**{**inputs, "q": interleaved[:, 0]}, out=interleaved[:, 1])
    for out in (rows[1:4], interleaved[:, 0]):
        with pytest.raises(ValueError, match="out: got .*memory of q; accepted: all of q's memory"):
            validate(**{**inputs, "q": rows[:3]}, out=out)


def test_long_values_are_cut_in_messages():
    inputs = make_inputs(AttentionCase(id="list", kv_lens=(70,), q_lens=(1,)))
    with pytest.raises(ValueError, match="q:") as refusal:
        validate(**{**inputs, "q": [0.0] * 10_000})
    assert len(str(refusal.value)) < 500


def test_meta_tensors_are_refused():
    inputs = make_inputs(AttentionCase(id="meta", kv_lens=(70,), q_lens=(1,)))
    with pytest.raises(ValueError, match="cpu or cuda"):
        validate(**{**inputs, "q": inputs["q"].to("meta")})


def test_merge_refuses_to_write_elements_that_share_memory():
    o, lse = torch.zeros(2, 3, 4), torch.zeros(3, 2)
    for name, expanded in (("output", o[:, :1]), ("output_lse", lse[:1])):
        shape = o.shape if name == "output" else lse.shape
        given = {"output": o.clone(), "output_lse": lse.clone(), name: expanded.expand(shape)}
        with pytest.raises(ValueError, match=f"{name}: got .*elements do not share memory"):
            merge_attn_states(given["output"], o, lse, o, lse, given["output_lse"])


@pytest.mark.parametrize("given", ([0.0], None, "x"))
@pytest.mark.parametrize("index", range(5))
def test_merge_names_what_is_no_tensor(index, given):
    names = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
    o, lse = torch.zeros(2, 3, 4), torch.zeros(3, 2)
    arguments = [o, o.clone(), lse, o.clone(), lse.clone()]
    arguments[index] = given
    with pytest.raises(ValueError, match=f"{names[index]}: got a {type(given).__name__}"):
        merge_attn_states(*arguments)
