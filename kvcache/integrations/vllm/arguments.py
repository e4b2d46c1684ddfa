"""vLLM's `flash_attn_varlen_func`, argument for argument, served by ours."""

from __future__ import annotations

from typing import Any

import torch

import cute_kernels

# They choose and plan kernels that are not ours and hold no part of the result.
_DROPPED = ("fa_version", "scheduler_metadata")
# Of vLLM's FA4; ours does not know them, and they are None where nothing uses them.
_REFUSED = (
    "aux_tensor_leading_dims",
    "dynamic_causal",
    "gather_kv_indices",
    "gather_kv_valid_length",
)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`cute_kernels.flash_attn_varlen_func` for call sites written for vLLM's.

    `fa_version` and `scheduler_metadata` are left out, and `q_descale`, which queries of 16 bits do
    not have; a `window_size` list becomes a tuple; arguments that only other kernels have pass when
    they are neutral.

    Raises:
        NotImplementedError: quantized queries, and whatever our function refuses.
    """
    for name in _DROPPED:
        kwargs.pop(name, None)
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise NotImplementedError(
            f"q: got {q.dtype}; our kernels take bf16 and fp16 queries and dequantize K and V: "
            "switch query quantization off (supports_quant_query_input is False here)"
        )
    kwargs.pop("q_descale", None)
    for name in _REFUSED:
        if kwargs.pop(name, None) is not None:
            raise NotImplementedError(f"{name} is not implemented")
    window = kwargs.get("window_size")
    if window is not None:
        kwargs["window_size"] = tuple(window)
    return cute_kernels.flash_attn_varlen_func(q, k, v, *args, **kwargs)
