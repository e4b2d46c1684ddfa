"""The real `Attention` layer over our backend with an nvfp4 cache, on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec

from cute_kernels.reference.store import gather_kv, quantize_nvfp4
from kvcache import bytes_per_token
from kvcache.integrations.vllm.backend import CuteAttentionBackend
from kvcache.integrations.vllm.metadata import CuteMetadataBuilder
from kvcache.integrations.vllm.pages import nvfp4_sides
from kvcache.integrations.vllm.warmup import compile_units
from tests.vllm.helpers import allocate, batch, layer, run, vllm_config
from tests.vllm.test_attention import STEPS, TOLERANCE, attention64

NAMES = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
BLOCK, SIZE = 64, 64
SCALES = (0.002, 0.003)
DENSE = [each for each in KVCacheLayout if each.is_block_compact]
APART = [each for each in KVCacheLayout if not each.is_block_compact]
TABLE = torch.tensor([[7, 2, 11, -1], [4, 9, -1, 2**31 - 1]])


def spec_of(made, config):
    return customize_attention_spec(CuteAttentionBackend, made.get_kv_cache_spec(config))


def serve(made, config, *, manager=BLOCK, layout=KVCacheLayout.LBHNC, reference=None):
    """Run STEPS; yields (output, wanted from what was stored) of each step in float64."""
    spec = spec_of(made, config).copy_with_new_block_size(manager)
    _, cache = allocate(spec, 12 * BLOCK // manager, layout, BLOCK)
    made.kv_cache = cache
    builder = CuteMetadataBuilder(
        spec.copy_with_new_block_size(BLOCK), [made.layer_name], config, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, size = made.num_heads, made.num_kv_heads, made.head_size
    written = [[], []]
    for query_lens, seq_lens in STEPS:
        metadata = builder.build(0, batch(query_lens, seq_lens, TABLE, BLOCK, padding=2))
        tokens = sum(query_lens) + 2
        query = torch.randn(tokens, heads, size, generator=generator, dtype=torch.float32)
        sides = torch.randn(2, tokens, kv_heads, size, generator=generator, dtype=torch.float32)
        query, (key, value) = query.bfloat16(), sides.bfloat16()
        got = run(config, made, metadata, query.flatten(1), key.flatten(1), value.flatten(1))
        want, start = [], 0
        for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            own = slice(start, start + query_len)
            written[index].append((key[own], value[own]))
            k, v = (
                dequantized(torch.cat(xs), made.kv_cache_dtype, scale, side)
                for xs, scale, side in zip(zip(*written[index], strict=True), SCALES, "kv",
                                           strict=True)
            )  # fmt: skip
            assert len(k) == seq_len
            asked = query[own].double()
            want.append(attention64(asked, k, v, made.impl.scale, **(reference or {})))
            start += query_len
        yield got[: tokens - 2].view(-1, heads, size).double(), torch.cat(want)


def dequantized(x, name, scale, side):
    """What a store of this dtype makes of x, in float64, by the format's definition."""
    codes, scales = quantize_nvfp4(x, scale, name, side=side)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = magnitudes[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    return values * scales.double().repeat_interleave(16, -1) * scale


def check(made, config, **options):
    for got, want in serve(made, config, **options):
        assert ((got - want).norm() / want.norm()).item() < TOLERANCE


@pytest.mark.parametrize("layout", DENSE, ids=lambda each: each.name)
@pytest.mark.parametrize("heads", ((8, 2), (4, 1)), ids=("2 KV heads", "1 KV head"))
def test_store_and_attention_in_every_layout_of_memory(layout, heads):
    config = vllm_config("nvfp4")
    check(layer(config, heads=heads, scales=SCALES), config, layout=layout)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_reaches_the_store(name):
    config = vllm_config(name)
    made = layer(config, scales=SCALES)
    assert made.impl.kernel == "decode_sm90 and prefill_sm90_nvfp4"
    check(made, config)


@pytest.mark.parametrize("manager", (64, 128, 192))
def test_manager_blocks_are_split_into_kernel_blocks(manager):
    config = vllm_config("nvfp4_mse")
    check(layer(config, scales=SCALES), config, manager=manager)


@pytest.mark.parametrize(
    ("arguments", "reference"),
    (
        ({"per_layer_sliding_window": 20}, {"window": 20}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"head_size": 256, "heads": (4, 2)}, {}),
        ({"head_size": 512, "heads": (4, 1), "scale": 1.0}, {}),
    ),
    ids=("window", "softcap", "D 256", "D 512"),
)
def test_layers_of_every_kind(arguments, reference):
    config = vllm_config("nvfp4_4over6")
    check(layer(config, scales=SCALES, **arguments), config, reference=reference)


@pytest.mark.parametrize("name", NAMES)
def test_page_bytes_are_ours(name):
    config = vllm_config(name)
    spec = spec_of(layer(config), config)
    assert spec.page_size_bytes == BLOCK * bytes_per_token(name, 2, SIZE)
    (cache, _) = allocate(spec, 3, KVCacheLayout.LBHNC, BLOCK)
    assert cache.shape == (3, 4, BLOCK, SIZE // 16 * 9)
    assert CuteAttentionBackend.customize_spec(spec) == spec


@pytest.mark.parametrize("layout", DENSE, ids=lambda each: each.name)
def test_a_side_is_a_half_of_a_block(layout):
    """Nothing of another block, nor of K's side, is V's."""
    config = vllm_config("nvfp4")
    made = layer(config, scales=SCALES)
    cache = allocate(spec_of(made, config), 3, layout, BLOCK)[1]
    k, v = nvfp4_sides(cache, 2)
    slots = torch.arange(BLOCK, 2 * BLOCK)
    x = torch.randn(BLOCK, 2, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    made.impl.do_kv_cache_update(made, x, -x, cache, slots)
    for side, sign, scale in ((k, 1, SCALES[0]), (v, -1, SCALES[1])):
        read = gather_kv(side, slots, "nvfp4", scale)
        assert ((read - sign * x.float()).norm() / x.float().norm()).item() < 0.12
    assert (cache[[0, 2]] == 0x7F).all()


@pytest.mark.parametrize("layout", APART, ids=lambda each: each.name)
def test_blocks_that_are_not_whole_are_caught(layout):
    config = vllm_config("nvfp4")
    made = layer(config, scales=SCALES)
    cache = allocate(spec_of(made, config), 3, layout, BLOCK)[1]
    x = torch.zeros(1, 2, SIZE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="kv_cache: got shape .* dense, in HND or NHD order"):
        made.impl.do_kv_cache_update(made, x, x, cache, torch.tensor([0]))


def test_the_warmup_has_the_users_store_and_what_reads_copies():
    config = vllm_config("nvfp4_mse")
    spec = spec_of(layer(config), config)
    units = compile_units(spec, 16, torch.bfloat16, 8192, "nvfp4_mse")
    names = {unit.name.removesuffix(" for sm_90a") for unit in units}
    assert "store_nvfp4_mse_bf16" in names
    assert "prefill_sm90_fp16_d64_r128_bf16_box64_from_nvfp4" in names
    assert "store_nvfp4_bf16" not in names
