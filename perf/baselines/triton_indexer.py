"""Triton baselines of the indexer's fused steps, MXFP4 and FP8.

Plain fused formulations, one program for some heads of a token (Q) and for a token (K, which ends
at once where no row is complete), with the number of heads and warps measured per size
(`triton.autotune`). Rounding to E2M1 by additions, as in our SM90 kernel, in float32: Triton has no
conversion on SM90, and comparisons with seven boundaries take longer.

Bytes of Q are ours but for the sign of a zero that is not rotated; those of K may differ where sums
in another order round a bf16 element the other way. Not built: strides other than dense ones,
repeated slots, head sizes other than 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEAD_SIZE, ROPE_DIM = 128, 64
_Q_CONFIGS = [
    triton.Config({"HEADS": heads}, num_warps=warps)
    for heads, warps in ((2, 1), (4, 1), (8, 2), (8, 4), (16, 4), (32, 4), (32, 8))
]
_K_CONFIGS = [
    triton.Config({"ROWS": rows}, num_warps=warps)
    for rows, warps in ((8, 1), (8, 4), (16, 4), (32, 8), (64, 8))
]


def _time(call, quantiles):
    """Autotuning's measure: 20 ms a configuration instead of 125, which all sizes pay again."""
    return triton.testing.do_bench(call, warmup=4, rep=16, quantiles=quantiles)


