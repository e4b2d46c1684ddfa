"""`transformers` models over the paged cache, against their own eager attention."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from tests.requires import requires_module

transformers = requires_module("transformers")

from kvcache.integrations.transformers import (  # noqa: E402 - needs transformers
    PagedKVCache,
    PagedKVLayer,
    cache_keyword,
    calibrate_scales,
    forward,
    register,
)
from kvcache.paged import FP8_MAX, PageTable  # noqa: E402
from kvcache.scales import KVScales  # noqa: E402
from tests.demo import models  # noqa: E402

BATCH, LENGTH = 2, 150
# Relative errors of the logits. Measured: at most 0.0055 and 0.062; 0.157 in a window off by one.
TOLERANCE = {"auto": 0.01, "bf16": 0.01, "fp8": 0.1}
STEPS = {"one pass": (LENGTH,), "chunks": (37, 64, 49), "decode": (140, *[1] * 10)}


@pytest.fixture(autouse=True)
def _registered():
    register("cute_kv", models.reference)
    with torch.inference_mode():
        yield


def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits = model(ids).logits
    model.set_attn_implementation("cute_kv")
    return logits


def cached_logits(model, ids: torch.Tensor, cache: PagedKVCache, steps=(LENGTH,)) -> torch.Tensor:
    return torch.cat([forward(model, x, cache).logits for x in ids.split(steps, dim=1)], dim=1)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("kv_cache_dtype", TOLERANCE)
@pytest.mark.parametrize("name", models.MODELS)
def test_logits_are_those_of_eager_attention(name, kv_cache_dtype, steps):
    model, ids = models.MODELS[name](), models.tokens(BATCH, LENGTH)
    want = eager_logits(model, ids)
    scales = calibrate_scales(model, ids) if kv_cache_dtype == "fp8" else None
    cache = PagedKVCache(model.config, kv_cache_dtype, scales)
    assert error(cached_logits(model, ids, cache, steps), want) < TOLERANCE[kv_cache_dtype]
    assert cache.get_seq_length() == LENGTH


def test_the_window_is_the_models_own_to_the_token():
    ids = models.tokens(BATCH, LENGTH)
    eager = {w: eager_logits(models.gemma(w), ids) for w in (23, 24, 25)}
    model = models.gemma(24)
    model.set_attn_implementation("cute_kv")
    got = cached_logits(model, ids, PagedKVCache(model.config, "bf16"))
    assert error(got, eager[24]) < TOLERANCE["bf16"]
    assert min(error(got, eager[23]), error(got, eager[25])) > 10 * TOLERANCE["bf16"]


@pytest.mark.parametrize("kv_cache_dtype", ("bf16", "fp8"))
def test_rotated_keys_change_rounding_only(kv_cache_dtype):
    model, ids = models.llama(), models.tokens(BATCH, LENGTH)
    want = eager_logits(model, ids)
    scales = calibrate_scales(model, ids, rotate_keys=True) if kv_cache_dtype == "fp8" else None
    rotated = PagedKVCache(model.config, kv_cache_dtype, scales, rotate_keys=True)
    plain = PagedKVCache(model.config, "bf16")
    assert error(cached_logits(model, ids, rotated), want) < TOLERANCE[kv_cache_dtype]
    cached_logits(model, ids, plain)
    assert error(rotated.layers[0].read()[0], plain.layers[0].read()[0]) > 1.0


def test_prefill_reads_what_the_cache_holds():
    model, ids = models.llama(), models.tokens(BATCH, LENGTH)
    want = eager_logits(model, ids)
    ruined = [KVScales(1e4, 1e4, "fp8")] * 2  # every code is zero
    cache = PagedKVCache(model.config, "fp8", ruined)
    assert error(cached_logits(model, ids, cache), want) > 0.3


def test_fp8_takes_half_the_bytes_of_bf16():
    model, ids = models.gemma(), models.tokens(BATCH, LENGTH)
    model.set_attn_implementation("cute_kv")
    caches = [
        PagedKVCache(model.config, "fp8", calibrate_scales(model, ids)),
        PagedKVCache(model.config, "bf16"),
    ]
    for cache in caches:
        cached_logits(model, ids, cache)
    pages = -(-LENGTH // 64) * BATCH
    assert caches[0].nbytes == 3 * pages * 2 * 64 * 1 * 64
    assert caches[1].nbytes == 2 * caches[0].nbytes


def test_calibration_maps_the_largest_element_to_448():
    model, ids = models.llama(), models.tokens(BATCH, LENGTH)
    model.set_attn_implementation("cute_kv")
    scales = calibrate_scales(model, ids)
    cache = PagedKVCache(model.config, "auto")
    cached_logits(model, ids, cache)
    for layer, scale in zip(cache.layers, scales, strict=True):
        for x, factor in zip(layer.read(), (scale.k, scale.v), strict=True):
            assert x.abs().max().item() == pytest.approx(FP8_MAX * factor[0], rel=1e-6)
    assert scales[0] != scales[1]


@pytest.mark.parametrize("name", models.MODELS)
def test_generate_gives_the_tokens_of_eager_attention(name):
    model, ids = models.MODELS[name](), models.tokens(1, 70)
    model.set_attn_implementation("eager")
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **arguments)
    model.set_attn_implementation("cute_kv")
    cache = PagedKVCache(model.config)
    got = model.generate(ids, **{cache_keyword(model): cache}, **arguments)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == 70 + 12 - 1


def test_cropped_tokens_are_forgotten():
    model, ids = models.gemma(), models.tokens(BATCH, LENGTH)
    want = eager_logits(model, ids)
    cache = PagedKVCache(model.config)
    forward(model, ids[:, :100], cache)
    forward(model, models.tokens(BATCH, 33, seed=9), cache)
    cache.crop(-33)
    got = forward(model, ids[:, 100:], cache).logits
    assert error(got, want[:, 100:]) < TOLERANCE["auto"]
    with pytest.raises(ValueError, match="tokens_to_remove: got 1;"):
        cache.crop(1)


def test_a_cache_can_be_reset():
    model, ids = models.llama(), models.tokens(BATCH, LENGTH)
    want = eager_logits(model, ids)
    cache = PagedKVCache(model.config)
    forward(model, models.tokens(BATCH, 80, seed=9), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert error(cached_logits(model, ids, cache), want) < TOLERANCE["auto"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.MODELS)
def test_the_kernel_gives_the_references_logits(name):
    model, ids = models.MODELS[name]().cuda(), models.tokens(BATCH, LENGTH).cuda()
    model.set_attn_implementation("cute_kv")
    scales = calibrate_scales(model, ids)
    steps = (16,) * (LENGTH // 16) + (LENGTH % 16,)
    register("cute_kv")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flash_attn_varlen_func")  # no fallback
        got = cached_logits(model, ids, PagedKVCache(model.config, "fp8", scales), steps)
    register("cute_kv", models.reference)
    want = cached_logits(model, ids, PagedKVCache(model.config, "fp8", scales), steps)
    assert error(got, want) < TOLERANCE["bf16"]


# ---- refusals ----------------------------------------------------------------------------------


def test_padding_is_refused():
    model, ids = models.llama(), models.tokens(BATCH, 20)
    model.set_attn_implementation("cute_kv")
    mask = torch.ones_like(ids)
    forward(model, ids, PagedKVCache(model.config), attention_mask=mask)
    mask[1, 0] = 0
    with pytest.raises(NotImplementedError, match="padding"):
        forward(model, ids, PagedKVCache(model.config), attention_mask=mask)


def test_a_mask_of_the_users_own_is_refused():
    model, ids = models.llama(), models.tokens(BATCH, 20)
    model.set_attn_implementation("cute_kv")
    with pytest.raises(NotImplementedError, match="masks of your own"):
        forward(model, ids, PagedKVCache(model.config), attention_mask=torch.ones(BATCH, 1, 20, 20))


def test_bidirectional_attention_is_refused():
    config = models.gemma().config
    config.use_bidirectional_attention = True
    model = transformers.Gemma3ForCausalLM(config).eval()
    model.set_attn_implementation("cute_kv")
    with pytest.raises(NotImplementedError, match="bidirectional"):
        forward(model, models.tokens(1, 20), PagedKVCache(model.config))


def test_another_cache_is_refused():
    model = models.llama()
    model.set_attn_implementation("cute_kv")
    with pytest.raises(TypeError, match="PagedKVCache"):
        model(models.tokens(1, 20))


def test_a_cache_for_another_window_is_refused():
    model = models.gemma(24)
    model.set_attn_implementation("cute_kv")
    with pytest.raises(ValueError, match="attends with 24, its cache was made for 32"):
        forward(model, models.tokens(1, 20), PagedKVCache(models.gemma(32).config))


def test_scales_serve_every_dtype_of_their_storage_format():
    model, ids = models.llama(), models.tokens(BATCH, LENGTH)
    model.set_attn_implementation("cute_kv")
    scales = calibrate_scales(model, ids, kv_cache_dtype="nvfp4")
    cached_logits(model, ids, PagedKVCache(model.config, "nvfp4_mse", scales))
    with pytest.raises(ValueError, match="for kv_cache_dtype 'nvfp4', asked for .* 'fp8'"):
        PagedKVCache(model.config, "fp8", scales)


@pytest.mark.parametrize(("calibrated", "used"), ((True, False), (False, True)))
def test_scales_of_keys_otherwise_rotated_are_refused(calibrated, used):
    """Rotation changes the largest key: nothing in the numbers would show it."""
    model, ids = models.llama(), models.tokens(BATCH, LENGTH)
    model.set_attn_implementation("cute_kv")
    scales = calibrate_scales(model, ids, rotate_keys=calibrated)
    assert {each.rotated_keys for each in scales} == {calibrated}
    with pytest.raises(ValueError, match=f"rotated_keys is {calibrated}"):
        PagedKVCache(model.config, "fp8", scales, rotate_keys=used)
    PagedKVCache(model.config, "fp8", scales, rotate_keys=calibrated)


def test_options_are_named_and_of_their_types():
    model, ids = models.llama(), models.tokens(1, 8)
    model.set_attn_implementation("cute_kv")
    with pytest.raises(TypeError):
        calibrate_scales(model, ids, "fp8")
    with pytest.raises(TypeError):
        PagedKVCache(model.config, "bf16", None, 64, True)
    for wrong in ("yes", "fp8", 1, None):
        with pytest.raises(TypeError, match="rotate_keys: got"):
            calibrate_scales(model, ids, rotate_keys=wrong)
        with pytest.raises(TypeError, match="rotate_keys: got"):
            PagedKVCache(model.config, "bf16", rotate_keys=wrong)
    with pytest.raises(TypeError, match="kv_cache_dtype: got a list"):
        PagedKVCache(model.config, ["fp8"])
    with pytest.raises(ValueError, match="accepted: one that has scales"):
        calibrate_scales(model, ids, kv_cache_dtype="bf16")


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_another_attention_than_ours_is_told_what_it_needs(implementation):
    model, ids = models.llama(), models.tokens(1, 8)
    model.set_attn_implementation(implementation)
    with pytest.raises(TypeError, match=r"register\(\) .* attn_implementation='cute_kv'"):
        forward(model, ids, PagedKVCache(model.config, "bf16"))


def test_what_a_cache_hands_to_attention_can_still_be_copied():
    model, ids = models.llama(), models.tokens(1, 8)
    model.set_attn_implementation("cute_kv")
    cache = PagedKVCache(model.config, "bf16")
    cached_logits(model, ids, cache, (8,))
    keys, _ = cache.layers[0].update(*torch.zeros(2, 1, 2, 1, 64))
    assert copy.copy(keys) == keys and not hasattr(keys, "__array__")


def test_beam_search_is_refused():
    layer = PagedKVLayer(PageTable(64), "bf16")
    with pytest.raises(NotImplementedError, match="beam search"):
        layer.reorder_cache(torch.tensor([0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("fp9",), "got 'fp9'; accepted: auto, bf16, fp8"),
        (("fp8",), "got none for kv_cache_dtype 'fp8'"),
        (("bf16", [KVScales(1.0, 1.0)] * 2), "got some for kv_cache_dtype 'bf16'"),
        (("fp8", [KVScales(1.0, 1.0, "fp8")]), "got 1; the model has 2 layers"),
        (
            ("fp8", [KVScales(1.0, 1.0, "nvfp4")] * 2),
            "these are for kv_cache_dtype 'nvfp4', asked for were those of 'fp8'",
        ),
        (("nvfp4", [KVScales(1.0, 1.0)] * 2), r"accepted: KVScales\(k, v, 'nvfp4'\)"),
    ),
    ids=("dtype", "no scales", "needless scales", "too few scales", "other scales", "no dtype"),
)
def test_a_cache_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(models.llama().config, *arguments)


def test_layers_of_another_kind_are_refused():
    config = models.gemma().config
    config.layer_types = ["sliding_attention", "full_attention", "chunked_attention"]
    with pytest.raises(NotImplementedError, match="chunked_attention; accepted"):
        PagedKVCache(config)


def test_a_window_without_layer_types_is_every_layers():
    config = transformers.MistralConfig(num_hidden_layers=3, sliding_window=16)
    assert [layer.sliding_window for layer in PagedKVCache(config).layers] == [16] * 3
