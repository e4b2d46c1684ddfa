"""The loader of the decode kernel alone: how fast paged K and V come into shared memory.

The same kernel with the same schedule, whose consumers hand each tile back as soon as it has
arrived (``DecodeConfig.loader_only``): a ceiling for whatever attention does with the tiles. Always
the variant of 8 rows, which has the deepest ring, with one query head a KV head and one query token
a sequence, so that each tile is loaded once however many rows a case has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cute_kernels.attention.arguments import AttentionProblem, validate
from cute_kernels.attention.common.operands import UNLIMITED, run_planned
from cute_kernels.attention.decode_sm90 import op
from cute_kernels.attention.decode_sm90.config import TILE_TOKENS, box_tokens_for_page, make_config
from perf.inputs import InputSet
from perf.providers import varlen_arguments
from perf.timing import Call

ROWS = 8


def loader_calls(sets: Sequence[InputSet]) -> tuple[Call, ...]:
    """A call for each input set; none where the kernel cannot run."""
    problems = [_problem(inputs) for inputs in sets]
    if any(op.can_run(problem) is not None for problem in problems):
        return ()
    return tuple(_call(problem, inputs) for problem, inputs in zip(problems, sets, strict=True))


def _problem(inputs: InputSet) -> AttentionProblem:
    """The same keys for as few rows as there can be."""
    batch, kv_heads = inputs.block_table.shape[0], inputs.k.shape[2]
    few = replace(
        inputs,
        q=inputs.q[:batch, :kv_heads],
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=inputs.q.device),
        max_seqlen_q=1,
    )
    return validate(**varlen_arguments(few))


def _call(problem: AttentionProblem, inputs: InputSet) -> Call:
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[problem.q.dtype]
    config = make_config(
        problem.q.shape[2],
        ROWS,
        dtype,
        box_tokens_for_page(problem.k.shape[1]),
        loader_only=True,
        kv_format=problem.kv_format,
    )
    # not written: the output's rows stay as they are
    out = inputs.out[: problem.q.shape[0], : problem.q.shape[1]]

    def call() -> None:
        run_planned(
            problem,
            out,
            None,
            TILE_TOKENS,
            lambda *operands: op.launch_of(problem, *operands, config, (0, UNLIMITED)),
        )

    return call
