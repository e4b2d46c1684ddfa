"""`can_run` and what is built on it: one answer, with its reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import registry
from kvcache import blocks, contracts, selection
from kvcache.contracts import Writer
from kvcache.dtypes import KV_CACHE_DTYPES, ScaleLayout, resolve_kv_cache_dtype
from kvcache.paged import PAGE_FORMATS, NVFP4Pages
from kvcache.scales import KVScales
from tests.kvcache.helpers import (
    DECODE_16_BITS,
    DECODE_SM90,
    PREFILL_16_BITS,
    PREFILL_NVFP4,
    PREFILL_SM90,
    config,
    contract,
    pretend_kernels,
    pretend_writers,
)

NVFP4_WRITER = Writer("a store", ("nvfp4",), ("sm_90a",), (ScaleLayout.LINEAR,))
NVFP4_READER = contract(name="a reader", kv_cache_formats=("nvfp4",))
FP8_READER = contract(kv_cache_formats=("fp8_e4m3",))


def test_fp8_on_hopper_is_shared_by_the_decode_and_the_prefill_kernel():
    assert selection.can_run(config()) is None
    assert selection.select_kernels(config()) == (DECODE_SM90, PREFILL_SM90)
    assert selection.select_kernel(config()) == DECODE_SM90
    assert selection.select_kernel(config(), 4) == DECODE_SM90
    assert selection.select_kernel(config(), 5) == PREFILL_SM90
    for tokens, error in ((0, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="^query_tokens: got"):
            selection.select_kernel(config(), tokens)


@pytest.mark.parametrize("head_size", (16, 64, 80, 96, 128, 192, 256, 512, 576))
@pytest.mark.parametrize("page_size", (None, 1, 8, 16, 24, 48, 64, 100, 256, 1600))
@pytest.mark.parametrize("capability", ("sm_80", "sm_90a", "sm_100a", "sm_120a"))
def test_answers_are_the_contract(head_size, page_size, capability):
    """Against the contract's own words, for every shape that `tests/test_registry.py` holds
    against the kernel."""
    fp8 = config(head_size=head_size, page_size=page_size, capability=capability)
    for name, kernel in (("fp8", DECODE_SM90), ("auto", DECODE_16_BITS)):
        asked = dataclasses.replace(fp8, kv_cache_dtype=name)
        served = head_size in kernel.head_sizes and capability in kernel.architectures
        served &= page_size is None or page_size in kernel.page_sizes
        assert (selection.can_run(asked) is None) == served


NVFP4_NAMES = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")


@pytest.mark.parametrize("name", NVFP4_NAMES)
def test_nvfp4_on_hopper_is_stored_and_read(name):
    asked = config(kv_cache_dtype=name)
    assert selection.can_run(asked) is None
    assert selection.select_kernels(asked) == (DECODE_SM90, PREFILL_NVFP4)
    assert selection.decode_caveat(asked) is None
    swizzled = selection.can_run(config(kv_cache_dtype=name, v_scale_layout="sm100"))
    assert "the reader is missing" in swizzled and "store is missing" not in swizzled


@pytest.mark.parametrize("name", NVFP4_NAMES)
def test_on_blackwell_the_reader_is_missing(name):
    reason = selection.can_run(config(kv_cache_dtype=name, capability="sm_100a"))
    assert reason.startswith(f"kv_cache_dtype '{name}' on sm_100: the reader is missing (")
    assert "store is missing" not in reason


@pytest.mark.parametrize("name", NVFP4_NAMES)
def test_without_the_store_and_the_reader_both_halves_are_named(name, monkeypatch):
    pretend_writers(monkeypatch)
    pretend_kernels(monkeypatch, FP8_READER)
    reason = selection.can_run(config(kv_cache_dtype=name))
    assert reason.startswith(f"kv_cache_dtype '{name}' on sm_90: the reader is missing (")
    assert "decode_sm90 reads fp8_e4m3 on sm_90a" in reason
    assert " and the store is missing (" in reason
    assert reason.endswith("the nearest kv_cache_dtype that works is 'fp8'")


def test_only_the_store_exists(monkeypatch):
    pretend_writers(monkeypatch, NVFP4_WRITER)
    pretend_kernels(monkeypatch, FP8_READER)
    reason = selection.can_run(config(kv_cache_dtype="nvfp4"))
    assert "the reader is missing" in reason and "store is missing" not in reason
    assert reason.endswith("works is 'fp8'")


def test_only_the_reader_exists(monkeypatch):
    pretend_writers(monkeypatch)
    pretend_kernels(monkeypatch, FP8_READER, NVFP4_READER)
    reason = selection.can_run(config(kv_cache_dtype="nvfp4"))
    assert "the store is missing" in reason and "reader is missing" not in reason
    assert reason.endswith("works is 'fp8'")


def test_both_halves_exist(monkeypatch):
    pretend_kernels(monkeypatch, FP8_READER, NVFP4_READER)
    pretend_writers(monkeypatch, NVFP4_WRITER)
    asked = config(kv_cache_dtype="nvfp4")
    assert selection.can_run(asked) is None
    assert selection.select_kernel(asked).name == "a reader"
    assert selection.select_kernel(config()).name == "decode_sm90"
    # The store needs the user's dtype, not only the storage format.
    reason = selection.can_run(config(kv_cache_dtype="nvfp4_mse"))
    assert "the store is missing" in reason
    assert reason.endswith("the nearest kv_cache_dtype that works is 'nvfp4'")


def test_halves_must_meet_on_one_device_and_in_one_layout(monkeypatch):
    pretend_kernels(monkeypatch, NVFP4_READER)
    pretend_writers(monkeypatch, dataclasses.replace(NVFP4_WRITER, architectures=("sm_100a",)))
    assert "the store is missing" in selection.can_run(config(kv_cache_dtype="nvfp4"))
    on_blackwell = selection.can_run(config(kv_cache_dtype="nvfp4", capability="sm_100a"))
    assert "the reader is missing" in on_blackwell and "store is missing" not in on_blackwell
    pretend_writers(monkeypatch, NVFP4_WRITER)
    assert selection.can_run(config(kv_cache_dtype="nvfp4")) is None
    swizzled = selection.can_run(config(kv_cache_dtype="nvfp4", v_scale_layout="sm100"))
    assert "the reader is missing" in swizzled and "the store is missing" in swizzled
    # The same dtype in another layout is no other dtype.
    pretend_kernels(monkeypatch, DECODE_SM90, NVFP4_READER)
    asked = config(kv_cache_dtype="nvfp4", v_scale_layout="sm100")
    assert selection.nearest_kv_cache_dtype(asked) == "fp8"


def test_there_is_no_nearest_dtype_where_none_works():
    reason = selection.can_run(config(capability="sm_100a"))
    assert "the reader is missing" in reason and "store is missing" not in reason
    assert "head size" not in reason
    assert reason.endswith("no other kv_cache_dtype works with this configuration either")
    # What stands in the way of the others is said too.
    swizzled = {"kv_cache_dtype": "nvfp4", "v_scale_layout": "sm100"}
    reason = selection.can_run(config(**swizzled, head_size=96))
    kernels = "decode_sm90, decode_sm90_16_bits, prefill_sm90, prefill_sm90_16_bits"
    sizes = "head size 96, the kernel has 64, 128, 256 or 512"
    assert f"{kernels}, prefill_sm90_nvfp4: {sizes}; " in reason
    # What stands in the way of some of them only, is not.
    assert "head size" not in selection.can_run(config(**swizzled, head_size=512))
    assert selection.nearest_kv_cache_dtype(config(head_size=96)) is None


@pytest.mark.parametrize(
    ("fields", "needed"),
    (
        ({"head_size": 80}, "head size 80, the kernel has 64, 128, 256 or 512"),
        ({"query_dtype": "fp32"}, "query dtype fp32, the kernel takes bf16 or fp16"),
        ({"page_size": 24}, "page size 24, the kernel reads multiples of 16"),
        ({"bidirectional_spans": True}, "bidirectional spans"),
        ({"chunked": True}, "chunked attention"),
        ({"mla": True, "head_size": 576, "num_kv_heads": 1}, "latent K and V (MLA)"),
    ),
)
def test_each_reason_is_named(fields, needed):
    assert needed in selection.can_run(config(**fields))


def test_several_reasons_are_all_named():
    reason = selection.can_run(config(head_size=80, page_size=24, bidirectional_spans=True))
    for needed in ("head size 80", "page size 24", "bidirectional spans"):
        assert needed in reason


@pytest.mark.parametrize("feature", ("sliding_window", "softcap", "sinks", "causal", "paged"))
def test_a_feature_that_a_kernel_loses_is_refused(monkeypatch, feature):
    asked = config(sliding_window=1024, softcap=True, sinks=True)
    assert selection.can_run(asked) is None
    left = tuple(name for name in DECODE_SM90.features if name != feature)
    pretend_kernels(monkeypatch, contract(features=left))
    assert registry.FEATURES[feature] in selection.can_run(asked)


def test_every_feature_of_the_registry_has_words():
    assert set(registry.FEATURES) <= set(contracts.NEEDS)


# Window, fp8, D 512; a bidirectional model; another device; another dtype.
CONFIGURATIONS = (
    config(sliding_window=1024),
    config(bidirectional_spans=True),
    config(capability="sm_100a"),
    config(kv_cache_dtype="nvfp4"),
    config(kv_cache_dtype="bf16"),
    config(kv_cache_dtype="bf16", head_size=256),
    config(kv_cache_dtype="fp16", head_size=256),
    config(batch_invariant=True),
    config(head_size=96),
)


@pytest.mark.parametrize("asked", CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
@pytest.mark.parametrize(
    "constructor",
    (
        selection.select_kernel,
        selection.select_kernels,
        selection.decode_caveat,
        selection.supports_quant_query_input,
        lambda asked: selection.classify_batch(asked, 1),
        blocks.get_supported_kernel_block_sizes_for_config,
        lambda asked: blocks.get_preferred_block_size_for_config(16, asked),
        lambda asked: blocks.largest_kernel_block_within(asked, 1, 1 << 20, 16),
        lambda asked: blocks.select_common_block_size([asked]),
    ),
)
def test_selector_and_constructors_give_one_answer(asked, constructor):
    reason = selection.can_run(asked)
    if reason is None:
        constructor(asked)
        return
    with pytest.raises(NotImplementedError) as refused:
        constructor(asked)
    assert str(refused.value) == reason


def test_draft_and_target_on_different_backends():
    """A draft that reads the target's cache is asked about with the same function."""
    target = config(sliding_window=1024, page_size=64)
    draft = config(num_q_heads=8, query_dtype="fp16", page_size=64, kv_cache_dtype="fp8_e4m3")
    assert selection.can_share_cache(target, draft) is None

    def why(**fields):
        return selection.can_share_cache(target, dataclasses.replace(draft, **fields))

    assert why(kv_cache_dtype="bf16").startswith("the draft cannot run: decode_sm90_16_bits")
    written = "is written as 'fp8' (fp8_e4m3) and read as 'fp16' (fp16)"
    assert why(kv_cache_dtype="fp16").endswith(written)
    assert why(bidirectional_spans=True).startswith(
        "the draft cannot run: decode_sm90, prefill_sm90: bidirectional"
    )
    assert why(num_kv_heads=8) == "num_kv_heads: the draft has 8, the target 4"
    assert why(head_size=256) == "head_size: the draft has 256, the target 512"
    assert why(page_size=128) == "page_size: the draft has 128, the target 64"
    broken = dataclasses.replace(target, kv_cache_dtype="nvfp4", v_scale_layout="sm100")
    assert selection.can_share_cache(broken, draft).startswith("the target cannot run: kv_cache_")


