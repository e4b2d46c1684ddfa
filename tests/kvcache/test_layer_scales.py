"""Scales as state of a model: sleep, wake and refit."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.layer_scales import restore_scales, save_scales, sync_host_copies
from tests.kvcache.helpers import Layer, snapshot


class Model(torch.nn.Module):
    """Two attention layers of different kinds of scales, and something without scales."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, 2)
        self.layers = torch.nn.ModuleList(
            (
                Layer(0.003, registration="parameter", extra=("_q_scale",)),
                Layer([0.1, 0.2, 0.3, 0.4], registration="plain", dtype=torch.float64),
            )
        )


def without_ids(layer: torch.nn.Module) -> dict[str, object]:
    found = snapshot(layer)
    return {name: v[1:] if isinstance(v, tuple) else v for name, v in found.items()}


def test_sleep_and_wake_restore_every_bit():
    model = Model()
    before = [snapshot(layer) for layer in model.layers]
    state = save_scales(model)
    assert len(state) == 9 + 6
    for layer in model.layers:
        for name in before[0]:
            if isinstance(getattr(layer, name, None), torch.Tensor):
                getattr(layer, name).data.fill_(1.0)
            elif hasattr(layer, name):
                setattr(layer, name, 1.0)
    assert [snapshot(layer) for layer in model.layers] != before
    restore_scales(model, state)
    # The same tensor objects, so that captured graphs read the right memory.
    assert [snapshot(layer) for layer in model.layers] == before


@pytest.mark.parametrize("pattern", (0x00000001, 0x7F7FFFFF, 0x3B449BA6, 0x7FC12345))
def test_bits_survive_that_comparisons_do_not_see(pattern):
    model = Model()
    bits = torch.tensor(pattern, dtype=torch.int32)
    model.layers[0]._k_scale.data.copy_(bits.view(torch.float32))
    state = save_scales(model)
    model.layers[0]._k_scale.data.fill_(1.0)
    restore_scales(model, state)
    assert model.layers[0]._k_scale.data.view(torch.int32).item() == pattern


def test_saved_scales_do_not_share_memory_with_the_model():
    model = Model()
    state = save_scales(model)
    model.layers[1]._k_scale.fill_(9.0)
    assert state["layers.1._k_scale"].tolist() == [0.1, 0.2, 0.3, 0.4]
    restore_scales(model, state)
    model.layers[1]._k_scale.fill_(9.0)
    assert state["layers.1._k_scale"].tolist() == [0.1, 0.2, 0.3, 0.4]


def test_layers_that_share_a_tensor_go_on_sharing_it():
    model = Model()
    shared = model.layers[0]._v_scale
    model.layers[1]._v_scale = shared
    state = save_scales(model)
    shared.data.fill_(1.0)
    restore_scales(model, state)
    assert model.layers[0]._v_scale is model.layers[1]._v_scale is shared
    assert shared.item() == state["layers.0._v_scale"].item() != 1.0


@pytest.mark.parametrize("forms", (("",), ("_cpu",), ("", "_cpu")))
def test_layers_that_share_a_default_now_get_their_own_scales_back(forms):
    """A reload may give every attribute one tensor of 1.0; each must not get the last one's."""
    model = torch.nn.ModuleDict({name: Layer(0.1 * i) for i, name in enumerate("abc", 1)})
    state = save_scales(model)
    one = torch.tensor(1.0)
    for layer in model.values():
        for base in ("_k_scale", "_v_scale"):
            for form in forms:
                setattr(layer, base + form, one)
    restore_scales(model, state)
    restored = save_scales(model)
    assert {key: torch.as_tensor(value).item() for key, value in restored.items()} == {
        key: torch.as_tensor(value).item() for key, value in state.items()
    }
    # One of them keeps the tensor; a second restore finds nothing left to separate.
    assert getattr(model["a"], "_k_scale" + forms[0]) is one
    held = [snapshot(layer) for layer in model.values()]
    restore_scales(model, state)
    assert [snapshot(layer) for layer in model.values()] == held


def test_those_that_get_the_same_still_share():
    model = torch.nn.ModuleDict({"a": Layer(0.1), "b": Layer(0.2), "c": Layer(0.1)})
    state = save_scales(model)
    one = torch.tensor(1.0)
    for layer in model.values():
        layer._k_scale = one
    restore_scales(model, state)
    assert model["a"]._k_scale is model["c"]._k_scale is one is not model["b"]._k_scale
    assert [layer._k_scale.item() for layer in model.values()] == [
        state[f"{name}._k_scale"].item() for name in "abc"
    ]


def test_host_tensors_that_a_reload_made_anew_get_their_shape_back():
    """An engine keeps (Hkv,) on the device and makes () on the host."""
    layer = Layer([0.1, 0.2, 0.3, 0.4])
    before, held = save_scales(layer), layer._k_scale
    layer._k_scale.fill_(1.0)
    layer._k_scale_cpu, layer._k_scale_float = torch.tensor(1.0), 1.0
    restore_scales(layer, before)
    assert layer._k_scale is held
    for form in ("", "_cpu"):
        assert torch.equal(getattr(layer, "_k_scale" + form), before["_k_scale"])
    layer._k_scale_cpu = torch.ones((), dtype=torch.float64)
    with pytest.raises(ValueError, match="_k_scale_cpu: the layer has torch.float64"):
        restore_scales(layer, before)


