"""The real `Attention` layer over our backend, on CPU tensors, against float64 attention."""

from __future__ import annotations

import math

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import KVCacheLayout

from cute_kernels.reference.store import gather_kv, sequence_slots
from kvcache.integrations.vllm.attention import CuteAttentionImpl
from kvcache.integrations.vllm.metadata import CuteMetadataBuilder
from tests.vllm.helpers import allocate, batch, layer, run, vllm_config

BLOCK = 64
SCALES = (0.02, 0.03)
# bf16 queries and output over exact codes.
TOLERANCE = 1e-2
# (query lengths, key lengths) of the steps: prefill, a mixed batch, a verify batch, decode.
STEPS = (([130, 3], [130, 3]), ([1, 70], [131, 73]), ([4, 4], [135, 77]), ([1, 1], [136, 78]))


def attention64(query, k, v, scale, *, window=None, softcap=0.0, sinks=None):
    """One sequence: (q, Hq, D) queries behind (n, Hkv, D) keys and values, all float64."""
    group = query.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, k.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(k.shape[0])
    own = torch.arange(query.shape[0])[:, None] + k.shape[0] - query.shape[0]
    seen = position <= own
    if window is not None:
        seen &= position > own - window
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


def serve(made, config, *, manager=BLOCK, layout=KVCacheLayout.LBHNC, reference=None):
    """Run STEPS through the layer; yields (output, wanted) of each step in float64."""
    spec = made.get_kv_cache_spec(config)
    spec = spec.copy_with_new_block_size(manager)
    _, cache = allocate(spec, 12 * BLOCK // manager, layout, BLOCK)
    made.kv_cache = cache
    builder = CuteMetadataBuilder(
        spec.copy_with_new_block_size(BLOCK), [made.layer_name], config, torch.device("cpu")
    )
    table = torch.tensor([[7, 2, 11, -1], [4, 9, -1, 2**31 - 1]])
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, size = made.num_heads, made.num_kv_heads, made.head_size
    for query_lens, seq_lens in STEPS:
        metadata = builder.build(0, batch(query_lens, seq_lens, table, BLOCK, padding=2))
        tokens = sum(query_lens) + 2
        query = torch.randn(tokens, heads, size, generator=generator, dtype=torch.float32)
        key, value = torch.randn(
            2, tokens, kv_heads, size, generator=generator, dtype=torch.float32
        )
        query, key, value = (x.bfloat16() for x in (query, key, value))
        got = run(config, made, metadata, query.flatten(1), key.flatten(1), value.flatten(1))
        want = []
        sides = cache.transpose(1, 2).split(size, -1)
        start = 0
        for row, query_len, seq_len in zip(table, query_lens, seq_lens, strict=True):
            slots = sequence_slots(row, seq_len, BLOCK)
            k, v = (
                gather_kv(side, slots, "fp8_e4m3", scale, dtype=torch.float64)
                for side, scale in zip(sides, (made._k_scale, made._v_scale), strict=True)
            )
            asked = query[start : start + query_len].double()
            want.append(attention64(asked, k, v, made.impl.scale, **(reference or {})))
            start += query_len
        yield got[: tokens - 2].view(-1, heads, size).double(), torch.cat(want)


def check(made, config, **options):
    for got, want in serve(made, config, **options):
        assert ((got - want).norm() / want.norm()).item() < TOLERANCE


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda each: each.name)
@pytest.mark.parametrize("heads", ((8, 2), (4, 1)), ids=("2 KV heads", "1 KV head"))
def test_store_and_attention_in_every_layout_of_memory(layout, heads):
    config = vllm_config()
    check(layer(config, heads=heads, scales=SCALES), config, layout=layout)


def test_what_is_read_was_stored_under_the_layers_scales():
    config = vllm_config()
    made = layer(config, scales=SCALES)
    next(iter(serve(made, config)))
    k, v = made.kv_cache.transpose(1, 2).split(64, -1)
    slots = sequence_slots(torch.tensor([7, 2, 11]), 130, BLOCK)
    for side, scale in ((k, SCALES[0]), (v, SCALES[1])):
        stored = gather_kv(side, slots, "fp8_e4m3", scale)
        assert stored.std().item() == pytest.approx(1.0, abs=0.05)
    # The tokens behind the sequence's end, and the padding's, were not written.
    assert (k.view(torch.uint8)[11, 2:] == 0x7F).all()
    assert (v.view(torch.uint8)[[0, 1, 3]] == 0x7F).all()


