"""The arguments of the indexer functions, checked: shapes, dtypes, devices and host numbers.

Contents of tensors are not read here, so that traced calls are checked the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.calls import as_number, check_not_meta, check_tensor, is_int
from cute_kernels.indexer.formats import IndexerFormat, check_head_size, get_indexer_format
from cute_kernels.memory import has_address, overlapping, shares_elements
from cute_kernels.numerics import FLOAT32_END

# Positions of a window, twice the ratio with overlap, are counted in 32 bits.
_MAX_RATIO = 2**30 - 1
_FLOATS = (torch.float32, torch.bfloat16)


Q_TENSORS = ("positions", "index_q", "cos_sin_cache", "index_weights")
K_TENSORS = (
    "state_cache", "token_to_seq", "positions", "slot_mapping", "state_block_table", "norm_weight",
    "cos_sin_cache", "k_cache",
)  # fmt: skip


class IndexerQ(NamedTuple):
    """A checked call of `fused_indexer_q_rope_quant`; the fields are its arguments."""

    positions: torch.Tensor
    index_q: torch.Tensor
    cos_sin_cache: torch.Tensor
    index_weights: torch.Tensor
    softmax_scale: float
    head_scale: float
    use_fp4: bool

    @property
    def head_size(self) -> int:
        return self.index_q.shape[2]

    @property
    def cache_format(self) -> str:
        """The codes' format."""
        return "mxfp4" if self.use_fp4 else "fp8_e4m3"


class IndexerK(NamedTuple):
    """A checked call of `compress_norm_rope_insert`; most fields are its arguments.

    overlap: 1 where a window reaches one ratio of tokens further back, else 0.
    """

    state_cache: torch.Tensor
    token_to_seq: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    state_block_table: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    cos_sin_cache: torch.Tensor
    k_cache: torch.Tensor
    compress_ratio: int
    cache_format: IndexerFormat
    overlap: int

    @property
    def head_size(self) -> int:
        return self.norm_weight.shape[0]


def check_q(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    use_fp4: bool,
) -> IndexerQ:
    """Check the arguments of `fused_indexer_q_rope_quant`.

    Raises:
        ValueError: as there.
    """
    call = IndexerQ(
        positions, index_q, cos_sin_cache, index_weights, softmax_scale, head_scale, use_fp4
    )
    _check_tensors(call, Q_TENSORS)
    _check("index_q", index_q, (None, None, None), (torch.bfloat16,), "(T, H, D)")
    tokens, heads, head_size = index_q.shape
    check_head_size("index_q", head_size)
    _check("positions", positions, (tokens,), (torch.int64,), f"(T,) = ({tokens},)")
    _check_cos_sin(cos_sin_cache, head_size)
    shape = (tokens, heads)
    _check("index_weights", index_weights, shape, _FLOATS, f"(T, H) = {shape}")
    scales = (_single("softmax_scale", softmax_scale), _single("head_scale", head_scale))
    if not isinstance(use_fp4, bool):
        raise ValueError(f"use_fp4: got {use_fp4!r}; accepted: True, False")
    return call._replace(softmax_scale=scales[0], head_scale=scales[1])


def check_k(
    state_cache: torch.Tensor,
    token_to_seq: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    state_block_table: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    compress_ratio: int,
    cache_format: str,
) -> IndexerK:
    """Check the arguments of `compress_norm_rope_insert`.

    Raises:
        ValueError: as there.
    """
    storage = get_indexer_format(cache_format)
    if not is_int(compress_ratio):
        raise ValueError(f"compress_ratio: got {compress_ratio!r}; accepted: an int")
    if not 1 <= compress_ratio <= _MAX_RATIO:
        raise ValueError(f"compress_ratio: got {compress_ratio}; accepted: 1 to {_MAX_RATIO}")
    call = IndexerK(
        state_cache, token_to_seq, positions, slot_mapping, state_block_table, norm_weight,
        norm_eps, cos_sin_cache, k_cache, int(compress_ratio), storage, overlap=0,
    )  # fmt: skip
    _check_tensors(call, K_TENSORS)
    _check("norm_weight", norm_weight, (None,), _FLOATS, "(D,)")
    head_size = call.head_size
    check_head_size("norm_weight", head_size)
    eps = _single("norm_eps", norm_eps)
    if eps < 0:
        raise ValueError(f"norm_eps: got {norm_eps!r}; accepted: 0 or more")
    _check_cos_sin(cos_sin_cache, head_size)
    _check("slot_mapping", slot_mapping, (None,), (torch.int64,), "(n,)")
    tokens = slot_mapping.shape[0]
    for name, x, dtype in (
        ("positions", positions, torch.int64),
        ("token_to_seq", token_to_seq, torch.int32),
    ):
        _check(name, x, (None,), (dtype,), f"(T,), T >= len(slot_mapping) = {tokens}")
        if x.shape[0] < tokens:
            raise ValueError(f"{name}: got {x.shape[0]} entries, slot_mapping {tokens}")
    _check("state_block_table", state_block_table, (None, None), (torch.int32,), "(B, max_blocks)")
    check_k_cache(k_cache, storage, head_size)
    overlap = _overlap(state_cache, head_size)
    _check_memory(call)
    return call._replace(norm_eps=eps, overlap=overlap)


