"""Page sizes that planners are offered, and block tables split to them."""

from __future__ import annotations

import pytest
import torch

from kvcache.blocks import (
    MultipleOf,
    check_split,
    get_preferred_block_size_for_config,
    get_supported_kernel_block_sizes_for_config,
    largest_kernel_block_within,
    select_common_block_size,
    split_block_table,
)
from tests.kvcache.helpers import DECODE_SM90, config, contract, pages, pretend_kernels
from tests.requires import requires_module

hypothesis = requires_module("hypothesis")
st = requires_module("hypothesis.strategies")

SLIDING = config(head_size=256, num_kv_heads=16, sliding_window=1024)
FULL = config()


def test_multiple_of():
    sizes = MultipleOf(16)
    assert [size for size in range(-32, 49) if size in sizes] == [16, 32, 48]
    assert sizes == MultipleOf(16) and sizes != MultipleOf(32)
    for bad in (0, -16, 16.0, True):
        with pytest.raises(ValueError, match="MultipleOf: got "):
            MultipleOf(bad)


@pytest.mark.parametrize("head_size", DECODE_SM90.head_sizes)
@pytest.mark.parametrize("window", (None, 128))
def test_advertised_sizes(head_size, window):
    """64 by name, for planners that split to named sizes only; nothing smaller, because a
    sliding-window planner takes the smallest it is offered."""
    asked = config(head_size=head_size, sliding_window=window)
    assert get_supported_kernel_block_sizes_for_config(asked) == [64, MultipleOf(64)]
    wide = config(head_size=head_size, sliding_window=window, kv_cache_dtype="auto")
    assert get_supported_kernel_block_sizes_for_config(wide) == [64, MultipleOf(64)]
    assert select_common_block_size([wide, asked], 1600) == 1600
    # A page size that is already there does not change what is offered.
    for page_size in (16, 24):
        asked = config(head_size=head_size, sliding_window=window, page_size=page_size)
        assert get_supported_kernel_block_sizes_for_config(asked) == [64, MultipleOf(64)]


@pytest.mark.parametrize("head_size", DECODE_SM90.head_sizes)
@pytest.mark.parametrize(
    ("default", "preferred"), ((1, 64), (16, 64), (32, 64), (64, 64), (96, 64), (128, 128))
)
def test_preferred_size(head_size, default, preferred):
    assert get_preferred_block_size_for_config(default, config(head_size=head_size)) == preferred


def test_what_is_offered_the_kernel_reads():
    for size in (64, 128, 192, 1600):
        assert size in DECODE_SM90.page_sizes
        assert get_preferred_block_size_for_config(size, FULL) == size


@pytest.mark.parametrize(
    ("budget", "expected"),
    (
        (64 * 4096 - 1, 16),
        (64 * 4096, 64),
        (128 * 4096 - 1, 64),
        (128 * 4096, 128),
        (1000 * 4096, 960),
        (1, 16),
    ),
)
def test_largest_kernel_block_within(budget, expected):
    assert largest_kernel_block_within(FULL, FULL.bytes_per_token, budget, 16) == expected


def test_largest_kernel_block_counts_named_sizes(monkeypatch):
    pretend_kernels(monkeypatch, contract(**pages(24, 80, multiple_of=64)))
    assert [largest_kernel_block_within(FULL, 1, budget, 7) for budget in (23, 24, 63, 64, 80)] == [
        7,
        24,
        24,
        64,
        80,
    ]


@pytest.mark.parametrize("name", ("per_token_bytes", "page_budget", "fallback"))
def test_largest_kernel_block_refuses(name):
    arguments = {"per_token_bytes": 1, "page_budget": 64, "fallback": 16, name: 0}
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        largest_kernel_block_within(FULL, **arguments)


def test_common_size_of_several_layers():
    layers = [SLIDING, FULL, config(head_size=64)]
    assert select_common_block_size(layers) == 64
    assert select_common_block_size(layers, 64) == 64
    assert select_common_block_size(layers, 256) == 256
    assert select_common_block_size(iter(layers), 1600) == 1600
    assert select_common_block_size(layers, accept_small=True) == 64


@pytest.mark.parametrize("manager_block", (16, 32, 96, 1056))
def test_small_pages_only_when_asked_for(manager_block):
    with pytest.raises(ValueError, match=f"manager_block: got {manager_block}; .* multiples of 64"):
        select_common_block_size([SLIDING, FULL], manager_block)
    found = select_common_block_size([SLIDING, FULL], manager_block, accept_small=True)
    assert found == manager_block
    with pytest.raises(ValueError, match="manager_block: got 40; .* multiples of 16"):
        select_common_block_size([SLIDING, FULL], 40, accept_small=True)