def test_draft_and_target_must_agree_about_the_bytes(monkeypatch):
    pretend_kernels(monkeypatch, contract(kv_cache_formats=("fp8_e4m3", "nvfp4")))
    pretend_writers(monkeypatch, NVFP4_WRITER)
    reason = selection.can_share_cache(config(kv_cache_dtype="nvfp4"), config())
    assert "written as 'nvfp4' (nvfp4) and read as 'fp8' (fp8_e4m3)" in reason


def test_queries_are_not_quantized_where_the_kernel_dequantizes(monkeypatch):
    assert selection.supports_quant_query_input(config()) is False
    pretend_kernels(monkeypatch, contract(q_dtypes=("bf16", "fp8_e4m3")))
    assert selection.supports_quant_query_input(config()) is True


@pytest.mark.parametrize(
    ("head_size", "group", "tokens", "expected"),
    (
        (128, 8, 1, ("decode", 8, 1, "decode_sm90")),
        (128, 8, 8, ("decode", 64, 1, "decode_sm90")),
        (128, 8, 9, ("prefill", 72, 1, "prefill_sm90")),
        (128, 1, 64, ("decode", 64, 1, "decode_sm90")),
        (128, 1, 65, ("prefill", 65, 1, "prefill_sm90")),
        (128, 1, 129, ("prefill", 129, 2, "prefill_sm90")),
        (512, 8, 4, ("decode", 32, 1, "decode_sm90")),
        (512, 8, 5, ("decode", 40, 1, "prefill_sm90")),
        (512, 8, 8, ("decode", 64, 1, "prefill_sm90")),
        (512, 16, 5, ("prefill", 80, 2, "prefill_sm90")),
    ),
)
def test_verify_batches_are_decode_up_to_64_packed_rows(head_size, group, tokens, expected):
    """A verify batch of k draft tokens has k + 1 query tokens."""
    asked = config(head_size=head_size, num_kv_heads=2, num_q_heads=2 * group)
    found = selection.classify_batch(asked, tokens)
    assert dataclasses.astuple(found) == expected
    with pytest.raises(ValueError, match="query_tokens: got 0"):
        selection.classify_batch(asked, 0)


