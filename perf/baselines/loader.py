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

from cute_kernels.arch import device_arch, on_device
from cute_kernels.attention.arguments import AttentionProblem, validate
from cute_kernels.attention.common.operands import UNLIMITED, run_planned
from cute_kernels.attention.decode_sm90 import op
from cute_kernels.attention.decode_sm90.config import (
    TILE_TOKENS,
    DecodeConfig,
    box_tokens_for_page,
    make_config,
)
from cute_kernels.compile.errors import CompilerUnavailableError, UnplannedCompileError
from perf.inputs import InputSet
from perf.providers import varlen_arguments
from perf.timing import Call

ROWS = 8
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def loader_config(head_size: int, q_dtype: str, page_size: int, kv_format: str) -> DecodeConfig:
    """The variant for pages of so many tokens."""
    box = box_tokens_for_page(page_size)
    return make_config(head_size, ROWS, q_dtype, box, loader_only=True, kv_format=kv_format)


def loader_calls(sets: Sequence[InputSet]) -> tuple[Call, ...] | str:
    """A call for each input set, or why there are none."""
    problems = [problem_of(inputs) for inputs in sets]
    for problem in problems:
        if (obstacle := op.can_run(problem)) is not None:
            return obstacle
    try:
        return tuple(_call(problem, inputs) for problem, inputs in zip(problems, sets, strict=True))
    except (CompilerUnavailableError, UnplannedCompileError) as error:
        return f"{error}; `python -m perf.bundle` makes it"


def problem_of(inputs: InputSet) -> AttentionProblem:
    """The same keys for as few rows as there can be."""
    batch, kv_heads = inputs.block_table.shape[0], inputs.k.shape[2]
    few = replace(
        inputs,
        q=inputs.q[:batch, :kv_heads],
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=inputs.q.device),
        max_seqlen_q=1,
    )
    return validate(**varlen_arguments(few))


def config_of(problem: AttentionProblem) -> DecodeConfig:
    head_size, q_dtype = problem.q.shape[2], _DTYPES[problem.q.dtype]
    return loader_config(head_size, q_dtype, problem.k.shape[1], problem.kv_format)


def _call(problem: AttentionProblem, inputs: InputSet) -> Call:
    config = config_of(problem)
    device = problem.q.device
    on_device(device, op.compiled, config, device_arch(device.index).target)
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
