"""Scales of drafts, of layers that share a cache, and from files, through vLLM's own wiring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.worker.gpu.spec_decode.gemma4 import speculator

from kvcache import (
    StaleScalesError,
    check_mtp_scales,
    map_draft_to_target,
    restore_scales,
    save_scales,
    sync_host_copies,
)
from kvcache.calibration import apply_kv_scales, save_kv_scales
from kvcache.integrations.vllm import scales as plugin_scales
from kvcache.integrations.vllm.metadata import CuteMetadataBuilder
from kvcache.scales import KVScales
from tests.vllm.helpers import allocate, batch, layer, run, set_scales, vllm_config

TARGET_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
DRAFT_TYPES = ["sliding_attention", "full_attention"]
TARGET, DRAFT = "language_model.model.layers", "draft_model.layers"
SHARED = 1  # the last target layers read another target layer's cache


def name(prefix: str, index: int) -> str:
    return f"{prefix}.{index}.self_attn.attn"


class Models:
    """A Gemma-4 target and its draft, in vLLM's attention layers; sliding layers are 2 wide."""

    def __init__(self, target_types=tuple(TARGET_TYPES), draft_types=tuple(DRAFT_TYPES)) -> None:
        self.config = vllm_config()
        self.types = {TARGET: list(target_types), DRAFT: list(draft_types)}
        for prefix, types in self.types.items():
            for index, kind in enumerate(types):
                sliding = kind == "sliding_attention"
                made = layer(
                    self.config,
                    index,
                    prefix=prefix,
                    heads=(8, 2) if sliding else (8, 1),
                    head_size=64 if sliding else 128,
                    per_layer_sliding_window=16 if sliding else None,
                )
                if prefix == TARGET:
                    set_scales(made, 0.003 * (index + 1), 0.005 * (index + 1))
        self.layers = self.config.compilation_config.static_forward_context
        self.targets = [each for each in self.layers if each.startswith(TARGET)]
        self.drafts = [each for each in self.layers if each.startswith(DRAFT)]

    def wire(self, wiring) -> None:
        """vLLM's own wiring, given the parts of its runner and configuration that it reads."""

        def text(types, shared):
            found = SimpleNamespace(
                layer_types=types, num_kv_shared_layers=shared, num_hidden_layers=len(types)
            )
            return SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: found))

        draft = SimpleNamespace(
            layers=[
                SimpleNamespace(self_attn=SimpleNamespace(attn=self.layers[each]))
                for each in self.drafts
            ]
        )
        model = SimpleNamespace(model=draft)
        runner = SimpleNamespace(
            model=model,
            speculative_config=SimpleNamespace(draft_model_config=text(self.types[DRAFT], 0)),
            vllm_config=SimpleNamespace(
                model_config=text(self.types[TARGET], SHARED),
                compilation_config=self.config.compilation_config,
            ),
        )
        wiring(runner, model, set(self.targets))

    def builder(self, names: list[str]) -> CuteMetadataBuilder:
        spec = self.layers[names[0]].get_kv_cache_spec(self.config)
        return CuteMetadataBuilder(spec, names, self.config, torch.device("cpu"))


def v1(runner, model, targets):
    Gemma4Proposer._setup_gemma4_kv_sharing(runner, targets)


def v2(runner, model, targets):
    speculator.Gemma4Speculator._setup_gemma4_kv_sharing(runner, model, targets)


def one_batch():
    return batch([1], [40], torch.tensor([[1]]), 64)


@pytest.mark.parametrize("wiring", (v1, v2))
def test_vllms_map_is_ours(wiring):
    models = Models()
    models.wire(wiring)
    mapped = plugin_scales.sharing(models.layers, models.drafts)
    assert mapped == map_draft_to_target(
        models.drafts,
        models.targets,
        draft_layer_types=DRAFT_TYPES,
        target_layer_types=TARGET_TYPES,
        num_kv_shared_layers=SHARED,
    )
    assert mapped == {name(DRAFT, 0): name(TARGET, 2), name(DRAFT, 1): name(TARGET, 1)}


def test_the_v1_runner_leaves_drafts_at_scale_one_and_the_first_batch_repairs_it():
    models = Models()
    models.wire(v1)
    mapping = plugin_scales.sharing(models.layers, models.drafts)
    drafts = {each: models.layers[each] for each in models.drafts}
    with pytest.raises(StaleScalesError, match=r"draft_model\.layers\.0.*should be 0\.0089"):
        check_mtp_scales(drafts, models.layers, mapping)
    for each in models.drafts:
        models.builder([each]).build(0, one_batch())
    check_mtp_scales(drafts, models.layers, mapping)
    draft, target = (models.layers[each] for each in (name(DRAFT, 0), name(TARGET, 2)))
    assert torch.equal(draft._k_scale, target._k_scale)
    assert draft._k_scale.data_ptr() != target._k_scale.data_ptr()
    assert "_k_scale" in draft._buffers
    assert draft._v_scale_float == target._v_scale_float
    assert torch.equal(draft._v_scale_cpu, target._v_scale_cpu)


