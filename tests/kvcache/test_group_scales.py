"""The scales of a group of an engine's layers, looked at for each batch."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from kvcache import (
    KVScales,
    StaleScalesError,
    apply_kv_scales,
    check_mtp_scales,
    save_kv_scales,
    sync_host_copies,
)
from kvcache.integrations.vllm import scales
from kvcache.integrations.vllm.scales import GroupScales
from kvcache.layer_scales import ScaleWatch
from tests.kvcache.helpers import Layer, snapshot
from tests.kvcache.mtp_helpers import assert_copied
from tests.requires import requires_module

PAIR = ("target", "draft")
HEADS = [0.3, 0.4]


def engine(layers, options=None, kv_cache_dtype="fp8", **parallel):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        additional_config={} if options is None else {"cute_kernels": options},
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype),
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **parallel}
        ),
    )


def reading(target, layer=None, **fields):
    """A layer that reads another's cache."""
    layer = Layer(num_kv_heads=2) if layer is None else layer
    for name, value in {"kv_sharing_target_layer_name": target, **fields}.items():
        setattr(layer, name, value)
    return layer


def pair(scale=HEADS):
    layers = {"target": Layer(scale, num_kv_heads=2), "draft": reading("target")}
    return layers, GroupScales(engine(layers), PAIR)


def test_a_batch_that_changes_nothing_reads_no_device(monkeypatch):
    layers, group = pair()
    assert group.refresh() == ["draft"]
    monkeypatch.setattr(torch.Tensor, "cpu", lambda *_: pytest.fail("a device read"))
    assert group.refresh() == []


def one_head_of_the_target(layers):
    apply_kv_scales(
        {"target": layers["target"]}, {"target": KVScales((0.1, 0.4), (0.6, 0.8), "fp8")}
    )


def the_device_of_the_target_then_its_copies(layers):
    layers["target"]._k_scale.copy_(torch.tensor([0.35, 0.5]))
    assert sync_host_copies(layers["target"])


def the_device_of_the_draft_alone(layers):
    layers["draft"]._v_scale.fill_(1.0)


def another_tensor_of_the_draft(layers):
    layers["draft"]._k_scale = torch.ones(2)


def other_memory_of_the_draft(layers):
    layers["draft"]._k_scale.data = torch.ones(2)


def a_head_of_the_drafts_host_tensor(layers):
    layers["draft"]._k_scale_cpu.data[0] = 1.0


def the_float_of_the_draft(layers):
    layers["draft"]._k_scale_float = 1.0


@pytest.mark.parametrize("inference", (False, True))
@pytest.mark.parametrize(
    "write",
    (
        one_head_of_the_target,
        the_device_of_the_target_then_its_copies,
        the_device_of_the_draft_alone,
        another_tensor_of_the_draft,
        other_memory_of_the_draft,
        a_head_of_the_drafts_host_tensor,
        the_float_of_the_draft,
    ),
)
def test_the_next_batch_repairs_whatever_form_of_a_scale_was_written(write, inference):
    layers, group = pair()
    group.refresh()
    with torch.inference_mode(inference):
        write(layers)
    assert group.refresh() == ["draft"]
    assert_copied(layers["draft"], layers["target"])
    assert group.refresh() == []


def test_what_no_version_counts_is_not_seen_on_the_device():
    """So the documentation says, and what to do then."""
    layers, group = pair()
    group.refresh()
    layers["draft"]._k_scale.data.fill_(1.0)
    assert group.refresh() == []
    with pytest.raises(StaleScalesError, match="draft: _k_scale is .*1.0"):
        check_mtp_scales({"draft": layers["draft"]}, layers, {"draft": "target"})
    assert sync_host_copies(layers["draft"])
    assert group.refresh() == ["draft"]
    with torch.inference_mode():
        layer = Layer(HEADS)
    watch = ScaleWatch(layer)
    watch.accept()
    with torch.inference_mode():
        layer._k_scale.fill_(1.0)
        assert not watch.changed()
        layer._k_scale_cpu.fill_(1.0)
    assert watch.changed()


def test_a_new_tensor_at_the_address_of_the_old_one_is_seen():
    layer = Layer()
    watch = ScaleWatch(layer)
    for _ in range(100):
        watch.accept()
        del layer._k_scale
        layer.register_buffer("_k_scale", torch.tensor(1.0))
        assert watch.changed()


@pytest.fixture
def path(tmp_path):
    requires_module("safetensors")
    return tmp_path / "kv_scales.safetensors"


@pytest.mark.parametrize("forms", (("",), ("_cpu",), ("", "_cpu")))
def test_scales_of_a_file_are_repaired_head_by_head(path, forms):
    save_kv_scales(path, [KVScales((0.1, 0.4), 0.2, "fp8")])
    name = "model.layers.0.self_attn.attn"
    layers = {name: Layer(num_kv_heads=2)}
    group = GroupScales(engine(layers, {"kv_scales": str(path)}), [name])
    assert group.refresh() == [name]
    for form in forms:
        getattr(layers[name], f"_k_scale{form}").fill_(0.4)
    assert group.refresh() == [name]
    for form in ("", "_cpu"):
        assert getattr(layers[name], f"_k_scale{form}").tolist() == pytest.approx([0.1, 0.4])


def cannot_be(scale):
    return {"target": Layer(scale), "draft": reading("target", Layer(scale))}


def other_geometry():
    draft = reading("target", Layer(num_kv_heads=4, head_size=512))
    return {"target": Layer(num_kv_heads=16, head_size=256), "draft": draft}


