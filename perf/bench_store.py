"""Stores of new keys and values: ours, the Triton baseline, and a copy of as many bytes.

    python -m perf.bench_store --json results.json

Sizes of decode batches (1 to 256 tokens) and of prefills (1k to 64k tokens). `perf/writers.py` says
how they are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from perf.providers import NOT_INSTALLED
from perf.rows import BY_HAND, OK, Measurement
from perf.writers import OURS, Benchmark, command

TOKENS = (1, 8, 64, 256, 1024, 4096, 16384, 65536)
DTYPES = ("fp8", "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
CACHE_BYTES = {"fp8": 1.0}  # of an element; nvfp4 has 9 bytes for 16
# Bytes of the baseline that may differ: it sums errors in another order.
BASELINE_MISMATCHES = 1e-3


@dataclass(frozen=True)
class StoreCase:
    """One call of `reshape_and_cache`; slots of decode batches are scattered, of others pages."""

    tokens: int
    kv_cache_dtype: str
    num_kv_heads: int = 8
    head_size: int = 128
    page_size: int = 64
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.kv_cache_dtype} T{self.tokens} {self.num_kv_heads}x{self.head_size}"

    @property
    def elements(self) -> int:
        return 2 * self.tokens * self.num_kv_heads * self.head_size

    @property
    def moved_bytes(self) -> int:
        """Elements read once, codes and scales written once, and the slots."""
        written = CACHE_BYTES.get(self.kv_cache_dtype, 9 / 16)
        return int(self.elements * (2 + written)) + 8 * self.tokens

    def workload(self) -> dict[str, Any]:
        """What makes two measurements comparable; fields of attention calls are None."""
        return {
            "op": "store",
            "batch": self.tokens,
            "kv_len": None,
            "q_len": None,
            "num_q_heads": None,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "page_size": self.page_size,
            "window": None,
            "x_dtype": "bfloat16",
            "slots": "scattered" if self.tokens <= 256 else "whole pages in random order",
            "scales": "one tensor a side",
            "seed": self.seed,
        }


CASES = (
    *(StoreCase(tokens, dtype) for tokens in TOKENS for dtype in DTYPES),
    *(StoreCase(16384, dtype, 4, 512) for dtype in DTYPES),
)


def make_arguments(case: StoreCase, generator: torch.Generator) -> tuple:
    """Arguments of one call: K and V as slices of one projection, a cache of its own."""
    device, pages = generator.device, -(-max(case.tokens, 512) // case.page_size)
    shape = (case.tokens, 2, case.num_kv_heads, case.head_size)
    x = torch.randn(shape, generator=generator, device=device).bfloat16()
    page = (case.page_size, case.num_kv_heads)
    if case.kv_cache_dtype == "fp8":
        cache = torch.zeros((2, pages, *page, case.head_size), dtype=torch.uint8, device=device)
        sides = (cache[0], cache[1])
    else:
        row = case.head_size * 9 // 16
        cache = torch.zeros((pages, 2, *page, row), dtype=torch.uint8, device=device)
        sides = (cache[:, 0], cache[:, 1])
    order = torch.randperm(pages, generator=generator, device=device)
    slots = (
        order[:, None] * case.page_size + torch.arange(case.page_size, device=device)
    ).flatten()
    if case.tokens <= 256:
        slots = slots[torch.randperm(len(slots), generator=generator, device=device)]
    # What brings the largest of millions of normal elements near the end of the format's range.
    unit = 0.012 if case.kv_cache_dtype == "fp8" else 0.002
    scales = (torch.full((1,), s * unit, device=device) for s in (1.05, 0.95))
    return (x[:, 0], x[:, 1], *sides, slots[: case.tokens].clone(), case.kv_cache_dtype, *scales)


def bind(provider: str, arguments: tuple) -> Callable[[], object]:
    if provider == OURS:
        from cute_kernels import reshape_and_cache
    else:
        from perf.baselines.triton_store import reshape_and_cache
    return partial(reshape_and_cache, *arguments)


def why_not(provider: str, case: StoreCase) -> str | None:
    if provider == OURS:
        return None
    if find_spec("triton") is None:
        return NOT_INSTALLED
    from perf.baselines.triton_store import DTYPES as implemented

    return None if case.kv_cache_dtype in implemented else "not implemented here"


def check(provider: str, case: StoreCase) -> Measurement:
    """Store once by the provider and once by the reference, and compare all bytes of the caches."""
    reason = why_not(provider, case)
    if reason is not None:
        return Measurement(reason)
    from cute_kernels.reference.store import reshape_and_cache as reference

    try:
        generators = [torch.Generator("cuda").manual_seed(case.seed + 1_000_003) for _ in "ab"]
        found, expected = (make_arguments(case, generator) for generator in generators)
        bind(provider, found)()
        reference(*expected)
        pairs = zip(found[2:4], expected[2:4], strict=True)
        wrong = sum(int((a != b).sum()) for a, b in pairs)
    except Exception as error:  # whatever a provider throws, the others still get their turn
        return Measurement(f"failed: {type(error).__name__}: {error}".splitlines()[0])
    share = wrong / (2 * found[2].numel())
    allowed = 0.0 if provider == OURS else BASELINE_MISMATCHES
    status = OK if share <= allowed else f"wrong: {wrong} bytes differ from the reference"
    return Measurement(status, share)


BENCHMARK = Benchmark(make_arguments, bind, check, BY_HAND)
main = command(
    "perf.bench_store",
    "Time stores of new keys and values into an fp8 or nvfp4 cache.",
    CASES,
    BENCHMARK,
)

if __name__ == "__main__":
    main()
