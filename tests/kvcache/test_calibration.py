"""Scale files: names, shapes, what they are for, and putting them into layers."""

from __future__ import annotations

import sys

import pytest
import torch

from kvcache.calibration import apply_kv_scales, load_kv_scales, save_kv_scales
from kvcache.scales import KVScales
from tests.kvcache.helpers import Layer, snapshot
from tests.requires import requires_module

safetensors = requires_module("safetensors")
safetensors_torch = requires_module("safetensors.torch")

SCALES = [KVScales(0.01, 0.02), KVScales((0.03, 0.04), (0.05, 0.06))]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv_scales.safetensors"


def test_the_file_has_the_names_and_shapes_that_engines_read(path):
    save_kv_scales(path, SCALES, "fp8")
    stored = safetensors_torch.load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        "model.layers.0.self_attn.k_scale": (),
        "model.layers.0.self_attn.v_scale": (),
        "model.layers.1.self_attn.k_scale": (2,),
        "model.layers.1.self_attn.v_scale": (2,),
    }
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kv_cache_dtype", ("fp8", "fp8_e4m3", "nvfp4_mse"))
def test_scales_come_back_bit_for_bit(path, kv_cache_dtype):
    save_kv_scales(path, SCALES * 6, kv_cache_dtype)
    loaded = load_kv_scales(path, kv_cache_dtype)
    assert list(loaded) == [f"model.layers.{index}.self_attn" for index in range(12)]
    assert [(each.k, each.v) for each in loaded.values()] == [(s.k, s.v) for s in SCALES * 6]
    assert {each.kv_cache_dtype for each in loaded.values()} == {kv_cache_dtype}
    assert load_kv_scales(path) == loaded


def test_pairs_are_scales_too(path):
    save_kv_scales(path, [(0.5, (0.25, 0.125))], "fp8", layer_name="h.{}.attn")
    assert load_kv_scales(path, "fp8") == {"h.0.attn": KVScales(0.5, (0.25, 0.125), "fp8")}


def test_scales_of_another_storage_format_are_refused(path):
    """Used as nvfp4's global scales, fp8's would be wrong by a factor of 6, silently."""
    save_kv_scales(path, SCALES, "fp8")
    assert load_kv_scales(path, "fp8_e4m3")
    with pytest.raises(
        ValueError, match="for kv_cache_dtype 'fp8', asked for were those of 'nvfp4"
    ):
        load_kv_scales(path, "nvfp4_4over6")
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'bf16'"):
        load_kv_scales(path, "bf16")


def test_scales_know_what_they_are_saved_for(path):
    save_kv_scales(path, [KVScales(0.5, 0.25, "nvfp4")])
    assert load_kv_scales(path)["model.layers.0.self_attn"].kv_cache_dtype == "nvfp4"


def test_a_file_that_names_no_dtype_is_believed_to_be_what_the_caller_says(path):
    """What an engine wrote."""
    safetensors_torch.save_file({"a.k_scale": torch.ones(1), "a.v_scale": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"does not say .* accepted with an explicit"):
        load_kv_scales(path)
    assert load_kv_scales(path, "nvfp4") == {"a": KVScales(1.0, 1.0, "nvfp4")}


@pytest.mark.parametrize(
    ("tensors", "message"),
    (
        ({"model.layers.0.self_attn.k_scale": torch.tensor(1.0)}, "self_attn has k_scale only"),
        ({"lm_head.weight": torch.ones(3)}, "holds no k_scale and v_scale"),
        (
            {"a.k_scale": torch.tensor(0.0), "a.v_scale": torch.tensor(1.0)},
            r"scales\.safetensors: a: k scale: got \(0\.0,\); accepted: finite",
        ),
        (
            {"a.k_scale": torch.ones(2, 2), "a.v_scale": torch.tensor(1.0)},
            r"scales\.safetensors: a: k scale: got a torch.Tensor of shape \(2, 2\)",
        ),
    ),
    ids=("one side", "no scales", "zero", "matrix"),
)
def test_a_file_that_cannot_be_is_refused(path, tensors, message):
    safetensors_torch.save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        load_kv_scales(path, "fp8")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        (([], "fp8"), ValueError, "scales: got none"),
        ((SCALES, "bf16"), ValueError, "accepted: one that has scales"),
        ((SCALES, "fp9"), ValueError, "got 'fp9'; nearest: 'fp8'"),
        ((KVScales(1.0, 1.0), "fp8"), TypeError, "scales: got a kvcache.scales.KVScales"),
        (([1.0], "fp8"), TypeError, r"scales\[0\]: got a float"),
        ((SCALES,), ValueError, "kv_cache_dtype: got None"),
        (
            ([KVScales(1.0, 1.0, "nvfp4"), KVScales(1.0, 1.0, "fp8")],),
            ValueError,
            r"scales\[1\]: these are for kv_cache_dtype 'fp8', asked for were those of 'nvfp4'",
        ),
    ),
    ids=("none", "bf16", "fp9", "one", "number", "no dtype", "two dtypes"),
)
def test_what_cannot_be_saved_is_refused(path, arguments, error, message):
    with pytest.raises(error, match=message):
        save_kv_scales(path, *arguments)
    assert not path.exists()


