"""When the keys of a cache are copied as fp16, and in which pieces. Import-light: no DSL here."""

from __future__ import annotations

# What attention waits for as a whole: a head's K and V of so many tokens.
BLOCK_TOKENS = 64
# What a warp copies at a time.
UNIT_TOKENS = 32
# Elements that a lane converts at once, to 16 bytes.
VECTOR = 8
# Words of the counters in front of the blocks' own (copier.py).
COUNTERS_HEAD = 64
# cache format -> head size -> packed rows (query tokens x GQA group) that a call's longest sequence
# may have from which on it pays to widen keys: the fewest measured to gain (perf/NOTES.md), of
# sequences alike. The bound decides, as lengths are on the device. The other way is
# the prefill kernel that converts FP8 itself, or the decode kernel's row buckets for nvfp4.
MIN_ROWS = {
    "fp8_e4m3": {64: 1024, 128: 1024, 256: 1024},
    "nvfp4": {64: 1024, 128: 1024, 256: 512, 512: 1536},
}
# Fewer query tokens never make widening the keys worth a choice by their number.
_LONG_QUERIES = 128
# The most memory for a call's widened keys.
MAX_BYTES = 1 << 29
# The room for a sequence's keys grows in such steps: a step is planned anew.
_STEP = 2048


def head_sizes(kv_format: str) -> tuple[int, ...]:
    """Head sizes at which caches of a format are widened, ascending."""
    return tuple(sorted(MIN_ROWS.get(kv_format, ())))


def unit_sides(head_size: int) -> int:
    """2 where a unit has K and V of its tokens: short rows of one of them would not pay for looking
    the pages up."""
    return 2 if head_size <= 128 else 1


def units_per_block(head_size: int) -> int:
    return BLOCK_TOKENS // UNIT_TOKENS * 2 // unit_sides(head_size)


def min_rows(kv_format: str, head_size: int) -> int | None:
    """See ``MIN_ROWS``; None where keys are never widened."""
    return MIN_ROWS.get(kv_format, {}).get(head_size)


def most_copies(batch: int, rows: int, skip_rows: int) -> int:
    """How many sequences of a batch of ``rows`` packed rows can have more than ``skip_rows``."""
    return min(batch, rows // (skip_rows + 1))


def rounded_keys(max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Of the bound of the key lengths, what the choice of a kernel may depend on; 0: nothing."""
    if max_seqlen_q < _LONG_QUERIES:
        return 0
    return -(-max_seqlen_k // _STEP) * _STEP


def variants() -> list[tuple[int, str]]:
    """(head size, cache format) of everything that is copied."""
    return [(head_size, kind) for kind in MIN_ROWS for head_size in head_sizes(kind)]


def counters_of(copies: int, kv_heads: int, capacity: int) -> int:
    """int32 counters for copies of so many sequences with room for ``capacity`` tokens each. A
    power of two, so that the calls of a stream share few slices (counters.py)."""
    needed = COUNTERS_HEAD + copies * kv_heads * (capacity // BLOCK_TOKENS)
    return 1 << (needed - 1).bit_length()
