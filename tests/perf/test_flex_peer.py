"""FlexAttention over pages: what its block mask names, and what it computes, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from perf import flex_peer
from perf.inputs import InputSet
from perf.peers import Refusal
from perf.providers import varlen_arguments

PAGE, HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 2, 32
CASES = {
    "decode": (1, -1, (100, 64, 33)),
    "verify": (4, -1, (100, 64, 33)),
    "window": (1, 20, (100, 64, 33)),
    "prefill": (200, -1, (200, 333)),
    "prefill in a window": (200, 70, (200, 333)),
}


def make_inputs(q_len: int, window_left: int, kv_lens: tuple[int, ...]) -> InputSet:
    """Pages in random order among others, block-table tails of -1."""
    generator = torch.Generator().manual_seed(0)
    batch, counts = len(kv_lens), [-(-length // PAGE) for length in kv_lens]
    ids = torch.randperm(sum(counts) + 5, generator=generator).to(torch.int32)
    table = torch.full((batch, max(counts) + 1), -1, dtype=torch.int32)
    for row, own in zip(table, ids[: sum(counts)].split(counts), strict=True):
        row[: len(own)] = own

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    q = normal(batch * q_len, HEADS, HEAD_SIZE)
    return InputSet(
        q=q,
        k=normal(len(ids), PAGE, KV_HEADS, HEAD_SIZE),
        v=normal(len(ids), PAGE, KV_HEADS, HEAD_SIZE),
        block_table=table,
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * q_len,
        k_descale=None,
        v_descale=None,
        out=torch.full_like(q, float("nan")),
        lse=torch.empty(HEADS, len(q)),
        max_seqlen_q=q_len,
        max_seqlen_k=max(kv_lens),
        softmax_scale=HEAD_SIZE**-0.5,
        window_left=window_left,
    )


def seen_by_definition(inputs: InputSet, b: int) -> torch.Tensor:
    """(q_len, keys), of a sequence's own keys."""
    length = int(inputs.seqused_k[b])
    position = torch.arange(inputs.max_seqlen_q)[:, None] + length - inputs.max_seqlen_q
    key = torch.arange(length)
    seen = key <= position
    return seen if inputs.window_left < 0 else seen & (key >= position - inputs.window_left)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pages_are_named_as_the_mask_has_them(case):
    inputs = make_inputs(*case)
    mask, flex = flex_peer.page_mask(inputs), flex_peer.block_mask(inputs)
    for b in range(len(case[2])):
        seen = seen_by_definition(inputs, b)
        for block, rows in enumerate(seen.split(flex_peer.QUERY_BLOCK)):
            wanted = {"some": set(), "all": set()}
            for page, columns in enumerate(rows.split(PAGE, dim=1)):
                assert mask.visible[b, block, page] == columns.any()
                whole = columns.shape[1] == PAGE and bool(columns.all())
                assert mask.whole[b, block, page] == whole
                if columns.any():
                    wanted["all" if whole else "some"].add(int(inputs.block_table[b, page]))
            lists = (
                ("some", flex.kv_num_blocks, flex.kv_indices),
                ("all", flex.full_kv_num_blocks, flex.full_kv_indices),
            )
            for name, counts, ids in lists:
                count = int(counts[b, 0, block])
                named = ids[b, 0, block, :count].tolist()
                assert len(named) == len(set(named)) and set(named) == wanted[name]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_call_is_attention(case):
    """Uncompiled, where the element mask alone decides: other sequences' pages are not seen."""
    inputs = make_inputs(*case)
    flex_peer.torch_flex_attention(inputs, flex_attention)()
    want = attention_reference(validate(**varlen_arguments(inputs)), torch.float64)[0]
    assert (inputs.out.double() - want).norm() / want.norm() < 6e-3


def test_a_quantized_cache_is_refused():
    """As a refusal, which is no failure of the benchmark."""
    inputs = make_inputs(*CASES["decode"])
    fp8 = InputSet(**{**vars(inputs), "k": inputs.k.to(torch.float8_e4m3fn)})
    with pytest.raises(Refusal, match="queries' dtype, this one is torch.float8_e4m3fn"):
        flex_peer.torch_flex_attention(fp8, flex_attention)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_call_has_its_own_pages_and_too_many_are_refused(case, monkeypatch):
    """torch's decode template takes 31 bits of elements; here as many as the call's pages have."""
    inputs = make_inputs(*case)
    pages = sum(-(-length // PAGE) for length in case[2])
    own = flex_peer.with_own_pool(inputs)
    assert own.k.shape[0] == pages < inputs.k.shape[0]
    for b, length in enumerate(case[2]):
        count = -(-length // PAGE)
        for side in ("k", "v"):
            found = getattr(own, side)[own.block_table[b, :count].long()]
            assert torch.equal(found, getattr(inputs, side)[inputs.block_table[b, :count].long()])
    monkeypatch.setattr(flex_peer, "MAX_ELEMENTS", own.k.numel())
    flex_peer.torch_flex_attention(inputs, flex_attention)()
    want = attention_reference(validate(**varlen_arguments(inputs)), torch.float64)[0]
    assert (inputs.out.double() - want).norm() / want.norm() < 6e-3
    monkeypatch.setattr(flex_peer, "MAX_ELEMENTS", own.k.numel() - 1)
    with pytest.raises(Refusal, match="elements of K"):
        flex_peer.torch_flex_attention(inputs, flex_attention)
