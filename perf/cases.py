"""Benchmark cases: frozen descriptions of one attention call each.

The decode cases are those of the project's targets: few and many sequences, MQA to MHA-like
groups, every head size, a verification batch (q_len 4) and a sliding window. They are never
dropped for being slow: a case that we lose stays in the table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

# What `DecodeCase.lengths` may be.
UNIFORM, LOG_NORMAL, ONE_LONG = "uniform", "log-normal", "one 128k"
SIGMA, LONG = 1.2, 131_072


@dataclass(frozen=True)
class DecodeCase:
    """Paged decode attention; every sequence has `q_len` query tokens.

    lengths: "uniform": every sequence has `kv_len` keys; "log-normal": drawn with sigma 1.2 and
    mean `kv_len`; "one 128k": the first has 131072 keys, the others `kv_len`.
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
    lengths: str = UNIFORM

    @property
    def name(self) -> str:
        text = (
            f"B{self.batch} S{self.kv_len} {self.num_q_heads}/{self.num_kv_heads} D{self.head_size}"
        )
        if self.q_len != 1:
            text += f" q{self.q_len}"
        if self.window:
            text += f" w{self.window}"
        if self.lengths != UNIFORM:
            text += f" {self.lengths}"
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

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each sequence, the same in every run."""
        if self.lengths == UNIFORM:
            return (self.kv_len,) * self.batch
        if self.lengths == ONE_LONG:
            return (LONG,) + (self.kv_len,) * (self.batch - 1)
        draw = random.Random(self.seed)
        mu = math.log(self.kv_len) - SIGMA**2 / 2
        return tuple(max(1, round(draw.lognormvariate(mu, SIGMA))) for _ in range(self.batch))

    @property
    def longest(self) -> int:
        return max(self.kv_lens)

    @property
    def pages(self) -> tuple[int, ...]:
        """Of each sequence."""
        return tuple(-(-length // self.page_size) for length in self.kv_lens)

    def workload(self) -> dict[str, Any]:
        """What makes two measurements of this case comparable, timing and machine aside."""
        ragged = {} if self.lengths == UNIFORM else {"kv_lens": list(self.kv_lens)}
        return {
            **ragged,
            "op": "decode",
            "batch": self.batch,
            "kv_len": self.kv_len,
            "kv_len_distribution": self.lengths,
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
# Batches in which a sequence must not keep the others waiting.
BALANCE_CASES = tuple(
    DecodeCase(64, kv_len, *heads, lengths=lengths)
    for lengths, kv_len in ((LOG_NORMAL, 4096), (ONE_LONG, 1024))
    for heads in ((32, 4, 512), (64, 8, 128))
)
# And in which heads that share lines of memory must stay in step.
BALANCE_CASES += tuple(
    DecodeCase(64, 4096, *heads, lengths=LOG_NORMAL, kv_cache_dtype=dtype)
    for heads, dtype in (((64, 8, 64), "fp8_e4m3"), ((64, 8, 64), "nvfp4"), ((64, 8, 128), "nvfp4"))
)
# Draft tokens that are verified: the same bytes for more rows. Up to 32 packed rows, and 64.
VERIFY_CASES = (
    DecodeCase(64, 8192, 32, 4, 512, q_len=2),
    DecodeCase(64, 8192, 32, 4, 512, q_len=4),
    DecodeCase(32, 8192, 8, 1, 512, q_len=2),
    DecodeCase(32, 8192, 64, 8, 128, q_len=2),
    DecodeCase(32, 8192, 64, 8, 128, q_len=4),
    DecodeCase(32, 8192, 64, 8, 128, q_len=8),
    DecodeCase(64, 8192, 16, 1, 128, q_len=2),
    DecodeCase(64, 8192, 16, 1, 128, q_len=4),
    DecodeCase(32, 8192, 64, 8, 64, q_len=4),
    DecodeCase(32, 8192, 64, 8, 64, q_len=8),
)
GROUPS = {
    "fp8": DECODE_CASES,
    "nvfp4": NVFP4_CASES,
    "bf16": BF16_CASES,
    "ragged": BALANCE_CASES,
    "verify": VERIFY_CASES,
}
ALL_CASES = tuple(case for cases in GROUPS.values() for case in cases)
# One case of each head size, short ones: a smoke test, not a result.
QUICK_CASES = tuple(
    cases[i] for cases in (DECODE_CASES, NVFP4_CASES, BF16_CASES) for i in (1, 8, 10, 11)
)


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)


def select(cases: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """Cases that a pattern names, or, where it names none, whose name contains it (ignoring case);
    in the order of `cases`, each once. All of them without patterns.

    Raises:
        ValueError: a pattern that no case matches.
    """
    chosen = set()
    for pattern in patterns:
        found = [case.name for case in cases if pattern == case.name]
        found = found or [case.name for case in cases if pattern.lower() in case.name.lower()]
        if not found:
            known = ", ".join(case.name for case in cases)
            raise ValueError(f"no case matches {pattern!r}; known: {known}")
        chosen.update(found)
    return [case for case in cases if not patterns or case.name in chosen]
