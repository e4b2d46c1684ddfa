"""A frozen server in small, a process of its own: `python -m tests.compile_cache.replay NAME TP`.

It makes the calls that serving a model of tests/data/configs makes on one of TP devices, and prints
the names of the kernels that these asked for, one a line. Nothing is loaded before the first call,
and no other test of a process has left anything in a cache of prepared calls.
"""

from __future__ import annotations

import itertools
import sys

import torch

from cute_kernels import compile_cache, flash_attn_varlen_func, reshape_and_cache
from kvcache.cli_common import read_model
from kvcache.config import AttentionConfig
from kvcache.models import layer_kinds
from tests.cases import AttentionCase, make_inputs
from tests.kvcache.helpers import CONFIGS

# Decode, verify batches, chunks of prefill, whole prompts.
Q_LENGTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 128, 200, 400, 1500)
KV_LENGTHS = (1, 63, 500)


def replay(config: AttentionConfig, tp_size: int) -> None:
    """The calls of layers of this kind: store the new keys and values, then attend."""
    kv_heads = max(1, config.num_kv_heads // tp_size)
    for q_len, kv_len in itertools.product(Q_LENGTHS, KV_LENGTHS):
        inputs = make_inputs(
            AttentionCase(
                id="replay",
                kv_lens=(kv_len + q_len, q_len, 2 * q_len),
                q_lens=(q_len, 1, q_len),
                head_size=config.head_size,
                num_q_heads=config.num_q_heads // tp_size,
                num_kv_heads=kv_heads,
                window=(-1 if not config.sliding_window else config.sliding_window - 1, 0),
                sinks=config.sinks,
            ),
            "cuda",
        )
        tokens = inputs["q"].shape[0]
        new = torch.randn(tokens, kv_heads, config.head_size, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(tokens, device="cuda")
        slots %= inputs["k"].shape[0] * inputs["k"].shape[1]
        reshape_and_cache(new, new, inputs["k"], inputs["v"], slots, "fp8", 0.02, 0.02)
        flash_attn_varlen_func(**inputs)


def main() -> None:
    name, tp_size = sys.argv[1], int(sys.argv[2])
    compile_cache.freeze()
    model = read_model(CONFIGS / f"{name}.json")
    for kind in layer_kinds(model, "fp8", "sm_90a", text_only=True):
        replay(kind.config, tp_size)
    torch.cuda.synchronize()
    print("\n".join(unit.name for unit in compile_cache.loaded()))


if __name__ == "__main__":
    main()
