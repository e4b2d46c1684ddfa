"""The torch reference against implementations that share nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cute_kernels.attention.arguments import validate
from cute_kernels.reference import attention as reference_module
from cute_kernels.reference.attention import attention_reference
from tests.cases import DEFAULT_CASES, FULL_CASES, TILE, AttentionCase, make_inputs, spread
from tests.compare import (
    assert_bit_equal,
    assert_lse_close,
    assert_output_close,
    relative_error,
)


def lengths(offsets: torch.Tensor) -> torch.Tensor:
    return offsets.long().diff()


def padded_kv(inputs: dict, name: str, kv_lens: torch.Tensor) -> torch.Tensor:
    """(B, longest, Hkv, D) float64, zeros where there is no token or where its page was freed."""
    cache, batch = inputs[name], len(kv_lens)
    position = torch.arange(int(kv_lens.max())).expand(batch, -1)
    if inputs.get("block_table") is None:
        slot = inputs["cu_seqlens_k"][:-1, None] + position
        flat = cache
    else:
        page_size = cache.shape[1]
        table = inputs["block_table"].long()
        slot = table.gather(1, position // page_size) * page_size + position % page_size
        flat = cache.reshape(-1, *cache.shape[2:])
    live = (position < kv_lens[:, None]) & (slot >= 0) & (slot < len(flat))
    values = flat.double()[slot.masked_fill(~live, 0).long()]
    return values.nan_to_num(0.0) * live[..., None, None]


def dense_attention(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences at once on padded tensors, heads repeated, the sink as a softmax column."""
    q = inputs["q"].double()
    q_lens = lengths(inputs["cu_seqlens_q"])
    kv_lens = inputs.get("seqused_k")
    kv_lens = lengths(inputs["cu_seqlens_k"]) if kv_lens is None else kv_lens.long()
    batch, (_, heads, dim) = len(q_lens), q.shape
    k, v = (padded_kv(inputs, name, kv_lens) for name in "kv")
    descales = []
    for name in ("k_descale", "v_descale"):
        scale = inputs[name]
        descales.append(1.0 if scale is None else scale.double().broadcast_to(batch, k.shape[2]))
    k, v = (
        x * (s if isinstance(s, float) else s[:, None, :, None])
        for x, s in zip((k, v), descales, strict=True)
    )
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))

    longest = int(q_lens.max())
    row = torch.arange(longest)
    live_q = row < q_lens[:, None]
    padded_q = q.new_zeros(batch, longest, heads, dim)
    padded_q[live_q] = q
    scale = inputs["softmax_scale"]
    scores = torch.einsum("bqhd,bkhd->bhqk", padded_q, k) * (dim**-0.5 if scale is None else scale)
    if inputs["softcap"]:
        scores = torch.tanh(scores / inputs["softcap"]) * inputs["softcap"]

    distance = torch.arange(k.shape[1]) - (row[:, None] + (kv_lens - q_lens)[:, None, None])
    left, right = inputs["window_size"]
    allowed = (torch.arange(k.shape[1]) < kv_lens[:, None])[:, None].expand(-1, longest, -1)
    if inputs["causal"]:
        allowed = allowed & (distance <= 0)
    elif right >= 0:
        allowed = allowed & (distance <= right)
    if left >= 0:
        allowed = allowed & (distance >= -left)
    bias = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    scores = scores + bias[:, None]
    sinks = inputs["s_aux"]
    column = torch.full((heads,), -math.inf) if sinks is None else sinks
    column = column.double()[None, :, None, None].expand(batch, heads, longest, 1)
    logits = torch.cat([scores, column], -1)
    weights = torch.softmax(logits, -1)[..., :-1].nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return out[live_q], torch.logsumexp(logits, -1).permute(0, 2, 1)[live_q].t()


def test_against_a_dense_implementation(grid_case):
    inputs = make_inputs(grid_case)
    problem = validate(**inputs)
    expected, expected_lse = dense_attention(inputs)
    out, lse = attention_reference(problem, torch.float64)
    assert out.dtype is lse.dtype is torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-10)
    out, lse = attention_reference(problem)
    assert (out.dtype, lse.dtype) == (grid_case.q_dtype, torch.float32)
    assert_output_close(out, expected)
    assert_lse_close(lse, expected_lse)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("q_len", (1, 300))
