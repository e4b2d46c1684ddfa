"""A frozen server in small, a process of its own.

    python -m tests.compile_cache.replay NAME TP CACHE

makes the calls that serving a model of tests/data/configs makes on one of TP devices, from a cache
of `tests.cases.CACHES`, and prints the names of the kernels that these asked for, one a line.
Nothing is loaded before the first call, and no other test of a process has left anything in a cache
of prepared calls.
"""

from __future__ import annotations

import itertools
import sys

import torch

from cute_kernels import compile_cache, flash_attn_varlen_func, reshape_and_cache
from kvcache.cli_common import read_model
from kvcache.config import AttentionConfig
from kvcache.models import layer_kinds
from tests.cases import AttentionCase, make_inputs, with_cache
from tests.kvcache.helpers import CONFIGS

# Decode, verify batches, chunks of prefill, whole prompts.
Q_LENGTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 128, 200, 400, 1500)
KV_LENGTHS = (1, 63, 500)
# Many chunks, each too short for the prefill kernel to copy keys for it.
CROWD, CROWD_Q_LENGTH = 16, 60


def replay(config: AttentionConfig, tp_size: int, cache: str) -> None:
    """The calls of layers of this kind: store the new keys and values (in FP8; of 16 bits that is
    not ours), then attend."""
    kv_heads = max(1, config.num_kv_heads // tp_size)
    batches = [
        ((kv_len + q_len, q_len, 2 * q_len), (q_len, 1, q_len))
        for q_len, kv_len in itertools.product(Q_LENGTHS, KV_LENGTHS)
    ]
    batches.append(((200,) * CROWD, (CROWD_Q_LENGTH,) * CROWD))
    for kv_lens, q_lens in batches:
        case = AttentionCase(
            id="replay",
            kv_lens=kv_lens,
            q_lens=q_lens,
            head_size=config.head_size,
            num_q_heads=config.num_q_heads // tp_size,
            num_kv_heads=kv_heads,
            window=(-1 if not config.sliding_window else config.sliding_window - 1, 0),
            sinks=config.sinks,
        )
        inputs = make_inputs(with_cache(case, cache), "cuda")
        if cache == "fp8":
            store(inputs)
        flash_attn_varlen_func(**inputs)


def store(inputs: dict[str, object]) -> None:
    """As many new keys and values as there are queries."""
    tokens, (pages, page_size, *head) = inputs["q"].shape[0], inputs["k"].shape
    new = torch.randn(tokens, *head, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(tokens, device="cuda") % (pages * page_size)
    reshape_and_cache(new, new, inputs["k"], inputs["v"], slots, "fp8", 0.02, 0.02)


def main() -> None:
    name, tp_size, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    compile_cache.freeze()
    model = read_model(CONFIGS / f"{name}.json")
    for kind in layer_kinds(model, "fp8", "sm_90a", text_only=True):
        replay(kind.config, tp_size, cache)
    torch.cuda.synchronize()
    print("\n".join(unit.name for unit in compile_cache.loaded()))


if __name__ == "__main__":
    main()
