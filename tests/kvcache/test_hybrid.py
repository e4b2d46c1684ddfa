"""Page plans for models whose layers differ in bytes a token."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvcache.contracts import Writer
from kvcache.dtypes import ScaleLayout
from kvcache.hybrid import LayerGroup, plan_pages
from tests.kvcache.helpers import config, contract, pages, pretend_kernels, pretend_writers


def group(name: str, layers: int = 1, **fields) -> LayerGroup:
    return LayerGroup(name, config(**fields), layers)


def summary(plan) -> tuple[int, dict[str, int], Fraction]:
    sizes = {part.group.name: part.block_size for part in plan.groups}
    return plan.page_bytes, sizes, plan.waste_percent


def check_arithmetic(plan) -> None:
    """Every number of a plan, from the definition."""
    used = taken = 0
    for part in plan.groups:
        per_token = part.group.config.bytes_per_token
        assert part.used_bytes == part.block_size * per_token <= plan.page_bytes
        assert part.waste_percent == 100 * Fraction(
            plan.page_bytes - part.used_bytes, plan.page_bytes
        )
        tokens = 9 * 5 * 7 * 2**12  # whole pages of every group in these tests
        assert tokens % part.block_size == 0
        used += part.group.num_layers * tokens * per_token
        taken += part.group.num_layers * tokens // part.block_size * plan.page_bytes
    assert plan.waste_percent == 100 * Fraction(taken - used, taken)


def test_gemma_4_fits_without_waste():
    """256-wide sliding layers of 16 KV heads, 512-wide full layers of 4: 8192 and 4096 bytes."""
    sliding = group("sliding", 50, head_size=256, num_kv_heads=16, sliding_window=1024)
    plan = plan_pages([sliding, group("full", 10)])
    check_arithmetic(plan)
    assert summary(plan) == (64 * 8192, {"sliding": 64, "full": 128}, 0)


def test_layers_with_caches_of_other_dtypes_share_a_pool():
    """Sliding layers kept in the queries' dtype, 16384 bytes a token beside 4096."""
    wide = {"head_size": 256, "num_kv_heads": 16, "kv_cache_dtype": "auto"}
    plan = plan_pages([group("sliding", 50, sliding_window=1024, **wide), group("full", 10)])
    check_arithmetic(plan)
    assert summary(plan) == (64 * 16384, {"sliding": 64, "full": 256}, 0)
    with pytest.raises(NotImplementedError, match="head size 96, the kernel has"):
        plan_pages([group("full", 10, kv_cache_dtype="auto", head_size=96)])


def test_page_bytes_that_are_no_multiples_of_each_other():
    """1536 and 2048 bytes a token meet at 256 and 192 tokens, and not below."""
    groups = [
        group("sliding", 5, head_size=256, num_kv_heads=3, num_q_heads=12, sliding_window=512),
        group("full", 1, num_kv_heads=2),
    ]
    plan = plan_pages(groups)
    check_arithmetic(plan)
    assert summary(plan) == (256 * 1536, {"sliding": 256, "full": 192}, 0)
    short = plan_pages(groups, max_block_size=128)
    check_arithmetic(short)
    # Pages of 64 tokens: the 5 sliding layers leave a quarter of each page empty. Pages of 128
    # tokens for them hold 64 of the full layer, which wastes less in all.
    assert summary(short)[:2] == (128 * 1536, {"sliding": 128, "full": 64})
    assert [part.waste_percent for part in short.groups] == [0, Fraction(100, 3)]
    # Per token: used 5 * 1536 + 2048 bytes, taken 5 * 1536 + 3072.
    assert short.waste_percent == 100 * Fraction(1024, 10752)


def test_the_waste_is_weighed_by_layers():
    """The same two geometries: where most layers are full, another page is better."""

    def plan(sliding: int, full: int):
        found = plan_pages(
            [
                group("sliding", sliding, head_size=256, num_kv_heads=3, num_q_heads=12),
                group("full", full, num_kv_heads=2),
            ],
            max_block_size=128,
        )
        check_arithmetic(found)
        return summary(found)

    assert plan(5, 1)[:2] == (128 * 1536, {"sliding": 128, "full": 64})
    assert plan(1, 9)[:2] == (64 * 2048, {"sliding": 64, "full": 64})


def test_dtypes_by_layer(monkeypatch):
    """An nvfp4 layer beside an fp8 one of the same shape: 9/16 of its bytes."""
    pretend_kernels(monkeypatch, contract(kv_cache_formats=("fp8_e4m3", "nvfp4")))
    pretend_writers(monkeypatch, Writer("store", ("nvfp4",), None, (ScaleLayout.LINEAR,)))
    groups = [group("nvfp4", 1, kv_cache_dtype="nvfp4"), group("fp8", 1)]
    plan = plan_pages(groups, max_block_size=64)
    check_arithmetic(plan)
    assert summary(plan)[:2] == (64 * 4096, {"nvfp4": 64, "fp8": 64})
    assert plan.groups[0].waste_percent == Fraction(700, 16)
    exact = plan_pages(groups, max_block_size=1024)
    check_arithmetic(exact)
    assert summary(exact) == (576 * 4096, {"nvfp4": 1024, "fp8": 576}, 0)


def test_equal_layers_take_the_preferred_page():
    assert summary(plan_pages([group("all", 32)])) == (64 * 4096, {"all": 64}, 0)


def test_a_group_that_would_need_a_longer_page_than_allowed_wastes_it():
    plan = plan_pages(
        [group("wide", num_kv_heads=32), group("narrow", num_kv_heads=1)], max_block_size=256
    )
    check_arithmetic(plan)
    assert summary(plan)[:2] == (64 * 32768, {"wide": 64, "narrow": 256})
    assert plan.groups[1].waste_percent == Fraction(700, 8)


def test_other_page_sizes(monkeypatch):
    pretend_kernels(
        monkeypatch,
        contract(name="a", head_sizes=(512,), **pages(48, multiple_of=1024)),
        contract(name="b", head_sizes=(256,), **pages(multiple_of=64)),
    )
    plan = plan_pages([group("a"), group("b", head_size=256, num_kv_heads=4)])
    check_arithmetic(plan)
    assert summary(plan)[:2] == (48 * 4096, {"a": 48, "b": 64})


def test_refusals():
    with pytest.raises(ValueError, match="groups: got none"):
        plan_pages([])
    with pytest.raises(ValueError, match="num_layers: group 'full' has 0"):
        plan_pages([group("full", 0)])
    with pytest.raises(ValueError, match="max_block_size: got 32; the kernel of group 'full'"):
        plan_pages([group("full")], max_block_size=32)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype 'nvfp4' on sm_100"):
        plan_pages([group("full"), group("nvfp4", kv_cache_dtype="nvfp4", capability="sm_100a")])
