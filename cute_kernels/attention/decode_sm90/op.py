"""Host side of the SM90 decode kernel: can it run a problem, and launching it.

No DSL import at module level: ``can_run`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from cute_kernels.arch import device_arch, on_device
from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.attention.common.launches import Launch, SplitKvLaunch, packed, together
from cute_kernels.attention.common.operands import (
    UNLIMITED,
    cache_obstacle,
    operand_sizes,
    operand_strides,
    run_planned,
    score_scalars,
)
from cute_kernels.attention.decode_sm90.config import (
    HEAD_SIZES,
    TILE_TOKENS,
    DecodeConfig,
    box_tokens_for_page,
    make_config,
    row_bucket,
    row_buckets,
)
from cute_kernels.attention.decode_sm90.grid import FixedSplits, fixed_splits, grid_ctas
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit

_Q_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# A CTA with less than this to read costs more in partial results than it saves.
_MIN_BYTES_PER_CTA = 65536
# Beginning an item costs as much as so many steps of it (H200, log-normal lengths: 0, 1, 2, 4 and
# 6 tiles at head size 512 took 271, 258, 254 and 254 us, 0, 1, 2, 4, 8 and 12 at 128 took 159, 152,
# 141, 138, 139 and 140; at 64 4 is best). Where warps are apart and steps have one tile, as much as
# four (2, 4, 6 and 8 at head size 64: 77.3, 72.0, 71.9 and 71.8 us; of NVFP4 66.4 with 2, 58.2).
_STEPS_TO_BEGIN = 2
_INT32_MAX = 2**31 - 1


def compiled(config: DecodeConfig, target: str) -> Callable:
    """The launch function of a variant for an architecture: loaded, or compiled here."""
    return launcher(CompileUnit("decode_sm90", config, target))


def can_run(problem: AttentionProblem) -> str | None:
    """Why the kernel cannot serve this problem, or None; reads shapes and strides only."""
    q = problem.q
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}, the kernel runs on cuda"
    capability = device_arch(q.device.index).capability
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}, the kernel is for 9.0"
    head_size = q.shape[2]
    if head_size not in HEAD_SIZES:
        return f"head size {head_size}, the kernel has {HEAD_SIZES}"
    obstacle = cache_obstacle(problem)
    if obstacle is not None:
        return obstacle
    if _tile_bound(problem) > _INT32_MAX:
        return "more than 2^31 key tiles over all query rows of the batch"
    return None


def _tile_bound(problem: AttentionProblem) -> int:
    """Upper bound of (chunks x key tiles x KV heads) over the batch."""
    total_q, heads, head_size = problem.q.shape
    kv_heads = problem.k.shape[-2]
    batch = problem.cu_seqlens_q.shape[0] - 1
    rows = row_bucket(head_size, problem.max_seqlen_q * (heads // kv_heads))
    chunks = total_q * (heads // kv_heads) // rows + batch
    if problem.block_table is None:
        keys = problem.k.shape[0]
    else:
        keys = problem.block_table.shape[1] * problem.k.shape[1]
    return chunks * (keys // TILE_TOKENS + 1) * kv_heads


def run(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    max_rows: int = UNLIMITED,
) -> Launch | None:
    """Launch on q's device and the current stream: no host synchronisation, graph-capturable.

    Writes ``out`` (q's shape and dtype) and, unless None, ``lse`` (Hq, total_q) float32. Rows of
    tokens past cu_seqlens_q[-1] are left as they are, and so are those of sequences with more than
    ``max_rows`` packed rows (query tokens x GQA group).

    Returns:
        The launch, which serves other addresses as well; None where operands were copied.
    """
    total_q, heads, head_size = problem.q.shape
    ranges = [(0, max_rows)]
    if problem.deterministic:
        group, batch = heads // problem.k.shape[-2], problem.cu_seqlens_q.shape[0] - 1
        ranges = row_ranges(head_size, group, batch, total_q, problem.max_seqlen_q, max_rows)
    return together(
        [
            run_planned(problem, out, lse, TILE_TOKENS, partial(_plan, problem, each))
            for each in ranges
        ]
    )


def row_ranges(
    head_size: int, group: int, batch: int, total_q: int, max_seqlen_q: int, max_rows: int
) -> list[tuple[int, int]]:
    """(more than, at most): the packed rows of each launch's sequences, where bits must not depend
    on the batch: a sequence is served by the variant of its own rows then, and not of the longest.
    """
    most = min(max_seqlen_q * group, max_rows)
    if batch * max_seqlen_q <= total_q:  # all have as many
        return [(0, max_rows)]
    ranges, low = [], 0
    for bucket in row_buckets(head_size):
        last = bucket >= most or bucket == row_buckets(head_size)[-1]
        high = max_rows if last else bucket
        if low < most and high // group > low // group:
            ranges.append((low, high))
        low = bucket
    return ranges


def _plan(problem: AttentionProblem, row_range: tuple[int, int], q, k, v, out) -> SplitKvLaunch:
    heads, head_size = q.shape[1:]
    page_size = None if problem.block_table is None else k.shape[1]
    packed_rows = min(problem.max_seqlen_q * (heads // k.shape[-2]), row_range[1])
    config = _config(head_size, packed_rows, q.dtype, page_size, problem.kv_format)
    return launch_of(problem, q, k, v, out, config, row_range)


def launch_of(
    problem: AttentionProblem, q, k, v, out, config: DecodeConfig, row_range: tuple[int, int]
) -> SplitKvLaunch:
    """The launch of a variant for the sequences with so many packed rows, see ``row_ranges``."""
    arch = device_arch(q.device.index)
    abreast = heads_abreast(config, k.shape[-2])
    ctas = grid_ctas(config, arch.sm_count)
    ctas = ctas - ctas % abreast
    min_tiles = max(1, _MIN_BYTES_PER_CTA // (2 * config.tile_bytes))
    gap = 4 if config.warps_apart else _STEPS_TO_BEGIN * config.step_tiles
    fixed = fixed_splits(config, k.shape[-2]) if problem.deterministic else FixedSplits()
    function = on_device(q.device, compiled, config, arch.target)
    arguments = packed(
        operand_strides(problem, q, k, v, out),
        operand_sizes(problem, k),
        (*score_scalars(problem), ctas, min_tiles, gap, *row_range, *fixed, abreast),
    )
    workspace = max(2, fixed.splits + 1) * ctas * config.rows * (config.head_size + 2)
    return SplitKvLaunch(function, q.device, arguments, workspace, ctas)


def heads_abreast(config: DecodeConfig, kv_heads: int) -> int:
    """How many neighbouring KV heads are read in step by CTAs side by side (``heads_in_line``).

    Whatever the strides are: how keys are split, and so the bits, must not depend on them.
    """
    wanted = config.heads_in_line
    while kv_heads % wanted:
        wanted //= 2
    return wanted


@cache
def _config(
    head_size: int,
    packed_rows: int,
    q_dtype: torch.dtype,
    page_size: int | None,
    kv_format: str,
) -> DecodeConfig:
    box = TILE_TOKENS if page_size is None else box_tokens_for_page(page_size)
    rows = row_bucket(head_size, packed_rows)
    return make_config(head_size, rows, _Q_DTYPE_NAMES[q_dtype], box, kv_format=kv_format)