def test_layer_names_without_an_index_are_refused(path):
    with pytest.raises(ValueError, match="layer_name: got 'model.layers.self_attn'"):
        save_kv_scales(path, SCALES, "fp8", layer_name="model.layers.self_attn")
    for name in ("x{}{}", "x{layer}", "x{"):
        with pytest.raises(ValueError, match="layer_name: got"):
            save_kv_scales(path, SCALES, "fp8", layer_name=name)


def test_nothing_is_left_behind_where_the_file_cannot_be(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        save_kv_scales(tmp_path / "taken", SCALES, "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_layers_get_every_form_of_their_scales():
    layers = {"a": Layer(num_kv_heads=2), "b": Layer(num_kv_heads=2)}
    held = layers["a"]._k_scale
    apply_kv_scales(layers, {"a": SCALES[0], "b": SCALES[1]})
    assert layers["a"]._k_scale is held
    assert held.item() == layers["a"]._k_scale_float == layers["a"]._k_scale_cpu.item()
    assert layers["b"]._v_scale.tolist() == layers["b"]._v_scale_cpu.tolist()
    assert layers["b"]._v_scale_float == torch.tensor(0.06).item()


@pytest.mark.parametrize(
    ("scales", "message"),
    (
        ({"a": SCALES[0]}, "scales: has no b"),
        ({"a": SCALES[0], "b": SCALES[0], "c": SCALES[0]}, "layers: has no c"),
        ({"a": SCALES[0], "b": SCALES[1]}, "b: k_scale: got 2 scales; the layer has 4 KV heads"),
    ),
    ids=("missing", "too many", "heads"),
)
def test_a_mismatch_is_caught_by_name_and_changes_nothing(scales, message):
    layers = {"a": Layer(), "b": Layer()}
    before = [snapshot(layer) for layer in layers.values()]
    with pytest.raises(ValueError, match=message):
        apply_kv_scales(layers, scales)
    assert [snapshot(layer) for layer in layers.values()] == before


@pytest.mark.parametrize(
    ("layers", "scales", "message"),
    (
        ({}, {"b": {"k": 1.0}}, "b: scales: got a dict; accepted: KVScales"),
        ({}, {"b": 0.5}, "b: scales: got a float; accepted: KVScales"),
        ({}, {"b": None}, "b: scales: got a NoneType; accepted: KVScales"),
        ({"b": None}, {}, "b: got a NoneType; accepted: an attention layer"),
        ({"b": {}}, {}, "b: got a dict; accepted: an attention layer"),
        ({5: Layer()}, {}, "layers: name 5: got a int; accepted: a str"),
        ({}, {5: SCALES[0]}, "scales: name 5: got a int; accepted: a str"),
    ),
)
def test_what_is_no_layer_or_no_scales_is_refused_by_name(layers, scales, message):
    layers = {"a": Layer(), "b": Layer(), **layers}
    before = snapshot(layers["a"])
    with pytest.raises(TypeError, match=f"^{message}"):
        apply_kv_scales(layers, {"a": SCALES[0], "b": SCALES[0], **scales})
    assert snapshot(layers["a"]) == before


def test_layers_take_scales_of_their_own_cache_dtype_only():
    layer = Layer()
    layer.kv_cache_dtype, before = "nvfp4", snapshot(layer)
    for made_for, message in (("fp8", "a: .* 'fp8', .* 'nvfp4'"), (None, "a: do not say")):
        with pytest.raises(ValueError, match=message):
            apply_kv_scales({"a": layer}, {"a": KVScales(0.5, 0.5, made_for)})
    assert snapshot(layer) == before
    apply_kv_scales({"a": layer}, {"a": KVScales(0.5, 0.5, "nvfp4_4over6")})
    assert layer._k_scale.item() == 0.5


@pytest.mark.parametrize("dtype", ("bf16", "auto", "fp8_e5m2", 8))
def test_layers_whose_dtype_has_no_scales_or_is_not_known_are_refused_by_name(dtype):
    layers = {"a": Layer(), "b": Layer()}
    layers["a"].kv_cache_dtype, layers["b"].kv_cache_dtype = "fp8", dtype
    before = [snapshot(layer) for layer in layers.values()]
    scales = dict.fromkeys(layers, KVScales(0.5, 0.5, "fp8"))
    with pytest.raises((ValueError, TypeError), match=f"b: kv_cache_dtype: got {dtype!r}"):
        apply_kv_scales(layers, scales)
    assert [snapshot(layer) for layer in layers.values()] == before


@pytest.mark.parametrize("rotated", (True, False))
def test_a_file_says_whether_keys_were_rotated(path, rotated):
    saved = [KVScales(0.5, 0.25, "fp8", rotated_keys=rotated)]
    save_kv_scales(path, saved)
    assert list(load_kv_scales(path).values()) == saved
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"kv_cache_dtype": "fp8", "rotated_keys": str(rotated).lower()}


def test_a_file_of_an_engine_has_plain_keys(path):
    tensors = {"a.k_scale": torch.ones(1), "a.v_scale": torch.ones(1)}
    safetensors_torch.save_file(tensors, path)
    assert load_kv_scales(path, "fp8")["a"].rotated_keys is False
    safetensors_torch.save_file(tensors, path, metadata={"rotated_keys": "yes"})
    with pytest.raises(ValueError, match="rotated_keys is 'yes'; accepted: true, false"):
        load_kv_scales(path, "fp8")


def test_rotated_and_plain_keys_are_not_mixed(path):
    plain, rotated = (KVScales(0.5, 0.25, "fp8", rotated_keys=each) for each in (False, True))
    with pytest.raises(ValueError, match=r"scales\[1\]: rotated_keys is True"):
        save_kv_scales(path, [plain, rotated])
    for scales, layers_rotate in ((rotated, False), (plain, True)):
        layer = Layer()
        before = snapshot(layer)
        with pytest.raises(ValueError, match=f"^a: rotated_keys is {not layers_rotate}"):
            apply_kv_scales({"a": layer}, {"a": scales}, rotated_keys=layers_rotate)
        assert snapshot(layer) == before
    apply_kv_scales({"a": layer}, {"a": rotated}, rotated_keys=True)
    assert layer._k_scale.item() == 0.5


@pytest.mark.parametrize("dtype", (torch.bool, torch.int32))
def test_numbers_in_a_file_are_floating_point_ones(path, dtype):
    tensors = {f"a.{side}_scale": torch.ones(1, dtype=dtype) for side in "kv"}
    safetensors_torch.save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"scales\.safetensors: a\.[kv]_scale: is {dtype}"):
        load_kv_scales(path, "fp8")


def test_names_that_are_alike_are_refused(path):
    """The second of two layers would be written over the first."""
    with pytest.raises(ValueError, match="layer_name: .* names several of 12 layers alike"):
        save_kv_scales(path, SCALES * 6, "fp8", layer_name="m.{!s:.1}")
    assert not path.exists()


def test_what_is_no_file_of_scales_is_named(tmp_path, path):
    with pytest.raises(IsADirectoryError, match=f"^{tmp_path}: is a directory; accepted: a file"):
        load_kv_scales(tmp_path)
    path.write_text("k_scale: 1.0")
    with pytest.raises(ValueError, match=r"scales\.safetensors: is no safetensors file"):
        load_kv_scales(path)
    with pytest.raises(FileNotFoundError, match="gone"):
        load_kv_scales(tmp_path / "gone")


@pytest.mark.parametrize("call", (load_kv_scales, lambda path: save_kv_scales(path, SCALES, "fp8")))
def test_a_missing_library_is_named(path, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"safetensors: pip install 'cute-kernels\[scales\]'"):
        call(path)
