"""A refused pass leaves no tokens, frees no pages and fixes no batch size, in any layer."""

from __future__ import annotations

import pytest
import torch

from tests.requires import requires_module

transformers = requires_module("transformers")

from kvcache.integrations.transformers import (  # noqa: E402 - needs transformers
    PagedKVCache,
    forward,
    register,
)
from tests.demo import models  # noqa: E402
from tests.demo.models import lengths, loaded  # noqa: E402

HELD, LENGTH = 60, 80
PAGE = 8


@pytest.fixture(autouse=True)
def _registered():
    register("cute_kv", models.reference)
    with torch.no_grad():
        yield


def single_layer() -> torch.nn.Module:
    config = models.llama().config
    config.num_hidden_layers = 1
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@pytest.mark.parametrize("make", (models.llama, models.gemma, single_layer))
def test_a_model_with_attention_of_its_own(make, implementation):
    model, ids = loaded(make), models.tokens(1, LENGTH)
    want = forward(model, ids, PagedKVCache(model.config, page_size=PAGE)).logits
    cache = PagedKVCache(model.config, page_size=PAGE)
    for first, last in ((0, HELD), (HELD, LENGTH)):
        model.set_attn_implementation(implementation)
        with pytest.raises(TypeError, match="needs register"):
            forward(model, ids[:, first:last], cache)
        assert set(lengths(cache)) == {first}
        model.set_attn_implementation("cute_kv")
        got = forward(model, ids[:, first:last], cache).logits
        torch.testing.assert_close(got, want[:, first:last], rtol=0, atol=0.05)


REFUSED = {
    "attentions": {"output_attentions": True},
    "mask": {"attention_mask": torch.zeros(1, 1, 4, HELD + 4)},
    "packed": {"position_ids": torch.tensor([[0, 1, 0, 1]])},
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_pages_of_a_sliding_window_are_kept(arguments):
    model, ids = loaded(models.gemma), models.tokens(1, LENGTH)
    want = forward(model, ids, PagedKVCache(model.config, page_size=PAGE)).logits
    cache = PagedKVCache(model.config, page_size=PAGE)
    forward(model, ids[:, :HELD], cache)
    held, read = cache.nbytes, [layer.read() for layer in cache.layers]
    with pytest.raises((NotImplementedError, ValueError)):
        forward(model, ids[:, HELD : HELD + 4], cache, **arguments)
    assert cache.nbytes == held
    for layer, before in zip(cache.layers, read, strict=True):
        assert all(map(torch.equal, layer.read(), before))
    cache.crop(-40)
    got = forward(model, ids[:, HELD - 40 :], cache).logits
    torch.testing.assert_close(got, want[:, HELD - 40 :], rtol=0, atol=0.05)


@pytest.mark.parametrize("held", (0, HELD))
@pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
def test_gradients_that_begin_in_a_later_layer(make, held):
    model, ids = loaded(make), models.tokens(1, LENGTH)
    model.requires_grad_(False)
    cache = PagedKVCache(model.config, page_size=PAGE)
    if held:
        forward(model, ids[:, :held], cache)
    bytes_held = cache.nbytes
    model.model.layers[1].self_attn.k_proj.weight.requires_grad_(True)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="requires_grad"):
        forward(model, ids[:, held:], cache)
    assert set(lengths(cache)) == {held}
    assert cache.nbytes == bytes_held
    forward(model, ids[:, held:], cache)
    assert set(lengths(cache)) == {LENGTH}


@pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
def test_an_empty_cache_takes_any_batch_size(make):
    model, ids = loaded(make), models.tokens(3, 40)
    cache = PagedKVCache(model.config, page_size=PAGE)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        forward(model, ids[:2], cache, output_attentions=True)
    assert cache.nbytes == 0
    for batch in (1, 3, 2):
        want = forward(model, ids[:batch], PagedKVCache(model.config, page_size=PAGE)).logits
        assert torch.equal(forward(model, ids[:batch], cache).logits, want)
        with pytest.raises(ValueError, match="this cache holds"):
            forward(model, ids[:batch].repeat(2, 1), cache)
        assert set(lengths(cache)) == {40}
        if make is models.llama:
            cache.crop(-40)
        else:
            cache.reset()
