"""The indexer's fused steps: ours, the Triton baseline, and a copy of as many bytes.

    python -m perf.bench_indexer --json results.json

Sizes of decode batches (1 to 256 tokens, each of its own sequence, all of which complete a row of
K) and of prefills (1k to 64k tokens, sequences of 8,192). Q has DeepSeek-V4's 64 heads of 128, K
windows of 8 rows (ratio 4, overlap) or 128. `perf/writers.py` says how they are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from perf.providers import NOT_INSTALLED
from perf.rows import OK, TUNED, Measurement
from perf.writers import OURS, Benchmark, command

TOKENS = (1, 8, 64, 256, 1024, 4096, 8192, 16384, 65536)
FORMATS = ("mxfp4", "fp8_e4m3")
RATIOS = (4, 128)
HEADS, HEAD_SIZE, ROPE_DIM = 64, 128, 64
SEQUENCE, DECODE_TOKENS = 8192, 256
STATE_BLOCK, CACHE_BLOCK = 64, 64
ROW_BYTES = {"mxfp4": HEAD_SIZE // 2 + HEAD_SIZE // 32, "fp8_e4m3": HEAD_SIZE + 4}
# Bytes of the baseline that may differ: it sums in another order.
BASELINE_MISMATCHES = 1e-3


@dataclass(frozen=True)
class IndexerCase:
    """One call. ratio: of K; 0 for Q."""

    tokens: int
    kv_cache_dtype: str
    ratio: int = 0
    seed: int = 0

    @property
    def step(self) -> str:
        return f"K ratio {self.ratio}" if self.ratio else "Q"

    @property
    def name(self) -> str:
        return f"{self.step} {self.kv_cache_dtype} T{self.tokens}"

    @property
    def decodes(self) -> bool:
        return self.tokens <= DECODE_TOKENS

    @property
    def rows(self) -> int:
        """Rows of K that the call completes, or heads that it rotates."""
        if not self.ratio:
            return self.tokens * HEADS
        return self.tokens if self.decodes else self.tokens // self.ratio

    @property
    def window(self) -> int:
        """State rows of a row of K."""
        return 2 * self.ratio if self.ratio == 4 else self.ratio

    @property
    def moved_bytes(self) -> int:
        """Everything read once, everything written once; float32 cos and sin of a row."""
        table = 4 * ROPE_DIM
        if not self.ratio:
            # The scale of an FP8 row is not stored: it is in the weight.
            stored = ROW_BYTES[self.kv_cache_dtype] - (4 if self.kv_cache_dtype != "mxfp4" else 0)
            return self.rows * (2 * HEAD_SIZE + stored + 8) + self.tokens * (8 + table)
        row = self.window * 8 * HEAD_SIZE + table + ROW_BYTES[self.kv_cache_dtype]
        return self.tokens * (8 + 8 + 4) + self.rows * row

    def workload(self) -> dict[str, Any]:
        """What makes two measurements comparable; fields of attention calls are None."""
        return {
            "op": "indexer_k" if self.ratio else "indexer_q",
            "batch": self.tokens,
            "kv_len": None,
            "q_len": None,
            "num_q_heads": None if self.ratio else HEADS,
            "num_kv_heads": 1 if self.ratio else None,
            "head_size": HEAD_SIZE,
            "kv_cache_dtype": self.kv_cache_dtype,
            "page_size": CACHE_BLOCK if self.ratio else None,
            "window": self.window if self.ratio else None,
            "rope_dim": ROPE_DIM,
            "tokens": "of one sequence each" if self.decodes else f"sequences of {SEQUENCE}",
            "slots": "scattered" if self.ratio else None,
            "seed": self.seed,
        }


CASES = tuple(
    IndexerCase(tokens, dtype, ratio)
    for ratio in (0, *RATIOS)
    for dtype in FORMATS
    for tokens in TOKENS
)


def make_arguments(case: IndexerCase, generator: torch.Generator) -> dict[str, Any]:
    """Keyword arguments of one call, with tensors of its own."""
    device = generator.device
    random = partial(torch.randn, generator=generator, device=device)
    angles = 6.0 * torch.rand((SEQUENCE, ROPE_DIM // 2), generator=generator, device=device)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    if case.ratio:
        return _k_arguments(case, generator, table)
    return {
        "positions": torch.arange(case.tokens, device=device)
        * (997 if case.decodes else 1)
        % SEQUENCE,
        "index_q": random((case.tokens, HEADS, HEAD_SIZE)).bfloat16(),
        "cos_sin_cache": table,
        "index_weights": random((case.tokens, HEADS)),
        "softmax_scale": HEAD_SIZE**-0.5,
        "head_scale": HEADS**-0.5,
        "use_fp4": case.kv_cache_dtype == "mxfp4",
    }


def _k_arguments(
    case: IndexerCase, generator: torch.Generator, table: torch.Tensor
) -> dict[str, Any]:
    device, tokens = generator.device, case.tokens
    width = 2 * HEAD_SIZE if case.ratio == 4 else HEAD_SIZE
    at = torch.arange(tokens, device=device)
    length = min(SEQUENCE, tokens)
    if case.decodes:
        # Only the blocks with the window exist.
        blocks = case.window // STATE_BLOCK + 1
        sequences, positions = at, torch.full_like(at, 4096 - 1)
        state_table = torch.zeros((tokens, 4096 // STATE_BLOCK), dtype=torch.int32, device=device)
        count = tokens * blocks
        own = torch.randperm(count, generator=generator, device=device).int().view(tokens, blocks)
        state_table[:, -blocks:] = own
    else:
        sequences, positions = at // length, at % length
        count = tokens // STATE_BLOCK
        order = torch.randperm(count, generator=generator, device=device)
        state_table = order.int().view(tokens // length, length // STATE_BLOCK)
    state = torch.randn(
        (count, STATE_BLOCK, 2 * width), generator=generator, device=device, dtype=torch.float32
    )
    cache_blocks = -(-max(tokens, 512) // CACHE_BLOCK)
    slots = torch.randperm(cache_blocks * CACHE_BLOCK, generator=generator, device=device)
    shape = (cache_blocks, CACHE_BLOCK, ROW_BYTES[case.kv_cache_dtype])
    return {
        "state_cache": state,
        "token_to_seq": sequences.int(),
        "positions": positions,
        "slot_mapping": slots[:tokens].clone(),
        "state_block_table": state_table,
        "norm_weight": torch.randn(HEAD_SIZE, generator=generator, device=device),
        "norm_eps": 1e-6,
        "cos_sin_cache": table,
        "k_cache": torch.zeros(shape, dtype=torch.uint8, device=device),
        "compress_ratio": case.ratio,
        "cache_format": case.kv_cache_dtype,
    }


def bind(provider: str, arguments: dict[str, Any]) -> Callable[[], object]:
    if provider == OURS:
        import cute_kernels as functions
    else:
        import perf.baselines.triton_indexer as functions
    is_q = "index_q" in arguments
    name = "fused_indexer_q_rope_quant" if is_q else "compress_norm_rope_insert"
    return partial(getattr(functions, name), **arguments)


def why_not(provider: str) -> str | None:
    if provider == OURS or find_spec("triton") is not None:
        return None
    return NOT_INSTALLED


def check(provider: str, case: IndexerCase) -> Measurement:
    """Call the provider and the reference, and compare all bytes that they write."""
    reason = why_not(provider)
    if reason is not None:
        return Measurement(reason)
    try:
        generator = torch.Generator("cuda").manual_seed(case.seed + 1_000_003)
        arguments = make_arguments(case, generator)
        found, expected = (written(run_by, arguments) for run_by in (provider, None))
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
        wrong = sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in pairs)
    except Exception as error:  # whatever a provider throws, the others still get their turn
        return Measurement(f"failed: {type(error).__name__}: {error}".splitlines()[0])
    row = ROW_BYTES[case.kv_cache_dtype]
    size = case.rows * row if case.ratio else sum(_bytes(b).numel() for _, b in pairs)
    share = wrong / size
    # Sums of K before the rounding to bf16 have no order.
    allowed = 0.0 if provider == OURS and not case.ratio else BASELINE_MISMATCHES
    status = OK if share <= allowed else f"wrong: {wrong} bytes differ from the reference"
    return Measurement(status, share)


def written(provider: str | None, arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """What a call returns or writes; by the reference without a provider."""
    from cute_kernels.indexer.arguments import check_k, check_q
    from cute_kernels.reference.indexer import indexer_k, indexer_q

    if "index_q" in arguments:
        return bind(provider, arguments)() if provider else indexer_q(check_q(**arguments))
    own = arguments | {"k_cache": torch.zeros_like(arguments["k_cache"])}
    if provider:
        bind(provider, own)()
    else:
        indexer_k(check_k(**own))
    return (own["k_cache"],)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


main = command(
    "perf.bench_indexer",
    "Time the DeepSeek-V4 indexer's fused steps.",
    CASES,
    Benchmark(make_arguments, bind, check, TUNED),
)

if __name__ == "__main__":
    main()
