"""What happens to a paged cache between forward passes of `transformers` models."""

from __future__ import annotations

import pytest
import torch

from tests.requires import requires_module

transformers = requires_module("transformers")

from kvcache.integrations.transformers import (  # noqa: E402 - needs transformers
    PagedKVCache,
    cache_keyword,
    forward,
    register,
)
from tests.demo import models  # noqa: E402

LENGTH = 100
TOLERANCE = 0.01  # relative error of the logits of an unquantized cache; measured: 0.0055


@pytest.fixture(autouse=True)
def _registered():
    register("cute_kv", models.reference)


def loaded(make=models.llama):
    model = make()
    model.set_attn_implementation("cute_kv")
    return model


def lengths(cache: PagedKVCache) -> list[int]:
    return [layer.length for layer in cache.layers]


def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids).logits
    model.set_attn_implementation("cute_kv")
    return logits


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
def test_a_tensor_of_tokens_to_remove_is_taken_once(make):
    model, ids = loaded(make), models.tokens(1, LENGTH)
    want = eager_logits(model, ids)
    cache = PagedKVCache(model.config)
    forward(model, ids, cache)
    cache.crop(torch.tensor(-5))
    got = forward(model, ids[:, -5:-2], cache).logits
    cache.crop(torch.tensor(-3))
    assert lengths(cache) == [LENGTH - 5] * len(cache.layers)
    assert {type(length) for length in lengths(cache)} == {int}
    assert error(got, want[:, -5:-2]) < TOLERANCE
    assert error(forward(model, ids[:, -5:], cache).logits, want[:, -5:]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("wrong", (-1.0, torch.tensor(-1.0), "-1", None))
def test_only_integers_can_be_cropped(wrong):
    model, ids = loaded(), models.tokens(1, 8)
    cache = PagedKVCache(model.config)
    forward(model, ids, cache)
    for crop in (cache.crop, cache.layers[0].crop):
        with pytest.raises(TypeError):
            crop(wrong)
    assert lengths(cache) == [8, 8]


@pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(make):
    """Rejected candidates are cropped; some releases pass their number as a tensor."""
    model, ids = loaded(make), models.tokens(1, 8).repeat(1, 6)
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    plain, guessed = PagedKVCache(model.config), PagedKVCache(model.config)
    want = model.generate(ids, **{cache_keyword(model): plain}, **arguments)
    got = model.generate(
        ids, **{cache_keyword(model): guessed}, prompt_lookup_num_tokens=4, **arguments
    )
    assert torch.equal(got, want)
    assert len(set(lengths(guessed))) == 1
