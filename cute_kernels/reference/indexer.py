"""Torch definitions of the DeepSeek-V4 indexer's two fused steps, and a reader of its K cache.

Q: RoPE on the last elements of each head, then mxfp4 or fp8 codes, and the head weights with every
factor that the scores need later. K: a window of compressor states becomes one row by a softmax
over the window in each channel, then RMSNorm, RoPE and quantization, and goes to its cache slot
(RMSNorm: https://arxiv.org/abs/1910.07467, RoPE: https://arxiv.org/abs/2104.09864).

Exact to the bit: everything of Q, and of K what follows the bf16 rounding. There each float32
operation is rounded to nearest, none is contracted, no subnormal is flushed, and scales are powers
of two taken from bits. The sums before it (softmax, weighted sum, mean of squares) are float32 in
no fixed order, so that a kernel may round a bf16 element the other way.

Slots, positions and block tables are read on the host: a call on CUDA tensors synchronises.
"""

from __future__ import annotations

import math

import torch

from cute_kernels.calls import check_tensor, writing
from cute_kernels.indexer.arguments import IndexerK, IndexerQ, check_k_cache
from cute_kernels.indexer.formats import IndexerFormat, get_indexer_format
from cute_kernels.numerics import e4m3, ue8m0
from cute_kernels.reference.quantize import (
    check_dtype,
    dequantize_mxfp4,
    largest_magnitude,
    quantize_mxfp4,
)
from cute_kernels.reference.store import rows_to_write

_FP8_MIN_AMAX = 1e-4


