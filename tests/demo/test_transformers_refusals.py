"""What the paged cache and its attention cannot do is refused by its name."""

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
from kvcache.scales import KVScales  # noqa: E402
from tests.demo import models  # noqa: E402
from tests.demo.models import loaded  # noqa: E402

NEW = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


@pytest.fixture(autouse=True)
def _registered():
    register("cute_kv", models.reference)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("wrong", (0, -1, 2.5, "64", True, None))
def test_pages_of_no_size(wrong):
    with pytest.raises(ValueError, match="page_size: got .* accepted: an int > 0"):
        PagedKVCache(models.llama().config, page_size=wrong)


def deepseek() -> torch.nn.Module:
    config = transformers.DeepseekV3Config(
        vocab_size=models.VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def test_latent_attention():
    model, ids = loaded(deepseek), models.tokens(1, 8)
    for call in (lambda: PagedKVCache(model.config), lambda: model(ids)):
        with pytest.raises(NotImplementedError, match="latent attention"):
            call()


def test_caches_that_generate_makes():
    model, ids = loaded(), models.tokens(1, 8)
    cache = {cache_keyword(model): PagedKVCache(model.config)}
    with pytest.raises(TypeError, match="guidance_scale, assistant models"):
        model.generate(ids, **cache, guidance_scale=1.5, **NEW)
    cache[cache_keyword(model)].reset()
    with pytest.raises(TypeError, match="guidance_scale, assistant models"):
        model.generate(ids, **cache, assistant_model=loaded(), **NEW)


def test_offloading():
    model = loaded()
    cache = PagedKVCache(model.config)
    forward(model, models.tokens(1, 8), cache)
    for layer in cache.layers:
        for move in (layer.offload, layer.prefetch):
            with pytest.raises(NotImplementedError, match="no offloading"):
                move()
    for move in (cache.offload, cache.prefetch):
        with pytest.raises(NotImplementedError, match="no offloading"):
            move(0)


@pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
def test_packed_sequences(make):
    model, ids = loaded(make), models.tokens(2, 20)
    cache = PagedKVCache(model.config)
    apart = torch.arange(20).expand(2, 20)
    packed = torch.stack([torch.arange(20), torch.arange(20) % 10])
    for held in (0, 20):
        with pytest.raises(NotImplementedError, match="packed sequences"):
            forward(model, ids, cache, position_ids=packed + held)
        assert cache.get_seq_length() == held
        forward(model, ids, cache, position_ids=apart + held)
    lengths = torch.tensor([0, 10, 20], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="packed sequences"):
        forward(model, ids[:1], PagedKVCache(model.config), cu_seq_lens_q=lengths)


def test_positions_may_begin_elsewhere():
    """They are the model's affair as long as they count tokens."""
    model, ids = loaded(), models.tokens(1, 8)
    cache = PagedKVCache(model.config)
    forward(model, ids, cache, position_ids=torch.arange(100, 108)[None])
    assert cache.get_seq_length() == 8
    assert len(calibrate_scales(model, ids)) == 2


def test_scales_of_other_heads_in_one_layer():
    """At the first pass they would be found after the layers before have stored its tokens."""
    config = models.llama().config
    scales = [KVScales(0.1, 0.1, "fp8"), KVScales((0.1,) * 3, (0.1,) * 3, "fp8")]
    with pytest.raises(ValueError, match=r"scales\[1\]: got those of 3 heads; accepted: .* 2, one"):
        PagedKVCache(config, "fp8", scales)
    PagedKVCache(config, "fp8", [scales[0], KVScales((0.1, 0.2), 0.1, "fp8")])


def test_scales_of_more_heads_than_a_layer_has():
    """The config has layers of two head counts: only the pass knows which layer has which."""
    model, ids = loaded(models.gemma4), models.tokens(1, 8)
    model.config.num_global_key_value_heads = 2
    scales = [KVScales(0.1, 0.1, "fp8")] * 4
    scales[1] = KVScales((0.1, 0.1), (0.1, 0.1), "fp8")
    cache = PagedKVCache(model.config, "fp8", scales)
    with pytest.raises(ValueError, match="scales: got .* accepted: 1 number"):
        forward(model, ids, cache)
    assert [layer.length for layer in cache.layers] == [0, 0]
    assert cache.nbytes == 0


@pytest.mark.parametrize("sizes", ({"global_head_dim": 96}, {"head_dim": 48}))
def test_head_sizes_that_cannot_be_rotated(sizes):
    config = models.gemma4().config
    for name, size in sizes.items():
        setattr(config, name, size)
    with pytest.raises(
        ValueError, match="rotated keys: head size (96|48); accepted: powers of two"
    ):
        PagedKVCache(config, rotate_keys=True)
    PagedKVCache(config)


def test_scales_by_name():
    """What load_kv_scales returns has an order, but says so only by its layers' names."""
    config = models.llama().config
    found = {f"model.layers.{index}": KVScales(0.1, 0.1, "fp8") for index in range(2)}
    for wrong in (found, iter(found.values()), "ab"):
        with pytest.raises(TypeError, match=r"scales: got .*list\(d\.values\(\)\)"):
            PagedKVCache(config, "fp8", wrong)
    with pytest.raises(TypeError, match=r"scales\[0\]: got a str; .*list\(d\.values\(\)\)"):
        PagedKVCache(config, "fp8", list(found))
    PagedKVCache(config, "fp8", list(found.values()))