def other_format():
    target, draft = Layer(), reading("target", Layer(), kv_cache_dtype="nvfp4")
    target.kv_cache_dtype = "fp8"
    return {"target": target, "draft": draft}


@pytest.mark.parametrize(
    ("layers", "message"),
    (
        (cannot_be(0.0), "^target: _k_scale: got 0.0"),
        (cannot_be(-1.0), "^target: _k_scale: got -1.0"),
        (cannot_be(float("nan")), "^target: _k_scale: got nan"),
        (other_geometry(), "^draft: num_kv_heads: got 4; target, .* has 16"),
        (other_format(), "^draft: kv_cache_dtype: got 'nvfp4'; target, .* has 'fp8'"),
        ({"draft": reading("draft")}, "^draft: reads its own cache: draft -> draft"),
        (
            {"draft": reading("b"), "b": reading("draft")},
            "^draft: reads its own .*: draft -> b",
        ),
        ({"draft": reading("gone")}, "^draft: reads the cache of gone, which is no attention"),
    ),
    ids=("0", "-1", "nan", "geometry", "format", "itself", "circle", "gone"),
)
def test_what_cannot_be_right_is_refused_also_where_numbers_are_equal(layers, message):
    layers = {"good": reading("fine", Layer()), "fine": Layer(0.25), **layers}
    before = {name: snapshot(layer) for name, layer in layers.items()}
    group = GroupScales(engine(layers), list(layers))
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            group.refresh()
    assert {name: snapshot(layer) for name, layer in layers.items()} == before


@pytest.mark.parametrize("names", (["c", "b"], ["b", "c"], ["c"]))
def test_a_chain_of_readers_has_the_scales_of_the_layer_with_the_cache(names):
    layers = {"a": Layer(0.1), "b": reading("a", Layer()), "c": reading("b", Layer())}
    group = GroupScales(engine(layers), names)
    assert group.refresh() == names
    for name in names:
        assert_copied(layers[name], layers["a"])
    assert group.refresh() == []


def test_a_refusal_takes_back_what_the_file_gave(path):
    save_kv_scales(path, [KVScales(0.5, 0.25, "fp8")])
    own, target = "model.layers.0.self_attn.attn", Layer(float("nan"))
    layers = {own: Layer(), "target": target, "draft": reading("target", Layer())}
    before = [snapshot(layer) for layer in layers.values()]
    group = GroupScales(engine(layers, {"kv_scales": str(path)}), [own, "draft"])
    with pytest.raises(ValueError, match="^target: _k_scale: got nan"):
        group.refresh()
    assert [snapshot(layer) for layer in layers.values()] == before


def test_a_refit_of_the_device_alone_is_an_error_that_says_what_to_do():
    layers, group = pair()
    group.refresh()
    layers["target"]._k_scale.fill_(0.7)
    with pytest.raises(ValueError, match="^target: _k_scale_float: is .*kvcache.sync_host_copies"):
        group.refresh()
    sync_host_copies(layers["target"])
    assert group.refresh() == ["draft"]


@pytest.mark.parametrize(("rank", "found"), ((0, [0.1, 0.2]), (3, [0.7, 0.8])))
def test_a_rank_takes_the_scales_of_its_heads_from_the_file(path, monkeypatch, rank, found):
    save_kv_scales(path, [KVScales([0.1 * i for i in range(1, 9)], 0.5, "fp8")])
    name = "model.layers.0.self_attn.attn"
    layers = {name: Layer(num_kv_heads=2)}
    monkeypatch.setattr(scales, "_rank", lambda: rank)
    config = engine(layers, {"kv_scales": str(path)}, tensor_parallel_size=4)
    assert GroupScales(config, [name]).refresh() == [name]
    assert layers[name]._k_scale.tolist() == pytest.approx(found)
    assert layers[name]._v_scale.item() == 0.5


def test_heads_that_do_not_fit_name_tensor_parallelism(path, monkeypatch):
    name = "model.layers.0.self_attn.attn"
    layers = {name: Layer(num_kv_heads=2)}
    monkeypatch.setattr(scales, "_rank", lambda: 0)
    for heads, ranks, message in (
        (8, 1, "k_scale: got 8 scales; the layer has 2 KV heads .under tensor parallelism"),
        (2, 4, "got the scales of 2 KV heads; tensor parallelism over 4 ranks leaves 2 to each"),
        (4, 4, "got the scales of 4 KV heads"),
        (16, 4, "got the scales of 16 KV heads"),
        (9, 4, "tensor parallelism: world_size: got 4 for the scales of 9 KV heads"),
    ):
        save_kv_scales(path, [KVScales([0.5] * heads, 0.5, "fp8")])
        config = engine(layers, {"kv_scales": str(path)}, tensor_parallel_size=ranks)
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            GroupScales(config, [name]).refresh()


@pytest.mark.parametrize(("stages", "warnings"), ((1, 1), (2, 0)))
def test_a_file_with_layers_that_are_not_here_is_warned_about_once(
    path, caplog, monkeypatch, stages, warnings
):
    save_kv_scales(path, [KVScales(0.5, 0.5, "fp8")] * 3)
    name = "language_model.model.layers.0.self_attn.attn"
    layers = {name: Layer(), "model.layers.1.self_attn.attn": Layer()}
    scales._warn_once.cache_clear()
    monkeypatch.setattr(scales.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = engine(layers, {"kv_scales": str(path)}, pipeline_parallel_size=stages)
    with caplog.at_level(logging.WARNING, scales.logger.name):
        for _ in range(2):
            GroupScales(config, [name]).refresh()
    said = "the file has scales of no layer here: model.layers.2.self_attn"
    assert caplog.text.count(said) == warnings
