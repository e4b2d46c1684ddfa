"""What varies between the compiled variants of the widening kernel. Import-light: no DSL here."""

from __future__ import annotations

from dataclasses import dataclass

# A CTA's share of a sequence.
BLOCK_TOKENS = 64
THREADS = 128
# Elements that a thread converts at once: 8 bytes in, 16 out.
VECTOR = 8
# head size -> packed rows (query tokens x GQA group) of a sequence from which on it pays to widen
# its keys: the fewest that were measured (perf/NOTES.md), all faster.
MIN_ROWS = {64: 8192, 128: 2048, 256: 1024}
HEAD_SIZES = tuple(MIN_ROWS)
# Fewer query tokens never make widening the keys worth its time.
_LONG_QUERIES = 256
# The room for a sequence's keys grows in such steps: a step is planned anew.
_STEP = 2048


@dataclass(frozen=True)
class WidenConfig:
    """head_size: elements of a head, one of ``HEAD_SIZES``."""

    head_size: int

    @property
    def name(self) -> str:
        return f"widen_sm90_fp8_e4m3_d{self.head_size}"

    @property
    def vectors(self) -> int:
        """Of a token's row of one head."""
        return self.head_size // VECTOR


def rounded_keys(max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Of the bound of the key lengths, what the choice of a kernel may depend on; 0: nothing."""
    if max_seqlen_q < _LONG_QUERIES:
        return 0
    return -(-max_seqlen_k // _STEP) * _STEP


def support_table() -> list[WidenConfig]:
    """Every variant."""
    return [WidenConfig(head_size) for head_size in HEAD_SIZES]
