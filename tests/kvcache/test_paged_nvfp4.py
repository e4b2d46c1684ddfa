"""NVFP4 pages, scales per head, and sliding-window pages that are freed; no framework."""

from __future__ import annotations

import pytest
import torch

import cute_kernels
from kvcache import bytes_per_token
from kvcache.paged import PAGE_FORMATS, FP8Pages, NVFP4Pages, PageTable
from kvcache.scales import KVScales

CPU = torch.device("cpu")
PAGE, HEADS, SIZE = 8, 3, 32
NAMES = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
SCALES = KVScales(0.002, 0.003)
PER_HEAD = KVScales((0.002, 0.004, 0.001), (0.003, 0.005, 0.002))


def fill(make, steps, scales=SCALES, window=None):
    """Write random tokens of 2 sequences in `steps`; the pages, table, last step, K and V."""
    key, value = torch.randn(
        2, 2, HEADS, sum(steps), SIZE, generator=torch.Generator().manual_seed(3)
    )
    table = PageTable(PAGE, window)
    pages = make(key, PAGE, scales)
    start = 0
    for count in steps:
        step = table.advance(start, count, 2, CPU)
        pages.grow(table.num_pages)
        new = slice(start, start + count)
        pages.write(key[:, :, new], value[:, :, new], step.slots)
        start += count
    return pages, table, step, key, value


def rounded(x: torch.Tensor, scale, name: str, side: str) -> torch.Tensor:
    """(B, tokens, Hkv, D) of (B, Hkv, tokens, D) after one trip through the format."""
    x = x.bfloat16().transpose(1, 2).contiguous()
    scale = torch.tensor(scale)
    codes, blocks = cute_kernels.quantize_nvfp4(x, scale, name, side=side)
    return cute_kernels.dequantize_nvfp4(codes, blocks, scale)


@pytest.mark.parametrize("scales", (SCALES, PER_HEAD), ids=("one scale", "per head"))
@pytest.mark.parametrize("steps", ((1,) * 20, (5, 7, 1, 30, 2), (41,)))
@pytest.mark.parametrize("name", NAMES)
def test_tokens_come_back_rounded_once(name, steps, scales):
    pages, _, step, key, value = fill(PAGE_FORMATS[name], steps, scales)
    read_k, read_v = pages.read(step.block_table, sum(steps))
    assert torch.equal(read_k, rounded(key, scales.k, name, "k"))
    assert torch.equal(read_v, rounded(value, scales.v, name, "v"))


def test_attention_gets_the_same_tokens_without_a_copy():
    pages, _, step, *_ = fill(NVFP4Pages, (5, 30), PER_HEAD)
    found = pages.attended()
    sides = ((found.k, found.k_block_scale), (found.v, found.v_block_scale))
    want, descales = pages.read(step.block_table, 35), (found.k_descale, found.v_descale)
    for side, pool, x, scale in zip(sides, (pages.k, pages.v), want, descales, strict=True):
        data, block_scale = side
        assert data.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        assert block_scale.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        held = block_scale.view(torch.uint8)[step.block_table]
        read = cute_kernels.dequantize_nvfp4(data[step.block_table], held, scale)
        assert torch.equal(read.flatten(1, 2)[:, :35], x)


def test_fp8_scales_may_differ_per_head():
    scales = KVScales((0.01, 0.02, 0.04), 0.03)
    pages, _, step, key, value = fill(FP8Pages, (5, 30), scales)
    alone = [
        fill(FP8Pages, (5, 30), KVScales(k, 0.03))[0].read(step.block_table, 35) for k in scales.k
    ]
    read_k, read_v = pages.read(step.block_table, 35)
    for head in range(HEADS):
        assert torch.equal(read_k[:, :, head], alone[head][0][:, :, head])
    assert torch.equal(read_v, alone[0][1])
    assert pages.attended().k_descale.shape == (HEADS,)


@pytest.mark.parametrize("make", (FP8Pages, NVFP4Pages))
def test_another_number_of_heads_is_refused(make):
    with pytest.raises(ValueError, match="accepted: 1 number, or 3, one a head"):
        make(torch.zeros(1, HEADS, 1, SIZE), PAGE, KVScales((0.1, 0.2), 0.1))


def test_head_sizes_that_are_no_multiple_of_a_group_are_refused():
    with pytest.raises(ValueError, match="head size: got 24; nvfp4 accepts multiples of 16"):
        NVFP4Pages(torch.zeros(1, 1, 1, 24), PAGE, SCALES)


@pytest.mark.parametrize("name", NAMES)
def test_page_bytes_are_the_formats(name):
    pages = PAGE_FORMATS[name](torch.zeros(1, HEADS, 1, SIZE), PAGE, SCALES)
    assert pages.page_bytes == PAGE * bytes_per_token(name, HEADS, SIZE)


# ---- sliding windows ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", (1, 7, 8, 9, 20))
def test_pages_that_no_query_sees_again_are_freed_and_used_again(window):
    table = PageTable(PAGE, window)
    for start in range(100):
        step = table.advance(start, 1, 2, CPU)
        first_key = max(0, start - window + 1)
        row = step.block_table[0].tolist()
        held = [index for index, page in enumerate(row) if page >= 0]
        # What the window sees, and the page before it.
        assert held == list(range(max(0, first_key // PAGE - 1), start // PAGE + 1))
        assert table.pages_in_use == 2 * len(held)
        used = step.block_table[step.block_table >= 0]
        assert used.unique().numel() == used.numel()
    assert table.num_pages <= 4 * (window // PAGE + 4)  # 26 without


def test_a_full_attention_table_frees_nothing():
    table = PageTable(PAGE)
    for start in range(40):
        step = table.advance(start, 1, 1, CPU)
    assert table.pages_in_use == 5 and (step.block_table[0, :5] >= 0).all()


def test_up_to_a_page_of_tokens_can_be_taken_back_and_more_is_refused():
    table = PageTable(PAGE, 10)
    for start in range(60):
        table.advance(start, 1, 1, CPU)
    for back in range(1, PAGE + 1):
        table.check_start(60 - back)
    with pytest.raises(ValueError, match="got 40 tokens; the window of the next one begins at tok"):
        table.check_start(40)
    with pytest.raises(ValueError, match="have been freed"):
        table.advance(40, 1, 1, CPU)


def test_a_reset_table_takes_another_batch_and_keeps_its_pool():
    table = PageTable(PAGE, 10)
    for start in range(60):
        table.advance(start, 1, 2, CPU)
    pool = table.num_pages
    table.reset()
    assert table.pages_in_use == 0
    step = table.advance(0, 4 * PAGE, 1, CPU)
    assert table.num_pages == pool
    assert sorted(set(step.block_table[0, :4].tolist())) == sorted(step.block_table[0, :4].tolist())


@pytest.mark.parametrize("name", ("bf16", "fp8", "nvfp4"))
def test_what_is_left_reads_as_before(name):
    make = PAGE_FORMATS[name]
    scales = SCALES if make.needs_scales else None
    steps = (5,) + (1,) * 45
    windowed, table, step, *_ = fill(make, steps, scales, window=10)
    full, _, full_step, *_ = fill(make, steps, scales)
    first = table.first_page * PAGE
    assert first == 32
    kept = windowed.read(step.block_table[:, table.first_page :], 50 - first)
    for x, want in zip(kept, full.read(full_step.block_table, 50), strict=True):
        assert torch.equal(x, want[:, first:])