def test_writers_are_what_paged_writes():
    """The list of what plain torch stores, against the page formats that do it."""
    written = set()
    for name, pages in PAGE_FORMATS.items():
        if issubclass(pages, NVFP4Pages):  # which goes through our store
            continue
        for dtype in (torch.bfloat16, torch.float16):
            key = torch.zeros(1, 2, 3, 16, dtype=dtype)
            made = pages(key, 16, KVScales(1.0, 1.0) if pages.needs_scales else None)
            written.add(made.k.dtype)
            assert resolve_kv_cache_dtype(name, dtype).torch_dtype == made.k.dtype
    writer = contracts.WRITERS[0]
    claimed = {KV_CACHE_DTYPES[name].torch_dtype for name in writer.kv_cache_dtypes}
    assert claimed == written


def test_our_store_is_what_it_declares():
    """Its dtypes, devices and scale orders come from the store itself; these are spot checks."""
    for name in ("fp8", "nvfp4", "nvfp4_mse"):
        for capability in ("sm_90a", "sm_100a"):
            layouts = (None,) if name == "fp8" else ("linear", "sm100")
            for layout in layouts:
                asked = config(kv_cache_dtype=name, capability=capability, v_scale_layout=layout)
                assert contracts.WRITERS[1] in contracts.writers_for(asked)
    for fields in ({"kv_cache_dtype": "bf16"}, {"capability": "sm_80"}):
        assert contracts.WRITERS[1] not in contracts.writers_for(config(**fields))


