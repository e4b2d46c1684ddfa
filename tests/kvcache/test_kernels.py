"""Which kernel serves which sequences, held against the route of the launch."""

from __future__ import annotations

import dataclasses

import pytest

from cute_kernels.attention.route_sm90 import Bounds, route
from kvcache import selection
from tests.kvcache.helpers import PREFILL_16_BITS, PREFILL_SM90, config


@pytest.mark.parametrize("head_size", (64, 128, 256, 512))
@pytest.mark.parametrize("kv_cache_dtype", ("fp8", "nvfp4", "auto"))
@pytest.mark.parametrize("batch_invariant", (False, True))
@pytest.mark.parametrize("group", (1, 8, 12, 64, 128))
def test_a_sequence_is_given_to_the_kernel_that_the_launch_takes(
    head_size, kv_cache_dtype, batch_invariant, group
):
    """Against the route of calls with enough rows to fill the GPU, for every number of tokens."""
    asked = config(
        head_size=head_size,
        num_q_heads=8 * group,
        num_kv_heads=8,
        kv_cache_dtype=kv_cache_dtype,
        batch_invariant=batch_invariant,
    )
    if head_size == 512 and kv_cache_dtype == "auto":
        assert "head size 512" in selection.can_run(asked)
        return
    if batch_invariant and kv_cache_dtype == "nvfp4":
        assert "bits independent of the batch" in selection.can_run(asked)
        return
    storage = asked.dtype.storage
    prefill = "prefill_sm90" if storage == "fp8_e4m3" else "prefill_sm90_16_bits"
    for tokens in (*range(1, 70), 129, 8192):
        batch = 1000
        chosen = route(
            Bounds(
                batch, batch * tokens, tokens, group, 8, head_size, batch_invariant, storage, 8192
            ),
            132,
        )
        assert chosen.decode != chosen.prefill
        name = "decode_sm90" if chosen.decode else prefill
        assert selection.select_kernel(asked, tokens).name == name


@pytest.mark.parametrize("query", ("bf16", "fp16"))
@pytest.mark.parametrize("head_size", (64, 128, 256, 512))
@pytest.mark.parametrize("name", ("auto", "bf16", "bfloat16", "fp16", "float16"))
def test_caches_of_16_bits_are_read_in_the_dtype_of_the_queries(name, head_size, query):
    asked = config(kv_cache_dtype=name, head_size=head_size, query_dtype=query)
    same = asked.dtype.storage == query
    if same and head_size < 512:
        assert selection.select_kernels(asked) == (PREFILL_16_BITS,)
        assert selection.supports_quant_query_input(asked) is False
        return
    reason = selection.can_run(asked)
    # The kernels for FP8 have no part in this.
    assert reason.startswith("prefill_sm90_16_bits: ")
    mixed = f"a {asked.dtype.storage} cache with {query} queries, the kernel reads the queries'"
    assert (mixed in reason) == (not same)
    assert ("head size 512, the kernel has 64, 128 or 256" in reason) == (head_size == 512)
    nearest = "fp8" if head_size == 512 else {"bf16": "bfloat16", "fp16": "float16"}[query]
    assert reason.endswith(f"the nearest kv_cache_dtype that works is {nearest!r}")


@pytest.mark.parametrize("name", ("fp8", "auto"))
def test_batch_invariance_is_served_by_the_prefill_kernel(name):
    asked = config(kv_cache_dtype=name, head_size=128, batch_invariant=True)
    only = PREFILL_SM90 if name == "fp8" else PREFILL_16_BITS
    assert selection.select_kernels(asked) == (only,)


def test_decoding_without_split_keys_is_called_slow():
    slow = "does not split a sequence's keys over CTAs: decoding is right, but slow for few"
    for fields in ({"kv_cache_dtype": "auto"}, {"batch_invariant": True}):
        asked = config(head_size=128, **fields)
        assert slow in selection.decode_caveat(asked) and slow in selection.explain(asked)
    # 128 rows a token: the decode kernel is there for calls that would leave the GPU idle.
    for fields in ({}, {"num_q_heads": 512}):
        asked = config(head_size=128, **fields)
        assert selection.decode_caveat(asked) is None and slow not in selection.explain(asked)
    with pytest.raises(NotImplementedError, match="head size 96"):
        selection.decode_caveat(config(head_size=96))


def test_a_cache_of_16_bits_has_the_same_classes():
    asked = config(head_size=256, kv_cache_dtype="auto", num_q_heads=8)
    name = "prefill_sm90_16_bits"
    for tokens, expected in (
        (1, ("decode", 2, 1, name)),
        (64, ("prefill", 128, 1, name)),
        (65, ("prefill", 130, 2, name)),
    ):
        assert dataclasses.astuple(selection.classify_batch(asked, tokens)) == expected
