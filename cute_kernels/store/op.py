"""Host side of the store kernels: can they serve a call, and launching them.

No DSL import at module level: ``can_run`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.arch import current_device, device_arch
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.reference.store import block_order
from cute_kernels.store.config import (
    BOTH_SIDES_THREADS,
    GROUP,
    SCANNED_TOKENS,
    TARGETS,
    ClaimConfig,
    kernel_name,
    make_config,
)

_X_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_NVFP4_BYTES = 9  # of a group: 8 of codes, 1 of scale
_INT32_MAX = 2**31 - 1
_CLAIM = ClaimConfig()


class StoreCall(NamedTuple):
    """A checked call of `reshape_and_cache` and its storage format ("fp8_e4m3", "nvfp4")."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    kv_cache_dtype: str
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    v_scale_layout: str
    storage: str


def can_run(call: StoreCall) -> str | None:
    """Why the kernels cannot serve this call, or None; reads shapes and strides only."""
    key = call.key
    if key.device.type != "cuda":
        return f"tensors are on {key.device.type}, the kernels run on cuda"
    arch = device_arch(key.device.index)
    if arch.target not in TARGETS:
        major, minor = arch.capability
        return f"compute capability {major}.{minor}, the kernels are compiled for {TARGETS}"
    if key.shape[2] % GROUP:
        return f"head size {key.shape[2]}, the kernels take multiples of {GROUP}"
    blocks, block_size = call.key_cache.shape[:2]
    if blocks * block_size > _INT32_MAX:
        return f"{blocks * block_size} slots, the kernels count to 2^31"
    if call.slot_mapping.shape[0] * key.shape[1] * (key.shape[2] // GROUP) > _INT32_MAX:
        return "more than 2^31 groups of 16 elements"
    for name in ("key", "value", "key_cache", "value_cache"):
        x = getattr(call, name)
        # The stride between pages is a 64-bit number, all others are 32-bit ones.
        strides = x.stride() if name in ("key", "value") else x.stride()[1:]
        if max(strides) * x.element_size() > _INT32_MAX:
            return f"{name} with strides {x.stride()}: beyond 2^31 bytes within a page or token"
    return None


def run(call: StoreCall) -> None:
    """Launch on key's device and the current stream: no host synchronisation, graph-capturable."""
    if not call.slot_mapping.shape[0] or not call.key[0].numel() or not call.key_cache.numel():
        return
    index = call.key.device.index
    if index == current_device():
        _launch(call, index)
    else:
        with torch.cuda.device(index):
            _launch(call, index)


def _launch(call: StoreCall, index: int) -> None:
    target = device_arch(index).target
    config = make_config(call.kv_cache_dtype, _X_DTYPE_NAMES[call.key.dtype], target)
    slots = call.slot_mapping.contiguous()
    capacity = call.key_cache.shape[0] * call.key_cache.shape[1]
    tokens = slots.shape[0]
    key, value = (_aligned(x, tokens) for x in (call.key, call.value))
    sides = (
        _side(key, call.key_cache, call.k_scale, call.storage),
        _side(value, call.value_cache, call.v_scale, call.storage),
    )
    owner = None
    if tokens > SCANNED_TOKENS:
        owner = torch.empty(capacity, dtype=torch.int32, device=slots.device)
        claim = launcher(CompileUnit("store_claim", _CLAIM, target))
        claim(slots, tokens, capacity, owner.data_ptr())
    launch = launcher(CompileUnit(kernel_name(target), config, target))
    launch(slots, *sides, _shape(call, tokens, capacity, owner, device_arch(index).sm_count))


def _aligned(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """``x``, or a copy of its first rows where they do not allow 16-byte loads."""
    aligned = x.stride(2) == 1 and x.data_ptr() % 16 == 0 and are_multiples(x, 8)
    return x if aligned else x[:tokens].clone(memory_format=torch.contiguous_format)


def are_multiples(x: torch.Tensor, elements: int) -> bool:
    """Whether all strides but the last are; that of a dim of size 1 says nothing."""
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return not any(size > 1 and stride % elements for size, stride in pairs)


def _side(x: torch.Tensor, cache: torch.Tensor, scale: float | torch.Tensor, storage: str) -> tuple:
    """``kernel.Side`` of keys or values."""
    data = data_token = data_head = block_scale = scale_token = scale_head = 0
    if storage == "fp8_e4m3":
        data, data_token, data_head = cache.data_ptr(), *cache.stride()[1:3]
        aligned = data % 16 == 0 and are_multiples(cache, 16)
    else:
        _, tokens, heads, row = cache.shape
        token, head = block_order(cache)
        groups = row // _NVFP4_BYTES
        data, data_token, data_head = cache.data_ptr(), token * groups * 8, head * groups * 8
        block_scale = data + tokens * heads * groups * 8
        scale_token, scale_head = token * groups, head * groups
        aligned = data % 8 == 0 and (cache.shape[0] == 1 or cache.stride(0) % 8 == 0)
    at, head, value = 0, 0, 0.0
    if isinstance(scale, torch.Tensor):
        at = scale.data_ptr()
        head = 4 * scale.stride(0) if scale.numel() > 1 else 0
    else:
        value = float(scale)
    return (
        x.data_ptr(),
        x.stride(0) * 2,
        x.stride(1) * 2,
        data,
        data_token,
        data_head,
        block_scale,
        scale_token,
        scale_head,
        cache.stride(0),
        at,
        head,
        value,
        int(aligned),
    )


def _shape(
    call: StoreCall, tokens: int, capacity: int, owner: torch.Tensor | None, sm_count: int
) -> tuple:
    """``kernel.Shape`` of a call."""
    _, heads, head_size = call.key.shape
    groups = head_size // GROUP
    swizzled = call.v_scale_layout == "sm100"
    return (
        tokens,
        divisor(heads * groups),
        divisor(groups),
        divisor(call.key_cache.shape[1]),
        divisor(groups // 4) if swizzled else (0, 0, 0),
        capacity,
        0 if owner is None else owner.data_ptr(),
        int(tokens * heads * groups >= BOTH_SIDES_THREADS * sm_count),
    )


def divisor(d: int) -> tuple[int, int, int]:
    """``kernel.Divisor`` of 1 <= d < 2^31: n // d for 0 <= n < 2^31 without a division.

    With 2^(s-1) < d <= 2^s and m = ceil(2^(31+s) / d), n * m >> (31 + s) is exact: m exceeds the
    quotient by less than 1, so n * m / 2^(31+s) exceeds n / d by less than 2^-s <= 1 / d. m lies
    in [2^31, 2^32) and is passed as a signed word.
    """
    s = (d - 1).bit_length()
    m = -(-(1 << 31 + s) // d)
    return d, m - (1 << 32), s
