"""Host side of the SM90 prefill kernel: can it run a problem, and launching it.

No DSL import at module level: ``can_run`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from functools import cache

import torch

from cute_kernels.arch import device_arch, on_device
from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.attention.common.launches import CopyingLaunch, KernelLaunch, WidenedLaunch, packed
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
    copy_counters,
    copying_config,
    head_sizes,
    make_config,
    rows_of,
)
from cute_kernels.attention.widen_sm90.config import WidenConfig, most_copies
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


def item_bound(problem: AttentionProblem, read_format: str = "") -> int:
    """Upper bound of the work items (chunks of rows x KV heads) of a batch. read_format: what the
    kernel reads, if it is not what the cache makes it read."""
    total_q, heads, head_size = problem.q.shape
    kv_heads = problem.k.shape[-2]
    batch = problem.cu_seqlens_q.shape[0] - 1
    rows = total_q * (heads // kv_heads)
    return min(rows, rows // rows_of(head_size, read_format or _read_format(problem)) + batch) * kv_heads


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
            return _plan_copying(problem, *operands, skip_rows, capacity)
        return _plan(problem, *operands, skip_rows)

    return run_planned(problem, out, lse, HALF_TOKENS, plan)


def _plan(problem: AttentionProblem, q, k, v, out, skip_rows: int) -> KernelLaunch:
    page_size = None if problem.block_table is None else k.shape[1]
    config = _config(q.shape[2], q.dtype, k.dtype, page_size)
    arch = device_arch(q.device.index)
    ctas = min(item_bound(problem), arch.sm_count)
    function = on_device(q.device, compiled, config, arch.target)
    arguments = packed(
        operand_strides(problem, q, k, v, out),
        operand_sizes(problem, k),
        (*score_scalars(problem), skip_rows, ctas),
    )
    return KernelLaunch(function, q.device, arguments)


def _plan_copying(
    problem: AttentionProblem, q, k, v, out, skip_rows: int, capacity: int
) -> CopyingLaunch:
    """One kernel makes fp16 copies of k and v and reads them."""
    batch = problem.cu_seqlens_q.shape[0] - 1
    kv_heads, head_size = k.shape[-2], q.shape[2]
    rows = q.shape[0] * (q.shape[1] // kv_heads)
    copies = most_copies(batch, rows, skip_rows)
    arch = device_arch(q.device.index)
    config = copying_config(head_size, _FORMAT_NAMES[q.dtype], problem.kv_format)
    function = on_device(q.device, compiled, config, arch.target)
    ctas = min(item_bound(problem, "fp16"), arch.sm_count)
    arguments = packed(
        operand_strides(problem, q, k, v, out),
        operand_sizes(problem, k),
        (*score_scalars(problem), skip_rows, ctas),
    )
    return CopyingLaunch(
        function,
        q.device,
        arguments,
        2 * kv_heads * copies * capacity * head_size,
        copy_counters(copies, kv_heads, capacity),
        capacity,
        copies,
    )


def _plan_widened(
    problem: AttentionProblem, q, k, v, out, skip_rows: int, capacity: int
) -> WidenedLaunch:
    """Widen k and v, then read the copies, of which only shape and strides matter here."""
    batch = problem.cu_seqlens_q.shape[0] - 1
    kv_heads, head_size = k.shape[-2], q.shape[2]
    rows = q.shape[0] * (q.shape[1] // kv_heads)
    copies = most_copies(batch, rows, skip_rows)
    copy = torch.empty(
        (kv_heads, copies * capacity, head_size), dtype=torch.float16, device="meta"
    ).transpose(0, 1)
    # Any tensor: that it is there says that lengths are.
    ragged = problem._replace(
        k=copy, block_table=None, seqused_k=problem.cu_seqlens_q, k_block_scale=None,
        v_block_scale=None,
    )  # fmt: skip
    attention = _plan(ragged, q, copy, copy, out, skip_rows)
    target = device_arch(q.device.index).target
    unit = CompileUnit("widen_sm90", WidenConfig(head_size, problem.kv_format), target)
    function = on_device(q.device, launcher, unit)
    arguments = packed(operand_strides(problem, q, k, v, out), operand_sizes(problem, k))
    left = score_scalars(problem)[2]
    return WidenedLaunch(
        function,
        q.device,
        arguments,
        attention,
        copy.nbytes,
        batch,
        (capacity, left, skip_rows, copies),
    )


@cache
def _config(
    head_size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int | None
) -> PrefillConfig:
    box = HALF_TOKENS if page_size is None else box_tokens_for_page(page_size)
    return make_config(head_size, _FORMAT_NAMES[q_dtype], box, _FORMAT_NAMES[kv_dtype])
