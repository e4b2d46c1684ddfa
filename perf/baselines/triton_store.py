"""Triton baseline: quantize new keys and values into a paged fp8 or nvfp4 cache.

A plain formulation that is bandwidth-bound where Triton's code allows it: one program quantizes a
tile of groups of 16 elements of K or V, rows and addresses by integer division, codes by comparison
with the boundaries of E2M1 (Triton has no conversion to it on SM90). The same bytes as ours but
where the errors of 4 and 6 differ by rounding: Triton sums them in another order.

Not built: swizzled V scales, per-head scales, `nvfp4_mse`, slots that repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cute_kernels.reference.store import split_nvfp4

DTYPES = ("fp8", "nvfp4", "nvfp4_4over6")
GROUP = 16
# Groups of a program and warps, the fastest of a few on the H200 (`perf/NOTES.md`).
BLOCK, WARPS = 256, 4


@triton.jit
def _e2m1(q):
    """Codes without sign of |q|."""
    a = tl.abs(q)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    return code + (a > 5.0).to(tl.int32)


@triton.jit
def _value(code):
    """Magnitudes of codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    c = code.to(tl.float32)
    return tl.maximum(tl.maximum(c * 0.5, c - 2.0), c * 2.0 - 8.0)


@triton.jit
def _trial(x, inverse_d, scale, inverse_scale):
    amax = tl.max(tl.abs(x), 1)
    sf = ((amax * inverse_d) * inverse_scale).to(tl.float8e4nv)
    decode = sf.to(tl.float32) * scale
    encode = tl.where(decode > 0.0, tl.math.div_rn(1.0, decode), 0.0)
    q = x * encode[:, None]
    code = _e2m1(q)
    delta = _value(code) * decode[:, None] - tl.abs(x)
    return sf, code | ((q.to(tl.int32, bitcast=True) >> 31) & 1) << 3, tl.sum(delta * delta, 1)


@triton.jit
def store_kernel(  # noqa: PLR0913 - flat operands, as a launch passes them
    key, value, k_data, v_data, k_block_scale, v_block_scale, slots, k_scale, v_scale,
    groups, head_groups, page_tokens, x_token, x_head, page, data_token, data_head,
    scale_token, scale_head, token_groups,
    FP8: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK groups of K (axis 1 is 0) or V. Strides in elements, of caches bytes."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < groups
    token, rest = item // token_groups, item % token_groups
    head, group = rest // head_groups, rest % head_groups
    slot = tl.load(slots + token, inside, -1)
    inside &= slot >= 0
    if tl.program_id(1) == 0:
        x_base, data, block_scale, scale_at = key, k_data, k_block_scale, k_scale
    else:
        x_base, data, block_scale, scale_at = value, v_data, v_block_scale, v_scale
    lane = tl.arange(0, 16)
    at = token.to(tl.int64) * x_token + head * x_head + group * 16
    x = tl.load(x_base + at[:, None] + lane[None, :], inside[:, None], 0.0).to(tl.float32)
    scale = tl.load(scale_at)
    inverse = tl.math.div_rn(1.0, scale)
    row = slot // page_tokens * page
    in_page = (slot % page_tokens) * data_token + head * data_head
    if FP8:
        codes = (x * inverse).to(tl.float8e4nv)
        to = data + (row + in_page + group * 16)[:, None] + lane[None, :]
        tl.store(to, codes.to(tl.uint8, bitcast=True), inside[:, None])
    else:
        sf, code, error = _trial(x, 0.16666667163372039795, scale, inverse)
        if FOUR_OVER_SIX:
            sf4, code4, error4 = _trial(x, 0.25, scale, inverse)
            better = error4 < error
            sf = tl.where(better, sf4.to(tl.uint8, bitcast=True), sf.to(tl.uint8, bitcast=True))
            code = tl.where(better[:, None], code4, code)
        else:
            sf = sf.to(tl.uint8, bitcast=True)
        low, high = tl.split(tl.reshape(code, (BLOCK, 8, 2)))
        to = data + (row + in_page + group * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(to, (low | high << 4).to(tl.uint8), inside[:, None])
        in_page = (slot % page_tokens) * scale_token + head * scale_head
        tl.store(block_scale + row + in_page + group, sf, inside)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """As `cute_kernels.reshape_and_cache`, for scales in tensors of one element, K and V of equal
    strides, and distinct slots within the capacity or -1."""
    fp8 = kv_cache_dtype == "fp8"
    if fp8:
        k_parts, v_parts = ((x.view(torch.uint8),) * 2 for x in (key_cache, value_cache))
    else:
        k_parts, v_parts = (
            [part.view(torch.uint8) for part in split_nvfp4(x)] for x in (key_cache, value_cache)
        )
    tokens, (_, heads, size) = slot_mapping.shape[0], key.shape
    head_groups = size // GROUP
    groups = tokens * heads * head_groups
    data, block_scale = k_parts
    store_kernel[(triton.cdiv(groups, BLOCK), 2)](
        key, value, k_parts[0], v_parts[0], k_parts[1], v_parts[1], slot_mapping, k_scale, v_scale,
        groups, head_groups, key_cache.shape[1], key.stride(0), key.stride(1), data.stride(0),
        data.stride(1), data.stride(2), block_scale.stride(1), block_scale.stride(2),
        heads * head_groups,
        FP8=fp8, FOUR_OVER_SIX=kv_cache_dtype == "nvfp4_4over6", BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
