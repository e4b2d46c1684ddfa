"""Scales of a whole draft model: mapped, propagated, and found when they are stale."""

from __future__ import annotations

import math

import pytest

from kvcache.draft_map import layer_index, map_draft_to_target
from kvcache.mtp import StaleScalesError, check_mtp_scales, propagate_mtp_scales
from tests.kvcache.helpers import Layer, snapshot
from tests.kvcache.mtp_helpers import BASES, assert_copied, with_value

TYPES = ["sliding_attention"] * 5 + ["full_attention"]


def target_model() -> dict[str, Layer]:
    """12 layers of Gemma-4's kind; every layer has scales of its own."""
    return {
        f"language_model.model.layers.{index}.self_attn.attn": Layer(
            0.001 * (index + 1), head_size=512 if kind == "full_attention" else 256
        )
        for index, kind in enumerate(TYPES * 2)
    }


def draft_model() -> dict[str, Layer]:
    """4 layers, all at scale 1."""
    return {
        f"draft.model.layers.{index}.self_attn.attn": Layer(
            1.0, head_size=512 if index == 3 else 256
        )
        for index in range(4)
    }


DRAFT_TYPES = ["sliding_attention"] * 3 + ["full_attention"]


def mapping_of(drafts, targets, **fields):
    fields = {
        "draft_layer_types": DRAFT_TYPES,
        "target_layer_types": TYPES * 2,
        **fields,
    }
    return map_draft_to_target(list(drafts), list(targets), **fields)


def target_indices(mapping) -> list[int]:
    return [layer_index(name) for name in mapping.values()]


def test_drafts_read_the_last_layer_of_their_type():
    mapping = mapping_of(draft_model(), target_model())
    assert list(mapping) == list(draft_model())
    assert target_indices(mapping) == [10, 10, 10, 11]


def test_layers_that_share_a_cache_are_not_read():
    mapping = mapping_of(draft_model(), target_model(), num_kv_shared_layers=2)
    assert target_indices(mapping) == [9, 9, 9, 5]
    with pytest.raises(ValueError, match="layers.3.* is 'full_attention'; .* 'sliding_attention'"):
        mapping_of(draft_model(), target_model(), num_kv_shared_layers=7)
    for bad in (-1, 12):
        with pytest.raises(ValueError, match=f"num_kv_shared_layers: got {bad}; .* 12 layers"):
            mapping_of(draft_model(), target_model(), num_kv_shared_layers=bad)


def test_indices_come_from_names_not_from_order():
    drafts, targets = list(draft_model())[::-1], list(target_model())[::-1]
    mapping = mapping_of(drafts, targets)
    assert target_indices(mapping) == [11, 10, 10, 10]
    # A draft whose layers are counted on from the target's.
    drafts = [f"model.layers.{index}.self_attn" for index in (12, 15)]
    types = dict(enumerate(DRAFT_TYPES, 12))
    assert target_indices(mapping_of(drafts, targets, draft_layer_types=types)) == [10, 11]


@pytest.mark.parametrize(
    ("name", "index"),
    (
        ("language_model.model.layers.5.self_attn.attn", 5),
        ("model.layers.61.mlp.experts.3", 61),
        ("layers.0", 0),
        ("mtp.layers.2.attn", 2),
        ("vision.0.mtp_layers.7.attn", 7),
        ("transformer.h.11.attn", 11),
    ),
)
def test_layer_index(name, index):
    assert layer_index(name) == index


@pytest.mark.parametrize(
    "name", ("model.attn", "blocks.1.heads.2", "layers.1.layers.2", "layers.x.attn", "")
)
def test_names_without_one_index(name):
    with pytest.raises(ValueError, match="layer name: got "):
        layer_index(name)


def test_mappings_that_cannot_be():
    drafts, targets = list(draft_model()), list(target_model())
    with pytest.raises(ValueError, match="draft_layer_types: has no layer 3, which draft.model"):
        mapping_of(drafts, targets, draft_layer_types=DRAFT_TYPES[:3])
    # With a type too few, a layer before the last of its type would be read.
    with pytest.raises(ValueError, match="target_layer_types: has no layer 11, which language_"):
        mapping_of(drafts, targets, target_layer_types=(TYPES * 2)[:11])
    with pytest.raises(ValueError, match="layers.3.* reads the cache of target layer 11, which"):
        mapping_of(drafts, targets[:11])
    with pytest.raises(ValueError, match="target_names: .* and other.layers.0 are both layer 0"):
        mapping_of(drafts, [*targets, "other.layers.0"])
    with pytest.raises(ValueError, match="draft_names: .* are both layer 1"):
        mapping_of([*drafts, "x.layers.1"], targets)


