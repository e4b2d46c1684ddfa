"""Scales of one draft layer: copied whole or not at all."""

from __future__ import annotations

import math
import types
from itertools import product

import pytest
import torch

from kvcache.mtp import copy_target_kv_scales, propagate_mtp_scales
from tests.kvcache.helpers import Layer, snapshot
from tests.kvcache.mtp_helpers import BASES, assert_copied, with_value, without

SHAPES = ((), (1,), (4,))
REGISTRATIONS = ("parameter", "buffer", "plain")
HEADS = [0.003, 0.004, 0.005, 0.006]


def make(shape, scale: float | None = None, **fields) -> Layer:
    if shape == (4,) and scale is None:
        return Layer(HEADS, **fields)
    return Layer(0.003 if scale is None else scale, shape=shape, **fields)


@pytest.mark.parametrize(
    ("target_shape", "draft_shape", "registration"), list(product(SHAPES, SHAPES, REGISTRATIONS))
)
def test_all_three_representations_are_copied(target_shape, draft_shape, registration):
    target = make(target_shape, registration="parameter")
    before = snapshot(target)
    draft = make(draft_shape, 1.0, registration=registration)
    held = {base: getattr(draft, base + "_cpu") for base in BASES}
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)
    assert snapshot(target) == before
    for base in BASES:
        assert (base in draft._parameters) == (registration == "parameter")
        assert (base in draft._buffers) == (registration == "buffer")
        assert not getattr(draft, base).requires_grad
        # Whoever holds the host tensor sees the new values.
        assert getattr(draft, base + "_cpu") is held[base]
    assert draft._k_scale.flatten()[0] != draft._v_scale.flatten()[0]


def test_a_tensor_that_can_hold_the_scale_stays_the_same():
    """A captured graph reads its memory."""
    for registration in REGISTRATIONS:
        target, draft = make((4,)), make((4,), 1.0, registration=registration)
        device = draft._k_scale
        copy_target_kv_scales(draft, target)
        assert draft._k_scale is device


def test_a_parameter_is_frozen():
    draft = Layer(1.0)
    for base in BASES:
        delattr(draft, base)
        setattr(draft, base, torch.nn.Parameter(torch.tensor(1.0)))
    assert draft._k_scale.requires_grad
    target = Layer(0.003)
    copy_target_kv_scales(draft, target)
    assert isinstance(draft._k_scale, torch.nn.Parameter) and not draft._k_scale.requires_grad
    assert_copied(draft, target)


def test_layers_may_be_any_objects():
    target = types.SimpleNamespace(**vars(make((4,), registration="plain")), num_heads=8)
    draft = types.SimpleNamespace(**vars(make((), 1.0, registration="plain")))
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)


def test_dtypes_follow_the_target():
    target, draft = Layer(0.003, dtype=torch.float64), Layer(1.0, dtype=torch.bfloat16)
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)


def test_an_aliased_draft_is_separated():
    target, draft = Layer(0.003), Layer(1.0)
    for base in BASES:
        setattr(draft, base, getattr(target, base))
        setattr(draft, base + "_cpu", getattr(target, base + "_cpu"))
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)


def test_a_draft_whose_scales_are_one_tensor():
    """Layers may start with one tensor of 1.0 for everything."""
    one = torch.tensor(1.0)
    drafts = {"first": Layer(1.0), "second": Layer(1.0)}
    for draft in drafts.values():
        for base in BASES:
            delattr(draft, base)
            setattr(draft, base, one)
            setattr(draft, base + "_cpu", one)
    targets = {"third": Layer(0.003), "fourth": Layer(0.02), "other": Layer(1.0)}
    targets["other"]._k_scale = one
    mapping = {"first": "third", "second": "fourth"}
    propagate_mtp_scales(drafts, targets, mapping)
    for draft, target in mapping.items():
        assert_copied(drafts[draft], targets[target])
    # The target's layers are only read.
    assert one.item() == 1.0


def test_an_expanded_draft_tensor_is_replaced():
    target, draft = make((4,)), make((4,), 1.0, registration="plain")
    draft._k_scale = torch.tensor(1.0).expand(4)
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)


def test_a_host_tensor_that_is_a_view_is_not_grown_over_its_neighbours():
    target, draft = make((4,)), make((), 1.0)
    together = torch.ones(6)
    draft._k_scale_cpu = together[2]
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)
    assert together.tolist() == [1.0] * 6


def test_missing_host_tensors_are_made():
    target, draft = make((4,)), make((), 1.0)
    del draft._k_scale_cpu, draft._v_scale_cpu
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)
    # Also where the target has none.
    target, draft = make((4,)), make((), 1.0)
    del target._k_scale_cpu, draft._k_scale_cpu
    copy_target_kv_scales(draft, target)
    assert draft._k_scale_cpu.tolist() == target._k_scale.tolist()


def test_query_and_probability_scales_where_both_have_them():
    extra = ("_q_scale", "_prob_scale")
    target, draft = Layer(0.003, extra=extra), Layer(1.0, extra=extra)
    copy_target_kv_scales(draft, target)
    for base in extra:
        assert getattr(draft, base) == getattr(target, base)
        assert getattr(draft, base + "_float") == getattr(target, base + "_float")
        assert getattr(draft, base + "_cpu") == getattr(target, base + "_cpu")
    plain = Layer(1.0)
    copy_target_kv_scales(plain, target)
    assert not hasattr(plain, "_q_scale")
    draft = Layer(1.0, extra=extra)
    before = draft._q_scale.item()
    copy_target_kv_scales(draft, Layer(0.003))
    assert draft._q_scale.item() == before


