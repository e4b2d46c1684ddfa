"""NVFP4 on SM100 as far as a CPU can prove it: selection, page bytes, dtypes, bytes written."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends import flashinfer as vllm_flashinfer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout, get_kv_quant_mode
from vllm.v1.worker.utils import customize_attention_spec

from cute_kernels.formats import ScaleLayout
from cute_kernels.reference.store import gather_kv, quantize_nvfp4, sequence_slots
from kvcache import bytes_per_token, contracts
from kvcache.contracts import Writer
from kvcache.integrations.vllm import nvfp4_sm100
from kvcache.integrations.vllm.nvfp4_sm100 import CuteNVFP4Backend, CuteNVFP4Impl
from tests.vllm.helpers import allocate, layer, vllm_config

NAMES = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
BLACKWELL, HOPPER = DeviceCapability(10, 0), DeviceCapability(9, 0)
SCALES = (0.002, 0.003)
BLOCK, HEADS, SIZE = 64, 2, 128


def reasons(**changes) -> list[str]:
    asked = {
        "head_size": SIZE,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "nvfp4_mse",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": BLACKWELL,
        "attn_type": AttentionType.DECODER,
    }
    return CuteNVFP4Backend.validate_configuration(**(asked | changes))


@pytest.fixture
def blackwell(monkeypatch):
    """As if the reader's half were there, too: the device and its kernels."""
    platform = type(current_platform)
    family = classmethod(lambda _, number, *__: number == 100)
    monkeypatch.setattr(platform, "is_device_capability_family", family)
    monkeypatch.setattr(vllm_flashinfer, "supports_trtllm_attention", lambda **_: True)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """Inside an engine a layer allocates its kernels' buffers on the GPU; outside, none."""
    monkeypatch.setattr(vllm_flashinfer, "get_current_vllm_config_or_none", lambda: None)


@pytest.fixture
def made():
    config = vllm_config("nvfp4_mse")
    found = layer(config, backend=CuteNVFP4Backend, heads=(8, HEADS), head_size=SIZE, scales=SCALES)
    return config, found


def test_the_backend_is_complete_and_named():
    assert CuteNVFP4Backend.get_impl_cls() is CuteNVFP4Impl
    assert issubclass(CuteNVFP4Impl, AttentionImpl)
    for cls in (CuteNVFP4Backend, CuteNVFP4Impl, CuteNVFP4Backend.get_builder_cls()):
        assert not getattr(cls, "__abstractmethods__", None)
    assert AttentionBackendEnum[CuteNVFP4Backend.get_name()].get_class() is CuteNVFP4Backend


@pytest.mark.parametrize("kv_cache_dtype", NAMES)
@pytest.mark.parametrize("head_size", (64, 128, 256, 512))
def test_with_both_halves_each_dtype_is_selected(blackwell, kv_cache_dtype, head_size):
    assert reasons(kv_cache_dtype=kv_cache_dtype, head_size=head_size, block_size=64) == []


def test_without_a_blackwell_device_the_reader_is_missing(monkeypatch, blackwell):
    monkeypatch.undo()
    assert [each for each in reasons() if "missing" in each] == [
        "kv_cache_dtype 'nvfp4_mse': the reader is missing (FlashInfer trtllm-gen)"
    ]


def test_both_halves_can_be_missing(monkeypatch, blackwell):
    monkeypatch.undo()
    monkeypatch.setattr(contracts, "WRITERS", contracts.WRITERS[:1])
    (found,) = [each for each in reasons() if "missing" in each]
    assert "the store is missing (nothing here writes it on sm_100) and the reader" in found


def test_the_missing_half_is_named(monkeypatch, blackwell):
    monkeypatch.setattr(vllm_flashinfer, "supports_trtllm_attention", lambda **_: False)
    assert any("the reader is missing" in each for each in reasons())
    assert not any("the store is missing" in each for each in reasons())
    linear = Writer("a store kernel", NAMES, ("sm_100a",), (ScaleLayout.LINEAR,))
    monkeypatch.setattr(contracts, "WRITERS", (linear,))
    monkeypatch.setattr(vllm_flashinfer, "supports_trtllm_attention", lambda **_: True)
    assert any("the store is missing" in each for each in reasons())  # it writes another order
    assert not any("the reader is missing" in each for each in reasons())


