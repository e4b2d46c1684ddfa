"""Host side of the SM90 prefill kernel: can it run a problem, and launching it.

No DSL import at module level: ``can_run`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from functools import cache

import torch

from cute_kernels.arch import device_arch, on_device
from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.attention.common.launches import KernelLaunch, WidenedLaunch, packed
from cute_kernels.attention.common.operands import (
    cache_obstacle,
    operand_sizes,
    operand_strides,
    run_planned,
    score_scalars,
)
from cute_kernels.attention.decode_sm90.config import box_tokens_for_page
from cute_kernels.attention.prefill_sm90.config import (
    HALF_TOKENS,
    PrefillConfig,
    head_sizes,
    make_config,
    rows_of,
    widened_config,
)
from cute_kernels.attention.widen_sm90.config import counters_of, most_copies
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit

_FORMAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8_e4m3"}
_INT32_MAX = 2**31 - 1


def compiled(config: PrefillConfig, target: str):
    """The launch function of a variant for an architecture: built ahead, or compiled here."""
    return launcher(CompileUnit("prefill_sm90", config, target))


def can_run(problem: AttentionProblem) -> str | None:
    """Why the kernel cannot serve this problem, or None; reads shapes and strides only."""
    q, k = problem.q, problem.k
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}, the kernel runs on cuda"
    capability = device_arch(q.device.index).capability
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}, the kernel is for 9.0"
    head_size = q.shape[2]
    sizes = head_sizes(_read_format(problem))
    if head_size not in sizes:
        return f"head size {head_size}, for a {k.dtype} cache the kernel has {sizes}"
    return cache_obstacle(problem) or cannot_count(problem)


def cannot_count(problem: AttentionProblem) -> str | None:
    """Why the kernel cannot number a batch's rows and items, or None."""
    total_q, heads, _ = problem.q.shape
    group = heads // problem.k.shape[-2]
    if total_q * group * group > _INT32_MAX or item_bound(problem) > _INT32_MAX:
        return f"{total_q} query tokens in groups of {group} heads are too many to count in 32 bits"
    return None


def _read_format(problem: AttentionProblem) -> str:
    """What the kernel reads for a cache: of nvfp4 its fp16 copies."""
    return "fp16" if problem.kv_format == "nvfp4" else problem.kv_format


def item_bound(problem: AttentionProblem) -> int:
    """Upper bound of the work items (chunks of rows x KV heads) of a batch."""
    return _item_bound(problem, rows_of(problem.q.shape[2], _read_format(problem)))


def _item_bound(problem: AttentionProblem, chunk: int) -> int:
    """The same for chunks of so many rows."""
    total_q, heads, _ = problem.q.shape
    kv_heads = problem.k.shape[-2]
    batch = problem.cu_seqlens_q.shape[0] - 1
    rows = total_q * (heads // kv_heads)
    return min(rows, rows // chunk + batch) * kv_heads


def run(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    skip_rows: int = 0,
    capacity: int = 0,
) -> KernelLaunch | None:
    """Launch on q's device and the current stream: no host synchronisation, graph-capturable.

    Writes ``out`` (q's shape and dtype) and, unless None, ``lse`` (Hq, total_q) float32. Rows of
    tokens past cu_seqlens_q[-1] are left as they are, and so are those of sequences with at most
    ``skip_rows`` packed rows (query tokens x GQA group).

    capacity: not 0 where an FP8 or nvfp4 cache is to be widened first: the most keys of a sequence.

    Returns:
        The launch, which serves other addresses as well; None where operands were copied.
    """

    def plan(*operands: torch.Tensor) -> KernelLaunch:
        if capacity:
            return _plan_widened(problem, *operands, skip_rows, capacity)
        return _plan(problem, *operands, skip_rows)

    return run_planned(problem, out, lse, HALF_TOKENS, plan)


def _plan(problem: AttentionProblem, q, k, v, out, skip_rows: int) -> KernelLaunch:
    page_size = None if problem.block_table is None else k.shape[1]
    config = _config(q.shape[2], q.dtype, k.dtype, page_size)
    function, arguments = _launch_of(config, problem, q, k, v, out, skip_rows)
    return KernelLaunch(function, q.device, arguments)


def _plan_widened(
    problem: AttentionProblem, q, k, v, out, skip_rows: int, capacity: int
) -> WidenedLaunch:
    """One kernel makes fp16 copies of k and v and reads them."""
    batch = problem.cu_seqlens_q.shape[0] - 1
    kv_heads, head_size = k.shape[-2], q.shape[2]
    rows = q.shape[0] * (q.shape[1] // kv_heads)
    copies = most_copies(batch, rows, skip_rows)
    config = widened_config(head_size, _FORMAT_NAMES[q.dtype], problem.kv_format)
    function, arguments = _launch_of(config, problem, q, k, v, out, skip_rows)
    return WidenedLaunch(
        function,
        q.device,
        arguments,
        2 * kv_heads * copies * capacity * head_size,
        counters_of(copies, kv_heads, capacity),
        (capacity, copies),
    )


def _launch_of(config: PrefillConfig, problem: AttentionProblem, q, k, v, out, skip_rows: int):
    """A variant's launch function and its arguments past the addresses."""
    arch = device_arch(q.device.index)
    ctas = min(_item_bound(problem, config.rows), arch.sm_count)
    arguments = packed(
        operand_strides(problem, q, k, v, out),
        operand_sizes(problem, k),
        (*score_scalars(problem), skip_rows, ctas),
    )
    return on_device(q.device, compiled, config, arch.target), arguments


@cache
def _config(
    head_size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int | None
) -> PrefillConfig:
    box = HALF_TOKENS if page_size is None else box_tokens_for_page(page_size)
    return make_config(head_size, _FORMAT_NAMES[q_dtype], box, _FORMAT_NAMES[kv_dtype])