def test_state_survives_torch_save(tmp_path):
    model = Model()
    before = [snapshot(layer) for layer in model.layers]
    torch.save(save_scales(model), tmp_path / "scales.pt")
    model.layers[0]._v_scale.data.zero_()
    restore_scales(model, torch.load(tmp_path / "scales.pt"))
    assert [snapshot(layer) for layer in model.layers] == before


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda s: s.pop("layers.1._v_scale"), "state: has no layers.1._v_scale"),
        (lambda s: s.update({"layers.2._k_scale": 1.0}), "model: has no layers.2._k_scale"),
        (
            lambda s: s.update({"layers.1._v_scale": torch.ones(3, dtype=torch.float64)}),
            r"layers.1._v_scale: the layer has torch.float64 \(4,\), saved was .* \(3,\)",
        ),
        (
            lambda s: s.update({"layers.1._v_scale": torch.ones(4)}),
            r"layers.1._v_scale: .* saved was torch.float32 \(4,\)",
        ),
        (lambda s: s.update({"layers.1._v_scale": 1.0}), "layers.1._v_scale: .* saved was float"),
    ),
)
def test_nothing_is_restored_unless_everything_is(change, message):
    model = Model()
    state = save_scales(model)
    model.layers[0]._k_scale.data.fill_(7.0)
    before = [snapshot(layer) for layer in model.layers]
    change(state)
    with pytest.raises(ValueError, match=message):
        restore_scales(model, state)
    assert [snapshot(layer) for layer in model.layers] == before


def test_models_without_scales_and_on_the_meta_device():
    with pytest.raises(ValueError, match="model: no layer has a _k_scale"):
        save_scales(torch.nn.Linear(2, 2))
    model = Model()
    state = save_scales(model)
    model.to("meta")
    with pytest.raises(ValueError, match=r"layers.0: _k_scale: is on the meta device"):
        save_scales(model)
    with pytest.raises(ValueError, match="_k_scale: is on the meta device"):
        restore_scales(model, state)


def test_a_layer_may_be_the_whole_model():
    layer = Layer(0.5)
    state = save_scales(layer)
    before = snapshot(layer)
    layer._k_scale.fill_(1.0)
    restore_scales(layer, state)
    assert snapshot(layer) == before


# ---- host copies -------------------------------------------------------------------------------


def test_host_copies_follow_the_device_after_a_refit():
    model = Model()
    assert sync_host_copies(model) == []
    first, second = model.layers
    held = first._k_scale_cpu
    first._k_scale.data.fill_(0.25)
    second._v_scale.copy_(torch.tensor([1.0, 2.0, 4.0, 3.0]))
    untouched = without_ids(first)["_v_scale_cpu"], second._k_scale_float
    stale = sync_host_copies(model)
    assert stale == [
        "layers.0._k_scale_float",
        "layers.0._k_scale_cpu",
        "layers.1._v_scale_float",
        "layers.1._v_scale_cpu",
    ]
    assert first._k_scale_float == 0.25
    assert held is first._k_scale_cpu and held.item() == 0.25
    assert second._v_scale_float == 4.0
    assert second._v_scale_cpu.tolist() == [1.0, 2.0, 4.0, 3.0]
    assert (without_ids(first)["_v_scale_cpu"], second._k_scale_float) == untouched
    assert sync_host_copies(model) == []


def test_scales_with_degenerate_strides():
    """(1,) with stride 0: a slice of an expanded scalar counts as contiguous."""
    layer = Layer(0.5, shape=(1,))
    assert layer._k_scale.stride() == (0,)
    assert sync_host_copies(layer) == []
    layer._k_scale.fill_(0.25)
    assert sync_host_copies(layer) == ["_k_scale_float", "_k_scale_cpu"]
    assert layer._k_scale_cpu.tolist() == [0.25]


def test_a_refit_with_a_bad_scale_changes_no_host_copy():
    model = Model()
    model.layers[0]._k_scale.data.fill_(0.25)
    model.layers[1]._v_scale[2] = math.nan
    before = [snapshot(layer) for layer in model.layers]
    with pytest.raises(ValueError, match=r"layers.1: _v_scale: got .*nan.*; accepted: finite"):
        sync_host_copies(model)
    assert [snapshot(layer) for layer in model.layers] == before


def test_layers_without_host_copies_are_left_so():
    layer = Layer(0.5)
    del layer._k_scale_cpu
    layer._k_scale_float = None
    layer._k_scale.fill_(0.25)
    assert sync_host_copies(layer) == []
    assert not hasattr(layer, "_k_scale_cpu") and layer._k_scale_float is None


def test_an_empty_scale_is_refused_by_name():
    layer = Layer()
    layer._v_scale = torch.empty(0)
    with pytest.raises(ValueError, match=r"_v_scale: got \[\]; accepted: finite and > 0"):
        sync_host_copies(layer)