@triton.jit
def _e2m1(q):
    """Codes of float32, finite and at most 6."""
    bits = q.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    m = power * 3145728.0 + 4194304.0
    rounded = (tl.abs(q) + m) - m
    code = (rounded * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    return code | ((bits >> 28) & 8)


@triton.jit
def _ceil_exponent(r):
    bits = r.to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def _inverse(biased):
    """2^(127 - biased) for biased from 1 to 253."""
    return ((254 - biased) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fp8(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.autotune(configs=_Q_CONFIGS, key=["tokens", "FP4"], do_bench=_time)
@triton.jit(do_not_specialize=["tokens"])
def q_kernel(  # noqa: PLR0913 - flat operands, as a launch passes them
    positions, q, cos_sin, weights, codes, scales, weights_out, softmax_scale, head_scale, tokens,
    H: tl.constexpr, FP4: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = token * H + head
    x = tl.load(q + row[:, None] * 128 + tl.arange(0, 128)[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEADS, 64, 2)))
    pair = tl.arange(0, 64)
    table = cos_sin + tl.load(positions + token) * 64 + pair - 32
    cos = tl.load(table, pair >= 32, 1.0).to(tl.float32)[None, :]
    sin = tl.load(table + 32, pair >= 32, 0.0).to(tl.float32)[None, :]
    even, odd = _bf16(even * cos - odd * sin), _bf16(odd * cos + even * sin)
    weight = tl.load(weights + row).to(tl.float32)
    larger = tl.maximum(tl.abs(even), tl.abs(odd))
    if FP4:
        amax = tl.max(tl.reshape(larger, (HEADS, 4, 16)), 2)
        biased = _ceil_exponent(tl.maximum(amax, 7.052966104933725e-38) * 0.16666667163372039795)
        inverse = _inverse(biased)[:, :, None]
        low = _e2m1(tl.reshape(even, (HEADS, 4, 16)) * inverse)
        high = _e2m1(tl.reshape(odd, (HEADS, 4, 16)) * inverse)
        packed = tl.reshape((low | high << 4).to(tl.uint8), (HEADS, 64))
        tl.store(codes + row[:, None] * 64 + pair[None, :], packed)
        group = tl.arange(0, 4)
        tl.store(scales + row[:, None] * 4 + group[None, :], biased.to(tl.uint8))
    else:
        amax = tl.maximum(tl.max(larger, 1), 1e-4)
        biased = _ceil_exponent(tl.math.div_rn(amax, 448.0))
        inverse = _inverse(biased)[:, None]
        both = tl.reshape(tl.join(even * inverse, odd * inverse), (HEADS, 128))
        tl.store(codes + row[:, None] * 128 + tl.arange(0, 128)[None, :], _fp8(both))
        weight = weight * (biased << 23).to(tl.float32, bitcast=True)
    tl.store(weights_out + row, weight * softmax_scale * head_scale)


def fused_indexer_q_rope_quant(
    positions, index_q, cos_sin_cache, index_weights, softmax_scale, head_scale, use_fp4=False
):
    """As `cute_kernels.fused_indexer_q_rope_quant`, for dense inputs of head size 128, rope 64."""
    tokens, heads, size = index_q.shape
    device = index_q.device
    weights = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if use_fp4:
        codes = torch.empty((tokens, heads, size // 2), dtype=torch.uint8, device=device)
        scales = torch.empty((tokens, heads, size // 32), dtype=torch.uint8, device=device)
    else:
        codes = torch.empty((tokens, heads, size), dtype=torch.float8_e4m3fn, device=device)
        scales = None
    q_kernel[lambda meta: (tokens, heads // meta["HEADS"])](
        positions, index_q, cos_sin_cache, index_weights, codes.view(torch.uint8), scales, weights,
        softmax_scale, head_scale, tokens, H=heads, FP4=use_fp4,
    )  # fmt: skip
    return codes, scales, weights


@triton.autotune(configs=_K_CONFIGS, key=["tokens", "RATIO", "FP4"], do_bench=_time)
@triton.jit(do_not_specialize=["tokens"])
def k_kernel(  # noqa: PLR0913 - flat operands, as a launch passes them
    state, sequences, positions, slots, table, norm_weight, eps, cos_sin, cache, tokens,
    table_width, state_tokens, block_bytes, block_tokens,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, FP4: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: a token. Blocks of the cache are dense and so are state rows."""
    token = tl.program_id(0)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    if (slot < 0) | ((position + 1) % RATIO != 0):
        return
    width: tl.constexpr = 128 * (1 + OVERLAP)
    window: tl.constexpr = RATIO * (1 + OVERLAP)
    sequence = tl.load(sequences + token)
    channel = tl.arange(0, 128)
    top = tl.full((128,), float("-inf"), tl.float32)
    total = tl.zeros((128,), tl.float32)
    value = tl.zeros((128,), tl.float32)
    for start in range(0, window, ROWS):
        index = start + tl.arange(0, ROWS)
        at = position - window + 1 + index
        exists = (at >= 0) & (index < window)
        block = tl.load(table + sequence * table_width + at // state_tokens, exists, 0)
        row = block.to(tl.int64) * state_tokens + at % state_tokens
        late = tl.where(index >= RATIO, 128 * OVERLAP, 0)
        place = state + (row * 2 * width + late)[:, None] + channel[None, :]
        entries = tl.load(place, exists[:, None], 0.0)
        scores = tl.load(place + width, exists[:, None], float("-inf"))
        new = tl.maximum(top, tl.max(scores, 0))
        reference = tl.where(new == float("-inf"), 0.0, new)
        old = tl.exp(top - reference)
        power = tl.exp(scores - reference[None, :])
        total = total * old + tl.sum(power, 0)
        value = value * old + tl.sum(power * entries, 0)
        top = new
    x = value / total
    x = x * tl.math.rsqrt(tl.sum(x * x, 0) / 128.0 + eps) * tl.load(norm_weight + channel)
    even, odd = tl.split(tl.reshape(x, (64, 2)))
    pair = tl.arange(0, 64)
    rotary = cos_sin + (position + 1 - RATIO) * 64 + pair - 32
    cos = tl.load(rotary, pair >= 32, 1.0)
    sin = tl.load(rotary + 32, pair >= 32, 0.0)
    even, odd = _bf16(even * cos - odd * sin), _bf16(odd * cos + even * sin)
    larger = tl.maximum(tl.abs(even), tl.abs(odd))
    block = cache + slot // block_tokens * block_bytes
    inside = slot % block_tokens
    if FP4:
        amax = tl.max(tl.reshape(larger, (4, 16)), 1)
        biased = _ceil_exponent(tl.maximum(amax, 7.052966104933725e-38) * 0.16666667163372039795)
        inverse = _inverse(biased)[:, None]
        low, high = (
            _e2m1(tl.reshape(even, (4, 16)) * inverse), _e2m1(tl.reshape(odd, (4, 16)) * inverse)
        )  # fmt: skip
        packed = tl.reshape((low | high << 4).to(tl.uint8), (64,))
        tl.store(block + inside * 64 + pair, packed)
        scales = block + block_tokens * 64 + inside * 4 + tl.arange(0, 4)
        tl.store(scales, biased.to(tl.uint8))
    else:
        amax = tl.maximum(tl.max(larger, 0), 1e-4)
        biased = _ceil_exponent(tl.math.div_rn(amax, 448.0))
        inverse = _inverse(biased)
        both = tl.reshape(tl.join(even * inverse, odd * inverse), (128,))
        tl.store(block + inside * 128 + channel, _fp8(both))
        scale = (block + block_tokens * 128 + inside * 4).to(tl.pointer_type(tl.int32))
        tl.store(scale, biased << 23)


def compress_norm_rope_insert(
    state_cache, token_to_seq, positions, slot_mapping, state_block_table, norm_weight, norm_eps,
    cos_sin_cache, k_cache, *, compress_ratio, cache_format,
) -> None:  # fmt: skip
    """As `cute_kernels.compress_norm_rope_insert`, for dense tensors of head size 128, rope 64."""
    overlap = state_cache.shape[2] // (4 * HEAD_SIZE)
    tokens = slot_mapping.shape[0]
    k_kernel[(tokens,)](
        state_cache, token_to_seq, positions, slot_mapping, state_block_table, norm_weight,
        norm_eps, cos_sin_cache, k_cache, tokens, state_block_table.shape[1], state_cache.shape[1],
        k_cache.stride(0), k_cache.shape[1],
        RATIO=compress_ratio, OVERLAP=overlap, FP4=cache_format == "mxfp4",
    )  # fmt: skip
