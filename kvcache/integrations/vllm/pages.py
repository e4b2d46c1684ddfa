"""K and V of a layer's cache, as our store and our kernels take them."""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides


def halves(kv_cache: torch.Tensor, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V side by side in a row, (num_blocks, Hkv, block_size, 2 D), as views
    (num_blocks, block_size, Hkv, D) of the dtype `stored`."""
    sides = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    k, v = (canonicalize_singleton_dim_strides(side) for side in sides)
    return (k, v) if k.dtype is stored else (k.view(stored), v.view(stored))


def nvfp4_sides(kv_cache: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[K data | K scales | V data | V scales]` as views (num_blocks, block_size, Hkv,
    9 D / 16) of K and V, whose shape is nominal: see `cute_kernels.split_nvfp4`.

    Args:
        kv_cache: (num_blocks, 2 Hkv, block_size, 9 D / 16) uint8, blocks dense and in HND or NHD
            order. In both K is the first half of a block's bytes: the strides of vLLM's view say in
            which order the heads of a side come, not that the sides are interleaved.

    Raises:
        ValueError: blocks in another order.
    """
    blocks, slots, tokens, row = kv_cache.shape
    page, head, token, _ = kv_cache.stride()
    order = {
        (tokens * row, row): (row, tokens * row),
        (row, slots * row): (num_kv_heads * row, row),
    }
    if kv_cache.stride(-1) != 1 or (head, token) not in order or slots != 2 * num_kv_heads:
        raise ValueError(
            f"kv_cache: got shape {tuple(kv_cache.shape)} with strides {kv_cache.stride()} for "
            f"{num_kv_heads} KV heads; accepted: (num_blocks, {2 * num_kv_heads}, block_size, row) "
            "with blocks that are dense, in HND or NHD order"
        )
    shape, strides = (blocks, tokens, num_kv_heads, row), (page, *order[head, token], 1)
    first = kv_cache.storage_offset()
    side = num_kv_heads * tokens * row
    k, v = (kv_cache.as_strided(shape, strides, first + i * side) for i in range(2))
    return k, v