def test_the_v2_runner_copies_and_the_first_batch_changes_nothing(monkeypatch):
    models = Models()
    models.wire(v2)
    written = []
    monkeypatch.setattr(plugin_scales, "propagate_mtp_scales", lambda *args: written.append(args))
    models.builder([name(DRAFT, 0)]).build(0, one_batch())
    assert not written


def test_a_reload_resets_scales_and_the_next_batch_repairs_them():
    models = Models()
    models.wire(v2)
    builder = models.builder([name(DRAFT, 1)])
    builder.build(0, one_batch())
    draft, target = models.layers[name(DRAFT, 1)], models.layers[name(TARGET, 1)]
    held = draft._k_scale
    draft.process_weights_after_loading(torch.bfloat16)  # what a reload of a bf16 draft ends with
    assert held.item() == 1.0
    builder.build(0, one_batch())
    assert held.item() == target._k_scale.item()
    set_scales(target, 0.25, 0.5)  # a refit of the target
    builder.build(0, one_batch())
    assert (draft._k_scale.item(), draft._v_scale_float) == (0.25, 0.5)
    assert draft._k_scale is held


def test_layers_that_join_a_group_later_are_seen():
    models = Models()
    models.wire(v1)
    names = [name(DRAFT, 0)]
    builder = models.builder(names)
    builder.build(0, one_batch())
    models.layers["late"] = late = layer(models.config, 7, heads=(8, 2))
    late.kv_sharing_target_layer_name = name(TARGET, 0)
    names.append("late")
    builder.build(0, one_batch())
    assert late._k_scale.item() == models.layers[name(TARGET, 0)]._k_scale.item()


@pytest.mark.parametrize("wrong", (0.0, -1.0, float("nan")))
def test_a_wrong_scale_is_caught_by_name(wrong):
    models = Models()
    models.wire(v1)
    set_scales(models.layers[name(TARGET, 1)], wrong, 0.5)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.attn: _k_scale"):
        models.builder([name(DRAFT, 1)]).build(0, one_batch())


def test_a_draft_of_another_geometry_is_caught_by_name():
    models = Models()
    models.wire(v1)
    models.layers[name(DRAFT, 0)].kv_sharing_target_layer_name = name(TARGET, 1)
    with pytest.raises(ValueError, match=r"draft_model\.layers\.0.*num_kv_heads: got 2; .* has 1"):
        models.builder([name(DRAFT, 0)]).build(0, one_batch())


def test_a_draft_reads_the_targets_cache_as_the_target_does():
    """The same query through both layers gives the same output: cache and scales agree."""
    models = Models(("full_attention", "full_attention"), ("full_attention",))
    models.wire(v1)
    target, draft = models.layers[name(TARGET, 0)], models.layers[name(DRAFT, 0)]
    assert draft.kv_sharing_target_layer_name == target.layer_name
    spec = target.get_kv_cache_spec(models.config)
    target.kv_cache = draft.kv_cache = allocate(spec, 3, KVCacheLayout.LBHNC, 64)[0]
    common = batch([40], [40], torch.tensor([[1]]), 64)
    query = torch.randn(40, 8 * 128)
    key, value = torch.randn(2, 40, 128)
    metadata = models.builder([target.layer_name]).build(0, common)
    want = run(models.config, target, metadata, query, key, value)
    metadata = models.builder([draft.layer_name]).build(0, common)
    got = run(models.config, draft, metadata, query, None, None)
    assert torch.equal(got, want)
    set_scales(draft, 1.0, 1.0)
    wrong = run(models.config, draft, metadata, query, None, None)
    assert not torch.allclose(wrong, want, atol=0.1)


@pytest.mark.parametrize("per_head", (False, True))
def test_scales_survive_a_sleep_and_a_reload_bit_for_bit(per_head):
    models = Models()
    if per_head:
        wide = name(TARGET, 0)
        scales = {wide: KVScales((0.1, 0.4), (0.2, 0.3), "fp8")}
        apply_kv_scales({wide: models.layers[wide]}, scales)
    model = torch.nn.ModuleDict(
        {each.replace(".", "/"): models.layers[each] for each in models.targets}
    )
    before = save_scales(model)
    for each in model.values():
        set_default_quant_scales(each)
    assert not torch.equal(
        save_scales(model)["/".join(name(TARGET, 0).split(".")) + "._k_scale"],
        before["/".join(name(TARGET, 0).split(".")) + "._k_scale"],
    )
    restore_scales(model, before)
    after = save_scales(model)
    assert after.keys() == before.keys()
    for key, value in before.items():
        same = torch.equal(after[key], value) if torch.is_tensor(value) else after[key] == value
        assert same, key