@pytest.mark.parametrize("manager", (64, 128, 192))
def test_manager_blocks_are_split_into_kernel_blocks(manager):
    config = vllm_config()
    check(layer(config, scales=SCALES), config, manager=manager)


@pytest.mark.parametrize(
    ("arguments", "reference"),
    (
        ({"per_layer_sliding_window": 20}, {"window": 20}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"scale": 1.0}, {}),
        ({"head_size": 256, "heads": (4, 2)}, {}),
        ({"head_size": 512, "heads": (4, 1), "scale": 1.0}, {}),
    ),
    ids=("window", "softcap", "scale 1", "D 256", "D 512"),
)
def test_layers_of_every_kind(arguments, reference):
    config = vllm_config()
    check(layer(config, scales=SCALES, **arguments), config, reference=reference)


def test_sinks_are_float32_and_follow_a_reload():
    config, sinks = vllm_config(), torch.linspace(-1, 2, 8)
    made = layer(config, scales=SCALES, sinks=sinks)
    made.process_weights_after_loading(torch.bfloat16)
    held = made.impl.sinks
    assert held.dtype is torch.float32
    sinks.mul_(0.5)  # weights are loaded into the tensors that the model has
    made.process_weights_after_loading(torch.bfloat16)
    assert made.impl.sinks is held
    from tests.vllm.helpers import set_scales

    set_scales(made, *SCALES)  # vLLM's own reload reset them
    check(made, config, reference={"sinks": sinks.double()})


def test_scales_per_head():
    config = vllm_config()
    made = layer(config)
    made._k_scale = torch.tensor([0.02, 0.05], dtype=torch.float32)
    made._v_scale = torch.tensor([0.03, 0.01], dtype=torch.float32)
    check(made, config)


def test_a_profiling_run_gives_zeros():
    config = vllm_config()
    made = layer(config)
    out = torch.full((3, 8, 64), torch.nan)
    made.impl.forward(made, out.clone(), None, None, made.kv_cache, None, out)
    assert not out.any()


def test_a_table_of_manager_blocks_is_caught_by_name():
    config = vllm_config()
    made = layer(config, scales=SCALES)
    spec = made.get_kv_cache_spec(config).copy_with_new_block_size(128)
    made.kv_cache = allocate(spec, 4, KVCacheLayout.LBHNC, 64)[0]
    builder = CuteMetadataBuilder(spec, [made.layer_name], config, torch.device("cpu"))
    metadata = builder.build(0, batch([1], [100], torch.tensor([[1]]), 128))
    query, key = torch.zeros(1, 512), torch.zeros(1, 128)
    with pytest.raises(
        ValueError, match="blocks of 64 tokens, the block table counts blocks of 128"
    ):
        run(config, made, metadata, query, key, key)


def test_a_layer_without_keys_and_without_a_cache_to_read_is_caught_by_name():
    """What vLLM leaves of a draft layer whose type no target layer has, with a warning."""
    config = vllm_config()
    made = layer(config)
    spec = made.get_kv_cache_spec(config)
    made.kv_cache = allocate(spec, 2, KVCacheLayout.LBHNC, 64)[0]
    builder = CuteMetadataBuilder(spec, [made.layer_name], config, torch.device("cpu"))
    metadata = builder.build(0, batch([1], [1], torch.tensor([[1]]), 64))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.attn: has no keys of its own"):
        run(config, made, metadata, torch.zeros(1, 512), None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"alibi_slopes": [1.0] * 8}, "alibi_slopes: not implemented"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type"),
        ({"chunk_lookback": 1}, "chunk_lookback: not implemented"),
        ({"head_size": 96}, "head size 96, the kernel has 64, 128, 256 or 512"),
        ({"kv_cache_dtype": "auto"}, "'auto': the store is missing"),
    ),
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_the_constructor_refuses_what_the_selector_refuses(arguments, message):
    given = {
        "num_heads": 8,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 2,
        "kv_cache_dtype": "fp8",
    }
    with pytest.raises(NotImplementedError, match=message):
        CuteAttentionImpl(**(given | arguments))


def test_the_log_names_the_kernels_that_share_a_layers_batches():
    assert layer(vllm_config()).impl.kernel == "decode_sm90 and prefill_sm90"


def test_fused_output_quantization_is_refused():
    made = layer(vllm_config())
    out = torch.zeros(1, 8, 64)
    with pytest.raises(NotImplementedError, match="fused output quantization"):
        made.impl.forward(made, out, None, None, made.kv_cache, None, out, output_scale=out)
