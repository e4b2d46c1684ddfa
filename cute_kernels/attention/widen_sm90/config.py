"""What varies between the compiled variants of the widening kernel. Import-light: no DSL here."""

from __future__ import annotations

from dataclasses import dataclass

# A CTA's share of a sequence.
BLOCK_TOKENS = 64
THREADS = 128
# Elements that a thread converts at once, to 16 bytes.
VECTOR = 8
# cache format -> head size -> packed rows (query tokens x GQA group) of a sequence from which on it
# pays to widen its keys: the fewest that were measured to gain (perf/NOTES.md). The other way is
# the prefill kernel that converts FP8 itself, or the decode kernel's row buckets for nvfp4.
MIN_ROWS = {
    "fp8_e4m3": {64: 8192, 128: 2048, 256: 1024},
    "nvfp4": {64: 1024, 128: 1024, 256: 512, 512: 1536},
}
# Fewer query tokens never make widening the keys worth a choice by their number.
_LONG_QUERIES = 256
# The most memory for a call's widened keys.
MAX_BYTES = 1 << 29
# The room for a sequence's keys grows in such steps: a step is planned anew.
_STEP = 2048


@dataclass(frozen=True)
class WidenConfig:
    """head_size: elements of a head, one of ``head_sizes(kv_format)``.

    kv_format: of the cache, a key of ``MIN_ROWS``.
    """

    head_size: int
    kv_format: str = "fp8_e4m3"

    @property
    def name(self) -> str:
        return f"widen_sm90_{self.kv_format}_d{self.head_size}"

    @property
    def vectors(self) -> int:
        """Of a token's row of one head."""
        return self.head_size // VECTOR


def head_sizes(kv_format: str) -> tuple[int, ...]:
    """Head sizes at which caches of a format are widened, ascending."""
    return tuple(sorted(MIN_ROWS.get(kv_format, ())))


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


def support_table() -> list[WidenConfig]:
    """Every variant."""
    return [
        WidenConfig(head_size, kv_format)
        for kv_format in MIN_ROWS
        for head_size in head_sizes(kv_format)
    ]