def indexer_q(call: IndexerQ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Codes, scales and weights of checked arguments, as `fused_indexer_q_rope_quant` has them.

    Raises:
        ValueError: a position outside cos_sin_cache.
    """
    _check_range("positions", call.positions, call.cos_sin_cache.shape[0])
    rows = rotated(call.index_q, call.cos_sin_cache[call.positions].unsqueeze(1))
    weights = call.index_weights.float()
    if call.use_fp4:
        codes, scales = quantize_mxfp4(rows)
    else:
        codes, scale = quantize_fp8(rows)
        weights, scales = weights * scale, None
    for factor in (call.softmax_scale, call.head_scale):
        weights = weights * _float32(factor, weights)
    return codes, scales, weights


def indexer_k(call: IndexerK) -> None:
    """Write the rows of checked arguments, as `compress_norm_rope_insert` has it.

    Raises:
        ValueError: a live token whose sequence, position or state block does not exist.
    """
    tokens, slots = _live_tokens(call)
    if not tokens.numel():
        return
    values, scales = encoded(k_rows(call, tokens), call.cache_format)
    value_bytes, scale_bytes = split_k_cache(call.k_cache, call.cache_format.name, call.head_size)
    block_size = call.k_cache.shape[1]
    at = slots // block_size, slots % block_size
    with writing(call.k_cache):
        value_bytes[at], scale_bytes[at] = values, scales


def k_rows(call: IndexerK, tokens: torch.Tensor) -> torch.Tensor:
    """The rows that the named tokens complete, before quantization.

    Args:
        tokens: (m,) int64, tokens with (position + 1) % compress_ratio == 0.

    Returns:
        (m, D) float32, rounded to bf16.

    Raises:
        ValueError: as `indexer_k`.
    """
    position = call.positions[tokens]
    rope_position = position // call.compress_ratio * call.compress_ratio
    rounded = f"positions (rounded down to multiples of {call.compress_ratio}, for cos_sin_cache)"
    _check_range(rounded, rope_position, call.cos_sin_cache.shape[0])
    kv, score = _windows(call, tokens, position)
    compressed = (kv * score.softmax(1)).sum(1)
    eps = _float32(call.norm_eps, compressed)
    rms = torch.rsqrt(compressed.square().mean(-1, keepdim=True) + eps)
    normed = compressed * rms * call.norm_weight.float()
    return rotated(normed, call.cos_sin_cache[rope_position]).bfloat16().float()


def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """RoPE on the last elements of each row, in interleaved (GPT-J) pairs, rounded to bf16.

    Args:
        x: (..., D).
        cos_sin: [cos | sin] of the pairs, half each; broadcasts to (..., rope_dim).

    Returns:
        (..., D) float32: [the first elements as they are | the rotated ones, rounded to bf16].
    """
    rope_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.float().chunk(2, -1)
    first, last = x.float().split((x.shape[-1] - rope_dim, rope_dim), -1)
    even, odd = last[..., 0::2], last[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((first, pairs.flatten(-2).bfloat16().float()), -1)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of rows, and a power of two each, rounded up so that no element exceeds 448.

    The scale is 2^ceil(log2(max(amax, 1e-4) / 448)), 2^127 for an infinite amax; a NaN does not
    count in amax and becomes the code 0x7F.

    Args:
        x: (..., D) float32.

    Returns:
        codes: (..., D) float8_e4m3fn.
        scale: (...,) float32.
    """
    amax = largest_magnitude(x).clamp(min=_FP8_MIN_AMAX)
    scale = ue8m0.power_of_two(ue8m0.ceil_exponent(amax / e4m3.MAX))
    return e4m3.encode(x / scale.unsqueeze(-1)).view(torch.float8_e4m3fn), scale


def encoded(rows: torch.Tensor, storage: IndexerFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of cache rows.

    Args:
        rows: (m, D) float32.

    Returns:
        values, scales: uint8, (m, bytes of a row's values) and (m, bytes of its scales).
    """
    if storage.name == "mxfp4":
        return quantize_mxfp4(rows)
    codes, scale = quantize_fp8(rows)
    return codes.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)


def split_k_cache(
    k_cache: torch.Tensor, cache_format: str, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the scales of an indexer K cache, as views.

    Args:
        k_cache: (num_blocks, block_size, row bytes) uint8; the shape is nominal, a block holds all
            values before all scales. The stride between blocks and the storage offset are free.
        cache_format: "mxfp4" or "fp8_e4m3".

    Returns:
        values: uint8 (num_blocks, block_size, D / 2) for mxfp4, (..., D) for fp8_e4m3.
        scales: uint8 (num_blocks, block_size, D / 32), ue8m0, or (..., 4), bytes of a float32.

    Raises:
        ValueError: an argument not as above, or rows of another format's or head size's bytes.
    """
    storage = get_indexer_format(cache_format)
    check_tensor("k_cache", k_cache)
    check_k_cache(k_cache, storage, head_size)
    blocks, tokens, _ = k_cache.shape
    views = []
    offset = k_cache.storage_offset()
    for part in storage.row_parts(head_size):
        stride = (k_cache.stride(0), part, 1)
        views.append(k_cache.as_strided((blocks, tokens, part), stride, offset))
        offset += tokens * part
    return views[0], views[1]


def gather_indexer_k(
    k_cache: torch.Tensor,
    slots: torch.Tensor,
    cache_format: str,
    head_size: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Read rows of an indexer K cache and dequantize them.

    Args:
        k_cache, cache_format, head_size: as in `split_k_cache`.
        slots: (n,) int64; slot s is row s % block_size of block s // block_size. A negative slot
            gives a row of zeros.
        dtype: of the result, exact in float64.

    Returns:
        (n, D).

    Raises:
        ValueError: as `split_k_cache`, or a slot beyond the cache.
    """
    value_bytes, scale_bytes = split_k_cache(k_cache, cache_format, head_size)
    check_tensor("slots", slots)
    check_dtype(dtype)
    if slots.dtype is not torch.int64 or slots.dim() != 1:
        got = f"{slots.dtype} {tuple(slots.shape)}"
        raise ValueError(f"slots: got {got}; accepted: int64 (n,)")
    live = slots >= 0
    chosen = slots[live]
    _check_range("slots", chosen, k_cache.shape[0] * k_cache.shape[1])
    at = chosen // k_cache.shape[1], chosen % k_cache.shape[1]
    values, scales = value_bytes[at], scale_bytes[at]
    out = torch.zeros((slots.shape[0], head_size), dtype=dtype, device=k_cache.device)
    if cache_format == "mxfp4":
        out[live] = dequantize_mxfp4(values, scales, dtype)
    else:
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        out[live] = (e4m3.decode(values).to(exact) * scales.view(torch.float32)).to(dtype)
    return out


def _live_tokens(call: IndexerK) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that complete a row which has a slot, and their slots, each slot once."""
    slots = call.slot_mapping
    position = call.positions[: slots.shape[0]]
    # Position -1, which padding may have, completes nothing, though (-1 + 1) % ratio is 0.
    completes = (position >= 0) & ((position + 1) % call.compress_ratio == 0)
    slots = slots.masked_fill(~completes, -1)
    return rows_to_write(slots, call.k_cache.shape[0] * call.k_cache.shape[1])


def _windows(
    call: IndexerK, tokens: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries and scores (m, window, D) of the tokens' windows; 0 and -inf before position 0."""
    ratio, head_size = call.compress_ratio, call.head_size
    length = (1 + call.overlap) * ratio
    state_block_size, table = call.state_cache.shape[1], call.state_block_table
    # First, because it bounds the window's size: a position is its window's last.
    _check_range("positions // state_block_size", position // state_block_size, table.shape[1])
    back = torch.arange(1 - length, 1, device=position.device)
    at = position.unsqueeze(1) + back
    exists = (at >= 0).unsqueeze(-1)
    # Where a window begins before position 0, it also has that position: nothing more is read.
    at = at.clamp(min=0)
    sequence = call.token_to_seq[tokens].long()
    _check_range("token_to_seq", sequence, table.shape[0])
    block = table[sequence.unsqueeze(1), at // state_block_size].long()
    _check_range("state_block_table", block, call.state_cache.shape[0])
    kv, score = call.state_cache[block, at % state_block_size].chunk(2, -1)
    if call.overlap:
        kv, score = (
            torch.cat((x[:, :ratio, :head_size], x[:, ratio:, head_size:]), 1) for x in (kv, score)
        )
    return torch.where(exists, kv, 0.0), torch.where(exists, score, -math.inf)


def _float32(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _check_range(name: str, x: torch.Tensor, end: int) -> None:
    """That all entries are in [0, end)."""
    if x.numel() and (int(x.min()) < 0 or int(x.max()) >= end):
        raise ValueError(
            f"{name}: got entries from {int(x.min())} to {int(x.max())}; accepted: 0 or more, "
            f"less than {end}"
        )
