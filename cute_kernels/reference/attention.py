"""Torch reference of `flash_attn_varlen_func`: the full semantics, on CPU and CUDA tensors.

One loop over the sequences; per sequence, and per chunk of its queries where the score matrix would
be large,

    S   = softmax_scale * k_descale * (Q K^T)
    S   = softcap * tanh(S / softcap)                            where softcap > 0
    S   = -inf where the key is not visible
    LSE = log(sum_j exp(S_j) + exp(sink))                        the sink term where there are sinks
    O   = v_descale * sum_j exp(S_j - LSE) V_j

in this order, in float32 where its range suffices for the products of Q and K and for their factor,
else in float64 (softcap as in Gemma 2, https://arxiv.org/abs/2408.00118; sinks as in the gpt-oss
model card, https://arxiv.org/abs/2508.10925: a column of the softmax that has no value). A row that
sees no key gets output 0 and LSE -inf, or the sink's value.

Only keys that some query of the chunk sees are read: slots and pages past a sequence's end, or left
of every window, are excluded by slicing and may hold anything, NaN included. The lengths and the
block table are read on the host, so a call on CUDA tensors synchronises and cannot be captured.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.calls import writing
from cute_kernels.reference.quantize import dequantize_nvfp4

# Upper bound of the elements of one score matrix: 256 MiB in float64.
_MAX_SCORES = 2**25
_SMALLEST_NORMAL, _FAR = 2.0**-126, 2.0**100


class _Sequence(NamedTuple):
    index: int
    q_start: int
    q_len: int
    kv_len: int
    kv_start: int  # ragged: first row in k and v
    pages: list[int]  # paged: a row of the block table


def attention_reference(
    problem: AttentionProblem, compute_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a validated problem.

    Args:
        problem: from `cute_kernels.attention.arguments.validate`.
        compute_dtype: torch.float32, the behaviour of the public function on CPU tensors, or
            torch.float64, for tests: everything is computed and returned in float64, and
            `problem.out` is left alone. Float32 products on a GPU follow torch's TF32 setting.

    Returns:
        out: (total_q, Hq, D) in q's dtype, `problem.out` where that is given. Rows from
            cu_seqlens_q[-1] on keep their contents in a given `out` and are 0 in a new one.
        lse: (Hq, total_q) float32, natural logarithm; rows from cu_seqlens_q[-1] on are -inf.

    Raises:
        ValueError: lengths or page ids, up to a sequence's last page, that no cache could have.
    """
    if compute_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"compute_dtype: got {compute_dtype}; accepted: float32, float64")
    q = problem.q
    if compute_dtype is torch.float64:
        out = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    elif problem.out is not None:
        out = problem.out
    else:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=compute_dtype, device=q.device)
    # Autocast would compute float32 products in 16 bits.
    with torch.autocast(q.device.type, enabled=False), writing(out):
        for sequence in _read_sequences(problem):
            rows = max(1, _MAX_SCORES // (q.shape[1] * max(1, sequence.kv_len)))
            for first in range(0, sequence.q_len, rows):
                last = min(first + rows, sequence.q_len)
                o, row_lse = _attend(problem, sequence, first, last, compute_dtype)
                where = slice(sequence.q_start + first, sequence.q_start + last)
                out[where] = o.to(out.dtype)
                lse[:, where] = row_lse
    return out, lse


def _read_sequences(problem: AttentionProblem) -> list[_Sequence]:
    """Copy lengths and page ids to the host and check what the device code has to trust."""
    q_offsets = problem.cu_seqlens_q.tolist()
    batch = len(q_offsets) - 1
    _check_offsets("cu_seqlens_q", q_offsets, problem.q.shape[0])
    kv_lens = None if problem.seqused_k is None else problem.seqused_k.tolist()
    kv_offsets = [0] * (batch + 1)
    pages: list[list[int]] = [[]] * batch
    if problem.cu_seqlens_k is not None:
        kv_offsets = problem.cu_seqlens_k.tolist()
        rows = None if problem.block_table is not None else problem.k.shape[0]
        _check_offsets("cu_seqlens_k", kv_offsets, rows)
        room = [b - a for a, b in itertools.pairwise(kv_offsets)]
        if kv_lens is None:
            kv_lens = room
        elif problem.block_table is None:
            _check_room(kv_lens, room)
    if problem.block_table is not None:
        pages = problem.block_table.tolist()
    sequences = []
    for i in range(batch):
        q_len = q_offsets[i + 1] - q_offsets[i]
        if kv_lens[i] < 0:
            got = f"sequence {i} has {kv_lens[i]} keys"
            raise ValueError(f"flash_attn_varlen_func: seqused_k: {got}; accepted: >= 0")
        sequences.append(_Sequence(i, q_offsets[i], q_len, kv_lens[i], kv_offsets[i], pages[i]))
        if problem.block_table is not None:
            _check_pages(problem, sequences[-1])
    return sequences


def _check_room(kv_lens: list[int], room: list[int]) -> None:
    """Of ragged keys: those beyond a sequence's own are another's."""
    for i, (n, most) in enumerate(zip(kv_lens, room, strict=True)):
        if n > most:
            raise ValueError(
                f"flash_attn_varlen_func: seqused_k: sequence {i} has {n} keys; accepted: at most "
                f"the {most} that cu_seqlens_k gives it"
            )


def _visible(
    problem: AttentionProblem, sequence: _Sequence, first: int, last: int
) -> tuple[int, int]:
    """The keys [begin, end) that some of the queries [first, last) of a sequence see."""
    left, right = problem.window_left, problem.window_right
    shift = sequence.kv_len - sequence.q_len  # bottom-right alignment
    begin = max(0, first + shift - left) if left >= 0 else 0
    end = min(sequence.kv_len, last + shift + right) if right >= 0 else sequence.kv_len
    return begin, end


def _check_pages(problem: AttentionProblem, sequence: _Sequence) -> None:
    """Of all that the sequence's queries see: nothing has been written yet."""
    begin, end = _visible(problem, sequence, 0, sequence.q_len)
    if sequence.q_len == 0 or end <= begin:
        return
    num_pages, page_size = problem.k.shape[:2]
    first_page, last_page = begin // page_size, -(-end // page_size)
    pages = sequence.pages[first_page:last_page]
    if len(pages) < last_page - first_page or min(pages) < 0 or max(pages) >= num_pages:
        ids = f"ids from 0 to {num_pages - 1}" if num_pages else "ids, but k has no pages"
        raise ValueError(
            f"flash_attn_varlen_func: block_table: sequence {sequence.index} reads "
            f"{sequence.kv_len} keys from pages {pages}; accepted: {last_page - first_page} {ids}"
        )


def _check_offsets(name: str, offsets: list[int], limit: int | None) -> None:
    if offsets[0] < 0 or any(b < a for a, b in itertools.pairwise(offsets)):
        raise ValueError(
            f"flash_attn_varlen_func: {name}: got {offsets}; accepted: non-decreasing offsets >= 0"
        )
    if limit is not None and offsets[-1] > limit:
        got = f"last offset {offsets[-1]}"
        raise ValueError(f"flash_attn_varlen_func: {name}: {got}; accepted: at most {limit} rows")


def _attend(
    problem: AttentionProblem,
    sequence: _Sequence,
    first: int,
    last: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [first, last) of one sequence: O (rows, Hq, D) and LSE (Hq, rows) in `dtype`."""
    num_q_heads, head_size = problem.q.shape[1:]
    num_kv_heads = problem.k.shape[-2]
    group, rows, device = num_q_heads // num_kv_heads, last - first, problem.q.device
    left, right = problem.window_left, problem.window_right
    shift = sequence.kv_len - sequence.q_len  # bottom-right alignment
    begin, end = _visible(problem, sequence, first, last)
    sinks = None if problem.sinks is None else problem.sinks.to(dtype)[:, None].expand(-1, rows)
    if end <= begin:
        o = torch.zeros((rows, num_q_heads, head_size), dtype=dtype, device=device)
        nothing = torch.full((num_q_heads, rows), -math.inf, dtype=dtype, device=device)
        return o, nothing if sinks is None else sinks

    start = sequence.q_start
    # Row r * group + g of KV head h is query r of head h * group + g.
    q = (
        problem.q[start + first : start + last]
        .view(rows, num_kv_heads, group, head_size)
        .transpose(0, 1)
        .reshape(num_kv_heads, -1, head_size)
    )
    k, v = (
        _keys(*side, problem, sequence, begin, end).transpose(0, 1)
        for side in ((problem.k, problem.k_block_scale), (problem.v, problem.v_block_scale))
    )
    factor = _score_factor(problem, sequence)
    result_dtype = dtype
    q, k = q.to(dtype), k.to(dtype)
    if dtype is torch.float32 and not _scores_fit(q, k, factor):
        dtype = torch.float64
        q, k = q.to(dtype), k.to(dtype)
        sinks = None if sinks is None else sinks.to(dtype)
    v = v.to(dtype)

    scores = torch.bmm(q, k.transpose(1, 2)) * factor.to(dtype)
    if problem.softcap > 0.0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.view(num_kv_heads, rows, group, end - begin).transpose(1, 2)
    scores = scores.reshape(num_q_heads, rows, end - begin)
    position = torch.arange(first, last, device=device)[:, None] + shift
    key = torch.arange(begin, end, device=device)
    if right >= 0:
        scores = scores.masked_fill(key > position + right, -math.inf)
    if left >= 0:
        scores = scores.masked_fill(key < position - left, -math.inf)

    top = scores.amax(-1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = torch.where(top == -math.inf, 0.0, top)  # a row without keys: exp(-inf - 0) = 0
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    lse = top + torch.log(total)
    weights /= torch.where(total == 0.0, 1.0, total)[..., None]
    weights = weights.reshape(num_kv_heads, group * rows, end - begin)
    o = torch.bmm(weights, v)
    if problem.v_descale is not None:
        o *= problem.v_descale[sequence.index].to(dtype)[:, None, None]
    o = o.view(num_q_heads, rows, head_size).transpose(0, 1)
    return o.to(result_dtype), lse.to(result_dtype)


def _score_factor(problem: AttentionProblem, sequence: _Sequence) -> torch.Tensor:
    """softmax_scale * k_descale, float64, (Hkv, 1, 1) or 0-d: one float32 factor may be far beyond
    the range that their product is in."""
    scale = torch.full((), problem.softmax_scale, dtype=torch.float64, device=problem.q.device)
    if problem.k_descale is None:
        return scale
    return scale * problem.k_descale[sequence.index].double()[:, None, None]


def _scores_fit(q: torch.Tensor, k: torch.Tensor, factor: torch.Tensor) -> bool:
    """Whether float32 holds the products before and after the factor, and the factor.

    With products below 2^100 and such a factor, what float32 flushes to 0 is below 2^-40 as a
    score. Comparisons with NaN are false.
    """
    largest = q.shape[-1] * math.prod(max(map(abs, map(float, x.aminmax()))) for x in (q, k))
    factors = factor.abs().flatten().tolist()
    in_range = all(f == 0.0 or _SMALLEST_NORMAL <= f < _FAR for f in factors)
    return in_range and largest < _FAR and largest * max(factors) < 2.0**126


def _keys(
    cache: torch.Tensor,
    block_scale: torch.Tensor | None,
    problem: AttentionProblem,
    sequence: _Sequence,
    begin: int,
    end: int,
) -> torch.Tensor:
    """Keys or values as `_gather` gives them; of an nvfp4 cache in float32, block scales applied,
    which is exact."""
    stored = _gather(cache, problem, sequence, begin, end)
    if block_scale is None:
        return stored
    return dequantize_nvfp4(stored, _gather(block_scale, problem, sequence, begin, end), 1.0)


def _gather(
    cache: torch.Tensor, problem: AttentionProblem, sequence: _Sequence, begin: int, end: int
) -> torch.Tensor:
    """Keys or values [begin, end) of one sequence: (end - begin, Hkv, D) in the cache's dtype."""
    if problem.block_table is None:
        return cache[sequence.kv_start + begin : sequence.kv_start + end]
    page_size = cache.shape[1]
    first_page, last_page = begin // page_size, -(-end // page_size)
    pages = sequence.pages[first_page:last_page]
    # As bytes: indexing is not implemented for fp8 on every device.
    bits = cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
    taken = bits[torch.tensor(pages, device=cache.device)].flatten(0, 1)
    offset = first_page * page_size
    return taken[begin - offset : end - offset].view(cache.dtype)
