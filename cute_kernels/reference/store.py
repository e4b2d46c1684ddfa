"""Torch reference of the paged stores: quantize K and V into a cache, and read them back.

A cache side (K or V) has shape (num_blocks, block_size, Hkv, F) and any strides with a contiguous
last dim; slot s is token s % block_size of block s // block_size.

    fp8_e4m3    F = D, float8_e4m3fn or uint8:   code = e4m3(x * (1 / scale))
    nvfp4       F = 9 D / 16, uint8: a block is `[data: D / 2 bytes a row | scales: D / 16 a row]`,
                a row being one head of one token. The shape is nominal, `split_nvfp4` gives the
                rows. Usually K and V share an allocation `[K data | K scales | V data | V scales]`
                per block; the page stride of a side is then twice its size.

Scales are linear, [token][D / 16], or, for the V side alone, swizzled within each group of 4 tokens
as the SM100 trtllm-gen reader wants them ("sm100"): nothing in the bytes tells the two apart.

Slots are read on the host, so a call on CUDA tensors synchronises and cannot be captured.
"""

from __future__ import annotations

import torch

from cute_kernels.calls import check_not_meta, check_tensor, writing
from cute_kernels.formats import KV_CACHE_DTYPES, ScaleLayout
from cute_kernels.memory import has_address, overlapping, shares_elements
from cute_kernels.numerics import e4m3
from cute_kernels.reference.quantize import (
    NVFP4_GROUP,
    as_scale,
    check_dtype,
    dequantize_mxfp4,
    dequantize_nvfp4,
    known,
    quantize_mxfp4,
    quantize_nvfp4,
    reciprocal,
)

__all__ = [
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "gather_kv",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "reshape_and_cache",
    "sequence_slots",
    "split_nvfp4",
]