def test_layers_loaded_under_inference_mode():
    with torch.inference_mode():
        target, draft = make((4,)), make((4,), 1.0)
    copy_target_kv_scales(draft, target)
    assert_copied(draft, target)


def test_running_under_inference_mode():
    target, draft = make((4,)), make((), 1.0, registration="parameter")
    with torch.inference_mode():
        copy_target_kv_scales(draft, target)
        assert_copied(draft, target)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (without("_v_scale"), "^target: _v_scale: is missing"),
        (without("_v_scale_float"), "^target: _v_scale_float: is missing"),
        (with_value("_v_scale_float", None), "^target: _v_scale_float: is missing"),
        (with_value("_v_scale", torch.ones(3)), r"^target: _v_scale: got shape \(3,\); .*\(4,\)"),
        (with_value("_v_scale", torch.ones(4, 1)), r"^target: _v_scale: got shape \(4, 1\)"),
        (with_value("_v_scale", 0.0), "^target: _v_scale: got 0.0; accepted: finite and > 0"),
        (with_value("_v_scale", -0.003), "^target: _v_scale: got -0.003"),
        (with_value("_v_scale", math.nan), "^target: _v_scale: got nan"),
        (with_value("_v_scale", math.inf), "^target: _v_scale: got inf"),
        (with_value("_v_scale_float", 1.0), "^target: _v_scale_float: is 1.0, but _v_scale on"),
        (with_value("_v_scale_float", math.nan), "^target: _v_scale_float: is nan"),
        (with_value("_v_scale_cpu", 1.0), "^target: _v_scale_cpu: is 1.0, but _v_scale on"),
        (with_value("_v_scale_cpu", torch.ones(4)), "^target: _v_scale_cpu: is "),
        (with_value("num_kv_heads", 8), "^draft: num_kv_heads: got 4; target, .* has 8"),
        (with_value("head_size", 512), "^draft: head_size: got 256; target, .* has 512"),
        (lambda layer: layer.to("meta"), "^target: _k_scale: is on the meta device"),
    ),
)
def test_a_bad_target_changes_nothing(change, message):
    """The fault is in V, which is written after K: nothing may be half-copied."""
    target, draft = Layer(0.003), Layer(1.0)
    change(target)
    before = snapshot(draft)
    with pytest.raises(ValueError, match=message):
        copy_target_kv_scales(draft, target, draft_name="draft", target_name="target")
    assert snapshot(draft) == before


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (without("_v_scale"), "^draft: _v_scale: is missing"),
        (without("_v_scale_float"), "^draft: _v_scale_float: is missing"),
        (with_value("_v_scale", torch.ones((), device="meta")), "_v_scale: is on the meta device"),
    ),
)
def test_a_bad_draft_is_not_changed(change, message):
    target, draft = Layer(0.003), Layer(1.0)
    change(draft)
    before = snapshot(draft)
    with pytest.raises(ValueError, match=message):
        copy_target_kv_scales(draft, target, draft_name="draft", target_name="target")
    assert snapshot(draft) == before


def test_scales_per_head_need_the_number_of_heads():
    target, draft = make((4,)), make((4,), 1.0)
    del target.num_kv_heads, draft.num_kv_heads
    with pytest.raises(ValueError, match="num_kv_heads, which the layer does not say"):
        copy_target_kv_scales(draft, target)


def test_a_float_of_scales_per_head_is_between_them():
    """Engines reduce the heads differently; a left-over 1.0 is still seen."""
    for reduced in (0.003, 0.006):
        target = make((4,))
        target._k_scale_float = torch.tensor(reduced).item()
        copy_target_kv_scales(make((4,), 1.0), target)
    target._k_scale_float = 1.0
    with pytest.raises(ValueError, match="_k_scale_float: is 1.0, but _k_scale on the device"):
        copy_target_kv_scales(make((4,), 1.0), target)


def test_a_layer_is_not_its_own_target():
    layer = Layer(0.003)
    with pytest.raises(ValueError, match="^d: is the same layer as t"):
        copy_target_kv_scales(layer, layer, draft_name="d", target_name="t")


def test_a_float_that_engines_do_not_keep_is_no_reason_to_refuse():
    """vLLM's loading writes _prob_scale and leaves its float at 1.0."""
    target, draft = (Layer(scale, extra=("_prob_scale",)) for scale in (0.003, 1.0))
    target._prob_scale_float = 1.0
    copy_target_kv_scales(draft, target)
    assert draft._prob_scale == target._prob_scale


class Stubborn(Layer):
    """Refuses the last of the writes."""

    armed = False

    def __setattr__(self, name, value):
        if self.armed and name == "_v_scale_float":
            raise RuntimeError("read only")
        super().__setattr__(name, value)


@pytest.mark.parametrize("registration", REGISTRATIONS)
def test_a_write_that_fails_takes_back_those_before_it(registration):
    target = make((4,))
    good, bad = (kind(1.0, registration=registration) for kind in (Layer, Stubborn))
    del good._v_scale_cpu
    bad.armed = True
    before = snapshot(good), snapshot(bad)
    names = {"good": "target", "bad": "target"}
    with pytest.raises(RuntimeError, match="read only"):
        propagate_mtp_scales({"good": good, "bad": bad}, {"target": target}, names)
    assert (snapshot(good), snapshot(bad)) == before
