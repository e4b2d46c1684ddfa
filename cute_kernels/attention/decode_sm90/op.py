"""Host side of the SM90 decode kernel: can it run a problem, and launching it.

No DSL import at module level: ``can_run`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from functools import cache

import torch

from cute_kernels.arch import current_device, current_stream, device_arch
from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.attention.common.counters import counters_for
from cute_kernels.attention.decode_sm90.config import (
    HEAD_SIZES,
    TILE_TOKENS,
    DecodeConfig,
    box_tokens_for_page,
    grid_ctas,
    make_config,
    row_bucket,
)
from cute_kernels.compile import bundle
from cute_kernels.compile.cache import KERNELS
from cute_kernels.compile.key import compile_key
from cute_kernels.env import bundle_directories

UNLIMITED = 1 << 30
_Q_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# A CTA with less than this to read costs more in partial results than it saves.
_MIN_BYTES_PER_CTA = 65536
_INT32_MAX = 2**31 - 1


def compile_options(target: str) -> str:
    return f"--enable-tvm-ffi --gpu-arch={target}"


def compiled(config: DecodeConfig, target: str):
    """The launch function of a variant for an architecture: built ahead, or compiled here."""

    def build():
        found = bundle.find(compile_key(config, target)) if bundle_directories() else None
        if found is not None:
            return found
        from cute_kernels.attention.decode_sm90.build import compile_decode

        return compile_decode(config, compile_options(target))

    return KERNELS.get((config, target), build)


def can_run(problem: AttentionProblem) -> str | None:
    """Why the kernel cannot serve this problem, or None; reads shapes and strides only."""
    q, k = problem.q, problem.k
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}, the kernel runs on cuda"
    capability = device_arch(q.device.index).capability
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}, the kernel is for 9.0"
    if k.dtype is not torch.float8_e4m3fn:
        return f"KV dtype {k.dtype}, the kernel reads float8_e4m3fn"
    head_size = q.shape[2]
    if head_size not in HEAD_SIZES:
        return f"head size {head_size}, the kernel has {HEAD_SIZES}"
    if problem.block_table is not None and box_tokens_for_page(k.shape[1]) is None:
        return f"block size {k.shape[1]}, the kernel reads multiples of 16"
    for name, side in (("k", k), ("v", problem.v)):
        if side.data_ptr() % 16:
            return f"{name} at an address that is no multiple of 16"
        for size, stride in zip(side.shape[:-1], side.stride()[:-1], strict=True):
            if size > 1 and stride % 16:
                return (
                    f"{name} with strides {side.stride()}, the kernel needs multiples of 16 bytes"
                )
    if problem.deterministic:
        return "deterministic=True, the kernel's splits follow the whole batch"
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


def run(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launch on q's device and the current stream: no host synchronisation, graph-capturable.

    Writes ``out`` (q's shape and dtype) and, unless None, ``lse`` (Hq, total_q) float32. Rows of
    tokens past cu_seqlens_q[-1] are left as they are.
    """
    index = problem.q.device.index
    if index == current_device():
        _launch(problem, out, lse, index)
    else:
        with torch.cuda.device(index):
            _launch(problem, out, lse, index)


def _launch(problem: AttentionProblem, out, lse, index: int) -> None:
    q = _aligned_queries(problem.q)
    # A copy, not an empty tensor: rows past cu_seqlens_q[-1] must survive the way back.
    contiguous = torch.contiguous_format
    target_out = out if _aligned(out, 4, 8) else out.clone(memory_format=contiguous)
    k, v, paged = problem.k, problem.v, problem.block_table is not None
    if k.numel() == 0:
        k = v = torch.zeros((1, TILE_TOKENS, *k.shape[-2:]), dtype=k.dtype, device=k.device)
        if not paged:
            k, v = k[0], v[0]
    total_q, heads, head_size = q.shape
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    batch = problem.cu_seqlens_q.shape[0] - 1
    page_size = k.shape[1] if paged else k.shape[0]
    config = _config(head_size, problem.max_seqlen_q * group, q.dtype, page_size if paged else None)
    arch = device_arch(index)
    ctas = grid_ctas(config, arch.sm_count)
    workspace = torch.empty(
        2 * ctas * config.rows * (head_size + 1), dtype=torch.float32, device=q.device
    )
    counters = counters_for(q.device, current_stream(index), ctas)
    compiled(config, arch.target)(
        workspace,
        _addresses(problem, q, k, v, target_out, lse, counters),
        _strides(problem, q, k, v, target_out),
        (
            batch,
            total_q,
            kv_heads,
            group,
            -(-(1 << 32) // group),
            k.shape[0] if paged else 1,
            page_size,
            problem.block_table.shape[1] if paged else 1,
            int(paged),
            int(problem.seqused_k is not None),
        ),
        (
            problem.softmax_scale,
            problem.softcap,
            UNLIMITED if problem.window_left < 0 else problem.window_left,
            UNLIMITED if problem.window_right < 0 else problem.window_right,
            ctas,
            max(1, _MIN_BYTES_PER_CTA // (2 * config.stage_bytes)),
        ),
    )
    if target_out is not out:
        out.copy_(target_out)


@cache
def _config(
    head_size: int, packed_rows: int, q_dtype: torch.dtype, page_size: int | None
) -> DecodeConfig:
    box = TILE_TOKENS if page_size is None else box_tokens_for_page(page_size)
    return make_config(head_size, row_bucket(head_size, packed_rows), _Q_DTYPE_NAMES[q_dtype], box)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _addresses(problem: AttentionProblem, q, k, v, out, lse, counters) -> tuple[int, ...]:
    return (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        _address(lse),
        _address(problem.sinks),
        _address(problem.k_descale),
        _address(problem.v_descale),
        problem.cu_seqlens_q.data_ptr(),
        _address(problem.seqused_k),
        _address(problem.cu_seqlens_k),
        _address(problem.block_table),
        counters.data_ptr(),
    )


def _cache_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """(page, token, head) strides in bytes; a dimension of size 1 gets one that TMA accepts."""
    sizes, strides = cache.shape, cache.stride()
    if len(sizes) == 3:
        sizes, strides = (1, *sizes), (16, *strides)
    return tuple(16 if sizes[i] == 1 else strides[i] for i in range(3))


def _strides(problem: AttentionProblem, q, k, v, out) -> tuple[int, ...]:
    table = problem.block_table
    return (
        *q.stride()[:2],
        *_cache_strides(k),
        *_cache_strides(v),
        *out.stride()[:2],
        *((0, 0) if problem.k_descale is None else problem.k_descale.stride()),
        *((0, 0) if problem.v_descale is None else problem.v_descale.stride()),
        1 if table is None else table.stride(0),
    )


def _aligned(x: torch.Tensor, elements: int, address: int) -> bool:
    """Rows of ``x`` start at multiples of ``address`` bytes (strides: of ``elements``)."""
    return (
        x.data_ptr() % address == 0 and x.stride(0) % elements == 0 and x.stride(1) % elements == 0
    )


def _aligned_queries(q: torch.Tensor) -> torch.Tensor:
    """``q``, copied where its rows do not allow 16-byte loads."""
    return q if _aligned(q, 8, 16) else q.clone(memory_format=torch.contiguous_format)