@pytest.mark.parametrize("kv_cache_dtype", NAMES)
def test_mla_is_refused_for_every_variant_with_the_reason(blackwell, kv_cache_dtype):
    found = reasons(kv_cache_dtype=kv_cache_dtype, use_mla=True, head_size=576)
    assert "MLA not supported" in found
    assert any(
        each.startswith(f"kv_cache_dtype {kv_cache_dtype!r} with latent K and V (MLA): ")
        for each in found
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    (
        ({"kv_cache_dtype": "fp8"}, "'fp8': CUTE_NVFP4_SM100 has"),
        ({"kv_cache_dtype": "auto"}, "'auto': CUTE_NVFP4_SM100 has"),
        ({"kv_cache_dtype": None}, "None: CUTE_NVFP4_SM100 has"),
        ({"kv_cache_dtype": "nvfp4_foo"}, "'nvfp4_foo': CUTE_NVFP4_SM100 has"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "'nvfp4_ds_mla': CUTE_NVFP4_SM100 has"),
        ({"head_size": 80}, "head size 80"),
        ({"block_size": 66}, "block size 66"),
        ({"device_capability": HOPPER}, "compute capability not supported"),
    ),
    ids=str,
)
def test_what_it_has_not_is_refused_by_name(blackwell, changes, name):
    assert any(name in each for each in reasons(**changes))


def test_user_dtype_and_storage_dtype_stay_two_fields(made):
    config, found = made
    impl = found.impl
    assert config.cache_config.cache_dtype == found.kv_cache_dtype == impl.user_dtype == "nvfp4_mse"
    assert impl.kv_cache_dtype == impl.cache_dtype == "nvfp4"
    assert found.kv_cache_torch_dtype is torch.uint8
    assert get_kv_quant_mode(found.kv_cache_dtype).is_nvfp4
    with pytest.raises(NotImplementedError, match="got 'fp8'; CUTE_NVFP4_SM100 stores nvfp4"):
        layer(vllm_config("fp8"), backend=CuteNVFP4Backend, head_size=SIZE)


