"""The paged stores, compared byte for byte with their documented memory maps.

Every comparison is of a whole allocation, so a byte that should not have been written fails too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels.reference.store import (
    dequantize_nvfp4,
    gather_kv,
    quantize_nvfp4,
    reshape_and_cache,
    sequence_slots,
    split_nvfp4,
)
from tests.store.oracle import e4m3_code
from tests.store.pools import FP8_POOLS, NVFP4_POOLS, Pool, swizzled

CAPACITY = 40
# Skipped: negatives. Never written: from the capacity on. Slots 8 and 39 come twice.
SLOTS = [17, -1, 8, 39, CAPACITY, 0, 2**40, 8, -(2**63), 26, 2**63 - 1, 3, 39, 31]
NVFP4_DTYPES = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")


def by_id(pool: Pool) -> str:
    return pool.id


def new_tokens(pool: Pool, count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """K and V (count, Hkv, D) as slices of one projection, which is how engines hand them over."""
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(count, 2 + 4, pool.heads, pool.head_size, generator=generator)
    projection = (projection * 3).to(dtype)
    return projection[:, 2], projection[:, 4]


def last_rows(slots: list[int], capacity: int) -> dict[int, int]:
    """Slot -> the row that it keeps."""
    return {slot: row for row, slot in enumerate(slots) if 0 <= slot < capacity}


def expected_bytes(pool: Pool, slots: list[int], parts, v_scale_layout: str) -> torch.Tensor:
    """The allocation after a store of `parts`: for K and V, (data, scales) or (data,) as uint8."""
    memory = pool.allocate()
    expected = memory.tolist()
    for slot, row in last_rows(slots, pool.blocks * pool.tokens).items():
        for side in (0, 1):
            for region, rows in enumerate(parts[side]):
                swizzle = region == 1 and side == 1 and v_scale_layout == "sm100"
                for head, values in enumerate(rows[row].tolist()):
                    for i, value in enumerate(values):
                        where, byte = slot, i
                        if swizzle:
                            token, byte = swizzled(slot % pool.tokens, i, len(values))
                            where = slot - slot % pool.tokens + token
                        expected[pool.offset(side, where, head, region, byte)] = value
    return torch.tensor(expected, dtype=torch.uint8)


def store(pool: Pool, memory, key, value, slots, dtype, *scales, layout="linear", fp8=False):
    sides = [pool.side(memory, side) for side in (0, 1)]
    if fp8:
        sides = [side.view(torch.float8_e4m3fn) for side in sides]
    slots = torch.tensor(slots, dtype=torch.int64)
    return reshape_and_cache(key, value, *sides, slots, dtype, *scales, v_scale_layout=layout)


@pytest.mark.parametrize("scale_kind", ("float", "scalar", "one", "per_head"))
@pytest.mark.parametrize("pool", FP8_POOLS, ids=by_id)
def test_fp8_bytes(pool, scale_kind):
    key, value = new_tokens(pool, len(SLOTS) + 2)  # two rows of padding
    per_head = torch.tensor([0.03, 1.7, 0.003])
    kinds = {"float": 0.3, "scalar": torch.tensor(0.3), "one": torch.tensor([0.3])}
    scale = kinds.get(scale_kind, per_head)
    memory = pool.allocate()
    dtype = "fp8" if scale_kind == "one" else "fp8_e4m3"
    as_fp8 = scale_kind == "float"
    assert store(pool, memory, key, value, SLOTS, dtype, scale, 2.0, fp8=as_fp8) is None
    parts = []
    for x, s in ((key, scale), (value, 2.0)):
        inverse = (1.0 / torch.as_tensor(s, dtype=torch.float32)).expand(pool.heads)
        products = x.float() * inverse.unsqueeze(-1)
        codes = [e4m3_code(v) for v in products.flatten().numpy()]
        parts.append([torch.tensor(codes).reshape(x.shape)])
    assert torch.equal(memory, expected_bytes(pool, SLOTS, parts, "linear"))


@pytest.mark.parametrize("layout", ("linear", "sm100"))
@pytest.mark.parametrize("pool", NVFP4_POOLS, ids=by_id)
def test_nvfp4_bytes(pool, layout):
    pool = replace(pool, blocks=CAPACITY // pool.tokens)
    dtype = NVFP4_DTYPES[NVFP4_POOLS.index(replace(pool, blocks=5)) % 4]
    half = torch.float16 if layout == "sm100" else torch.bfloat16
    key, value = new_tokens(pool, len(SLOTS) + 2, half)
    scales = (torch.linspace(0.01, 0.03, pool.heads), 0.02)
    memory = pool.allocate()
    store(pool, memory, key, value, SLOTS, dtype, *scales, layout=layout)
    parts = []
    for x, scale, side in zip((key, value), scales, "kv", strict=True):
        data, block_scale = quantize_nvfp4(x, scale, dtype, side=side)
        parts.append((data, block_scale.view(torch.uint8)))
    assert torch.equal(memory, expected_bytes(pool, SLOTS, parts, layout))


@pytest.mark.parametrize("pool", [*FP8_POOLS, *NVFP4_POOLS], ids=by_id)
def test_gather_reads_what_was_stored(pool):
    key, value = new_tokens(pool, 11)
    slots = torch.randperm(pool.blocks * pool.tokens, generator=torch.Generator().manual_seed(1))
    slots = slots[:11]
    dtype, storage = ("fp8", "fp8_e4m3") if pool.storage == "fp8" else ("nvfp4_mse", "nvfp4")
    layout = "linear" if pool.storage == "fp8" else "sm100"
    memory = pool.allocate()
    scales = (torch.linspace(0.03, 0.05, pool.heads), 0.04)
    store(pool, memory, key, value, slots.tolist(), dtype, *scales, layout=layout)
    for x, side, scale in zip((key, value), (0, 1), scales, strict=True):
        cache = pool.side(memory, side)
        side_layout = layout if side else "linear"
        slots_read = torch.cat((torch.tensor([-1]), slots))
        y = gather_kv(cache, slots_read, storage, scale, scale_layout=side_layout)
        assert not y[0].any()
        if pool.storage == "nvfp4":
            assert torch.equal(y[1:], dequantize_nvfp4(*quantize_nvfp4(x, scale, dtype), scale))
        bound = 2.0**-4 if pool.storage == "fp8" else 0.25
        assert ((y[1:] - x.float()).norm() / x.float().norm()) < bound
        exact = gather_kv(
            cache, slots, storage, scale, scale_layout=side_layout, dtype=torch.float64
        )
        assert torch.equal(exact.float(), y[1:])
        half = gather_kv(
            cache, slots, storage, scale, scale_layout=side_layout, dtype=torch.bfloat16
        )
        assert torch.equal(half, y[1:].bfloat16())


def marked_values() -> torch.Tensor:
    """V (4, 1, 64) whose 16 groups have the block scales 2^-8 .. 2^7, stored without an error.

    The largest does not lie on the diagonal, which the swizzle leaves in place.
    """
    pattern = torch.tensor([6.0, 0.5, -1, 1.5, -2, 3, -4, 0] * 2)
    scales = torch.arange(-8, 8).roll(2).float().exp2().reshape(4, 4, 1)
    return (pattern * scales).reshape(4, 1, 64).bfloat16()


def test_a_wrong_scale_layout_is_visible():
    """Sizes agree and nothing asserts: only values tell, where every group has its own scale."""
    pool = Pool("nvfp4", "NHD", together=True, blocks=1, tokens=4, heads=1)
    value = marked_values()
    slots = torch.arange(4)
    for written, other in (("linear", "sm100"), ("sm100", "linear")):
        memory = pool.allocate()
        store(pool, memory, value, value, slots.tolist(), "nvfp4", 1.0, 1.0, layout=written)
        v = pool.side(memory, 1)
        assert len(set(split_nvfp4(v)[1].view(torch.uint8).flatten().tolist())) == 16
        right = gather_kv(v, slots, "nvfp4", 1.0, scale_layout=written)
        assert torch.equal(right, value.float())
        wrong = gather_kv(v, slots, "nvfp4", 1.0, scale_layout=other)
        assert (wrong - right).norm() / right.norm() > 0.9
        moved = (wrong != right).reshape(4, 4, 16).any(-1)
        assert moved.equal(~torch.eye(4, dtype=torch.bool))
        # Keys are never swizzled.
        key = gather_kv(pool.side(memory, 0), slots, "nvfp4", 1.0)
        assert torch.equal(key, value.float())


def test_the_swizzle_stays_within_four_tokens_and_loses_nothing():
    for groups in (4, 8, 16, 32):
        places = {(t, s): swizzled(t, s, groups) for t in range(8) for s in range(groups)}
        assert set(places.values()) == set(places)
        assert all(t // 4 == to[0] // 4 for (t, _), to in places.items())


def test_fp8_saturates_and_never_stores_nan_for_a_number():
    x = torch.tensor([464.0, 465.0, -500.0, 3e38, math.inf, -math.inf, math.nan, 1.0]).bfloat16()
    x = x.reshape(1, 1, 8)
    cache = torch.zeros(1, 1, 1, 8, dtype=torch.uint8)
    reshape_and_cache(x, x, cache, cache.clone(), torch.tensor([0]), "fp8", 1.0, 1.0)
    assert cache.flatten().tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x7F, 0x38]


def test_fp8_scales_in_tensors_are_not_checked():
    x = torch.tensor([0.0, -0.0, 1.0, -2.0]).bfloat16().reshape(1, 1, 4)
    expected = {
        0.0: [0x7F, 0x7F, 0x7E, 0xFE],  # 1 / 0 is infinite, and 0 * inf is NaN
        math.inf: [0x00, 0x80, 0x00, 0x80],
        math.nan: [0x7F] * 4,
        2.0**-149: [0x7F, 0x7F, 0x7E, 0xFE],
        -1.0: [0x80, 0x00, 0xB8, 0x40],
    }
    for scale, codes in expected.items():
        cache = torch.zeros(1, 1, 1, 4, dtype=torch.uint8)
        scales = (torch.tensor(scale), 1.0)
        reshape_and_cache(x, x, cache, cache.clone(), torch.tensor([0]), "fp8", *scales)
        assert cache.flatten().tolist() == codes, scale


@pytest.mark.parametrize("dtype", ("fp8", "nvfp4"))
@pytest.mark.parametrize("slots", ([], [-1, -1], [CAPACITY, CAPACITY + 1]))
def test_nothing_is_written_without_a_slot(dtype, slots):
    pool = (FP8_POOLS if dtype == "fp8" else NVFP4_POOLS)[0]
    memory = pool.allocate()
    store(pool, memory, *new_tokens(pool, 2), slots, dtype, 1.0, 1.0)
    assert torch.equal(memory, pool.allocate())


def test_float_and_tensor_scales_store_the_same():
    pool = NVFP4_POOLS[0]
    memories = []
    for scale in (0.1, torch.tensor(0.1), torch.full((pool.heads,), 0.1)):
        memories.append(pool.allocate())
        store(pool, memories[-1], *new_tokens(pool, 9), range(9), "nvfp4_mse", scale, scale)
    assert torch.equal(memories[0], memories[1])
    assert torch.equal(memories[0], memories[2])


def test_slots_of_a_sequence():
    pages = torch.tensor([7, 0, 3, -1], dtype=torch.int32)
    assert sequence_slots(pages, 6, 2).tolist() == [14, 15, 0, 1, 6, 7]
    assert sequence_slots(pages, 5, 2).dtype is torch.int64
    assert sequence_slots(pages, 0, 2).tolist() == []
    with pytest.raises(ValueError, match=r"length: got 9"):
        sequence_slots(pages, 9, 2)
