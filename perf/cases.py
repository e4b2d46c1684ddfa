"""Benchmark cases: frozen descriptions of one attention call each.

The decode cases are those of the project's targets: few and many sequences, MQA to MHA-like
groups, every head size, a verification batch (q_len 4) and a sliding window. They are never
dropped for being slow: a case that we lose stays in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class DecodeCase:
    """Paged decode attention; every sequence has `kv_len` keys and `q_len` query tokens.

    window: keys that a query sees, its own included; 0 for all of them.
    one_scale: K and V have one scale for all sequences and heads, as some peers need.
    """

    batch: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    q_len: int = 1
    window: int = 0
    page_size: int = 64
    q_dtype: str = "bfloat16"
    kv_cache_dtype: str = "fp8_e4m3"
    seed: int = 0
    one_scale: bool = False

    @property
    def name(self) -> str:
        text = (
            f"B{self.batch} S{self.kv_len} {self.num_q_heads}/{self.num_kv_heads} D{self.head_size}"
        )
        if self.q_len != 1:
            text += f" q{self.q_len}"
        if self.window:
            text += f" w{self.window}"
        if self.one_scale:
            text += " one scale"
        if self.kv_cache_dtype != "fp8_e4m3":
            text += f" {self.kv_cache_dtype}"
        return text

    @property
    def kv_layout(self) -> str:
        """Order in a page: that of serving engines, which keep a head's nvfp4 scales together."""
        return "HND" if self.kv_cache_dtype == "nvfp4" else "NHD"

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """The left bound of `window_size`: keys before the query's own position, -1 for all."""
        return self.window - 1

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.kv_len // self.page_size)

    def workload(self) -> dict[str, Any]:
        """What makes two measurements of this case comparable, timing and machine aside."""
        return {
            "op": "decode",
            "batch": self.batch,
            "kv_len": self.kv_len,
            "kv_len_distribution": "uniform",
            "q_len": self.q_len,
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "q_dtype": self.q_dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "page_size": self.page_size,
            "page_order": "random",
            "kv_layout": self.kv_layout,
            "mask": "causal",
            "window": self.window,
            "softcap": 0.0,
            "sinks": False,
            "scales": "one" if self.one_scale else "per sequence and KV head",
            "seed": self.seed,
        }


DECODE_CASES = (
    DecodeCase(64, 8192, 32, 4, 512),
    DecodeCase(8, 8192, 32, 4, 512),
    DecodeCase(1, 32768, 32, 4, 512),
    DecodeCase(128, 8192, 8, 1, 512),
    DecodeCase(32, 8192, 8, 1, 512),
    DecodeCase(1, 32768, 8, 1, 512),
    DecodeCase(32, 8192, 8, 1, 512, q_len=4),
    DecodeCase(32, 8192, 64, 8, 128),
    DecodeCase(1, 32768, 64, 8, 128),
    DecodeCase(64, 8192, 16, 1, 128),
    DecodeCase(64, 8192, 32, 16, 256, window=1024),
    DecodeCase(32, 8192, 64, 8, 64),
)
# The same from a cache of 9 / 16 of the bytes.
NVFP4_CASES = tuple(replace(case, kv_cache_dtype="nvfp4") for case in DECODE_CASES)
# And from a cache in the queries' dtype, of twice the bytes: what quantizing is worth.
BF16_CASES = tuple(replace(case, kv_cache_dtype="bf16") for case in DECODE_CASES)
ALL_CASES = DECODE_CASES + NVFP4_CASES + BF16_CASES
# One case of each head size, short ones: a smoke test, not a result.
QUICK_CASES = tuple(
    cases[i] for cases in (DECODE_CASES, NVFP4_CASES, BF16_CASES) for i in (1, 8, 10, 11)
)


def select_cases(patterns: tuple[str, ...]) -> list[DecodeCase]:
    """Cases whose name contains one of the patterns (ignoring case); all of them without any.

    Raises:
        ValueError: a pattern that no case matches.
    """
    chosen = []
    for pattern in patterns:
        found = [case for case in ALL_CASES if pattern.lower() in case.name.lower()]
        if not found:
            known = ", ".join(case.name for case in ALL_CASES)
            raise ValueError(f"no case matches {pattern!r}; known: {known}")
        chosen += [case for case in found if case not in chosen]
    return chosen or list(ALL_CASES)
