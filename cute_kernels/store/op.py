"""Host side of the store kernels: can they serve a call, and launching them.

No DSL import at module level: ``can_run`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cute_kernels.arch import device_arch, on_device
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.memory import Lattice, lattice, meet
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


def run(call: StoreCall) -> StoreLaunch | None:
    """Launch on key's device and the current stream: no host synchronisation, graph-capturable.

    Returns:
        The launch, which serves other addresses as well; None where there was nothing to do or
        operands were copied.
    """
    if not call.slot_mapping.shape[0] or not call.key[0].numel() or not call.key_cache.numel():
        return None
    slots = call.slot_mapping.contiguous()
    key, value = (aligned(x, slots.shape[0]) for x in (call.key, call.value))
    launch = _plan(call._replace(key=key, value=value, slot_mapping=slots))
    launch.go(key, value, call.key_cache, call.value_cache, slots, call.k_scale, call.v_scale)
    copied = slots is not call.slot_mapping or key is not call.key or value is not call.value
    return None if copied else launch


def _plan(call: StoreCall) -> StoreLaunch:
    device, tokens = call.key.device, call.slot_mapping.shape[0]
    arch = device_arch(device.index)
    config = make_config(call.kv_cache_dtype, _X_DTYPE_NAMES[call.key.dtype], arch.target)
    capacity = call.key_cache.shape[0] * call.key_cache.shape[1]
    claim = None
    unit = CompileUnit(kernel_name(arch.target), config, arch.target)
    function = on_device(device, launcher, unit)
    if tokens > SCANNED_TOKENS:
        claim = on_device(device, launcher, CompileUnit("store_claim", _CLAIM, arch.target))
    return StoreLaunch(
        function,
        claim,
        device,
        side_plan(call.key, call.key_cache, call.k_scale, call.storage),
        side_plan(call.value, call.value_cache, call.v_scale, call.storage),
        _shape(call, tokens, capacity, arch.sm_count),
        tokens,
        capacity,
        lattice(call.key_cache, call.value_cache),
    )


@dataclass(frozen=True)
class StoreLaunch:
    """What is launched for a call, but for the addresses.

    claim: launched before, in long calls; shape: ``kernel.Shape`` without the owner's address.
    lying: how the two caches lie; apart: bytes from the one to the other, found to be right.
    """

    function: Callable
    claim: Callable | None
    device: torch.device
    key: SidePlan
    value: SidePlan
    shape: tuple
    tokens: int
    capacity: int
    lying: Lattice
    apart: set[int] = field(default_factory=set)

    def go(self, key, value, key_cache, value_cache, slots, k_scale, v_scale) -> bool:
        """Launch on the device's current stream; False, and nothing, where ``key`` or ``value``
        do not allow 16-byte loads or the caches overlap."""
        at_key, at_value = key.data_ptr(), value.data_ptr()
        at_key_cache, at_value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        offset = at_value_cache - at_key_cache
        if (at_key | at_value) & 15 or (offset not in self.apart and not self._are_apart(offset)):
            return False
        sides = (
            self.key.at(at_key, at_key_cache, k_scale),
            self.value.at(at_value, at_value_cache, v_scale),
        )
        on_device(self.device, self._go, slots, sides)
        return True

    def _are_apart(self, offset: int) -> bool:
        if meet(offset, self.lying):
            return False
        self.apart.add(offset)  # a model has as many as layers
        return True

    def _go(self, slots: torch.Tensor, sides: tuple[tuple, tuple]) -> None:
        owner = 0
        if self.claim is not None:
            owners = torch.empty(self.capacity, dtype=torch.int32, device=self.device)
            owner = owners.data_ptr()
            self.claim(slots, self.tokens, self.capacity, owner)
        self.function(slots, *sides, (*self.shape[:-1], owner, self.shape[-1]))


def aligned(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """``x`` (16-bit), or a copy of its first rows where they do not allow 16-byte loads."""
    if x.stride(2) == 1 and x.data_ptr() % 16 == 0 and are_multiples(x, 8):
        return x
    return x[:tokens].clone(memory_format=torch.contiguous_format)


def are_multiples(x: torch.Tensor, elements: int) -> bool:
    """Whether all strides but the last are; that of a dim of size 1 says nothing."""
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return not any(size > 1 and stride % elements for size, stride in pairs)


class SidePlan(NamedTuple):
    """``kernel.Side`` of keys or values, but for the addresses.

    block_scale: bytes from the data to the block scales; rows: those allow vector stores where the
    data's address is a multiple of ``alignment``. scale: the stride between heads' scales, and the
    scale where it is a number.
    """

    x: tuple[int, int]
    data: tuple[int, int]
    block_scale: int
    strides: tuple[int, int, int]
    scale: tuple[int, float]
    rows: bool
    alignment: int

    def at(self, x: int, data: int, scale: float | torch.Tensor) -> tuple:
        vector = int(self.rows and data % self.alignment == 0)
        at_scale = scale.data_ptr() if isinstance(scale, torch.Tensor) else 0
        block_scale = data + self.block_scale
        addresses_and_strides = (x, *self.x, data, *self.data, block_scale, *self.strides)
        return (*addresses_and_strides, at_scale, *self.scale, vector)


def side_plan(
    x: torch.Tensor, cache: torch.Tensor, scale: float | torch.Tensor, storage: str
) -> SidePlan:
    if storage == "fp8_e4m3":
        alignment, block_scale, scale_strides = 16, 0, (0, 0)
        data = cache.stride()[1:3]
        rows = are_multiples(cache, alignment)
    else:
        alignment = 8
        _, tokens, heads, row = cache.shape
        groups = row // _NVFP4_BYTES
        scale_strides = tuple(stride * groups for stride in block_order(cache))
        data = tuple(stride * 8 for stride in scale_strides)
        block_scale = tokens * heads * groups * 8
        rows = cache.shape[0] == 1 or cache.stride(0) % alignment == 0
    if isinstance(scale, torch.Tensor):
        of_scale = (4 * scale.stride(0) if scale.numel() > 1 else 0, 0.0)
    else:
        of_scale = (0, float(scale))
    strides = (*scale_strides, cache.stride(0))
    x_strides = (x.stride(0) * 2, x.stride(1) * 2)
    return SidePlan(x_strides, data, block_scale, strides, of_scale, rows, alignment)


def _shape(call: StoreCall, tokens: int, capacity: int, sm_count: int) -> tuple:
    """``kernel.Shape`` of a call, without ``owner``."""
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