def test_common_size_of_different_kernels(monkeypatch):
    pretend_kernels(
        monkeypatch,
        contract(name="wide", head_sizes=(512,), **pages(multiple_of=64)),
        contract(name="narrow", head_sizes=(256,), **pages(32, multiple_of=96)),
        contract(name="named", head_sizes=(128,), **pages(64, multiple_of=1024)),
    )
    wide, narrow, named = FULL, SLIDING, config(head_size=128)
    assert select_common_block_size([wide, narrow]) == 192
    assert select_common_block_size([wide, named]) == 64
    assert select_common_block_size([narrow]) == 32
    assert select_common_block_size([wide, narrow], 384) == 384
    assert select_common_block_size([wide, named], 192) == 64
    assert select_common_block_size([narrow], 64) == 32
    with pytest.raises(ValueError, match="manager_block: got 256; .* multiples of 192"):
        select_common_block_size([wide, narrow], 256)


def test_the_larger_preference_counts(monkeypatch):
    small, large = pages(multiple_of=32), {**pages(multiple_of=32), "preferred_page_size": 64}
    pretend_kernels(
        monkeypatch,
        contract(name="small", head_sizes=(256,), **small),
        contract(name="large", head_sizes=(512,), **large),
    )
    assert select_common_block_size([SLIDING]) == 32
    assert select_common_block_size([SLIDING, FULL]) == 64


def test_common_size_of_no_layers():
    with pytest.raises(ValueError, match="configs: got none"):
        select_common_block_size([])
    with pytest.raises(ValueError, match="manager_block: got 0"):
        select_common_block_size([FULL], 0)


def as_pages(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The tokens of each sequence, gathered through a table."""
    return pool[table.long()].flatten(1, 2)


@hypothesis.given(
    ratio=st.integers(1, 25),
    kernel_block=st.sampled_from((16, 64, 128)),
    shape=st.tuples(st.integers(0, 4), st.integers(0, 5)),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_split_table_reads_the_same_tokens(ratio, kernel_block, shape, dtype, seed):
    manager_block = ratio * kernel_block
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 7, shape, generator=generator, dtype=dtype)
    split = split_block_table(table, manager_block, kernel_block)
    assert (split.shape, split.dtype) == ((shape[0], shape[1] * ratio), dtype)
    assert split.is_contiguous()
    pool = torch.arange(7 * manager_block)
    expected = as_pages(pool.view(7, manager_block), table)
    assert torch.equal(as_pages(pool.view(-1, kernel_block), split), expected)


def test_split_of_a_strided_table():
    table = torch.tensor([[3, 9], [0, 9], [5, 9]], dtype=torch.int32)[:, :1]
    assert split_block_table(table, 128, 64).tolist() == [[6, 7], [0, 1], [10, 11]]


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_garbage_past_a_sequences_end_stays_harmless(dtype):
    most = torch.iinfo(dtype).max
    table = torch.tensor([[2, -1, most, -(most // 2), most // 4 + 1]], dtype=dtype)
    split = split_block_table(table, 256, 64)[0].tolist()
    assert split[:4] == [8, 9, 10, 11]
    assert split[4:] == [-1] * 16


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("ratio", (2, 3, 4))
def test_the_largest_ids_that_fit(dtype, ratio):
    most = torch.iinfo(dtype).max
    largest = (most - ratio + 1) // ratio
    table = torch.tensor([[largest, largest + 1]], dtype=dtype)
    split = split_block_table(table, 64 * ratio, 64)[0].tolist()
    assert split == [largest * ratio + i for i in range(ratio)] + [-1] * ratio


def test_equal_sizes_are_not_copied():
    table = torch.tensor([[1, -5]], dtype=torch.int32)
    assert split_block_table(table, 64, 64) is table


@pytest.mark.parametrize(
    ("manager_block", "kernel_block", "message"),
    (
        (100, 64, "manager_block: got 100; accepted: multiples of kernel_block, 64"),
        (64, 128, "manager_block: got 64; accepted: multiples of kernel_block, 128"),
        (0, 64, "manager_block: got 0"),
        (64, 0, "kernel_block: got 0"),
        (-128, -64, "manager_block: got -128"),
        (128.0, 64, "manager_block: got 128.0"),
    ),
)
def test_sizes_that_do_not_divide(manager_block, kernel_block, message):
    with pytest.raises(ValueError, match=message):
        check_split(manager_block, kernel_block)
    with pytest.raises(ValueError, match=message):
        split_block_table(torch.zeros(1, 1, dtype=torch.int32), manager_block, kernel_block)


@pytest.mark.parametrize(
    "table",
    (
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(1, 3, 1, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.float32),
        torch.zeros(1, 3, dtype=torch.int16),
    ),
)
def test_tables_of_another_kind(table):
    with pytest.raises(ValueError, match="block_table: got torch"):
        split_block_table(table, 128, 64)


def test_a_manager_table_handed_to_the_kernel_reads_other_tokens():
    """What the split is for: without it nothing fails, and the answer is wrong."""
    pool = torch.arange(6 * 128)
    table = torch.tensor([[1, 4]], dtype=torch.int32)
    right = as_pages(pool.view(6, 128), table)
    split = split_block_table(table, 128, 64)
    assert torch.equal(as_pages(pool.view(12, 64), split), right)
    unsplit = as_pages(pool.view(12, 64), table)
    assert not torch.equal(unsplit, right[:, : unsplit.shape[1]])