def _check_memory(call: IndexerK) -> None:
    """Two rows must not be the same bytes, and what is read not be written meanwhile."""
    cache = call.k_cache
    if has_address(cache) and shares_elements(cache):
        raise ValueError(
            f"k_cache: got strides {cache.stride()} of shape {tuple(cache.shape)}; accepted: blocks"
            " that do not share memory"
        )
    read = {name: getattr(call, name) for name in K_TENSORS if name != "k_cache"}
    found = overlapping({"k_cache": cache}, read)
    if found is not None:
        raise ValueError(
            f"k_cache: got memory of {found[1]}; accepted: memory apart from what is read"
        )


def check_k_cache(k_cache: torch.Tensor, storage: IndexerFormat, head_size: int) -> None:
    """Check that a tensor is an indexer K cache of this format.

    Raises:
        ValueError: another dtype or shape, or blocks that are not dense.
    """
    row = storage.row_bytes(head_size)
    accepted = f"(num_blocks, block_size, {row}), {storage.name} rows of head size {head_size}"
    _check("k_cache", k_cache, (None, None, row), (torch.uint8,), accepted)
    dense_tokens = k_cache.shape[1] <= 1 or k_cache.stride(1) == row
    if k_cache.shape[1] == 0 or k_cache.stride(2) != 1 or not dense_tokens:
        got = f"shape {tuple(k_cache.shape)}, strides {k_cache.stride()}"
        raise ValueError(
            f"k_cache: got {got}; accepted: blocks of a token or more, dense inside, strides "
            f"(any, {row}, 1)"
        )


def _overlap(state_cache: torch.Tensor, head_size: int) -> int:
    """Whether state rows hold two sets of columns: 1 or 0."""
    widths = (2 * head_size, 4 * head_size)
    accepted = (
        f"(num_blocks, block_size, F), F = {widths[0]}, or {widths[1]} with overlap, for head size "
        f"{head_size}"
    )
    _check("state_cache", state_cache, (None, None, None), (torch.float32,), accepted)
    if state_cache.shape[2] not in widths or state_cache.shape[1] == 0:
        raise ValueError(f"state_cache: got {tuple(state_cache.shape)}; accepted: {accepted}")
    return widths.index(state_cache.shape[2])


def _check_tensors(call: IndexerQ | IndexerK, names: tuple[str, ...]) -> None:
    """That what should be tensors are, on one device that can compute."""
    for name in names:
        x = getattr(call, name)
        check_tensor(name, x)
        device = getattr(call, names[0]).device
        if x.device != device:
            raise ValueError(f"{name}: got {x.device}; accepted: {device}, as {names[0]}")
        check_not_meta(name, x)


def _check(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    accepted: str,
) -> None:
    """That a tensor has this shape, None being any size, and one of these dtypes."""
    fits = x.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(x.shape, shape, strict=True)
    )
    if not fits or x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}; accepted: {names} {accepted}")


def _check_cos_sin(cos_sin_cache: torch.Tensor, head_size: int) -> None:
    accepted = f"(max_position, rope_dim), rope_dim even, 2 to {head_size}"
    _check("cos_sin_cache", cos_sin_cache, (None, None), _FLOATS, accepted)
    rope_dim = cos_sin_cache.shape[1]
    if rope_dim % 2 or not 2 <= rope_dim <= head_size:
        raise ValueError(f"cos_sin_cache: got rope_dim {rope_dim}; accepted: {accepted}")


def _single(name: str, value: float) -> float:
    """A host number that is finite as float32, which is what a device sees."""
    # Comparisons with NaN are false.
    number = as_number(value)
    if number is None or not abs(number) < FLOAT32_END:
        raise ValueError(f"{name}: got {value!r}; accepted: a number that is finite as float32")
    return number
