"""Layouts that share memory, against the addresses of every element."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from cute_kernels.memory import (
    extent,
    has_address,
    lattice,
    meet,
    overlapping,
    shares_elements,
)

MEMORY = torch.zeros(4096, dtype=torch.uint8)


def addresses(x: torch.Tensor) -> list[int]:
    """Every byte of every element."""
    found = [x.data_ptr()]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = [at + i * stride * x.element_size() for at in found for i in range(size)]
    return [at + byte for at in found for byte in range(x.element_size())]


def random_view(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    dims = rng.randrange(1, 4)
    shape = tuple(rng.choice((1, 1, 2, 3, 4)) for _ in range(dims))
    strides = tuple(rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48)) for _ in range(dims))
    return MEMORY.view(dtype).as_strided(shape, strides, rng.randrange(60))


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    found = overlapping({"a": a}, {"b": b})
    assert found in (None, ("a", "b"))
    return found is not None


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16))
def test_shared_elements_and_extents(dtype):
    rng, answers = random.Random(0), {True: 0, False: 0}
    for _ in range(3000):
        x = random_view(rng, dtype)
        found = addresses(x)
        assert extent(x) == max(found) + 1 - min(found)
        shared = len(set(found)) < len(found)
        assert shares_elements(x) == shared, (x.shape, x.stride())
        answers[shared] += 1
    assert min(answers.values()) > 300


def test_elements_are_apart_where_dimensions_do_not_nest():
    assert not shares_elements(MEMORY.as_strided((2, 2), (2, 3)))
    assert shares_elements(MEMORY.as_strided((4, 3), (2, 3)))
    for shared in (torch.zeros(4, 1).expand(4, 3), torch.zeros(9).unfold(0, 4, 2)):
        assert shares_elements(shared)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16))
def test_two_tensors_overlap_where_they_have_a_byte_in_common(dtype):
    """Of any shapes, strides and item sizes."""
    rng, answers = random.Random(1), {True: 0, False: 0}
    for _ in range(6000):
        a, b = random_view(rng, torch.uint8), random_view(rng, dtype)
        common = bool(set(addresses(a)) & set(addresses(b)))
        assert share(a, b) == share(b, a) == common, (a.shape, a.stride(), b.stride())
        assert meet(b.data_ptr() - a.data_ptr(), lattice(a, b)) == common
        answers[common] += 1
    assert min(answers.values()) > 600


def test_layouts_of_caches_in_one_allocation():
    """Pages of K and V in any two orders, at distances where only some of them meet."""
    answers = {True: 0, False: 0}
    for pages, tokens, heads in ((1, 2, 3), (2, 2, 2), (3, 4, 2)):
        shape, row, page = (pages, tokens, heads, 16), 16, tokens * heads * 16
        orders = {(heads * row, row), (row, tokens * row), (2 * row, 2 * tokens * row)}
        layouts = [(n * page, *order, 1) for n in (1, 2, 4) for order in orders]
        for first, second in itertools.product(layouts, repeat=2):
            a = MEMORY.as_strided(shape, first, 1500)
            at = set(addresses(a))
            for distance in range(-12 * row + 4, 12 * row, 2 * row + 4):
                b = MEMORY.as_strided(shape, second, 1500 + distance)
                common = not at.isdisjoint(addresses(b))
                assert share(a, b) == common, (shape, first, second, distance)
                answers[common] += 1
    assert min(answers.values()) > 200


def test_caches_as_large_as_they_come_are_compared_quickly():
    """Blocks by the million, interleaved, in orders that differ inside, on memory that is not."""
    blocks, side = 1_000_000, 64 * 8 * 128
    k_strides, v_strides = (2 * side, 1024, 128, 1), (2 * side, 128, 64 * 128, 1)
    shape = (blocks, 64, 8, 128)
    meta = torch.empty(0, dtype=torch.uint8, device="meta")
    k, v = (meta.as_strided(shape, strides) for strides in (k_strides, v_strides))
    began = time.perf_counter()
    lying = lattice(k, v)
    assert not meet(side, lying) and not meet(-side, lying)
    assert meet(0, lying) and meet(side - 1, lying) and meet(2 * side * (blocks - 1), lying)
    assert time.perf_counter() - began < 0.05


def test_what_takes_too_long_to_decide_counts_as_shared():
    """A limit for pools inside each other whose blocks differ in size; documented in memory.py."""
    meta = torch.empty(0, dtype=torch.uint8, device="meta")
    k = meta.as_strided((100_000, 40), (1_000, 1))
    v = meta.as_strided((100_000, 40), (1_300, 1))
    # Blocks of one begin 50 to 90 bytes behind a multiple of 100, those of the other 0 to 40.
    assert meet(50, lattice(k, v))
    assert not meet(50, lattice(k[:1000], v[:1000]))


def test_empty_tensors_and_those_without_addresses():
    empty = torch.zeros(0, 3)
    assert extent(empty) == 0 and not shares_elements(empty)
    assert not share(empty, empty) and not share(empty, MEMORY)
    assert has_address(empty) and has_address(torch.nn.Parameter(torch.zeros(1)))
    meta = torch.zeros(1, device="meta")
    assert not has_address(meta) and not share(meta, meta)
    read = {"none": None, "number": 1.0, "meta": meta, "own": MEMORY[3:]}
    assert overlapping({"a": MEMORY}, read) == ("a", "own")
    assert overlapping({"a": MEMORY[:9], "b": MEMORY[8:10]}, {}) == ("a", "b")
    assert overlapping({"a": MEMORY[:9], "b": MEMORY[9:10]}, {}) is None
