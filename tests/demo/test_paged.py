"""Pages, block tables and the fp8 write, without a framework."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.paged import (
    PAGE_FORMATS,
    BF16Pages,
    FP8Pages,
    Pages,
    PageTable,
    hadamard,
    quantize_fp8,
)
from kvcache.scales import KVScales

CPU = torch.device("cpu")
PAGE = 8
SCALES = KVScales(0.01, 0.02, "fp8")


def e4m3_values() -> torch.Tensor:
    """The 127 finite magnitudes, from the definition of the format."""
    codes = range(127)
    return torch.tensor(
        [
            math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10)
            for code in codes
        ],
        dtype=torch.float64,
    )


def test_quantize_rounds_to_the_nearest_value_and_ties_to_even_codes():
    values = e4m3_values()
    assert values[-1] == 448
    middle = (values[:-1] + values[1:]) / 2  # exact in float32, as is a step away from it
    one = torch.ones(())
    for sign in (1.0, -1.0):
        x = torch.cat((middle, middle * (1 + 2**-20), middle * (1 - 2**-20))).float() * sign
        codes = quantize_fp8(x, one).view(torch.uint8).int() & 0x7F
        tie, up, down = codes.view(3, -1)
        code = torch.arange(126)
        assert torch.equal(tie, code + code % 2)
        assert torch.equal(up, code + 1)
        assert torch.equal(down, code)


def test_quantize_saturates_and_has_one_nan():
    x = torch.tensor([449.0, -1e30, math.inf, -math.inf, math.nan, -math.nan])
    x[5] = -x[4].abs()
    codes = quantize_fp8(x, torch.ones(())).view(torch.uint8).tolist()
    assert codes == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F]


def test_quantize_multiplies_by_the_rounded_reciprocal():
    values = e4m3_values()
    x = (41 * (values[:-1] + values[1:]) / 2).float()  # ties, if they were divided by 41
    scale = torch.tensor(41.0)
    got = quantize_fp8(x, scale).view(torch.uint8)
    assert torch.equal(got, quantize_fp8(x * (1 / scale), torch.ones(())).view(torch.uint8))
    assert not torch.equal(got, quantize_fp8(x / scale, torch.ones(())).view(torch.uint8))


def test_an_fp8_layer_without_scales_is_refused():
    with pytest.raises(ValueError, match="needs KVScales"):
        FP8Pages(torch.zeros(1, 1, 1, 16), PAGE)


def fill(make: type[Pages], steps: tuple[int, ...], batch: int = 2) -> tuple:
    """Write random tokens in `steps`; return the pages, the last step, K and V."""
    generator = torch.Generator().manual_seed(3)
    length = sum(steps)
    key, value = torch.randn(2, batch, 3, length, 16, generator=generator)
    table = PageTable(PAGE)
    pages = make(key, PAGE, SCALES)
    start = 0
    for count in steps:
        step = table.advance(start, count, batch, CPU)
        pages.grow(table.num_pages)
        new = slice(start, start + count)
        pages.write(key[:, :, new], value[:, :, new], step.slots)
        start += count
    return pages, step, key, value


@pytest.mark.parametrize("steps", ((1,) * 20, (PAGE, PAGE, 1), (5, 7, 1, 30, 2), (41,)))
def test_tokens_come_back_from_their_pages(steps):
    for make in (BF16Pages, FP8Pages):
        pages, step, key, value = fill(make, steps)
        read_k, read_v = pages.read(step.block_table, sum(steps))
        if make is BF16Pages:
            want_k, want_v = key.bfloat16().float(), value.bfloat16().float()
        else:
            want_k = quantize_fp8(key, pages.k_scale).float() * pages.k_scale
            want_v = quantize_fp8(value, pages.v_scale).float() * pages.v_scale
        assert torch.equal(read_k, want_k.transpose(1, 2))
        assert torch.equal(read_v, want_v.transpose(1, 2))


def test_a_page_belongs_to_one_sequence_and_keeps_its_id():
    table = PageTable(PAGE)
    before = table.advance(0, 3 * PAGE, 2, CPU).block_table[:, :3].clone()
    step = table.advance(3 * PAGE, 5 * PAGE + 1, 2, CPU)
    used = step.block_table[:, :9]
    assert torch.equal(used[:, :3], before)
    assert used.unique().numel() == 18 == table.pages_in_use
    assert 0 <= used.min() and used.max() < table.num_pages
    assert (step.block_table[:, 9:] == -1).all()
    assert step.block_table.dtype == torch.int32


def test_a_growing_table_leaves_entries_past_the_last_page_invalid():
    table = PageTable(PAGE)
    for start in range(0, 3 * PAGE, PAGE):
        step = table.advance(start, PAGE, 1, CPU)
    assert table.num_pages == 4
    assert (step.block_table[0] >= 0).tolist() == [True, True, True, False]


def test_layers_that_share_a_table_share_the_step():
    table = PageTable(PAGE)
    first, second = (table.advance(0, PAGE + 1, 1, CPU) for _ in range(2))
    assert second is first
    assert table.pages_in_use == 2
    assert first.seqused_k.tolist() == [PAGE + 1]
    assert first.cu_seqlens_q.tolist() == [0, PAGE + 1]


def test_another_batch_size_is_refused():
    table = PageTable(PAGE)
    table.advance(0, 1, 2, CPU)
    with pytest.raises(ValueError, match="got 3; this cache holds 2"):
        table.advance(1, 1, 3, CPU)


def test_page_bytes():
    key = torch.zeros(1, 3, 1, 16)
    assert FP8Pages(key, PAGE, SCALES).page_bytes == 2 * PAGE * 3 * 16
    assert BF16Pages(key, PAGE).page_bytes == 2 * PAGE * 3 * 16 * 2


@pytest.mark.parametrize(
    ("model", "compute"),
    ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)),
    ids=("float32", "float16"),
)
def test_auto_stores_the_models_16_bit_dtype(model, compute):
    pages = PAGE_FORMATS["auto"](torch.zeros(1, 1, 1, 16, dtype=model), PAGE)
    assert pages.k.dtype == pages.query_dtype == compute


@pytest.mark.parametrize("size", (1, 2, 64, 256))
def test_hadamard_is_orthogonal_and_symmetric(size):
    matrix = hadamard(size, CPU)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size))
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5))


def test_hadamard_has_powers_of_two_only():
    with pytest.raises(ValueError, match="head size 96"):
        hadamard(96, CPU)