def test_host_copies_follow_a_refit_of_the_device_scales():
    models = Models()
    target = models.layers[name(TARGET, 0)]
    target._k_scale.fill_(0.125)
    model = torch.nn.ModuleDict({"layer": target})
    assert sync_host_copies(model) == ["layer._k_scale_float", "layer._k_scale_cpu"]
    assert target._k_scale_float == target._k_scale_cpu.item() == 0.125


def with_file(config, path, scales, kv_cache_dtype="fp8", layer_name="model.layers.{}.self_attn"):
    save_kv_scales(path, scales, kv_cache_dtype, layer_name=layer_name)
    config.additional_config = {"cute_kernels": {"kv_scales": str(path)}}


def test_a_calibration_file_gives_every_layer_its_scales_and_survives_a_reload(tmp_path):
    models = Models(draft_types=())
    with_file(models.config, tmp_path / "s", [KVScales(0.5 + i, 0.25 + i) for i in range(4)])
    for index in (0, 2):
        names = [name(TARGET, index)]
        builder = models.builder(names)
        made = models.layers[names[0]]
        for _ in range(2):
            builder.build(0, one_batch())
            assert (made._k_scale.item(), made._v_scale_float) == (0.5 + index, 0.25 + index)
            assert made._v_scale_cpu.item() == 0.25 + index
            set_default_quant_scales(made)  # what a reload does


def test_drafts_take_the_calibrated_scales_of_their_targets(tmp_path):
    models = Models()
    models.wire(v1)
    with_file(models.config, tmp_path / "s", [KVScales(0.5 + i, 0.25 + i) for i in range(4)])
    for each in (name(TARGET, 1), name(DRAFT, 1)):
        models.builder([each]).build(0, one_batch())
    assert models.layers[name(DRAFT, 1)]._k_scale.item() == 1.5


def test_scales_per_head_reach_the_layer(tmp_path):
    models = Models(("sliding_attention",), ())
    with_file(models.config, tmp_path / "s", [KVScales((0.5, 0.25), (1.0, 2.0))])
    models.builder([name(TARGET, 0)]).build(0, one_batch())
    assert models.layers[name(TARGET, 0)]._k_scale.tolist() == [0.5, 0.25]


def test_a_file_that_does_not_fit_the_model_is_refused_by_name(tmp_path):
    models = Models(draft_types=())
    with_file(models.config, tmp_path / "s", [KVScales(0.5, 0.5)])
    models.builder([name(TARGET, 0)]).build(0, one_batch())
    with pytest.raises(ValueError, match=r"no scales of language_model\.model\.layers\.2"):
        models.builder([name(TARGET, 2)]).build(0, one_batch())
    with_file(models.config, tmp_path / "s", [KVScales((0.5,) * 3, 0.5)])
    with pytest.raises(ValueError, match=r"layers\.0.*: k_scale: got 3 scales; the layer has 2"):
        models.builder([name(TARGET, 0)]).build(0, one_batch())
    with_file(models.config, tmp_path / "s", [KVScales(0.5, 0.5)], "nvfp4")
    with pytest.raises(
        ValueError, match="for kv_cache_dtype 'nvfp4', asked for were those of 'fp8'"
    ):
        models.builder([name(TARGET, 0)])


def test_vllms_loader_finds_the_names_of_the_file(tmp_path):
    """A checkpoint with this file beside its own loads the scales by itself."""
    save_kv_scales(tmp_path / "s", [KVScales(0.5, 0.25)], "fp8")
    parameters = {f"model.layers.0.self_attn.attn.{side}_scale": None for side in "kv"}
    for stored in safe_open(tmp_path / "s", "pt").keys():
        assert maybe_remap_kv_scale_name(stored, parameters) in parameters


def test_scales_of_rotated_keys_are_refused(tmp_path):
    """vLLM stores keys as they are."""
    models = Models(draft_types=())
    with_file(models.config, tmp_path / "s", [KVScales(0.5, 0.5, rotated_keys=True)] * 4)
    with pytest.raises(ValueError, match=r"^kv_scales: .*layers\.0.*: rotated_keys is True"):
        models.builder([name(TARGET, 0)])
