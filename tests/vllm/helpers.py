"""Layers, caches and batches of the real vLLM, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from kvcache.integrations.vllm.backend import CuteAttentionBackend

NAN_BYTE = 0x7F


def vllm_config(kv_cache_dtype: str = "fp8", block_size: int = 64) -> VllmConfig:
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.cache_config.cache_dtype = kv_cache_dtype
    config.cache_config.block_size = block_size
    return config


def pretend_device(monkeypatch, major: int, minor: int = 0) -> None:
    """As if vLLM ran on a CUDA device of this capability."""
    found = DeviceCapability(major, minor)
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_, **__: found))


def layer(
    config: VllmConfig,
    index: int = 0,
    *,
    prefix: str = "model.layers",
    backend: type = CuteAttentionBackend,
    heads: tuple[int, int] = (8, 2),
    head_size: int = 64,
    scale: float | None = None,
    scales: tuple[float, float] | None = None,
    **arguments: Any,
) -> Attention:
    """An attention layer; `scales` are set as vLLM's loading sets them."""
    with set_current_vllm_config(config):
        made = Attention(
            heads[0],
            head_size,
            head_size**-0.5 if scale is None else scale,
            num_kv_heads=heads[1],
            cache_config=config.cache_config,
            prefix=f"{prefix}.{index}.self_attn.attn",
            attn_backend=backend,
            **arguments,
        )
    if scales is not None:
        set_scales(made, *scales)
    return made


def set_scales(made: Attention, k: float, v: float) -> None:
    for name, value in (("k", k), ("v", v)):
        getattr(made, f"_{name}_scale").fill_(value)
        setattr(made, f"_{name}_scale_float", getattr(made, f"_{name}_scale").item())
        getattr(made, f"_{name}_scale_cpu").fill_(value)


def allocate(
    spec: Any, num_blocks: int, layout: KVCacheLayout, kernel_block: int, num_layers: int = 2
) -> list[torch.Tensor]:
    """Caches of `num_layers` layers in one allocation, full of NaN codes, as vLLM makes them."""
    strides = compute_layout_strides(spec, num_blocks, num_layers, layout)
    raw = torch.full((num_layers * num_blocks * spec.page_size_bytes,), NAN_BYTE, dtype=torch.int8)
    names = [str(index) for index in range(num_layers)]
    placed = KVCacheTensor(raw.numel(), names, layer_stride=strides[0], block_stride=strides[1])
    return create_kv_cache_views(raw, spec, num_blocks, layout, placed, kernel_block)


def batch(
    query_lens: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,
    block_size: int,
    padding: int = 0,
) -> CommonAttentionMetadata:
    """What the model runner hands to a metadata builder; `padding` tokens have slot -1."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    slots = []
    for row, (query_len, seq_len) in zip(
        block_table, zip(query_lens, seq_lens, strict=True), strict=True
    ):
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(row[positions // block_size].long() * block_size + positions % block_size)
    slots.append(torch.full((padding,), -1))
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table.int(),
        slot_mapping=torch.cat(slots).long(),
    )


def run(
    config: VllmConfig,
    made: Attention,
    metadata: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """The layer's forward as the model calls it, store included."""
    name = made.layer_name
    slots = {name: metadata.slot_mapping}
    with set_forward_context({name: metadata}, config, slot_mapping=slots):
        return made(query, key, value)