# The name a user gives -> the storage format, all that a reader needs.
_STORAGE = {
    name: dtype.storage
    for name, dtype in KV_CACHE_DTYPES.items()
    if dtype.storage in ("fp8_e4m3", "nvfp4")
}
_SCALE_LAYOUTS = tuple(layout.value for layout in ScaleLayout)
_SWIZZLE_TOKENS = 4
_NVFP4_BYTES = 9  # for 16 elements: 8 of data, 1 of scale


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    v_scale_layout: str = "linear",
) -> None:
    """Quantize new tokens and write them into a paged cache.

    Args:
        key, value: (num_tokens, Hkv, D) bfloat16 or float16, any strides. Rows from
            len(slot_mapping) on are padding and are not stored.
        key_cache, value_cache: a side each, as in the module's docstring, written in place.
        slot_mapping: (n,) int64, n <= num_tokens. Negative slots are skipped; slots beyond the
            capacity are never written; of tokens with the same slot the last one stays.
        kv_cache_dtype: "fp8" ("fp8_e4m3"), "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k" or
            "nvfp4_mse".
        k_scale, v_scale: what a reader multiplies by: a float, or a float32 tensor (), (1,) or
            (Hkv,).
        v_scale_layout: "linear", or "sm100" for an nvfp4 cache with block_size a multiple of 4 and
            D of 64.

    Raises:
        ValueError: an argument not as above, or a float scale that, as float32, is not finite and
            within [2^-100, 2^100]. Scales in tensors are not checked: the formula decides.
    """
    storage = check_store(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale,
        v_scale_layout,
    )  # fmt: skip
    rows, slots = rows_to_write(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    sides = (("k", key, key_cache, k_scale), ("v", value, value_cache, v_scale))
    for side, x, cache, scale in sides:
        scale = _head_scale(scale, f"{side}_scale", x, x.device)
        layout = v_scale_layout if side == "v" else "linear"
        if storage == "nvfp4":
            parts = quantize_nvfp4(x[rows], scale, kv_cache_dtype, side=side)
            with writing(cache):
                _write_nvfp4(cache, slots, *parts, layout)
        else:
            codes = e4m3.encode(x[rows].float() * reciprocal(scale).unsqueeze(-1))
            page, token = _page_and_token(slots, cache.shape[1])
            with writing(cache):
                cache.view(torch.uint8)[page, token] = codes


def check_store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    v_scale_layout: str = "linear",
) -> str:
    """Check the arguments of `reshape_and_cache` without reading a tensor; the storage format.

    Raises:
        ValueError: as there.
    """
    storage = _STORAGE[known("kv_cache_dtype", kv_cache_dtype, _STORAGE)]
    _check_layout("v_scale_layout", v_scale_layout, storage)
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, x in {"key": key, "value": value, **caches, "slot_mapping": slot_mapping}.items():
        check_tensor(name, x)
        check_not_meta(name, x)
    _check_tokens(key, value, slot_mapping)
    if key_cache.shape != value_cache.shape:
        shapes = f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        raise ValueError(f"key_cache and value_cache: got {shapes}; accepted: one shape")
    sides = zip("kv", (key, value), caches.items(), (k_scale, v_scale), strict=True)
    for side, x, (name, cache), scale in sides:
        _check_cache(cache, name, storage)
        if cache.shape[2:] != (x.shape[1], _row_bytes(storage, x.shape[2])):
            raise ValueError(
                f"{name}: got {tuple(cache.shape)}; {storage} accepts (num_blocks, block_size, "
                f"{x.shape[1]}, {_row_bytes(storage, x.shape[2])}) for {tuple(x.shape)}"
            )
        if storage == "nvfp4":
            block_order(cache, name)
        _head_scale(scale, f"{side}_scale", x, torch.device("cpu"))
    if v_scale_layout == "sm100":
        _check_swizzle("v_scale_layout", key_cache.shape[1], key.shape[2] // NVFP4_GROUP)
    read = {"key": key, "value": value, "slot_mapping": slot_mapping}
    _check_memory(caches, read | {"k_scale": k_scale, "v_scale": v_scale})
    return storage


def split_nvfp4(side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The data and the block scales of one side of an nvfp4 cache, as views.

    Args:
        side: (num_blocks, block_size, Hkv, 9 D / 16) uint8. Within a block the strides are those
            of a dense NHD or HND array and say the order of both regions; the stride between
            blocks and the storage offset are free.

    Returns:
        data: (num_blocks, block_size, Hkv, D / 2) uint8.
        block_scale: (num_blocks, block_size, Hkv, D / 16) float8_e4m3fn.

    Raises:
        ValueError: an argument not as above.
    """
    _check_cache(side, "side", "nvfp4")
    blocks, tokens, heads, row = side.shape
    order = block_order(side)
    views = []
    offset = side.storage_offset()
    for part in (row // _NVFP4_BYTES * (_NVFP4_BYTES - 1), row // _NVFP4_BYTES):
        stride = (side.stride(0), order[0] * part, order[1] * part, 1)
        views.append(side.as_strided((blocks, tokens, heads, part), stride, offset))
        offset += tokens * heads * part
    return views[0], views[1].view(torch.float8_e4m3fn)


def block_order(side: torch.Tensor, name: str = "side") -> tuple[int, int]:
    """Rows between tokens, and between heads, of a dense block: NHD (Hkv, 1) or HND (1, tokens).

    Args:
        side: (num_blocks, tokens, Hkv, row).
        name: of the argument, for the message.

    Raises:
        ValueError: blocks that are neither.
    """
    _, tokens, heads, row = side.shape
    _, token, head, _ = side.stride()
    for order in ((heads, 1), (1, tokens)):
        # The stride of a dim of size 1 says nothing, and torch does not keep it.
        if tokens in (1, 0) or token == order[0] * row:
            if heads in (1, 0) or head == order[1] * row:
                return order
    raise ValueError(
        f"{name}: got strides {side.stride()} of shape {tuple(side.shape)}; accepted within a "
        "block: dense NHD or HND"
    )


def gather_kv(
    cache: torch.Tensor,
    slots: torch.Tensor,
    storage: str,
    scale: float | torch.Tensor,
    *,
    scale_layout: str = "linear",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Read tokens of one side of a cache and dequantize them.

    Args:
        cache: a side, as in the module's docstring.
        slots: (n,) int64. A negative slot gives a row of zeros.
        storage: "fp8_e4m3" or "nvfp4": how the bytes are stored, not how their scales were chosen.
        scale: the k_scale or v_scale that the store was given.
        scale_layout: of nvfp4 block scales, the one the store was given.
        dtype: of the result. Float64 holds the exact value; any other is rounded to float32 first.

    Returns:
        (n, Hkv, D).

    Raises:
        ValueError: an argument not as above, or a slot beyond the cache.
    """
    known("storage", storage, ("fp8_e4m3", "nvfp4"))
    _check_layout("scale_layout", scale_layout, storage)
    check_dtype(dtype)
    _check_cache(cache, "cache", storage)
    _check_slots("slots", slots)
    capacity = cache.shape[0] * cache.shape[1]
    if slots.numel() and int(slots.max()) >= capacity:
        raise ValueError(f"slots: got {int(slots.max())}; the cache has {capacity}")
    live = slots >= 0
    page, token = _page_and_token(slots[live], cache.shape[1])
    if storage == "nvfp4":
        data, block_scale = split_nvfp4(cache)
        groups = block_scale.shape[3]
        if scale_layout == "sm100":
            _check_swizzle("scale_layout", cache.shape[1], groups)
        t, s = _scale_positions(token, groups, scale_layout)
        # Heads last, so that the two index tensors are adjacent: the result is (n, groups, Hkv).
        by_group = block_scale.view(torch.uint8).transpose(2, 3)[page.unsqueeze(1), t, s]
        rows = data[page, token]
        scale = _head_scale(scale, "scale", rows, rows.device)
        values = dequantize_nvfp4(rows, by_group.transpose(1, 2), scale, dtype)
    else:
        rows = cache.view(torch.uint8)[page, token]
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        scale = _head_scale(scale, "scale", rows, rows.device)
        values = (e4m3.decode(rows).to(exact) * scale.unsqueeze(-1)).to(dtype)
    out = values.new_zeros((slots.shape[0], *values.shape[1:]))
    out[live] = values
    return out


def sequence_slots(pages: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """The slots (length,) int64 of a sequence's tokens, from its row of a block table.

    Raises:
        ValueError: more tokens than the row has pages for.
    """
    if length > pages.shape[0] * block_size:
        raise ValueError(f"length: got {length}; {pages.shape[0]} pages of {block_size} are given")
    position = torch.arange(length, device=pages.device)
    return pages.long()[position // block_size] * block_size + position % block_size


def rows_to_write(slot_mapping: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their slots, each slot once, sorted: the last row of each is kept."""
    rows = ((slot_mapping >= 0) & (slot_mapping < capacity)).nonzero().squeeze(1)
    slots, order = slot_mapping[rows].sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[1:] != slots[:-1]
    return rows[order[last]], slots[last]


def _write_nvfp4(
    cache: torch.Tensor,
    slots: torch.Tensor,
    data: torch.Tensor,
    block_scale: torch.Tensor,
    layout: str,
) -> None:
    data_view, scale_view = split_nvfp4(cache)
    page, token = _page_and_token(slots, cache.shape[1])
    data_view[page, token] = data
    t, s = _scale_positions(token, block_scale.shape[-1], layout)
    by_group = scale_view.view(torch.uint8).transpose(2, 3)
    by_group[page.unsqueeze(1), t, s] = block_scale.view(torch.uint8).transpose(1, 2)


def _scale_positions(
    token: torch.Tensor, groups: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in its block the scale of (token, group) is: two index tensors (n, groups)."""
    t = token.unsqueeze(1)
    s = torch.arange(groups, device=token.device).unsqueeze(0)
    if layout == "linear":
        return t.expand(-1, groups), s.expand(t.shape[0], -1)
    quarter = groups // _SWIZZLE_TOKENS
    first = t // _SWIZZLE_TOKENS * _SWIZZLE_TOKENS
    return first + s // quarter, s % quarter * _SWIZZLE_TOKENS + t % _SWIZZLE_TOKENS


def _page_and_token(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // block_size, slots % block_size


def _row_bytes(storage: str, head_size: int) -> int:
    if storage == "fp8_e4m3":
        return head_size
    if head_size % NVFP4_GROUP:
        raise ValueError(f"key: got head size {head_size}; nvfp4 accepts multiples of 16")
    return head_size // NVFP4_GROUP * _NVFP4_BYTES


def _head_scale(
    scale: float | torch.Tensor, name: str, x: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """A scale () or (Hkv,) for rows (n, Hkv, ...); a float becomes a tensor on `device`."""
    single = as_scale(scale, name, device)
    shape = tuple(scale.shape) if isinstance(scale, torch.Tensor) else ()
    if shape not in ((), (1,), (x.shape[1],)):
        raise ValueError(f"{name}: got shape {shape}; accepted: (), (1,), ({x.shape[1]},)")
    return single


def _check_tokens(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if key.dim() != 3 or key.shape != value.shape:
        shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
        raise ValueError(f"key and value: got {shapes}; accepted: (num_tokens, Hkv, D), both")
    if key.dtype not in (torch.bfloat16, torch.float16) or key.dtype is not value.dtype:
        dtypes = f"{key.dtype} and {value.dtype}"
        raise ValueError(f"key and value: got {dtypes}; accepted: bfloat16 or float16, both")
    _check_slots("slot_mapping", slot_mapping)
    if slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(f"slot_mapping: got {slot_mapping.shape[0]} slots, {key.shape[0]} tokens")


def _check_slots(name: str, slots: torch.Tensor) -> None:
    check_tensor(name, slots)
    if slots.dtype is not torch.int64 or slots.dim() != 1:
        got = f"{tuple(slots.shape)} {slots.dtype}"
        raise ValueError(f"{name}: got {got}; accepted: (n,) int64")


def _check_memory(caches: dict[str, torch.Tensor], read: dict[str, object]) -> None:
    """Two slots, or a slot of K and one of V, must not be the same bytes, and what is stored must
    not be memory that is written meanwhile.

    Of tensors in a trace nothing is known; the traced op checks again.
    """
    key_cache, value_cache = caches.values()
    for name, cache in caches.items():
        if has_address(cache) and shares_elements(cache):
            raise ValueError(
                f"{name}: got strides {cache.stride()} of shape {tuple(cache.shape)}; accepted:"
                " a tensor whose elements do not share memory"
            )
    found = overlapping(caches, read)
    if (key_cache is value_cache and not has_address(key_cache)) or found == tuple(caches):
        raise ValueError(
            "key_cache and value_cache: got the same memory; accepted: two sides of a cache, "
            "which may be interleaved"
        )
    if found is not None:
        raise ValueError(f"{found[1]}: got memory of the cache; accepted: memory apart from it")


def _check_cache(cache: torch.Tensor, name: str, storage: str) -> None:
    check_tensor(name, cache)
    dtypes = (torch.uint8,) if storage == "nvfp4" else (torch.uint8, torch.float8_e4m3fn)
    if cache.dtype not in dtypes:
        accepted = ", ".join(map(str, dtypes))
        raise ValueError(f"{name}: got {cache.dtype}; {storage} accepts {accepted}")
    if cache.dim() != 4 or (cache.shape[3] > 1 and cache.stride(3) != 1):
        got = f"shape {tuple(cache.shape)}, strides {cache.stride()}"
        raise ValueError(f"{name}: got {got}; accepted: 4 dims, the last one contiguous")
    if storage == "nvfp4" and (cache.shape[3] == 0 or cache.shape[3] % _NVFP4_BYTES):
        raise ValueError(f"{name}: got rows of {cache.shape[3]} bytes; nvfp4 has 9 D / 16")


def _check_layout(name: str, layout: str, storage: str) -> None:
    known(name, layout, _SCALE_LAYOUTS)
    if storage != "nvfp4" and layout != "linear":
        raise ValueError(f"{name}: got {layout!r}; {storage} accepts 'linear'")


def _check_swizzle(name: str, block_size: int, groups: int) -> None:
    if block_size % _SWIZZLE_TOKENS or groups % _SWIZZLE_TOKENS:
        raise ValueError(
            f"{name}: got 'sm100' for block_size {block_size} and D {groups * NVFP4_GROUP}; "
            "accepted: multiples of 4 and of 64"
        )
