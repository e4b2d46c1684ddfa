"""Layouts that share memory, against the addresses of every element."""

from __future__ import annotations

import random

import pytest
import torch

from cute_kernels.memory import (
    common_steps,
    extent,
    have_addresses,
    meet,
    reach_into,
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
    shape = tuple(rng.choice((1, 1, 2, 3, 4)) for _ in range(3))
    strides = tuple(rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48)) for _ in range(3))
    return MEMORY.view(dtype).as_strided(shape, strides, rng.randrange(40))


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16))
def test_shared_elements_and_extents(dtype):
    """Exact where dimensions nest; a view that does not nest may be called sharing, never not."""
    rng, apart = random.Random(0), 0
    for _ in range(2000):
        x = random_view(rng, dtype)
        found = addresses(x)
        assert extent(x) == max(found) + 1 - min(found)
        if not shares_elements(x):
            assert len(set(found)) == len(found)
            apart += 1
    assert apart > 300
    for nested in (torch.zeros(4, 3, 2), torch.zeros(4, 6, 2)[:, ::2], torch.zeros(2, 3, 4).mT):
        assert not shares_elements(nested)
    for shared in (torch.zeros(4, 1).expand(4, 3), torch.zeros(9).unfold(0, 4, 2)):
        assert shares_elements(shared)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16))
def test_two_tensors_of_one_layout_meet_where_they_have_a_byte_in_common(dtype):
    rng, answers = random.Random(1), {True: 0, False: 0}
    while min(answers.values()) < 300:
        a = random_view(rng, dtype)
        if shares_elements(a):
            continue
        b = MEMORY.view(dtype).as_strided(a.shape, a.stride(), rng.randrange(120))
        common = bool(set(addresses(a)) & set(addresses(b)))
        assert meet(b.data_ptr() - a.data_ptr(), common_steps(a, b)) == common
        answers[common] += 1


def test_two_tensors_of_two_layouts_that_are_apart_are_never_called_so_wrongly():
    rng, apart = random.Random(2), 0
    for _ in range(4000):
        a, b = (random_view(rng, torch.uint8) for _ in range(2))
        b = MEMORY.as_strided(a.shape, b.stride(), b.storage_offset() + rng.randrange(200))
        if shares_elements(a) or shares_elements(b):
            continue
        common = bool(set(addresses(a)) & set(addresses(b)))
        assert reach_into(a, b) or not common
        if not meet(b.data_ptr() - a.data_ptr(), common_steps(a, b)):
            assert not common, (a.shape, a.stride(), b.stride())
            apart += 1
    assert apart > 300


def test_blocks_of_other_orders_inside_are_apart_where_the_blocks_are():
    """K in NHD and V in HND, block by block in one allocation."""
    memory = torch.zeros(4, 2, 8 * 3 * 16, dtype=torch.uint8)
    k = memory[:, 0].view(4, 8, 3, 16)
    v = memory[:, 1].view(4, 3, 8, 16).transpose(1, 2)
    assert not meet(v.data_ptr() - k.data_ptr(), common_steps(k, v))
    assert meet(0, common_steps(k, v)) and meet(383, common_steps(k, v))


def test_empty_tensors_and_those_without_addresses():
    empty = torch.zeros(0, 3)
    assert extent(empty) == 0 and not shares_elements(empty)
    assert not meet(0, common_steps(empty, empty)) and not reach_into(empty, empty)
    assert have_addresses(empty)
    assert not have_addresses(empty, torch.zeros(1, device="meta"))
