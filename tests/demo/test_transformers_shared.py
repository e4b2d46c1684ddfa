"""Models whose last layers read the keys and values of earlier ones, as Gemma-4 E2B's do."""

from __future__ import annotations

import pytest
import torch

from tests.requires import requires_module

transformers = requires_module("transformers")

from kvcache.integrations.transformers import (  # noqa: E402 - needs transformers
    PagedKVCache,
    cache_keyword,
    calibrate_scales,
    forward,
    register,
)
from tests.demo import models  # noqa: E402

BATCH, LENGTH = 2, 150
# Relative errors of the logits. Measured: at most 0.0047 and 0.057; 0.17 in a window off by one.
TOLERANCE = {"auto": 0.01, "bf16": 0.01, "fp8": 0.1}
# How the tokens are split into passes, and how many logits of each pass are asked for.
PASSES = {
    "one pass": ((LENGTH,), 0),
    "last": ((LENGTH,), 1),
    "last five": ((LENGTH,), 5),
    "chunks": ((37, 64, 49), 5),
    "decode": ((140, *[1] * 10), 1),
}
NEW = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(autouse=True)
def _registered():
    register("cute_kv", models.reference)
    with torch.inference_mode():
        yield


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits = model(ids).logits
    model.set_attn_implementation("cute_kv")
    return logits


@pytest.mark.parametrize(("steps", "keep"), PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("kv_cache_dtype", TOLERANCE)
def test_logits_are_those_of_eager_attention(kv_cache_dtype, steps, keep):
    """Of `keep` tokens only, queries reach the layers that share (all for 0)."""
    model, ids = models.gemma4(), models.tokens(BATCH, LENGTH)
    want = eager_logits(model, ids).split(steps, dim=1)
    scales = calibrate_scales(model, ids) if kv_cache_dtype == "fp8" else None
    cache = PagedKVCache(model.config, kv_cache_dtype, scales)
    for x, expected in zip(ids.split(steps, dim=1), want, strict=True):
        got = forward(model, x, cache, logits_to_keep=keep).logits
        assert error(got, expected[:, -keep:]) < TOLERANCE[kv_cache_dtype]
    assert [layer.length for layer in cache.layers] == [LENGTH] * 2


def test_generate_gives_the_tokens_of_eager_attention():
    model, ids = models.gemma4(), models.tokens(BATCH, 70)
    model.set_attn_implementation("eager")
    want = model.generate(ids, **NEW)
    model.set_attn_implementation("cute_kv")
    got = model.generate(ids, **{cache_keyword(model): PagedKVCache(model.config)}, **NEW)
    assert torch.equal(got, want)


def test_guessed_tokens_can_be_cropped():
    model, ids = models.gemma4(), models.tokens(1, 8).repeat(1, 6)
    model.set_attn_implementation("cute_kv")
    plain, guessed = ({cache_keyword(model): PagedKVCache(model.config)} for _ in range(2))
    want = model.generate(ids, **plain, **NEW)
    got = model.generate(ids, **guessed, prompt_lookup_num_tokens=4, **NEW)
    assert torch.equal(got, want)


def test_each_layer_has_the_scales_of_the_pages_that_it_reads():
    model, ids = models.gemma4(), models.tokens(BATCH, LENGTH)
    model.set_attn_implementation("cute_kv")
    scales = calibrate_scales(model, ids)
    assert scales[2:] == scales[:2] and scales[0] != scales[1]
    with pytest.raises(ValueError, match="got 2; the model has 4 layers"):
        PagedKVCache(model.config, "fp8", scales[:2])


@pytest.mark.parametrize("wrong", ("1", -1, 5, 1.0))
def test_a_number_of_shared_layers_that_cannot_be_is_refused(wrong):
    config = models.llama().config
    config.num_kv_shared_layers = wrong
    with pytest.raises(ValueError, match="num_kv_shared_layers: got"):
        PagedKVCache(config)


def test_shared_layers_need_one_of_their_type():
    config = models.gemma().config
    config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="is of type full_attention"):
        PagedKVCache(config)


def test_a_model_without_keys_of_its_own_is_refused():
    config = models.llama().config
    config.num_kv_shared_layers = config.num_hidden_layers
    with pytest.raises(NotImplementedError, match="all 2 layers read the cache of another model"):
        PagedKVCache(config)


def test_a_layer_on_another_device_cannot_read_the_cache():
    model, ids = models.gemma4(), models.tokens(1, 8)
    model.set_attn_implementation("cute_kv")
    cache = PagedKVCache(model.config)
    forward(model, ids, cache)
    keys, _ = cache.layers[0].update(*torch.zeros(2, 1, 1, 1, 64))
    assert keys.to(ids.device, non_blocking=True) is keys
    with pytest.raises(NotImplementedError, match="layers on meta .* a layer on cpu"):
        keys.to("meta")