@pytest.mark.parametrize("kind", ("linear_attention", "conv", "mamba", "recurrent"))
def test_layers_without_keys_and_values_share_none(kind):
    with pytest.raises(ValueError, match=f"^d.0: is '{kind}', which keeps no keys and values"):
        mapping_of(["d.0"], ["t.0"], draft_layer_types=[kind], target_layer_types=[kind])
    with pytest.raises(ValueError, match="^d.0: is 'full_.*; .* cache of their own are 'sliding_"):
        mapping_of(
            ["d.0"],
            ["t.0", "t.1"],
            draft_layer_types=["full_attention"],
            target_layer_types=["sliding_attention", kind],
        )


def test_propagation_is_needed_detected_and_enough():
    """A draft at scale 1 while the target has 0.011: found by name, repaired, found no more."""
    drafts, targets = draft_model(), target_model()
    mapping = mapping_of(drafts, targets)
    with pytest.raises(StaleScalesError) as stale:
        check_mtp_scales(drafts, targets, mapping)
    assert len(stale.value.stale) == 4 * 6
    first = stale.value.stale[0]
    assert (first.draft, first.attribute) == ("draft.model.layers.0.self_attn.attn", "_k_scale")
    assert first.target == "language_model.model.layers.10.self_attn.attn"
    assert "draft.model.layers.3.self_attn.attn: _v_scale_cpu is 2.0" in str(stale.value)
    before = [snapshot(layer) for layer in targets.values()]
    propagate_mtp_scales(drafts, targets, mapping)
    check_mtp_scales(drafts, targets, mapping)
    assert [snapshot(layer) for layer in targets.values()] == before
    for draft, target in mapping.items():
        assert_copied(drafts[draft], targets[target])


@pytest.mark.parametrize(
    "attribute", [base + form for base in BASES for form in ("", "_float", "_cpu")]
)
def test_each_stale_attribute_is_found_alone(attribute):
    drafts, targets = draft_model(), target_model()
    mapping = mapping_of(drafts, targets)
    propagate_mtp_scales(drafts, targets, mapping)
    name = "draft.model.layers.2.self_attn.attn"
    with_value(attribute, 1.0)(drafts[name])
    with pytest.raises(StaleScalesError) as stale:
        check_mtp_scales(drafts, targets, mapping)
    assert [(each.draft, each.attribute) for each in stale.value.stale] == [(name, attribute)]


def test_a_refit_of_the_target_makes_the_draft_stale():
    drafts, targets = draft_model(), target_model()
    mapping = mapping_of(drafts, targets)
    propagate_mtp_scales(drafts, targets, mapping)
    full = targets[mapping["draft.model.layers.3.self_attn.attn"]]
    full._k_scale.fill_(0.5)
    full._k_scale_float = 0.5
    full._k_scale_cpu.fill_(0.5)
    with pytest.raises(StaleScalesError, match="layers.3.self_attn.attn: _k_scale is 0.01.*0.5"):
        check_mtp_scales(drafts, targets, mapping)


def test_shared_memory_and_missing_host_tensors_are_found():
    drafts, targets = {"draft": Layer(1.0)}, {"target": Layer(0.003)}
    mapping = {"draft": "target"}
    propagate_mtp_scales(drafts, targets, mapping)
    drafts["draft"]._k_scale = targets["target"]._k_scale
    del drafts["draft"]._v_scale_cpu
    with pytest.raises(StaleScalesError) as stale:
        check_mtp_scales(drafts, targets, mapping)
    assert [each.problem.split(",")[0] for each in stale.value.stale] == [
        "shares the target's memory",
        "is missing",
    ]


def test_equal_scales_of_other_shapes_are_not_stale():
    """An engine that wires () where the target has (1,) dequantizes with the right numbers."""
    drafts, targets = {"draft": Layer(0.003)}, {"target": Layer(0.003, shape=(1,))}
    check_mtp_scales(drafts, targets, {"draft": "target"})


