"""Per-batch metadata of the CUSTOM backend, and its builder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.warmup.cutedsl_warmup import (
    CuTeDSLCompileUnit,
    register_cutedsl_warmup_provider,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcache.integrations.vllm.counters import COUNTERS
from kvcache.integrations.vllm.scales import GroupScales
from kvcache.integrations.vllm.warmup import compile_units


@dataclass
class CuteAttentionMetadata(AttentionMetadata):
    """B requests, padding included; tensors on the device.

    query_start_loc: (B + 1,) int32. seq_lens: (B,) int32, tokens. block_table: (B, n) int32 of
    kernel blocks. slot_mapping: (tokens,) int64. block_size: tokens of a kernel block.
    max_query_len, max_seq_len: upper bounds, tokens.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int


class CuteMetadataBuilder(AttentionMetadataBuilder[CuteAttentionMetadata]):
    """Passes vLLM's tensors on: nothing is planned on the host, no device tensor is read.

    Full CUDA graphs serve uniform batches only. A graph is captured for a longest query and may be
    replayed with queries up to that; vLLM captures its graphs for mixed batches with queries of one
    token, which is less than they are replayed with.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._scales = GroupScales(vllm_config, layer_names)
        register_cutedsl_warmup_provider(self)

    def get_cutedsl_warmup_compile_units(self) -> tuple[CuTeDSLCompileUnit, ...]:
        """One unit per variant that this group's layers can ask for; see `warmup`."""
        if self.device.type != "cuda":
            return ()
        config = self.vllm_config
        heads = get_num_attention_heads_from_layers(config, self.layer_names)
        return compile_units(
            self.kv_cache_spec,
            heads or config.model_config.get_num_attention_heads(config.parallel_config),
            config.model_config.dtype,
            config.scheduler_config.max_num_batched_tokens,
            config.cache_config.cache_dtype,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CuteAttentionMetadata:
        """
        Raises:
            NotImplementedError: a batch that is not causal throughout.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("attention that is not causal")
        if common.mm_req_doc_ranges:
            raise NotImplementedError("bidirectional spans")
        self._scales.refresh()
        COUNTERS.batch()
        return CuteAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            block_size=self.kv_cache_spec.block_size,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> CuteAttentionMetadata:
        """The bound of the lengths is what the block table can hold: replays may be that long."""
        metadata = self.build(0, common_attn_metadata)
        COUNTERS.warmed_up()
        longest = metadata.block_table.shape[1] * metadata.block_size
        return replace(metadata, max_seq_len=max(metadata.max_seq_len, longest))

    def update_block_table(
        self,
        metadata: CuteAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> CuteAttentionMetadata:
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table, slot_mapping
        return updated
