"""The device conversions of SM90 against their torch definitions, for all 2^32 float32 patterns."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.numerics import e2m1, e4m3
from tests.requires import requires

pytestmark = pytest.mark.gpu

CHUNK = 1 << 27
FIRST = range(-(1 << 31), 1 << 31, CHUNK)


def patterns_and_words(convert: str):
    """Chunks of all bit patterns as float32, and the device's words (CHUNK / 8, 2) for them."""
    requires(gpu_gib=12)
    from tests.numerics import patterns

    function = patterns.compiled(getattr(patterns, convert))
    for first in FIRST:
        words = torch.full((CHUNK // patterns.FLOATS, 2), -1, dtype=torch.int32, device="cuda")
        function(words, first)
        bits = torch.arange(first, first + CHUNK, dtype=torch.int32, device="cuda")
        yield bits.view(torch.float32), words


def nibbles_of(codes: torch.Tensor) -> torch.Tensor:
    return e2m1.pack(codes).view(torch.int32)


def test_e2m1_of_every_float32():
    doubled = (torch.tensor(e2m1.VALUES, device="cuda") * 2).to(torch.uint8)
    for x, words in patterns_and_words("e2m1_both"):
        codes = e2m1.encode(x)
        assert torch.equal(words[:, 0], nibbles_of(codes))
        assert torch.equal(words[:, 1], nibbles_of(doubled[(codes & 7).int()]))


@pytest.mark.parametrize("convert", ("e4m3_by_four", "e4m3_by_one"))
def test_e4m3_of_every_float32(convert):
    """So of every bf16 and fp16 number, and around every rounding boundary."""
    for x, words in patterns_and_words(convert):
        assert torch.equal(words.flatten(), e4m3.encode(x).view(torch.int32))


def test_every_pattern_is_seen():
    assert len(FIRST) * CHUNK == 1 << 32
    assert (FIRST[0], FIRST[-1] + CHUNK) == (-(1 << 31), 1 << 31)