@pytest.mark.parametrize("name", ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse"))
def test_latent_keys_and_values_are_refused_for_every_nvfp4_dtype_with_the_reason(name):
    asked = config(kv_cache_dtype=name, mla=True, head_size=576, num_kv_heads=1)
    for capability in ("sm_90a", "sm_100a"):
        reason = selection.can_run(dataclasses.replace(asked, capability=capability))
        assert reason.startswith(f"kv_cache_dtype '{name}' with latent K and V (MLA): ")
        assert "one latent vector a token that is both K and V" in reason
    assert selection.mla_refusal(dataclasses.replace(asked, kv_cache_dtype="fp8")) is None
    assert selection.mla_refusal(config(kv_cache_dtype=name)) is None


def test_explain_says_which_kernel_and_why_not(monkeypatch):
    other = contract(name="other", architectures=("sm_100a",), kv_cache_formats=("nvfp4",))
    pretend_kernels(monkeypatch, DECODE_SM90, other)
    lines = selection.explain(config(sliding_window=128, page_size=64)).splitlines()
    assert lines == [
        "head size 512, 32 query heads, 4 KV heads, bf16 queries, kv_cache_dtype 'fp8', page size "
        "64 on sm_90 (paged cache, causal mask, sliding window of 128 keys):",
        "  decode_sm90 reads it",
        "  other cannot read it: device sm_90, the kernel is for sm_100a; cache format fp8_e4m3, "
        "the kernel reads nvfp4",
        "  kvcache.paged and cute_kernels.reshape_and_cache write it",
        "  decode_sm90 serves sequences of any number of query tokens",
        "  decode_sm90 reads all keys again for every 32 query rows (GQA group x query tokens): "
        "long prefill is right, but slow",
        "  served",
    ]
    pretend_kernels(monkeypatch, DECODE_SM90, PREFILL_SM90, PREFILL_16_BITS)
    shared = selection.explain(config()).splitlines()
    assert (
        "  decode_sm90 serves sequences of up to 4 query tokens, prefill_sm90 those of more, where "
        "the call has enough rows for the GPU; else decode_sm90 serves all of it in passes of 32 "
        "rows"
    ) in shared
    wide = config(kv_cache_dtype="auto", head_size=64)
    alone = selection.explain(wide).splitlines()
    assert "  prefill_sm90_16_bits serves sequences of any number of query tokens" in alone
    pretend_kernels(monkeypatch, DECODE_16_BITS, PREFILL_16_BITS)
    both = "decode_sm90_16_bits serves sequences of up to 8 query tokens, prefill_sm90_16_bits"
    assert both in selection.explain(wide)
    pretend_kernels(monkeypatch, DECODE_SM90, other)
    assert "  cute_kernels.reshape_and_cache writes it" in selection.explain(
        config(kv_cache_dtype="nvfp4")
    )
    pretend_writers(monkeypatch)
    refused = selection.explain(config(kv_cache_dtype="nvfp4"))
    assert "nothing here writes it" in refused
    assert f"not served: {selection.can_run(config(kv_cache_dtype='nvfp4'))}" in refused
    swizzled = selection.explain(config(kv_cache_dtype="nvfp4", v_scale_layout="sm100"))
    assert "V scales in sm100 order, the kernel reads linear ones" in swizzled


def test_explain_says_when_long_sequences_are_left_to_decode():
    asked = config(kv_cache_dtype="nvfp4", head_size=128, num_q_heads=16)
    assert (
        "  decode_sm90 serves sequences of up to 255 query tokens, prefill_sm90_nvfp4 those of "
        "more, where the call has enough rows for the GPU and copies of its keys fit 512 MiB; else "
        "decode_sm90 serves all of it in passes of 64 rows"
    ) in selection.explain(asked).splitlines()
    # A group larger than decode's pass: all is prefill's, in calls of enough rows.
    wide = selection.explain(config(num_q_heads=512)).splitlines()
    assert (
        "  prefill_sm90 serves sequences of any number of query tokens, where the call has enough "
        "rows for the GPU; else decode_sm90 serves all of it in passes of 32 rows"
    ) in wide
    fixed = dataclasses.replace(asked, batch_invariant=True)
    line = "  decode_sm90 serves sequences of any number of query tokens"
    assert line in selection.explain(fixed).splitlines()
    line = "  decode_sm90 serves sequences of up to 4 query tokens, prefill_sm90 those of more"
    assert line in selection.explain(config(batch_invariant=True)).splitlines()


def test_prefill_without_a_kernel_for_it_is_called_slow(monkeypatch):
    slow = "reads all keys again for every 64 query rows"
    asked = config(head_size=128)
    assert selection.prefill_caveat(asked) is None and slow not in selection.explain(asked)
    pretend_kernels(monkeypatch, DECODE_SM90)
    assert slow in selection.prefill_caveat(asked) and slow in selection.explain(asked)
    assert selection.caveats(asked) == [selection.prefill_caveat(asked)]
    with pytest.raises(NotImplementedError, match="head size 96"):
        selection.prefill_caveat(config(head_size=96))