def test_checking_writes_nothing():
    drafts, targets = draft_model(), target_model()
    before = [snapshot(layer) for layer in (*drafts.values(), *targets.values())]
    with pytest.raises(StaleScalesError):
        check_mtp_scales(drafts, targets, mapping_of(drafts, targets))
    assert [snapshot(layer) for layer in (*drafts.values(), *targets.values())] == before


@pytest.mark.parametrize("function", (propagate_mtp_scales, check_mtp_scales))
def test_wrong_mappings_are_named_and_nothing_is_written(function):
    drafts, targets = draft_model(), target_model()
    right = mapping_of(drafts, targets)
    first, last = list(drafts)[0], list(drafts)[-1]
    before = [snapshot(layer) for layer in drafts.values()]
    wrong = {
        f"draft_to_target: lacks the draft layers {last}": {
            name: target for name, target in right.items() if name != last
        },
        "draft_to_target: names layers.99, not in target_layers": {**right, first: "layers.99"},
        "draft_to_target: names layers.77, not in draft_layers": {
            **right,
            "layers.77": right[first],
        },
        # A sliding layer's cache handed to a full layer.
        f"{last}: head_size: got 512": {**right, last: right[first]},
    }
    for message, mapping in wrong.items():
        with pytest.raises(ValueError, match=message) as refused:
            function(drafts, targets, mapping)
        assert not isinstance(refused.value, StaleScalesError)
        assert [snapshot(layer) for layer in drafts.values()] == before


def test_one_bad_target_layer_stops_the_whole_propagation():
    drafts, targets = draft_model(), target_model()
    mapping = mapping_of(drafts, targets)
    last = mapping["draft.model.layers.3.self_attn.attn"]
    targets[last]._v_scale.fill_(math.nan)
    before = [snapshot(layer) for layer in drafts.values()]
    with pytest.raises(ValueError, match=f"^{last}: _v_scale: got nan"):
        propagate_mtp_scales(drafts, targets, mapping)
    assert [snapshot(layer) for layer in drafts.values()] == before


@pytest.mark.parametrize("function", (propagate_mtp_scales, check_mtp_scales))
def test_a_layer_is_a_draft_of_one_target_or_a_target(function):
    """Otherwise what is written would be read, or written again, in some order."""
    own, reader, other = Layer(0.5), Layer(), Layer(0.25)
    cases = {
        "^c: is mapped to b, which is draft layer b and reads the cache of a; accepted": (
            {"c": Layer(), "b": reader},
            {"a": own, "b": reader},
            {"c": "b", "b": "a"},
        ),
        "^d: is mapped to d, which is draft layer d": ({"d": own}, {"d": own}, {"d": "d"}),
        "^draft_to_target: d and e are one layer, mapped to a and to b": (
            {"d": reader, "e": reader},
            {"a": own, "b": other},
            {"d": "a", "e": "b"},
        ),
    }
    before = [snapshot(layer) for layer in (own, reader, other)]
    for message, (drafts, targets, mapping) in cases.items():
        with pytest.raises(ValueError, match=message) as refused:
            function(drafts, targets, mapping)
        assert not isinstance(refused.value, StaleScalesError)
        assert [snapshot(layer) for layer in (own, reader, other)] == before


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    (
        ("nvfp4", "fp8", "^draft: kv_cache_dtype: got 'nvfp4'; target, whose .* has 'fp8'"),
        ("auto", "fp8", "^draft: kv_cache_dtype: got 'auto'"),
        ("fp8", "bf16", "^draft: kv_cache_dtype: got 'fp8'"),
        ("int8_of_an_engine", "fp8", "^draft: kv_cache_dtype: got 'int8_of_an_engine'"),
        ("fp8_e4m3", "fp8", None),
        ("nvfp4", "nvfp4_mse", None),
        ("auto", "bf16", None),
        ("int8_of_an_engine", "int8_of_an_engine", None),
        (None, "fp8", None),
    ),
)
@pytest.mark.parametrize("function", (propagate_mtp_scales, check_mtp_scales))
def test_a_draft_reads_its_targets_storage_format_only(function, draft, target, message):
    drafts, targets = {"draft": Layer(0.5)}, {"target": Layer(0.5)}
    drafts["draft"].kv_cache_dtype, targets["target"].kv_cache_dtype = draft, target
    if message is None:
        function(drafts, targets, {"draft": "target"})
        return
    with pytest.raises(ValueError, match=message) as refused:
        function(drafts, targets, {"draft": "target"})
    assert not isinstance(refused.value, StaleScalesError)
