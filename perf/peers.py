"""Calls of other projects' attention on an input set of ours; each writes `inputs.out`.

Written for vLLM 0.33 and FlashInfer 0.7; imports happen in the bind functions, so a peer costs
nothing where it is not installed. What cannot be captured in a graph (plans, scales on the host) is
done when binding. Of them this project has run torch's and vLLM's Triton kernel on a GPU, the
latter from vLLM's Python files with an empty module in place of its compiled operators, which that
kernel does not call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from perf.inputs import InputSet
from perf.timing import Call

_WORKSPACE_BYTES = 128 << 20
# Of vLLM's Triton backend, whose module imports all of vLLM where the kernel's imports little: a
# launch grid smaller than the first splits keys into as many segments as the second.
VLLM_TRITON = {"MIN_LAUNCH_GRID_SIZE_2D": 128, "NUM_PAR_SOFTMAX_SEGMENTS": 16}


class Refusal(ValueError):
    """A peer that is not made for a workload; no failure."""


def one_scale(descale: torch.Tensor) -> float:
    """The value of a descale that all sequences and heads share, on the host.

    Raises:
        Refusal: they do not share one; the peer would read the first and be wrong.
    """
    values = descale.unique()
    if len(values) != 1:
        raise Refusal(f"takes one scale, this workload has {len(values)}: use --one-scale")
    return values.item()


def vllm_fa4(inputs: InputSet, arguments: dict[str, Any]) -> Call:
    """vLLM's flash attention 4, `arguments` as for our own function."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    window = list(arguments["window_size"])
    return partial(
        flash_attn_varlen_func,
        **{**arguments, "window_size": window},
        fa_version=4,
        out=inputs.out,
    )


def vllm_triton(inputs: InputSet) -> Call:
    """vLLM's Triton kernel, its two ways of launching chosen as its backend does."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = KVQuantMode.NONE
    if inputs.k_descale is not None:
        mode = KVQuantMode.FP8_PER_TENSOR
        for descale in (inputs.k_descale, inputs.v_descale):
            one_scale(descale)
    tokens, heads, head_size = inputs.q.shape
    padded = 1 << (head_size - 1).bit_length()
    scratch = partial(torch.empty, dtype=torch.float32, device=inputs.q.device)
    segments = (tokens, heads, VLLM_TRITON["NUM_PAR_SOFTMAX_SEGMENTS"])
    return partial(
        unified_attention,
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        out=inputs.out,
        cu_seqlens_q=inputs.cu_seqlens_q,
        max_seqlen_q=inputs.max_seqlen_q,
        seqused_k=inputs.seqused_k,
        max_seqlen_k=inputs.max_seqlen_k,
        softmax_scale=inputs.softmax_scale,
        causal=True,
        window_size=(inputs.window_left, 0 if inputs.window_left >= 0 else -1),
        block_table=inputs.block_table,
        softcap=0.0,
        q_descale=None,
        k_descale=inputs.k_descale,
        v_descale=inputs.v_descale,
        seq_threshold_3D=VLLM_TRITON["MIN_LAUNCH_GRID_SIZE_2D"] // inputs.k.shape[2],
        num_par_softmax_segments=segments[2],
        softmax_segm_output=scratch((*segments, padded)),
        softmax_segm_max=scratch(segments),
        softmax_segm_expsum=scratch(segments),
        kv_quant_mode=mode,
    )


def flashinfer_xqa(inputs: InputSet) -> Call:
    """FlashInfer's XQA, which quantizes queries to FP8 at head sizes up to 256."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    k_scale, v_scale = one_scale(inputs.k_descale), one_scale(inputs.v_descale)
    device = inputs.q.device
    return partial(
        xqa_batch_decode_with_kv_cache,
        inputs.q,
        (inputs.k, inputs.v),
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        inputs.block_table,
        inputs.seqused_k.to(torch.uint32),
        inputs.max_seqlen_k,
        bmm1_scale=inputs.softmax_scale * k_scale,
        bmm2_scale=v_scale,
        window_left=inputs.window_left,
        out=inputs.out,
        kv_layout="NHD",
        q_len_per_req=inputs.max_seqlen_q,
    )


def flashinfer_fa2(inputs: InputSet) -> Call:
    """FlashInfer's FA2 over the paged cache, planned when bound."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    k_scale, v_scale = one_scale(inputs.k_descale), one_scale(inputs.v_descale)
    batch, pages = inputs.block_table.shape
    page_size, device = inputs.k.shape[1], inputs.q.device
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    last = (inputs.seqused_k - 1) % page_size + 1
    wrapper.plan(
        inputs.cu_seqlens_q,
        torch.arange(batch + 1, dtype=torch.int32, device=device) * pages,
        inputs.block_table.flatten(),
        last.to(torch.int32),
        inputs.q.shape[1],
        inputs.k.shape[2],
        inputs.q.shape[2],
        page_size,
        causal=True,
        sm_scale=inputs.softmax_scale,
        window_left=inputs.window_left,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
    )
    kv = (inputs.k, inputs.v)
    return partial(wrapper.run, inputs.q, kv, k_scale=k_scale, v_scale=v_scale, out=inputs.out)


def dense_kv(inputs: InputSet) -> list[torch.Tensor]:
    """K and V of all sequences, gathered and dequantized: (B, Hkv, S, D) in the queries' dtype."""
    found = []
    for pages, descale in ((inputs.k, inputs.k_descale), (inputs.v, inputs.v_descale)):
        codes = pages.view(torch.uint8)[inputs.block_table].view(pages.dtype)
        dense = codes.flatten(1, 2)[:, : inputs.max_seqlen_k].to(inputs.q.dtype)
        if descale is not None:
            dense = dense * descale[:, None, :, None].to(dense.dtype)
        found.append(dense.transpose(1, 2))
    return found


def visible(inputs: InputSet) -> torch.Tensor | None:
    """(q_len, S) bool, what each query of a sequence sees; None where that is everything."""
    if inputs.max_seqlen_q == 1 and inputs.window_left < 0:
        return None
    keys = torch.arange(inputs.max_seqlen_k, device=inputs.q.device)
    own = keys[-inputs.max_seqlen_q :, None]
    seen = keys <= own
    return seen if inputs.window_left < 0 else seen & (keys >= own - inputs.window_left)


def torch_sdpa(inputs: InputSet) -> Call:
    """What there is without a kernel for such caches: gather, dequantize, torch's own attention."""

    def call() -> None:
        k, v = dense_kv(inputs)
        q = inputs.q.unflatten(0, (-1, inputs.max_seqlen_q)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, visible(inputs), scale=inputs.softmax_scale, enable_gqa=True
        )
        inputs.out.copy_(out.transpose(1, 2).flatten(0, 1))

    return call
