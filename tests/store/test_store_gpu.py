"""The store kernels on the GPU: the bytes of the reference, whatever the input.

Every test runs for the SM90 kernel and for the SM100 kernel retargeted to this device
(`retarget.py`), and compares whole allocations, so a byte that should not be written fails too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels import reshape_and_cache, split_nvfp4
from cute_kernels.reference import store as reference
from cute_kernels.store.config import HEAD_SIZES, SCANNED_TOKENS
from tests.requires import requires
from tests.store.gpu_helpers import DTYPES, NVFP4_DTYPES, allocate, dense_pool, kernel, store_both
from tests.store.pools import FP8_POOLS, GUARD, NVFP4_POOLS, Pool
from tests.store.test_nvfp4_quantize import GLOBALS, GROUPS, TAKES_FOUR, TAKES_SIX
from tests.store.test_reshape_and_cache import SLOTS, marked_values, new_tokens

pytestmark = pytest.mark.gpu
__all__ = ["kernel"]  # a fixture

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def random_like_activations(tokens: int, heads: int, size: int, dtype, seed: int) -> torch.Tensor:
    """Groups of all magnitudes, from block scales that underflow to ones that saturate; a share of
    elements on multiples of a group's grid, where ties are."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, heads, size // 16, 16, generator=generator, device="cuda")
    spread = torch.empty(tokens, heads, size // 16, 1, device="cuda")
    x = torch.where(spread.uniform_(generator=generator) < 0.25, (x * 4).round() / 4, x)
    x *= 10 ** spread.uniform_(-7, 4, generator=generator)
    return x.flatten(-2).to(dtype)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_elements(kernel, dtype, half):
    """At least 1e8 for each dtype, K and V and both halves together; also slots in random order."""
    tokens, heads, size = 4096, 8, 128
    rounds = math.ceil(1e8 / (2 * 2 * tokens * heads * size))
    pool = dense_pool(dtype, tokens + 64, heads, size)
    for seed in range(rounds):
        key, value = (
            random_like_activations(tokens, heads, size, HALVES[half], 2 * seed + side)
            for side in (0, 1)
        )
        slots = torch.randperm(tokens + 64, device="cuda")[:tokens]
        scales = (torch.tensor(0.013 * (seed + 1), device="cuda"), 0.7)
        store_both(pool, key, value, slots, dtype, scales)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_pattern_and_global_scale(kernel, dtype, half):
    """All 2^16 patterns, in order (neighbours) and shuffled (any mixture, NaN in most groups, and
    once without NaN and infinities)."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(HALVES[half])
    generator = torch.Generator("cuda").manual_seed(3)
    shuffled = patterns[torch.randperm(2**16, generator=generator, device="cuda")]
    finite = shuffled.where(shuffled.isfinite(), 0.0)
    x = torch.cat((patterns, shuffled, finite)).reshape(-1, 4, 64)
    slots = torch.arange(x.shape[0])
    pool = dense_pool(dtype, x.shape[0], 4, 64)
    for scale in GLOBALS:
        scales = (torch.tensor([scale], device="cuda"), torch.tensor(scale, device="cuda"))
        store_both(pool, x, x.flip(0), slots, dtype, scales)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", NVFP4_DTYPES)
def test_corner_groups(kernel, dtype, half):
    """Zeros, ties, subnormal and saturated scales, NaN; equal and nearly equal errors."""
    x = torch.tensor([*GROUPS.values(), *TAKES_FOUR, *TAKES_SIX], device="cuda")
    x = torch.cat((x, x * 0.1, x * 2.0**-9)).to(HALVES[half])
    x = torch.cat((x, x.new_zeros(-x.shape[0] % 4, 16))).reshape(-1, 1, 64)
    pool = dense_pool(dtype, x.shape[0], 1, 64)
    for scale in (*GLOBALS, 0.1):
        scales = (torch.tensor(scale, device="cuda"),) * 2
        store_both(pool, x, x, torch.arange(x.shape[0]), dtype, scales)


def test_six_and_fours_and_a_half(kernel):
    group = torch.tensor([6.0] + [4.5] * 15, device="cuda").repeat(4).bfloat16().reshape(1, 1, 64)
    for dtype, scale, values in (("nvfp4", 1.0, 4.0), ("nvfp4_4over6", 1.5, 4.5)):
        pool = dense_pool(dtype, 1, 1, 64)
        memory = allocate(pool)
        sides = [pool.side(memory, side) for side in (0, 1)]
        slots = torch.tensor([0], device="cuda")
        reshape_and_cache(group, group, *sides, slots, dtype, 1.0, 1.0)
        for side in sides:
            assert split_nvfp4(side)[1][0, 0].float().unique().tolist() == [scale]
            stored = reference.gather_kv(side, slots, "nvfp4", 1.0)
            assert stored.flatten()[:16].tolist() == [6.0] + [values] * 15


@pytest.mark.parametrize("layout", ("linear", "sm100"))
@pytest.mark.parametrize("pool", [*FP8_POOLS, *NVFP4_POOLS], ids=lambda pool: pool.id)
def test_layouts(kernel, pool, layout):
    """Strides of slices and pages, storage offsets, skipped and repeated slots, padding rows."""
    if pool.storage == "fp8" and layout == "sm100":
        layout = "linear"
    per_head = torch.linspace(0.01, 0.9, 2 * pool.heads, device="cuda")[::2]
    for dtype in ("fp8",) if pool.storage == "fp8" else NVFP4_DTYPES:
        for half in HALVES.values():
            key, value = (x.cuda() for x in new_tokens(pool, len(SLOTS) + 2, half))
            store_both(pool, key, value, SLOTS, dtype, (per_head, 0.02), layout)


@pytest.mark.parametrize("dtype", ("fp8", "nvfp4_4over6"))
def test_every_head_size(kernel, dtype):
    for head_size in (16, 48, *HEAD_SIZES):
        pool = replace(dense_pool(dtype, 192, 3, head_size), layers=2)
        pool = replace(pool, order="HND" if head_size % 32 else "NHD")
        x = torch.randn(70, 3, head_size, device="cuda").bfloat16()
        slots = torch.randperm(192, device="cuda")[:70]
        store_both(pool, x, x.flip(0), slots, dtype, (0.01, 0.02))


@pytest.mark.parametrize("dtype", ("fp8", "nvfp4"))
def test_rows_that_no_vector_access_reaches(kernel, dtype):
    """Inputs at odd addresses or with strided elements, cache rows at odd addresses."""
    pool = dense_pool(dtype, 64, 1, 64)
    wide = torch.randn(9, 1, 129, device="cuda").bfloat16()
    for x in (wide[..., 1:65], wide[..., :128:2], wide[..., 1:129:2]):
        store_both(pool, x, x.flip(0), range(9), dtype, (0.01, 0.02))
    memories = []
    x = wide[..., :64]
    slots = torch.arange(9, device="cuda")
    for shift in (0, 1, 5):
        memory = torch.full((allocate(pool).numel() + 8,), 0x7F, dtype=torch.uint8, device="cuda")
        sides = [pool.side(memory, side) for side in (0, 1)]
        sides = [s.as_strided(s.shape, s.stride(), s.storage_offset() + shift) for s in sides]
        assert {side.data_ptr() % 8 for side in sides} == {shift}
        reshape_and_cache(x, x, *sides, slots, dtype, 0.01, 0.02)
        memories.append(memory[shift:][: memory.numel() - 8].clone())
    assert torch.equal(memories[0], memories[1])
    assert torch.equal(memories[0], memories[2])


def test_a_wrong_scale_layout_is_visible(kernel):
    """Every group has its own power-of-two scale, so any permutation changes what is read."""
    pool = Pool("nvfp4", "NHD", together=True, blocks=1, tokens=4, heads=1)
    value, slots = marked_values().cuda(), torch.arange(4, device="cuda")
    for written, other in (("linear", "sm100"), ("sm100", "linear")):
        memory = allocate(pool)
        sides = [pool.side(memory, side) for side in (0, 1)]
        reshape_and_cache(value, value, *sides, slots, "nvfp4", 1.0, 1.0, v_scale_layout=written)
        right = reference.gather_kv(sides[1], slots, "nvfp4", 1.0, scale_layout=written)
        wrong = reference.gather_kv(sides[1], slots, "nvfp4", 1.0, scale_layout=other)
        assert torch.equal(right, value.float())
        assert (wrong - right).norm() / right.norm() > 0.9
        assert torch.equal(reference.gather_kv(sides[0], slots, "nvfp4", 1.0), value.float())


@pytest.mark.parametrize("count", (2, 33, 300, SCANNED_TOKENS, SCANNED_TOKENS + 1, 5000))
@pytest.mark.parametrize("dtype", ("fp8", "nvfp4_4over6_k"))
def test_repeated_slots(kernel, dtype, count):
    """One token of each slot is stored whole; up to SCANNED_TOKENS tokens it is the last one."""
    heads, size, capacity = 2, 64, max(1, count // 3)
    pool = dense_pool(dtype, capacity, heads, size)
    key = random_like_activations(count, heads, size, torch.bfloat16, seed=count)
    value = key.flip(-1)
    slots = torch.randint(0, capacity, (count,), device="cuda")
    if count <= SCANNED_TOKENS:
        store_both(pool, key, value, slots, dtype, (0.01, 0.01))
        return
    memory, arguments = allocate(pool), (dtype, 0.01, 0.01)
    sides = [pool.side(memory, side) for side in (0, 1)]
    reshape_and_cache(key, value, *sides, slots, *arguments)
    # Each token alone in a slot of its own gives the rows to look for.
    apart = dense_pool(dtype, count, heads, size)
    own = allocate(apart)
    own_sides = [apart.side(own, side) for side in (0, 1)]
    own_slots = torch.arange(count, device="cuda")
    reference.reshape_and_cache(key, value, *own_sides, own_slots, *arguments)
    rows = [rows_of(x, dtype, own_slots) for x in own_sides]
    stored = [rows_of(x, dtype, slots) for x in sides]
    winner = torch.full((count,), -1, device="cuda")
    for token in range(count):
        same = (slots == slots[token]).nonzero().squeeze(1)
        equal = [(r[same] == s[token]).all(-1) for r, s in zip(rows, stored, strict=True)]
        both = same[equal[0] & equal[1]]
        assert len(both), "no token of this slot is stored whole"
        winner[token] = both[0]
    assert (slots[winner] == slots).all()
    assert len(winner.unique()) == len(slots.unique())


def rows_of(side: torch.Tensor, dtype: str, slots: torch.Tensor) -> torch.Tensor:
    """(n, bytes): everything that a side stores of each slot."""
    page, token = slots // side.shape[1], slots % side.shape[1]
    parts = [side] if dtype == "fp8" else [x.view(torch.uint8) for x in split_nvfp4(side)]
    return torch.cat([x[page, token].flatten(1) for x in parts], dim=1)


@pytest.mark.parametrize("count", (5, 700))
@pytest.mark.parametrize("dtype", ("fp8", "nvfp4"))
def test_no_slot_beyond_the_cache_or_below_zero_is_written(kernel, dtype, count):
    pool = dense_pool(dtype, 64, 1, 64)
    bad = [-1, 64, 65, 2**31, 2**33, 2**40, 2**63 - 1, -(2**31), -(2**63)]
    slots = torch.tensor([bad[i % len(bad)] for i in range(count)])
    x = torch.ones(count, 1, 64, dtype=torch.bfloat16, device="cuda")
    store_both(pool, x, x, slots, dtype, (1.0, 1.0))
    store_both(pool, x, x, slots[:0], dtype, (1.0, 1.0))


@pytest.mark.parametrize("tokens", (7, 600))
@pytest.mark.parametrize("dtype", ("fp8", "nvfp4_mse"))
def test_graph_replay_reads_what_changed(kernel, dtype, tokens):
    pool = dense_pool(dtype, 2048, 2, 64)
    memory = allocate(pool)
    sides = [pool.side(memory, side) for side in (0, 1)]
    key, value = (torch.zeros(tokens, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    slots = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
    scale = torch.ones(1, device="cuda")
    arguments = (key, value, *sides, slots, dtype, scale, scale)
    reshape_and_cache(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reshape_and_cache(*arguments)
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        key.normal_(generator=generator)
        value.normal_(generator=generator)
        slots.copy_(torch.randperm(2048, generator=generator, device="cuda")[:tokens])
        slots[:: seed + 2] = -1
        scale.fill_(0.01 * (seed + 1))
        memory.fill_(0x7F)
        graph.replay()
        expected = allocate(pool)
        target = [pool.side(expected, side) for side in (0, 1)]
        reference.reshape_and_cache(key, value, *target, *arguments[4:])
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", ("fp8", "nvfp4"))
def test_pages_beyond_four_gigabytes(kernel, dtype):
    """Pages far apart: offsets of 2^32 bytes and more, in a pool that is otherwise untouched."""
    requires(gpu_gib=24)
    pool = replace(dense_pool(dtype, 64 * 6, 1, 64), layers=1 << 18)
    size = pool.page_stride * pool.blocks * (1 if pool.together else 2) + 2 * GUARD
    assert pool.page_stride * (pool.blocks - 1) > 1 << 32
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    sides = [pool.side(memory, side) for side in (0, 1)]
    x = torch.randn(10, 1, 64, device="cuda").bfloat16()
    slots = torch.arange(10, device="cuda") * 32
    reshape_and_cache(x, x.flip(0), *sides, slots, dtype, 0.01, 0.02)
    small = dense_pool(dtype, 64 * 6, 1, 64)
    expected = torch.zeros_like(allocate(small))
    target = [small.side(expected, side) for side in (0, 1)]
    reference.reshape_and_cache(x, x.flip(0), *target, slots, dtype, 0.01, 0.02)
    for side, wanted in zip(sides, target, strict=True):
        assert torch.equal(rows_of(side, dtype, slots), rows_of(wanted, dtype, slots))
    written = sum(int(part.count_nonzero()) for part in memory.split(1 << 28))  # 8 bytes a byte
    assert written == expected.count_nonzero()


def test_mixed_devices_are_refused():
    x = torch.ones(1, 1, 64, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(2, 1, 16, 1, 64, dtype=torch.uint8, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    for change in ({"slot_mapping": slots.cpu()}, {"k_scale": torch.ones(())}):
        arguments = {"slot_mapping": slots, "k_scale": 1.0, **change}
        with pytest.raises(ValueError, match="one device for all"):
            reshape_and_cache(x, x, *cache, kv_cache_dtype="fp8", v_scale=1.0, **arguments)
    assert not cache.any()


def test_a_traced_call(kernel):
    pool = dense_pool("nvfp4_4over6", 64, 2, 64)
    memory, expected = allocate(pool), allocate(pool)
    x = torch.randn(5, 2, 64, device="cuda").bfloat16()
    slots = torch.arange(5, device="cuda")
    for target, function in (
        (memory, torch.compile(reshape_and_cache, backend="eager", fullgraph=True)),
        (expected, reference.reshape_and_cache),
    ):
        sides = [pool.side(target, side) for side in (0, 1)]
        function(x, x, *sides, slots, "nvfp4_4over6", 0.01, 0.02)
    assert torch.equal(memory, expected)
