"""``deterministic=True``: a sequence's bits, whatever else is in its batch and wherever it lies."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from tests.attention.helpers import Inputs, attend, check
from tests.cases import AttentionCase, cumulative, make_inputs
from tests.compare import assert_bit_equal
from tests.nvfp4_cases import make_nvfp4_inputs

pytestmark = pytest.mark.gpu
BATCH = 64
# Of the first sequences; the others' are short. One split and many, whole tiles and not.
LONG = (9000, 1, 8192, 1024, 1025, 5000, 12_345, 64, 0, 3000, 40_000)


class Kind(NamedTuple):
    """fields: of the case. q_lens: repeated over the batch. nvfp4: the cache's format."""

    name: str
    q_lens: tuple[int, ...]
    fields: dict[str, object]
    nvfp4: bool = False


KINDS = (
    Kind("d512-one-head", (1,), {"head_size": 512, "num_kv_heads": 1}),
    Kind("d512-four-heads", (1,), {"head_size": 512, "num_q_heads": 32, "num_kv_heads": 4}),
    Kind("d512-q4", (4,), {"head_size": 512, "num_kv_heads": 1}),
    Kind("d512-mixed-q", (1, 4, 2, 0, 3), {"head_size": 512, "num_kv_heads": 1}),
    Kind("d128", (1,), {"num_q_heads": 16, "sinks": True}),
    Kind("d128-group-16", (1,), {"num_q_heads": 16, "num_kv_heads": 1, "softcap": 20.0}),
    Kind("d128-mixed-q", (1, 8, 3, 1, 5), {"page_size": 16}),
    Kind("d128-window", (1, 3), {"window": (1500, 0)}),
    Kind("d128-with-prompts", (1, 1, 40, 2, 1, 90), {"q_dtype": torch.float16}),
    Kind("d256", (1, 2), {"head_size": 256, "layout": "HND"}),
    Kind("d256-mixed-q", (1, 16, 9, 2, 5), {"head_size": 256}),
    Kind("d64", (1,), {"head_size": 64, "num_q_heads": 32, "num_kv_heads": 4}),
    Kind("d64-q8", (8,), {"head_size": 64}),
    Kind("nvfp4-d512", (1,), {"head_size": 512, "layout": "HND"}, nvfp4=True),
    Kind("nvfp4-d256-mixed-q", (1, 16, 9, 2), {"head_size": 256}, nvfp4=True),
    Kind("nvfp4-d128-mixed-q", (1, 4, 20, 2), {"layout": "HND"}, nvfp4=True),
)


def inputs_of(kind: Kind) -> Inputs:
    rng = random.Random(len(kind.name))
    kv_lens = LONG + tuple(rng.randint(1, 2500) for _ in range(BATCH - len(LONG)))
    q_lens = (kind.q_lens * BATCH)[:BATCH]
    case = AttentionCase(id=kind.name, kv_lens=kv_lens, q_lens=q_lens, **kind.fields)
    make = make_nvfp4_inputs if kind.nvfp4 else make_inputs
    return {**make(case, "cuda"), "deterministic": True}


def rows_of(inputs: Inputs, indices: list[int]) -> list[torch.Tensor]:
    """Rows of q of each of some sequences."""
    starts = inputs["cu_seqlens_q"].tolist()
    return [torch.arange(starts[b], starts[b + 1]) for b in indices]


def chosen(inputs: Inputs, indices: list[int], **others: object) -> Inputs:
    """The same call for some of the sequences, in this order, in the same cache."""
    rows = rows_of(inputs, indices)
    of_sequences = {
        name: inputs[name][indices].contiguous()
        for name in ("block_table", "seqused_k", "k_descale", "v_descale")
    }
    lengths = tuple(len(each) for each in rows)
    return {
        **inputs,
        **of_sequences,
        "q": inputs["q"][torch.cat(rows)],
        "cu_seqlens_q": cumulative(lengths, "cuda"),
        "max_seqlen_q": max(lengths),
        "max_seqlen_k": int(of_sequences["seqused_k"].max()),
        **others,
    }


def moved(inputs: Inputs) -> Inputs:
    """The same with every page elsewhere, in a larger pool, and a wider table."""
    pages, width = inputs["k"].shape[0], inputs["block_table"].shape[1]
    generator = torch.Generator("cuda").manual_seed(1)
    places = torch.randperm(pages + 77, generator=generator, device="cuda")[:pages]
    found = dict(inputs)
    for name in ("k", "v", "k_block_scale", "v_block_scale"):
        old = inputs.get(name)
        if old is None:
            continue
        bytes_of = old.view(torch.uint8)
        # as the old one lies in memory, heads first or tokens first
        heads_first = bytes_of.stride(2) > bytes_of.stride(1)
        source = bytes_of.transpose(1, 2) if heads_first else bytes_of
        pool = torch.full((pages + 77, *source.shape[1:]), 0x7F, dtype=torch.uint8, device="cuda")
        pool[places] = source
        pool = pool.transpose(1, 2) if heads_first else pool
        found[name] = pool.view(old.dtype)
    table = inputs["block_table"].long()
    valid = (table >= 0) & (table < pages)
    table = torch.where(valid, places[table.clamp(0, pages - 1)], table)
    wide = torch.full((table.shape[0], width + 33), -1, dtype=torch.int32, device="cuda")
    wide[:, :width] = table
    return {**found, "block_table": wide}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_bits_of_a_sequence_are_its_own(kind):
    inputs = inputs_of(kind)
    out, lse = check(inputs)
    everyone = list(range(BATCH))
    rows = rows_of(inputs, everyone)

    def same(indices: list[int], call: Inputs, what: str) -> None:
        got, got_lse = attend(call)
        at = torch.cat([rows[b] for b in indices])
        assert_bit_equal(got, out[at], f"out, {what}")
        assert_bit_equal(got_lse, lse[:, at], f"LSE, {what}")

    for b in range(len(LONG)):
        if len(rows[b]):
            same([b], chosen(inputs, [b]), f"sequence {b} alone")
    shuffled = everyone[:]
    random.Random(2).shuffle(shuffled)
    same(shuffled, chosen(inputs, shuffled), "in another order")
    same([10, 11, 0, 12], chosen(inputs, [10, 11, 0, 12]), "four of them")
    same([6] * 3 + [2] * 30, chosen(inputs, [6] * 3 + [2] * 30), "some repeated")
    same(everyone, moved(inputs), "with its pages elsewhere")
    for _ in range(20):
        same(everyone, inputs, "again")
