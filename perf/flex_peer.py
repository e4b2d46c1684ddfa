"""torch's FlexAttention over a paged cache in the queries' dtype: the block mask names the pages.

K and V are the pool as one long sequence, and a block of keys is a page: which pages a block of
queries visits, and which of them it sees whole, stands in a `BlockMask`. Pages that are seen in
part are masked element by element. Made when bound, as a serving engine makes it once a step for
all layers. A quantized cache cannot be read so: there is no scale a page or head to apply.

The pages of a call are copied into a pool of their own when it is bound, in the order that they
had: torch's decode template splits keys by the length of the pool, and that of torch 2.11 does not
compile for 2^31 and more elements (it mixes indices of 32 and 64 bits; H200, 2026-11-30). The copy
of the result into `inputs.out` is in the time; it moves what the kernel writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from perf.inputs import InputSet
from perf.peers import Refusal
from perf.timing import Call

QUERY_BLOCK = 128
MAX_ELEMENTS = 2**31 - 1
MAX_CASES = 64


class PageMask(NamedTuple):
    """What each block of queries sees of each page of its sequence: (B, query blocks, pages)."""

    visible: torch.Tensor  # something of it
    whole: torch.Tensor  # all of it


def page_mask(inputs: InputSet) -> PageMask:
    """From lengths and window; every sequence has as many queries."""
    q_len, page = inputs.max_seqlen_q, inputs.k.shape[1]
    device = inputs.q.device
    kv_len = inputs.seqused_k.long()[:, None, None]
    first_row = torch.arange(0, q_len, QUERY_BLOCK, device=device)[None, :, None]
    first = first_row + kv_len - q_len
    last = (first_row + QUERY_BLOCK - 1).clamp(max=q_len - 1) + kv_len - q_len
    begin = torch.arange(inputs.block_table.shape[1], device=device)[None, None] * page
    end = begin + page - 1
    visible, whole = begin <= last, end <= first
    if inputs.window_left >= 0:
        visible = visible & (end >= first - inputs.window_left)
        whole = whole & (begin >= last - inputs.window_left)
    return PageMask(visible, whole & visible)


def listed(mask: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the pages that `mask` (B, query blocks, pages) names, and their ids first."""
    order = mask.logical_not().int().argsort(dim=-1, stable=True)
    ids = table.clamp(min=0)[:, None].expand_as(mask).gather(-1, order)
    return mask.sum(-1, dtype=torch.int32)[:, None], ids.to(torch.int32)[:, None].contiguous()


def element_mask(inputs: InputSet) -> Callable[..., torch.Tensor]:
    """FlexAttention's mask function: whether a query sees an element of the pool."""
    page, window = inputs.k.shape[1], inputs.window_left
    batch, columns = inputs.block_table.shape
    kv_len, device = inputs.seqused_k.long(), inputs.q.device
    used = torch.arange(columns, device=device) < -(-kv_len[:, None] // page)
    owner, number = (torch.full((inputs.k.shape[0],), -1, device=device) for _ in range(2))
    pages = inputs.block_table[used].long()
    owner[pages] = torch.arange(batch, device=device)[:, None].expand_as(used)[used]
    number[pages] = torch.arange(columns, device=device).expand_as(used)[used]
    shift = kv_len - inputs.max_seqlen_q

    def sees(b, h, q_idx, kv_idx):
        physical = kv_idx // page
        key = number[physical] * page + kv_idx % page
        position = q_idx + shift[b]
        seen = (owner[physical] == b) & (key <= position)
        return seen if window < 0 else seen & (key >= position - window)

    return sees


def block_mask(inputs: InputSet) -> BlockMask:
    mask = page_mask(inputs)
    partly = listed(mask.visible & ~mask.whole, inputs.block_table)
    pool = inputs.k.shape[0] * inputs.k.shape[1]
    return BlockMask.from_kv_blocks(
        *partly,
        *listed(mask.whole, inputs.block_table),
        BLOCK_SIZE=(QUERY_BLOCK, inputs.k.shape[1]),
        mask_mod=element_mask(inputs),
        seq_lengths=(inputs.max_seqlen_q, pool),
        compute_q_blocks=False,  # for a backward pass; the pool has more blocks than columns
    )


def with_own_pool(inputs: InputSet) -> InputSet:
    """The same call over a pool that holds its pages alone, in the order that they had."""
    page = inputs.k.shape[1]
    counts = -(-inputs.seqused_k.long() // page)
    used = torch.arange(inputs.block_table.shape[1], device=counts.device) < counts[:, None]
    pages = inputs.block_table[used].long().unique()
    table = torch.zeros_like(inputs.block_table)
    table[used] = torch.searchsorted(pages, inputs.block_table[used].long()).to(torch.int32)
    return replace(inputs, k=inputs.k[pages], v=inputs.v[pages], block_table=table)


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    """Compiled anew for each case, of which there are more than the 8 that torch allows by default
    before it runs the function as it is, slowly; with `fullgraph` that would be an error."""
    torch._dynamo.config.recompile_limit = MAX_CASES
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def torch_flex_attention(
    inputs: InputSet, attention: Callable[..., torch.Tensor] | None = None
) -> Call:
    """The call, compiled unless `attention` is given.

    Raises:
        Refusal: a quantized cache, or more elements of K than it compiles for.
    """
    if inputs.k.dtype is not inputs.q.dtype:
        raise Refusal(f"reads a cache in the queries' dtype, this one is {inputs.k.dtype}")
    inputs = with_own_pool(inputs)
    if inputs.k.numel() > MAX_ELEMENTS:
        raise Refusal(f"{inputs.k.numel()} elements of K; its decode template is for 2^31 - 1")
    attention = attention or _compiled()
    q = inputs.q.unflatten(0, (-1, inputs.max_seqlen_q)).transpose(1, 2)
    k, v = (side.flatten(0, 1).transpose(0, 1)[None] for side in (inputs.k, inputs.v))
    mask = block_mask(inputs)

    def call() -> None:
        found = attention(q, k, v, block_mask=mask, scale=inputs.softmax_scale, enable_gqa=True)
        inputs.out.copy_(found.transpose(1, 2).flatten(0, 1))

    return call
