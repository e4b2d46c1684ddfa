"""The SM90 prefill kernel on a GPU: every head size and feature, mixed batches, agreement.

``deterministic=True`` is served by the prefill kernel alone, whatever the query lengths are; the
default lets the route choose (tests/attention/test_prefill_route.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels import flash_attn_varlen_func
from cute_kernels.attention import interface, prepared, route_sm90
from cute_kernels.attention.prefill_sm90.config import head_sizes
from cute_kernels.attention.widen_sm90 import config as widen_sm90
from cute_kernels.prepared import PreparedCalls
from tests.attention.helpers import Inputs, attend, check, exact
from tests.cases import FP8, AttentionCase, make_inputs, with_cache
from tests.compare import assert_bit_equal, assert_lse_close, assert_output_close
from tests.nvfp4_cases import make_nvfp4_inputs

pytestmark = pytest.mark.gpu

HEAD_SIZES = (64, 128, 256, 512)
# Of caches that the prefill kernel reads.
HEADS_AND_CACHES = [
    *((size, "fp8") for size in HEAD_SIZES),
    *((size, "bf16") for size in head_sizes("bf16")),
]


def case_of(name: str, kv_lens, q_lens, **fields) -> AttentionCase:
    return AttentionCase(id=name, kv_lens=tuple(kv_lens), q_lens=tuple(q_lens), **fields)


CASES = [
    case_of("one", [1000], [300]),
    case_of("tiny", [5], [5]),
    case_of("tile", [256], [256]),
    case_of("varlen", [700, 300, 1, 64, 0, 500, 129], [200, 130, 1, 64, 10, 0, 7]),
    case_of("q-longer-than-kv", [3, 200, 1, 65, 100], [8, 300, 4, 64, 150]),
    case_of("non-causal", [500, 130], [100, 70], causal=False),
    case_of("window-100", [700, 2000], [300, 500], window=(100, 0)),
    case_of("window-1023", [3000, 500], [700, 500], window=(1023, 0)),
    case_of("window-both", [900, 300], [300, 100], window=(100, 30), causal=False),
    case_of("window-right", [900, 300], [300, 350], window=(-1, 5), causal=False),
    case_of("window-0", [600, 300], [300, 300], window=(0, 0)),
    case_of("window-sinks", [3000], [260], window=(127, 0), sinks=True),
    case_of("softcap", [700, 300], [300, 200], softcap=20.0, q_magnitude=8.0),
    case_of("all", [700, 300, 0], [300, 200, 3], softcap=20.0, sinks=True, window=(200, 0)),
    case_of("sharp", [1500, 400], [300, 200], q_magnitude=30.0),
    case_of("sharp-window", [1500, 400], [300, 200], q_magnitude=30.0, window=(150, 0)),
    case_of("scale-1", [1500, 400], [300, 200], softmax_scale=1.0),
    case_of("group-1", [900], [400], num_q_heads=2, num_kv_heads=2, window=(60, 0)),
    case_of("group-3", [700, 129], [200, 129], num_q_heads=6, num_kv_heads=2),
    case_of("group-5", [700], [200], num_q_heads=5, num_kv_heads=1),
    case_of("group-16", [700], [200], num_q_heads=16, num_kv_heads=1),
    case_of("q-strided", [300, 100], [150, 100], q_strided=True),
    case_of("HND", [300, 700], [150, 100], layout="HND"),
    case_of("interleaved", [300, 700], [150, 100], layout="interleaved"),
    case_of("page-16", [700, 300, 0, 31], [200, 130, 5, 31], page_size=16),
    case_of("page-32", [700, 300], [200, 130], page_size=32, window=(77, 0)),
    case_of("page-48", [700, 300], [200, 130], page_size=48),
    case_of("page-192", [300, 700], [150, 100], page_size=192, window=(100, 0)),
    case_of("fp16", [700, 300], [200, 130], q_dtype=torch.float16),
    case_of("ragged", [700, 300, 64], [200, 130, 64], page_size=None),
    case_of("ragged-window", [700, 300, 64], [200, 130, 64], page_size=None, window=(90, 0)),
    case_of("long", [5000], [128]),
]
# Both kinds of sequences, none, and queries without keys. So many heads that every SM gets work.
MIXED = case_of(
    "mixed",
    [3000, 700, 0, 65, 2000, 4000, 129, 1, 900],
    [1, 700, 1, 0, 4, 1000, 129, 1, 300],
    num_q_heads=32,
    num_kv_heads=4,
)


def prefill(inputs: Inputs) -> Inputs:
    return {**inputs, "deterministic": True}


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_reference(case, head_size):
    case = replace(case, head_size=head_size)
    out, lse = check(prefill(make_inputs(case, "cuda")))
    clean, clean_lse = attend(prefill(make_inputs(case, "cuda", fill="zero")))
    assert_bit_equal(clean, out, "out, unused memory zero")
    assert_bit_equal(clean_lse, lse, "LSE, unused memory zero")


# A cache in the queries' type, also for decode rows and with the decode kernel's help.
CASES_16_BITS = [
    case_of("one", [1000], [300]),
    case_of("varlen", [700, 300, 1, 64, 0, 500, 129], [200, 130, 1, 64, 10, 0, 7]),
    case_of("q-longer-than-kv", [3, 200, 1, 65, 100], [8, 300, 4, 64, 150]),
    case_of("window", [700, 2000], [300, 500], window=(100, 0)),
    case_of("window-both", [900, 300], [300, 100], window=(100, 30), causal=False),
    case_of("all", [700, 300, 0], [300, 200, 3], softcap=20.0, sinks=True, window=(200, 0)),
    case_of("sharp", [1500, 400], [300, 200], q_magnitude=30.0),
    case_of("sharp-window", [1500, 400], [300, 200], q_magnitude=30.0, window=(150, 0)),
    case_of("group-3", [700, 129], [200, 129], num_q_heads=6, num_kv_heads=2),
    case_of("HND", [300, 700], [150, 100], layout="HND"),
    case_of("interleaved", [300, 700], [150, 100], layout="interleaved"),
    case_of("page-16", [700, 300, 0, 31], [200, 130, 5, 31], page_size=16),
    case_of("page-32", [700, 300], [200, 130], page_size=32, window=(77, 0)),
    case_of("ragged", [700, 300, 64], [200, 130, 64], page_size=None),
    case_of("ragged-window", [700, 300, 64], [200, 130, 64], page_size=None, window=(90, 0)),
    case_of("decode", [3000, 700, 0, 65, 129, 1], [1, 1, 1, 2, 4, 1], sinks=True),
    MIXED,
]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("cache", ("bf16", "fp16"))
@pytest.mark.parametrize("head_size", head_sizes("bf16"))
@pytest.mark.parametrize("case", CASES_16_BITS, ids=lambda case: case.id)
def test_a_cache_in_the_queries_type(case, head_size, cache, deterministic):
    case = with_cache(replace(case, head_size=head_size), cache)
    inputs = {**make_inputs(case, "cuda"), "deterministic": deterministic}
    out, lse = check(inputs)
    if case.page_size is not None:
        inputs = {**make_inputs(case, "cuda", fill="zero"), "deterministic": deterministic}
        clean, clean_lse = attend(inputs)
        assert_bit_equal(clean, out, "out, unused memory zero")
        assert_bit_equal(clean_lse, lse, "LSE, unused memory zero")


@pytest.fixture
def widened(monkeypatch):
    """Every FP8 call goes through fp16 copies of its keys."""

    def through_copies(problem):
        return route_sm90.Route(False, True, 0, 64 * -(-max(problem.max_seqlen_k, 1) // 64))

    monkeypatch.setattr(route_sm90, "_route_of", through_copies)
    monkeypatch.setattr(prepared, "PREPARED", PreparedCalls())
    monkeypatch.setattr(interface, "PREPARED", prepared.PREPARED)


@pytest.mark.parametrize("head_size", widen_sm90.head_sizes("fp8_e4m3"))
@pytest.mark.parametrize("case", [*CASES, MIXED], ids=lambda case: case.id)
def test_widened_keys(case, head_size, widened):
    case = replace(case, head_size=head_size)
    out, lse = check(make_inputs(case, "cuda"))
    clean, clean_lse = attend(make_inputs(case, "cuda", fill="zero"))
    assert_bit_equal(clean, out, "out, unused memory zero")
    assert_bit_equal(clean_lse, lse, "LSE, unused memory zero")


NVFP4_CASES = [
    case
    for case in [*CASES, MIXED]
    if case.id in ("one", "tiny", "varlen", "q-longer-than-kv", "non-causal", "window-both", "all",
                   "group-3", "HND", "interleaved", "page-16", "page-192", "fp16", "ragged-window",
                   "long", "mixed")
]  # fmt: skip


@pytest.mark.parametrize("head_size", widen_sm90.head_sizes("nvfp4"))
@pytest.mark.parametrize("case", NVFP4_CASES, ids=lambda case: case.id)
def test_widened_nvfp4_keys(case, head_size, widened):
    """Scales of unused slots are NaN in the first call, zero in the second: the same bits."""
    inputs = make_nvfp4_inputs(replace(case, head_size=head_size), "cuda")
    out, lse = check(inputs)
    for name in ("k_block_scale", "v_block_scale"):
        scale = inputs[name].view(torch.uint8)
        scale[(scale & 0x7F) == 0x7F] = 0
    clean, clean_lse = attend(inputs)
    assert_bit_equal(clean, out, "out, unused scales zero")
    assert_bit_equal(clean_lse, lse, "LSE, unused scales zero")


@pytest.mark.parametrize("head_size", widen_sm90.head_sizes("nvfp4"))
def test_the_route_of_long_queries_over_nvfp4(head_size):
    """Long sequences read copies, short ones the cache; again and at other addresses."""
    for seed in (0, 1):
        check(make_nvfp4_inputs(replace(MIXED, head_size=head_size, seed=seed), "cuda"))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("window", ((-1, -1), (700, 0)))
def test_maxima_that_keep_growing(head_size, window):
    """Keys grow along the sequence, so references move again and again, and not in all warps."""
    case = case_of("grow", [2000], [300], head_size=head_size, q_magnitude=2.0, window=window)
    inputs = make_inputs(case, "cuda")
    for n, page in enumerate(inputs["block_table"][0, :32].tolist()):
        live = min(64, 2000 - 64 * n)
        if page < 0 or page >= inputs["k"].shape[0]:
            continue
        grown = inputs["k"][page, :live].float() * (0.02 + n / 8)
        codes = grown.clamp(-448, 448).to(FP8).view(torch.uint8)
        inputs["k"].view(torch.uint8)[page, :live] = codes
    check(prefill(inputs))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_queries_beyond_fp16_range(head_size):
    scales = {"softmax_scale": 1.0, "k_scale": 0.003, "v_scale": 30.0}
    case = case_of("large-q", [300, 64, 1000], [200, 64, 100], head_size=head_size, **scales)
    inputs = make_inputs(case, "cuda")
    magnitude = torch.logspace(-3, 5, inputs["q"].shape[0] * 8, device="cuda").view(-1, 8, 1)
    q = inputs["q"].float()
    inputs["q"] = (q / q.abs().amax(-1, keepdim=True) * magnitude).to(torch.bfloat16)
    check(prefill(inputs))


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(
    "fields", ({}, {"window": (200, 0), "sinks": True}), ids=("full", "window")
)
@pytest.mark.parametrize(("head_size", "cache"), HEADS_AND_CACHES)
def test_mixed_batches(head_size, cache, fields, deterministic):
    """With all SMs at work, many times over: the slots of K and V must not be handed back early."""
    case = with_cache(replace(MIXED, head_size=head_size, **fields), cache)
    inputs = make_inputs(case, "cuda")
    inputs["deterministic"] = deterministic
    out, lse = check(inputs)
    for _ in range(10):
        again, lse_again = attend(inputs)
        assert_bit_equal(again, out, "out of another call")
        assert_bit_equal(lse_again, lse, "LSE of another call")


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_neighbour_does_not_change_a_sequence(head_size):
    heads = {"num_q_heads": 32, "num_kv_heads": 4, "head_size": head_size}
    inputs = prefill(make_inputs(case_of("two", [900, 300], [500, 200], **heads), "cuda"))
    out, lse = attend(inputs)
    alone = {
        **inputs,
        "q": inputs["q"][:500],
        "cu_seqlens_q": inputs["cu_seqlens_q"][:2].clone(),
        "seqused_k": inputs["seqused_k"][:1],
        "block_table": inputs["block_table"][:1],
        **{name: inputs[name][:1] for name in ("k_descale", "v_descale")},
    }
    single, single_lse = attend(alone)
    assert_bit_equal(single, out[:500].contiguous(), "out of the sequence alone")
    assert_bit_equal(single_lse, lse[:, :500].contiguous(), "LSE of the sequence alone")


def part(inputs: Inputs, q_begin: int, q_end: int, kv_len: int) -> Inputs:
    """Some of the queries of a call with one sequence, which then has ``kv_len`` keys."""
    device = inputs["q"].device
    return {
        **inputs,
        "q": inputs["q"][q_begin:q_end],
        "max_seqlen_q": q_end - q_begin,
        "cu_seqlens_q": torch.tensor([0, q_end - q_begin], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor([kv_len], dtype=torch.int32, device=device),
        "max_seqlen_k": kv_len,
    }


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_chunks_of_a_prefill_are_the_whole(head_size):
    heads = {"num_q_heads": 32, "num_kv_heads": 4, "head_size": head_size}
    inputs = make_inputs(case_of("8k", [8192], [8192], **heads), "cuda")
    whole, whole_lse = attend(inputs)
    for begin in range(0, 8192, 1024):
        out, lse = attend(part(inputs, begin, begin + 1024, begin + 1024))
        assert_output_close(out, whole[begin : begin + 1024].double())
        assert_lse_close(lse, whole_lse[:, begin : begin + 1024].double())


@pytest.mark.parametrize(("head_size", "cache"), HEADS_AND_CACHES)
def test_decode_and_prefill_agree(head_size, cache):
    """The last token, scored alone and within a prompt: equal to the rounding of the output, and
    from a bf16 cache to that of the probabilities, which are bf16 there: by 2^-9 in each kernel."""
    heads = {"num_q_heads": 8, "num_kv_heads": 1, "head_size": head_size}
    for kv_len in (88, 129, 256, 2000):
        case = case_of("score", [kv_len], [kv_len], **heads)
        inputs = make_inputs(with_cache(case, cache), "cuda")
        whole, whole_lse = attend(prefill(inputs))
        out, lse = attend(part(inputs, kv_len - 1, kv_len, kv_len))
        alone = part(inputs, kv_len - 1, kv_len, kv_len)
        reference, reference_lse = exact(alone)
        for got, got_lse in ((out, lse), (whole[-1:], whole_lse[:, -1:])):
            assert_output_close(got, reference)
            assert_lse_close(got_lse, reference_lse)
        difference = (out.float() - whole[-1:].float()).abs()
        ulp = torch.maximum(out.float().abs(), reference.abs().float()) * 2**-7
        allowed = ulp + 2e-3 * reference.abs().amax()
        if cache == "bf16":
            allowed = allowed + 2**-8 * exact({**alone, "v": alone["v"].abs()})[0]
        assert bool((difference <= allowed).all())


@pytest.mark.parametrize("head_size", (128, 512))
def test_a_graph_replayed_with_other_lengths(head_size):
    """Captured with one long and three short sequences; replayed with all kinds, padding too."""
    heads = {"num_q_heads": 32, "num_kv_heads": 4, "head_size": head_size}
    case = case_of("graph", [2000, 900, 700, 64], [1000, 1, 1, 1], **heads)
    inputs = make_inputs(case, "cuda", fill="zero")
    inputs["block_table"] = inputs["block_table"][:1].expand(4, -1).contiguous()
    out = torch.full_like(inputs["q"], math.nan)
    flash_attn_varlen_func(**inputs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = flash_attn_varlen_func(**inputs, out=out)
    for q_lens, kv_lens in (
        ((1, 1, 1, 1000), (500, 0, 1900, 2000)),
        ((300, 1, 400, 0), (300, 7, 1500, 0)),
        ((1, 1, 1, 1), (2000, 1999, 65, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
    ):
        offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
        inputs["cu_seqlens_q"].copy_(offsets)
        inputs["seqused_k"].copy_(torch.tensor(kv_lens).int())
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        written = int(offsets[-1])
        reference, reference_lse = exact(inputs)
        assert_output_close(out[:written], reference[:written])
        assert_lse_close(lse[:, :written], reference_lse[:, :written])
        assert out[written:].isnan().all(), "rows beyond cu_seqlens_q[-1] were written"