def test_against_torch_sdpa(causal, q_len):
    kv_len = 300
    case = AttentionCase(
        id="sdpa", kv_lens=(kv_len,) * 3, q_lens=(q_len,) * 3, num_q_heads=6, num_kv_heads=2,
        kv_dtype=torch.bfloat16, scale_kind="none", page_size=None, causal=causal,
    )  # fmt: skip
    inputs = make_inputs(case)
    q, k, v = (
        inputs[name].double().view(3, -1, inputs[name].shape[1], 128).transpose(1, 2)
        for name in "qkv"
    )
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    # torch aligns is_causal top-left: the same for q_len == kv_len; one query sees every key.
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal and q_len > 1)
    out, _ = attention_reference(validate(**inputs), torch.float64)
    torch.testing.assert_close(
        out, expected.transpose(1, 2).reshape(out.shape), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("window", ((-1, 0), (40, 0), (40, 30), (-1, -1)))
def test_chunks_of_queries_change_nothing(monkeypatch, window):
    case = AttentionCase(
        id="chunks", kv_lens=(400, 90, 0), q_lens=(130, 120, 5), causal=False, window=window,
        sinks=True, softcap=10.0,
    )  # fmt: skip
    problem = validate(**make_inputs(case))
    whole = attention_reference(problem, torch.float64)
    monkeypatch.setattr(reference_module, "_MAX_SCORES", 8 * 400 * 7)
    for part, expected in zip(attention_reference(problem, torch.float64), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-13)


def test_softcap_comes_after_the_descale():
    case = AttentionCase(id="order", kv_lens=(300,), q_lens=(1,), softcap=5.0, q_magnitude=10.0)
    inputs = make_inputs(case)
    out, lse = attention_reference(validate(**inputs), torch.float64)
    k = inputs["k"].double() * inputs["k_descale"][0].double()[:, None]
    bf16 = {**inputs, "k": k.to(torch.bfloat16), "v": inputs["v"].to(torch.bfloat16)}
    bf16 |= {"k_descale": None, "v_descale": None}
    folded, folded_lse = attention_reference(validate(**bf16), torch.float64)
    folded = folded.view(1, 2, 4, -1) * inputs["v_descale"].double()[:, :, None, None]
    assert relative_error(folded.view(out.shape), out) < 2e-2  # keys rounded to bf16
    uncapped, uncapped_lse = attention_reference(
        validate(**{**inputs, "softcap": 0.0}), torch.float64
    )
    assert relative_error(uncapped, out) > 0.1
    assert (folded_lse - lse).abs().max() < 0.05 < (uncapped_lse - lse).abs().min()


def test_fewer_ragged_keys_can_be_used_but_not_more():
    case = AttentionCase(id="ragged", kv_lens=(50, 70), q_lens=(2, 2), page_size=None)
    inputs = make_inputs(case)
    more = torch.tensor([20, 71], dtype=torch.int32)
    with pytest.raises(ValueError, match="seqused_k: sequence 1 has 71 keys; accepted: at most"):
        attention_reference(validate(**inputs, seqused_k=more))
    used = torch.tensor([20, 70], dtype=torch.int32)
    out, lse = attention_reference(validate(**inputs, seqused_k=used))
    expected, expected_lse = attention_reference(validate(**inputs))
    assert torch.equal(out[2:], expected[2:])
    assert torch.equal(lse[:, 2:], expected_lse[:, 2:])
    first = {**inputs, "k": inputs["k"][:20], "v": inputs["v"][:20], "q": inputs["q"][:2]}
    first |= {
        "cu_seqlens_k": torch.tensor([0, 20]).int(),
        "cu_seqlens_q": torch.tensor([0, 2]).int(),
    }
    first |= {name: inputs[name][:1] for name in ("k_descale", "v_descale")}
    alone, alone_lse = attention_reference(validate(**first))
    assert torch.equal(out[:2], alone)
    assert torch.equal(lse[:, :2], alone_lse)


def test_paged_lengths_from_cu_seqlens_k():
    inputs = make_inputs(AttentionCase(id="paged-cu", kv_lens=(50, 70, 0), q_lens=(2, 1, 1)))
    expected = attention_reference(validate(**inputs))
    del inputs["seqused_k"]
    offsets = torch.tensor([0, 50, 120, 120], dtype=torch.int32)
    got = attention_reference(validate(**inputs, cu_seqlens_k=offsets))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    (
        ("seqused_k", [-1, 5], "seqused_k: sequence 0 has -1 keys"),
        ("seqused_k", [300, 5], "block_table: sequence 0 reads 300 keys"),
        ("cu_seqlens_q", [0, 2, 1], "cu_seqlens_q: got .* non-decreasing"),
        ("cu_seqlens_q", [0, 1, 3], "cu_seqlens_q: last offset 3; accepted: at most 2"),
        ("block_table", [[-1, 0], [1, 0]], "block_table: sequence 0 reads 100 keys from pages"),
        ("block_table", [[0, 999], [1, 0]], "block_table: sequence 0 reads .* ids from 0 to"),
    ),
)
def test_impossible_contents_are_refused(name, value, message):
    inputs = make_inputs(AttentionCase(id="bad", kv_lens=(100, 5), q_lens=(1, 1)))
    inputs[name] = torch.tensor(value, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        attention_reference(validate(**inputs))


def test_contents_are_refused_before_anything_is_written():
    inputs = make_inputs(AttentionCase(id="bad", kv_lens=(100, 100), q_lens=(1, 1)))
    inputs["block_table"][1, 0] = 999
    inputs["out"] = torch.full_like(inputs["q"], 7.0)
    with pytest.raises(ValueError, match="^flash_attn_varlen_func: block_table: sequence 1 reads"):
        attention_reference(validate(**inputs))
    assert bool((inputs["out"] == 7.0).all())


def test_a_cache_without_pages_is_called_so():
    inputs = make_inputs(AttentionCase(id="empty", kv_lens=(5, 5), q_lens=(1, 1)))
    inputs["k"], inputs["v"] = inputs["k"][:0], inputs["v"][:0]
    with pytest.raises(ValueError, match=r"accepted: 1 ids, but k has no pages"):
        attention_reference(validate(**inputs))
    inputs["seqused_k"] = torch.zeros_like(inputs["seqused_k"])
    out, _ = attention_reference(validate(**inputs))
    assert not out.any()


def test_other_compute_dtypes_are_refused():
    problem = validate(**make_inputs(AttentionCase(id="dtype", kv_lens=(5,), q_lens=(1,))))
    with pytest.raises(ValueError, match="compute_dtype: got torch.bfloat16"):
        attention_reference(problem, torch.bfloat16)


def test_float64_leaves_out_alone():
    inputs = make_inputs(AttentionCase(id="out", kv_lens=(70, 3), q_lens=(1, 1)))
    given = torch.full_like(inputs["q"], math.nan)
    problem = validate(**inputs, out=given)
    out, _ = attention_reference(problem, torch.float64)
    assert given.isnan().all() and out.isfinite().all()
    written, _ = attention_reference(problem)
    assert written is given and given.isfinite().all()


def test_reference_reads_nothing_before_the_window():
    """A cache whose slots before every window are NaN, in pages that are partly visible."""
    case = AttentionCase(id="window", kv_lens=(200,), q_lens=(3,), window=(70, 0), page_size=128)
    inputs = make_inputs(case)
    expected = attention_reference(validate(**inputs))
    page, unseen = int(inputs["block_table"][0, 0]), 200 - 3 - 70
    for name in "kv":
        inputs[name].view(torch.uint8)[page, :unseen] = 0x7F
    got = attention_reference(validate(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_cases_span_tiles_and_splits():
    ids = [case.id for case in FULL_CASES]
    assert len(set(ids)) == len(ids)
    for cases in (DEFAULT_CASES, FULL_CASES):
        long = [case for case in cases if case.tiles >= 3]
        for field, values in {
            "head_size": {64, 128, 256, 512},
            "page_size": {16, 32, 64, 128, 192, 256},
            "group": {1, 2, 3, 5, 7, 12, 16},
            "layout": {"NHD", "HND", "interleaved"},
            "q_dtype": {torch.bfloat16, torch.float16},
        }.items():
            assert values <= {getattr(case, field) for case in long}, field
        assert set(range(1, 9)) <= {max(case.q_lens) for case in long}
        assert {2, 7, 32} <= {case.num_splits for case in long}
        assert any(case.packed_rows > 64 for case in long)
        assert any(n % TILE for case in long for n in case.kv_lens)
        # Two are about length itself, one about many items of two tiles.
        short = {case.id for case in cases if case.tiles < 3}
        assert short <= {"prefill-longer-than-kv", "ragged-short", "alike-d512"}, short


def test_inputs_are_poisoned():
    case = AttentionCase(
        id="poison", kv_lens=(130, 0, 64, 500), q_lens=(1, 1, 1, 1), window=(100, 0)
    )
    inputs = make_inputs(case)
    table, used = inputs["block_table"], inputs["seqused_k"]
    bytes_ = inputs["k"].view(torch.uint8)
    live = torch.zeros(bytes_.shape[:2], dtype=torch.bool)
    for row, length in enumerate(case.kv_lens):
        count = -(-length // case.page_size)
        tail = table[row, count:].tolist()
        assert len(tail) >= 2
        assert all(not 0 <= page < len(live) or not live[page].any() for page in tail)
        unseen = max(0, length - 1 - 100) // case.page_size
        for index in range(unseen, count):
            page = int(table[row, index])
            assert not live[page].any()
            live[page, : length - index * case.page_size] = True
    assert {-1, 2**31 - 1} & set(table.flatten().tolist())
    assert not (bytes_[live] & 0x7F == 0x7F).any()
    assert (bytes_ == 0x7F).all(-1).all(-1).sum() >= 5 * case.page_size
    assert used.tolist() == list(case.kv_lens)
    zero = make_inputs(case, fill="zero")
    same = bytes_[live] == zero["k"].view(torch.uint8)[live]
    assert same.all() and torch.equal(zero["q"], inputs["q"])
    assert not (zero["k"].view(torch.uint8) == 0x7F).any()


def test_spread_has_both_ends():
    assert {3, 90} <= set(spread(5, 3, 90)) and spread(1, 3, 90) == (90,)


def test_autocast_does_not_change_the_arithmetic():
    inputs = make_inputs(AttentionCase(id="autocast", kv_lens=(700, 65), q_lens=(1, 1)))
    expected = attention_reference(validate(**inputs))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_reference(validate(**inputs))
    assert_bit_equal(found[0], expected[0], "out under autocast")
    assert_bit_equal(found[1], expected[1], "LSE under autocast")
