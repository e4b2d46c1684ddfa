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
from tests.demo.models import lengths, loaded  # noqa: E402

LENGTH = 100
TOLERANCE = 0.01  # relative error of the logits of an unquantized cache; measured: 0.0055


@pytest.fixture(autouse=True)
def _registered():
    register("cute_kv", models.reference)


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


# ---- a forward pass that does not end ----------------------------------------------------------


def refused_gradients(model, ids, cache):
    forward(model, ids, cache)


@torch.no_grad()
def refused_attentions(model, ids, cache):
    forward(model, ids, cache, output_attentions=True)


def single_layer() -> torch.nn.Module:
    """Its one layer writes all there is before the first refusal."""
    config = models.llama().config
    config.num_hidden_layers = 1
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("held", (0, 40))
@pytest.mark.parametrize("refused", (refused_gradients, refused_attentions))
@pytest.mark.parametrize("make", (models.llama, models.gemma, single_layer))
def test_a_refused_pass_leaves_the_cache_as_it_was(make, refused, held):
    model, ids = loaded(make), models.tokens(1, LENGTH)
    want = eager_logits(model, ids)[:, held:]
    cache = PagedKVCache(model.config)
    if held:
        with torch.no_grad():
            forward(model, ids[:, :held], cache)
    with pytest.raises(NotImplementedError):
        refused(model, ids[:, held:], cache)
    assert set(lengths(cache)) == {held}
    with torch.no_grad():
        got = forward(model, ids[:, held:], cache).logits
    assert error(got, want) < TOLERANCE
    assert not any(layer.pages.k.requires_grad for layer in cache.layers)


def test_queries_with_gradients_alone_leave_the_cache_as_it_was():
    model, ids = loaded(), models.tokens(1, LENGTH)
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    cache = PagedKVCache(model.config)
    with pytest.raises(NotImplementedError, match="requires_grad"):
        forward(model, ids, cache)
    assert lengths(cache) == [0, 0]


@torch.no_grad()
def test_a_pass_that_ended_between_layers_is_not_continued():
    model, ids = loaded(models.gemma), models.tokens(1, LENGTH)
    cache = PagedKVCache(model.config)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids, cache)
    hook.remove()
    with pytest.raises(ValueError, match=r"hold 100, 100, 0 tokens: .* accepted after reset"):
        forward(model, ids, cache)
    assert lengths(cache) == [LENGTH, LENGTH, 0]
    cache.reset()
    assert error(forward(model, ids, cache).logits, eager_logits(model, ids)) < TOLERANCE
