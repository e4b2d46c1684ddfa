"""Which kernel serves which sequences, held against the route of the launch."""

from __future__ import annotations

import dataclasses

import pytest

from cute_kernels.attention.route_sm90 import Bounds, route
from kvcache import contracts, selection
from tests.kvcache.helpers import (
    DECODE_16_BITS,
    DECODE_SM90,
    PREFILL_16_BITS,
    PREFILL_SM90,
    config,
)


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
    storage = asked.dtype.storage
    prefill = {"fp8_e4m3": "prefill_sm90", "nvfp4": "prefill_sm90_nvfp4"}
    # Copies of so many keys of more sequences would be too large.
    batch, keys = (16, 256) if storage == "nvfp4" else (1000, 8192)
    for tokens in (*range(1, 70), 129, 8192):
        chosen = route(
            Bounds(
                batch, batch * tokens, tokens, group, 8, head_size, batch_invariant, storage, keys
            ),
            132,
        )
        assert chosen.decode != chosen.prefill
        name = prefill.get(storage, "prefill_sm90_16_bits")
        if chosen.decode:
            name = "decode_sm90" if storage in prefill else "decode_sm90_16_bits"
        assert selection.select_kernel(asked, tokens).name == name


@pytest.mark.parametrize("query", ("bf16", "fp16"))
@pytest.mark.parametrize("head_size", (64, 128, 256, 512))
@pytest.mark.parametrize("name", ("auto", "bf16", "bfloat16", "fp16", "float16"))
def test_caches_of_16_bits_are_read_in_the_dtype_of_the_queries(name, head_size, query):
    asked = config(kv_cache_dtype=name, head_size=head_size, query_dtype=query)
    same = asked.dtype.storage == query
    if same:
        both = (DECODE_16_BITS, PREFILL_16_BITS)
        assert selection.select_kernels(asked) == both
        assert selection.supports_quant_query_input(asked) is False
        return
    reason = selection.can_run(asked)
    # The kernels for FP8 have no part in this.
    assert reason.startswith("decode_sm90_16_bits") and "sm90: " not in reason
    assert f"a {asked.dtype.storage} cache with {query} queries, the kernel reads the que" in reason
    nearest = {"bf16": "bfloat16", "fp16": "float16"}[query]
    assert reason.endswith(f"the nearest kv_cache_dtype that works is {nearest!r}")


@pytest.mark.parametrize("name", ("fp8", "auto"))
def test_batch_invariance_changes_no_kernel(name):
    asked = config(kv_cache_dtype=name, head_size=128, batch_invariant=True)
    both = {"fp8": (DECODE_SM90, PREFILL_SM90), "auto": (DECODE_16_BITS, PREFILL_16_BITS)}
    assert selection.select_kernels(asked) == both[name]
    assert selection.select_kernels(asked) == selection.select_kernels(
        config(kv_cache_dtype=name, head_size=128)
    )


def test_decoding_without_split_keys_is_called_slow(monkeypatch):
    slow = "does not split a sequence's keys over CTAs: decoding is right, but slow for few"
    # 128 rows a token: the decode kernel is there for calls that would leave the GPU idle.
    for fields in ({}, {"num_q_heads": 512}, {"batch_invariant": True}, {"kv_cache_dtype": "auto"}):
        asked = config(head_size=128, **fields)
        assert selection.decode_caveat(asked) is None and slow not in selection.explain(asked)
    monkeypatch.setattr(contracts, "readers", lambda: (PREFILL_SM90,))
    asked = config(head_size=128)
    assert slow in selection.decode_caveat(asked) and slow in selection.explain(asked)
    with pytest.raises(NotImplementedError, match="head size 96"):
        selection.decode_caveat(config(head_size=96))


def test_a_cache_of_16_bits_has_the_same_classes():
    asked = config(head_size=256, kv_cache_dtype="auto", num_q_heads=8)
    for tokens, expected in (
        (1, ("decode", 2, 1, DECODE_16_BITS.name)),
        (32, ("decode", 64, 1, DECODE_16_BITS.name)),
        (33, ("prefill", 66, 1, PREFILL_16_BITS.name)),
        (64, ("prefill", 128, 1, PREFILL_16_BITS.name)),
        (65, ("prefill", 130, 2, PREFILL_16_BITS.name)),
    ):
        assert dataclasses.astuple(selection.classify_batch(asked, tokens)) == expected