@pytest.mark.parametrize("kv_cache_dtype", NAMES)
def test_page_bytes_are_ours(kv_cache_dtype):
    config = vllm_config(kv_cache_dtype)
    found = layer(config, backend=CuteNVFP4Backend, heads=(8, HEADS), head_size=SIZE)
    spec = customize_attention_spec(CuteNVFP4Backend, found.get_kv_cache_spec(config))
    assert spec.page_size_bytes == BLOCK * bytes_per_token(kv_cache_dtype, HEADS, SIZE)
    (cache, _) = allocate(spec, 3, KVCacheLayout.LBHNC, BLOCK)
    assert cache.shape == (3, 2 * HEADS, BLOCK, SIZE // 16 * 9)


def unswizzled(scales: torch.Tensor) -> torch.Tensor:
    """V scales (blocks, H, tokens, groups) in the reader's order, back to [token][group].

    Written from the layout's description, not from our store: (t, s) is at row
    4 (t // 4) + s // (S / 4), column 4 (s mod S / 4) + t mod 4.
    """
    out = torch.empty_like(scales)
    groups = scales.shape[-1]
    for t in range(scales.shape[-2]):
        for s in range(groups):
            row = t // 4 * 4 + s // (groups // 4)
            out[..., t, s] = scales[..., row, s % (groups // 4) * 4 + t % 4]
    return out


@pytest.mark.parametrize("kv_cache_dtype", NAMES)
@pytest.mark.parametrize("heads", (1, 2))
@pytest.mark.parametrize("layout", (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC), ids=lambda x: x.name)
def test_the_bytes_written_are_what_the_reader_takes(kv_cache_dtype, layout, heads):
    """Through vLLM's own views of the cache, the ones that it hands to trtllm-gen."""
    config = vllm_config(kv_cache_dtype)
    found = layer(config, backend=CuteNVFP4Backend, heads=(8, heads), head_size=SIZE, scales=SCALES)
    spec = customize_attention_spec(CuteNVFP4Backend, found.get_kv_cache_spec(config))
    cache = allocate(spec, 4, layout, BLOCK)[1]
    before = cache.clone()
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 103, heads, SIZE, generator=generator, dtype=torch.float32)
    key, value = key.bfloat16(), value.bfloat16()
    slots = sequence_slots(torch.tensor([3, 1]), 100, BLOCK)
    slots = torch.cat((slots, torch.full((2,), -1)))  # the last token is padding without a slot
    found.impl.do_kv_cache_update(found, key, value, cache, slots)
    data, scales, order = vllm_flashinfer._nvfp4_kv_views(cache, heads)
    assert order == "HND"
    page, token = slots[:100] // BLOCK, slots[:100] % BLOCK
    for index, (x, scale, side) in enumerate(((key, SCALES[0], "k"), (value, SCALES[1], "v"))):
        codes, block_scales = quantize_nvfp4(x[:100], scale, kv_cache_dtype, side=side)
        assert torch.equal(data[index].transpose(1, 2)[page, token], codes)
        stored = scales[index].view(torch.uint8)
        stored = unswizzled(stored) if side == "v" else stored
        got = stored.transpose(1, 2)[page, token]
        assert torch.equal(got, block_scales.view(torch.uint8))
    for block in (0, 2):  # not this sequence's
        assert torch.equal(cache[block], before[block])


def test_another_search_writes_other_bytes_and_reads_as_the_same_format():
    """The user's dtype reaches the store: the four dtypes write four caches."""
    written = {}
    for name in NAMES:
        config = vllm_config(name)
        found = layer(
            config, backend=CuteNVFP4Backend, heads=(8, HEADS), head_size=SIZE, scales=SCALES
        )
        spec = customize_attention_spec(CuteNVFP4Backend, found.get_kv_cache_spec(config))
        cache = allocate(spec, 2, KVCacheLayout.LBHNC, BLOCK)[0]
        x = torch.randn(64, HEADS, SIZE, generator=torch.Generator().manual_seed(2)).bfloat16()
        found.impl.do_kv_cache_update(found, x, x, cache, torch.arange(64))
        k = cache.transpose(1, 2).split(HEADS, dim=-2)[0]
        read = gather_kv(k, torch.arange(64), "nvfp4", SCALES[0])
        written[name] = cache.clone(), (read - x.float()).square().mean().item()
    errors = {name: error for name, (_, error) in written.items()}
    assert errors["nvfp4_mse"] < errors["nvfp4_4over6"] < errors["nvfp4"]
    assert errors["nvfp4_4over6_k"] == errors["nvfp4_4over6"]  # of keys
    caches = [cache for cache, _ in written.values()]
    assert not any(torch.equal(a, b) for index, a in enumerate(caches) for b in caches[index + 1 :])


def test_layers_that_share_a_cache_do_not_write_it(made):
    _, found = made
    found.impl.kv_sharing_target_layer_name = "another"
    found.impl.do_kv_cache_update(found, None, None, None, None)


def test_the_reader_sees_new_scales_after_a_reload_and_after_propagation(made, monkeypatch):
    """FlashInfer's layers multiply scales once, at their first call, and keep the product."""
    config, found = made
    found.impl.bmm1_scale, found.impl.bmm2_scale = 5.0, 6.0
    found.process_weights_after_loading(torch.bfloat16)
    assert found.impl.bmm1_scale is found.impl.bmm2_scale is None
    draft = layer(config, 1, backend=CuteNVFP4Backend, heads=(8, HEADS), head_size=SIZE)
    draft.kv_sharing_target_layer_name = found.layer_name
    draft.impl.bmm1_scale = draft.impl.bmm2_scale = 1.0
    found._k_scale_float, found._v_scale_float = 0.5, 0.25
    found._k_scale.fill_(0.5)
    found._v_scale.fill_(0.25)
    found._k_scale_cpu.fill_(0.5)
    found._v_scale_cpu.fill_(0.25)
    builder_cls = nvfp4_sm100.CuteNVFP4MetadataBuilder
    for method in ("__init__", "build"):
        monkeypatch.setattr(
            vllm_flashinfer.FlashInferMetadataBuilder, method, lambda *_, **__: None
        )
    builder = builder_cls(None, [draft.layer_name], config, torch.device("cpu"))
    builder.build(0, None)
    assert draft.impl.bmm1_scale is draft.impl.bmm2_scale is None
    assert (draft._k_scale.item(), draft._v_scale_float) == (0.5, 0.25)
