"""Validation of the KV cache's tensors: keys, values, and the scales that belong to them.

The rest of the arguments is checked in ``arguments.py``, whose principles hold here too.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from cute_kernels.formats import NVFP4_GROUP, ScaleLayout

_FP8 = torch.float8_e4m3fn
# What holds pairs of E2M1 codes.
_NVFP4 = torch.uint8
_SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)


def refuse(
    name: str, given: object, accepted: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(f"flash_attn_varlen_func: {name}: got {given}; accepted: {accepted}")


def describe(x: object) -> str:
    if isinstance(x, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in x):
        # Not its repr, which reads tensors from the device.
        return f"a {type(x).__name__} of {len(x)}: {'; '.join(describe(each) for each in x[:4])}"
    if not isinstance(x, torch.Tensor):
        text = repr(x)
        return text if len(text) <= 200 else f"{text[:200]}... ({type(x).__name__})"
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(x.shape)} with strides {tuple(x.stride())} on {x.device}"


def check_last_dim(name: str, x: torch.Tensor) -> None:
    if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
        refuse(name, describe(x), "any strides with a contiguous last dim")


def check_kv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: bool, block_scaled: bool
) -> int:
    """Check q's head counts, k and v, against each other; return Hkv.

    block_scaled: block scales are given, so that bytes are pairs of E2M1 codes.
    """
    form = "(num_blocks, block_size, Hkv, D) with" if paged else "(total_k, Hkv, D) without"
    rank, dtype, device = 4 if paged else 3, q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != rank:
            refuse(name, describe(x), f"{form} block_table")
        if (
            x.dtype is not _FP8
            and x.dtype is not dtype
            and not (x.dtype is _NVFP4 and block_scaled)
        ):
            hint = " (of a uint8 cache: .view(torch.float8_e4m3fn), or nvfp4 and its block scales)"
            hint = hint if x.dtype is torch.uint8 else ""
            refuse(name, describe(x), f"q's dtype, {dtype}, or torch.float8_e4m3fn{hint}")
        if x.device != device:
            refuse(name, describe(x), f"a tensor on q's device, {device}")
        check_last_dim(name, x)
    (_, num_q_heads, head_size), shape = q.shape, k.shape
    if num_q_heads < 1 or head_size < 1:
        refuse("q", describe(q), "Hq >= 1 and D >= 1")
    stored = head_size
    if k.dtype is _NVFP4:
        if head_size % NVFP4_GROUP:
            refuse("q", f"head size {head_size}", f"for nvfp4 a multiple of {NVFP4_GROUP}")
        stored = head_size // 2
    if shape[-1] != stored:
        pairs = "" if stored == head_size else f", in pairs: {stored} bytes"
        refuse("k", f"head size {shape[-1]}", f"q's head size, {head_size}{pairs}")
    if v.shape != shape or v.dtype is not k.dtype:
        refuse("v", describe(v), f"k's shape and dtype, {tuple(shape)} {k.dtype}")
    num_kv_heads = shape[-2]
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        refuse("k", f"{num_kv_heads} KV heads", f"a divisor of q's head count, {num_q_heads}")
    if paged and shape[1] < 1:
        refuse("k", f"block_size {shape[1]}", "block_size >= 1")
    return num_kv_heads


def check_block_scales(
    k: torch.Tensor,
    v: torch.Tensor,
    k_block_scale: torch.Tensor | None,
    v_block_scale: torch.Tensor | None,
    v_scale_layout: str,
) -> None:
    """Check the block scales, which an nvfp4 cache has and no other, against k and v."""
    if v_scale_layout != ScaleLayout.LINEAR.value:
        error = ValueError
        if v_scale_layout == ScaleLayout.SM100.value:
            error = NotImplementedError
        accepted = "'linear' (the swizzled order of SM100 readers is not read)"
        refuse("v_scale_layout", describe(v_scale_layout), accepted, error)
    sides = (("k_block_scale", k_block_scale, k), ("v_block_scale", v_block_scale, v))
    for name, scale, x in sides:
        if x.dtype is not _NVFP4:
            if scale is not None:
                refuse(name, describe(scale), f"None, as a {x.dtype} cache has no block scales")
            continue
        shape = (*x.shape[:-1], x.shape[-1] * 2 // NVFP4_GROUP)
        if (
            not isinstance(scale, torch.Tensor)
            or scale.dtype not in _SCALE_DTYPES
            or scale.shape != shape
            or scale.device != x.device
        ):
            accepted = f"float8_e4m3fn or uint8 {shape} on {x.device}, as {name[0]} is nvfp4"
            refuse(name, describe(scale), accepted)
        check_last_dim(name, scale)


def check_descale(
    name: str, scale: torch.Tensor, cache: torch.Tensor, batch: int, num_kv_heads: int
) -> torch.Tensor:
    """View a descale as (B, Hkv); a vector is always per head, so B == Hkv is not ambiguous."""
    if cache.dtype is not _FP8 and cache.dtype is not _NVFP4:
        refuse(name, describe(scale), f"None, as a {cache.dtype} cache has no scales")
    device = cache.device
    if (
        not isinstance(scale, torch.Tensor)
        or scale.dtype is not torch.float32
        or scale.device != device
    ):
        refuse(name, describe(scale), f"None or a float32 tensor on q's device, {device}")
    shape = scale.shape
    if shape == (batch, num_kv_heads):
        return scale
    if shape in ((), (1,), (num_kv_heads,)):
        return scale.expand(batch, num_kv_heads)
    accepted = f"shape (), (1,), (Hkv,) = ({num_kv_heads},) or (B, Hkv) = {(batch, num_kv_heads)}"
    refuse(name, describe(scale), accepted)
