"""vLLM's FlashAttention under the name CUSTOM: the switch back."""

from __future__ import annotations

from functools import cache

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from kvcache.integrations.vllm import logger
from kvcache.integrations.vllm.options import KV_SCALES, options


class NativeAttentionBackend(FlashAttentionBackend):
    """vLLM's own in everything; says that nothing reads our options here."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return FlashAttentionBackend.full_cls_name()

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        config = get_current_vllm_config_or_none()
        if config is not None and options(config).get(KV_SCALES) is not None:
            _warn()
        return FlashAttentionBackend.get_impl_cls()


@cache
def _warn() -> None:
    logger.warning(
        "cute_kernels: CUTE_KERNELS_VLLM=native: nothing reads %s; the scales are those of the "
        "checkpoint, or 1.0",
        KV_SCALES,
    )
