"""Host side of the indexer's kernels: can they serve a call, and launching them.

A launch is prepared once for calls that differ in addresses only (`prepared.py` keeps them). No DSL
import at module level: ``why_not`` serves planners and CPU-only machines too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.arch import current_stream, device_arch, on_device
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.counters import counters_for
from cute_kernels.indexer.arguments import IndexerK, IndexerQ
from cute_kernels.indexer.config import (
    CHUNK,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    Q_THREADS,
    TARGETS,
    TURNS,
    Table,
    k_config,
    kernel_name,
    q_config,
)
from cute_kernels.indexer.formats import HEAD_MULTIPLE
from cute_kernels.store.op import are_multiples, divisor

_INT32_MAX = 2**31 - 1


def why_not(call: IndexerQ | IndexerK) -> str | None:
    """Why the kernels cannot serve this call, or None; reads shapes only."""
    if call.positions.device.type != "cuda":
        return f"tensors are on {call.positions.device.type}, the kernels run on cuda"
    arch = device_arch(call.positions.device.index)
    if arch.target not in TARGETS:
        major, minor = arch.capability
        return f"compute capability {major}.{minor}, the kernels are compiled for {TARGETS}"
    if call.head_size > MAX_HEAD_SIZE:
        return f"head size {call.head_size}, the kernels take up to {MAX_HEAD_SIZE}"
    if call.cos_sin_cache.shape[0] == 0:
        return "cos_sin_cache without any position"
    return _why_not_q(call) if isinstance(call, IndexerQ) else _why_not_k(call)


def _why_not_q(call: IndexerQ) -> str | None:
    tokens, heads, head_size = call.index_q.shape
    if tokens > _INT32_MAX or heads * head_size > _INT32_MAX or heads > MAX_HEADS:
        return f"index_q {tuple(call.index_q.shape)}: beyond 2^31 elements a token or 2^16 heads"
    return None


def _why_not_k(call: IndexerK) -> str | None:
    for name in ("state_cache", "state_block_table"):
        if getattr(call, name).numel() == 0:
            return f"{name} is empty"
    blocks, block_size = call.k_cache.shape[:2]
    if blocks * block_size > _INT32_MAX or call.slot_mapping.shape[0] > _INT32_MAX:
        return "slots or tokens beyond 2^31"
    if call.state_block_table.shape[1] * call.state_cache.shape[1] > _INT32_MAX:
        return "state_block_table with positions beyond 2^31"
    return None


class QLaunch(NamedTuple):
    """A launch of Q but for the addresses.

    heads: (T, H). codes: their dtype and shape. scales: their shape, None for none. table_bytes:
    what the address of cos_sin_cache has to be a multiple of.
    """

    function: Callable[..., None]
    device: torch.device
    heads: tuple[int, int]
    codes: tuple[torch.dtype, tuple[int, ...]]
    scales: tuple[int, ...] | None
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    factors: tuple[float, float]
    table_bytes: int

    def go(
        self, positions, index_q, cos_sin_cache, index_weights
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None:
        """Launch on the device's current stream; None where addresses are not as aligned."""
        at_q, at_table = index_q.data_ptr(), cos_sin_cache.data_ptr()
        if at_q % (2 * CHUNK) or at_table % self.table_bytes:
            return None
        return on_device(self.device, self._go, positions, at_q, at_table, index_weights)

    def _go(
        self, positions: torch.Tensor, at_q: int, at_table: int, index_weights
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        dtype, shape = self.codes
        codes = torch.empty(shape, dtype=dtype, device=self.device)
        weights = torch.empty(self.heads, dtype=torch.float32, device=self.device)
        scales, at_scales = None, 0
        if self.scales is not None:
            scales = torch.empty(self.scales, dtype=torch.uint8, device=self.device)
            at_scales = scales.data_ptr()
        addresses = (
            positions.data_ptr(), at_q, at_table, index_weights.data_ptr(),
            codes.data_ptr(), at_scales,
        )  # fmt: skip
        self.function(weights, addresses, self.strides, self.sizes, self.factors)
        return codes, scales, weights


def table_kind(x: torch.Tensor, multiple: bool) -> tuple[Table, int]:
    """How a kernel reads rows of a table, and the bytes that their addresses are multiples of.

    multiple: whether what it reads at once begins at multiples of 4 numbers of each row.
    """
    bf16, size = x.dtype is torch.bfloat16, x.element_size()
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    if not multiple or rows.stride(1) != 1 or not are_multiples(rows, 4):
        return (Table.BF16 if bf16 else Table.FLOAT32), size
    return (Table.BF16_AT_ONCE if bf16 else Table.FLOAT32_AT_ONCE), 4 * size


def prepare_q(call: IndexerQ) -> QLaunch:
    """What launches calls like this one, whose index_q allows 16-byte loads."""
    tokens, heads, head_size = call.index_q.shape
    device = call.index_q.device
    arch = device_arch(device.index)
    storage = call.cache_format
    groups, pairs = head_size // HEAD_MULTIPLE, call.cos_sin_cache.shape[1] // 2
    rows_per_sm = tokens * heads / arch.sm_count
    config = q_config(storage, head_size, pairs, rows_per_sm, arch.target)
    half = (groups + 1) // 2 * HEAD_MULTIPLE
    team = (half // CHUNK - 1).bit_length()
    kind, table_bytes = table_kind(call.cos_sin_cache, pairs % 4 == 0)
    if call.cos_sin_cache.data_ptr() % table_bytes:
        kind, table_bytes = table_kind(call.cos_sin_cache, False)
    heads_of_cta = (Q_THREADS >> team) * config.heads_per_thread
    weight_size = call.index_weights.element_size()
    table_size = call.cos_sin_cache.element_size()
    strides = (
        8 * call.positions.stride(0),
        *(2 * stride for stride in call.index_q.stride()[:2]),
        *(table_size * stride for stride in call.cos_sin_cache.stride()),
        *(weight_size * stride for stride in call.index_weights.stride()),
    )
    sizes = (
        tokens,
        heads,
        groups,
        pairs,
        team,
        -(-heads // heads_of_cta),
        int(head_size - 2 * pairs < half),
        # One group has no second half: those chunks then repeat the last of the first.
        int(head_size - 2 * pairs > half or groups == 1),
        call.cos_sin_cache.shape[0] - 1,
        int(kind),
        int(call.index_weights.dtype is torch.bfloat16),
    )
    function = _compiled(kernel_name("q", arch.target), config, device, arch.target)
    if call.use_fp4:
        codes, scales = (torch.uint8, (tokens, heads, head_size // 2)), (tokens, heads, groups)
    else:
        codes, scales = (torch.float8_e4m3fn, (tokens, heads, head_size)), None
    factors = (call.softmax_scale, call.head_scale)
    return QLaunch(
        function, device, (tokens, heads), codes, scales, strides, sizes, factors, table_bytes
    )


class KLaunch(NamedTuple):
    """A launch of K but for the addresses: what follows them in the groups of `k_kernel`.

    vectors, aligned: whether the state's and the cache's strides allow wide accesses. state_bytes:
    what the state's address has to be a multiple of. norm_kind: a `Table`, for an address that is a
    multiple of norm_bytes and for another.
    """

    function: Callable[..., None]
    device: torch.device
    capacity: int
    buckets: int
    tokens: tuple[int, ...]
    state: tuple[Any, ...]
    vectors: bool
    state_bytes: int
    table: tuple[int, ...]
    rotary: tuple[int, ...]
    norm: tuple[Any, ...]
    norm_kind: tuple[int, int]
    norm_bytes: int
    cache: tuple[Any, ...]
    aligned: bool

    def go(self, state_cache: torch.Tensor, *tensors: torch.Tensor) -> bool:
        """Launch on the device's current stream, tensors as `_go` names them; False where the
        state's address is not as aligned."""
        if state_cache.data_ptr() % self.state_bytes:
            return False
        on_device(self.device, self._go, state_cache, *tensors)
        return True

    def _go(
        self, state_cache, token_to_seq, positions, slot_mapping, state_block_table, norm_weight,
        cos_sin_cache, k_cache,
    ) -> None:  # fmt: skip
        slots = slot_mapping.contiguous()
        count, span, position, sequence, ratio = self.tokens
        claims = 0
        if self.buckets:
            stream = current_stream(self.device.index)
            claims = counters_for(self.device, stream, TURNS + 2 * self.buckets).data_ptr()
        at_state, at_cache = state_cache.data_ptr(), k_cache.data_ptr()
        at_norm = norm_weight.data_ptr()
        vector = int(self.vectors and at_state % 16 == 0)
        self.function(
            slots,
            (
                count,
                span,
                positions.data_ptr(),
                position,
                token_to_seq.data_ptr(),
                sequence,
                ratio,
                self.capacity,
            ),
            (claims, self.buckets),
            (at_state, vector, *self.state, state_block_table.data_ptr(), *self.table),
            (cos_sin_cache.data_ptr(), *self.rotary),
            (at_norm, int(self.norm_kind[at_norm % self.norm_bytes != 0]), *self.norm),
            (at_cache, int(self.aligned and at_cache % 4 == 0), *self.cache),
        )


def prepare_k(call: IndexerK) -> KLaunch:
    """What launches calls like this one."""
    device, head_size = call.k_cache.device, call.head_size
    arch = device_arch(device.index)
    window, count = (1 + call.overlap) * call.compress_ratio, call.slot_mapping.shape[0]
    state = call.state_cache
    extent = sum((n - 1) * stride for n, stride in zip(state.shape, state.stride(), strict=True))
    dense = state.stride(2) == 1 and are_multiples(state, 4) and 4 * extent < 2**36
    wide = dense and state.data_ptr() % 16 == 0
    config = k_config(call.cache_format.name, head_size, window, arch.target, wide)
    blocks, block_size = call.k_cache.shape[:2]
    span = -(-count // min(config.ctas_of_call(count) * arch.sm_count, TURNS))
    table, norm_weight = call.cos_sin_cache, call.norm_weight
    norm_kind, norm_bytes = table_kind(norm_weight, True)
    values, scales = call.cache_format.row_parts(head_size)
    return KLaunch(
        function=_compiled(kernel_name("k", arch.target), config, device, arch.target),
        device=device,
        capacity=blocks * block_size,
        buckets=config.buckets(count),
        tokens=(
            count,
            span,
            8 * call.positions.stride(0),
            4 * call.token_to_seq.stride(0),
            divisor(call.compress_ratio),
        ),
        state=_state(call, window),
        vectors=dense,
        state_bytes=4 if config.loop else 16,
        table=(
            *(4 * stride for stride in call.state_block_table.stride()),
            call.state_block_table.shape[0] - 1,
            call.state_block_table.shape[1] - 1,
        ),
        rotary=(
            *(table.element_size() * stride for stride in table.stride()),
            table.shape[0] - 1,
            table.shape[1] // 2,
            int(table.dtype is torch.bfloat16),
        ),
        norm=(
            norm_weight.element_size() * norm_weight.stride(0),
            call.norm_eps,
            1.0 / head_size,
        ),
        norm_kind=(int(norm_kind), int(table_kind(norm_weight, False)[0])),
        norm_bytes=norm_bytes,
        cache=(
            call.k_cache.stride(0),
            block_size * values,
            values,
            scales,
            divisor(block_size),
        ),
        aligned=blocks == 1 or call.k_cache.stride(0) % 4 == 0,
    )


def _state(call: IndexerK, window: int) -> tuple[Any, ...]:
    """The middle of `window.State`."""
    state, head_size = call.state_cache, call.head_size
    block, token, element = (4 * stride for stride in state.stride())
    return (
        block,
        token,
        element,
        state.shape[2] // 2 * element,
        call.overlap * head_size * element,
        window,
        call.compress_ratio,
        head_size,
        state.shape[0] - 1,
        divisor(state.shape[1]),
    )


def _compiled(kernel: str, config: Any, device: torch.device, target: str) -> Callable[..., None]:
    return on_device(device, launcher, CompileUnit(kernel, config, target))
