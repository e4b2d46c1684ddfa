"""The DeepSeek-V4 indexer's fused steps: check, then the kernels on CUDA tensors, else torch.

A call that differs from an earlier one in addresses only is launched without being checked again.
Eager calls on plain tensors go straight to the implementation; traced calls (torch.compile, export,
fake tensors) go through the custom ops ``torch.ops.cute_kernels.fused_indexer_q_rope_quant`` and
``torch.ops.cute_kernels.compress_norm_rope_insert``, which have fake implementations.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable

import torch

from cute_kernels.calls import is_traced, refuse_gradients
from cute_kernels.indexer import op
from cute_kernels.indexer.arguments import (
    K_TENSORS,
    Q_TENSORS,
    IndexerK,
    IndexerQ,
    check_k,
    check_q,
)
from cute_kernels.prepared import PreparedCalls
from cute_kernels.reference.indexer import indexer_k, indexer_q
from cute_kernels.store.op import aligned


def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    use_fp4: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """RoPE and quantization of the indexer's queries, and their head weights.

    T tokens, H heads, head size D (128 in DeepSeek-V4, with rope_dim 64 and 64 heads); D is a
    multiple of 32. All inputs may have any strides.

    Args:
        positions: (T,) int64, within cos_sin_cache.
        index_q: (T, H, D) bfloat16. The last rope_dim elements of each head are rotated, in
            interleaved (GPT-J) pairs, and rounded to bf16.
        cos_sin_cache: (max_position, rope_dim) float32 or bfloat16: [cos | sin], half each.
        index_weights: (T, H) float32 or bfloat16, the weight of each head in the scores.
        softmax_scale, head_scale: factors of the weights; finite as float32.
        use_fp4: quantize to mxfp4, else to fp8_e4m3.

    Returns:
        codes: mxfp4: (T, H, D / 2) uint8, element 2i in the low nibble of byte i. fp8_e4m3:
            (T, H, D) float8_e4m3fn.
        scales: mxfp4: (T, H, D / 32) uint8, ue8m0 (OCP Microscaling Formats 1.0). fp8_e4m3: None:
            the scale s of a token and head is folded into its weight.
        weights: (T, H) float32: (w * softmax_scale) * head_scale for mxfp4,
            ((w * s) * softmax_scale) * head_scale for fp8_e4m3, in this order.

    Scales are powers of two: 2^ceil(log2(amax / 6)) for each group of 32, or
    2^ceil(log2(max(amax, 1e-4) / 448)) for each head. A NaN does not count in amax and becomes the
    code of +6, or 0x7F. `cute_kernels.reference.indexer` defines every bit.

    On CUDA tensors nothing synchronises, no device tensor is read on the host, and the call can be
    captured in a graph (call once before, so that the kernel is compiled); a position outside
    cos_sin_cache takes its nearest row. What no kernel serves (head sizes above 512, compute
    capability below 9.0) runs the torch definition: slowly, with a host synchronisation and a
    warning.

    Raises:
        ValueError: an argument not as above.
        NotImplementedError: CUDA tensors under graph capture that no kernel serves. In grad mode,
            a tensor that requires a gradient: there is no backward pass.
    """
    arguments = (
        positions, index_q, cos_sin_cache, index_weights, softmax_scale, head_scale, use_fp4,
    )  # fmt: skip
    key, launch = _PREPARED_Q.find(arguments[:4], arguments[4:])
    result = launch and launch.go(*arguments[:4])
    if result is not None:
        return result
    call = check_q(*arguments)
    refuse_gradients("fused_indexer_q_rope_quant", dict(zip(Q_TENSORS, arguments[:4], strict=True)))
    if not is_traced(index_q):
        return _run_q(call, key)
    codes, scales, weights = torch.ops.cute_kernels.fused_indexer_q_rope_quant(*call)
    return codes, scales if use_fp4 else None, weights


def compress_norm_rope_insert(
    state_cache: torch.Tensor,
    token_to_seq: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    state_block_table: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    compress_ratio: int,
    cache_format: str,
) -> None:
    """Compress windows of compressor states to rows of the indexer's K cache, and insert them.

    A token whose (position + 1) is a multiple of compress_ratio completes a row: softmax of the
    scores over its window in each channel, the sum of the entries weighted with it, RMSNorm, RoPE
    at position (position // compress_ratio) * compress_ratio, rounding to bf16, quantization.
    Other tokens, and those with a negative position or slot, do nothing.

    B sequences, head size D, a multiple of 32 (128 in DeepSeek-V4, rope_dim 64).

    Args:
        state_cache: (num_state_blocks, state_block_size, 2 * W) float32, any strides: rows
            [entries (W) | scores (W)]. W = D: the window is the last compress_ratio positions.
            W = 2 D: the last 2 * compress_ratio; their first half has its entries and scores in
            columns [0, D) of either part, their second half in [D, 2 D). (DeepSeek-V4: ratio 128
            has the first form, ratio 4 the second.) Positions before 0 do not take part.
        token_to_seq: (T,) int32, the row of state_block_table of each token.
        positions: (T,) int64.
        slot_mapping: (n,) int64, n <= T; tokens from n on are padding. Slot s is row s % block_size
            of block s // block_size. Slots beyond the capacity are never written; of rows with
            one slot one is stored whole: on the CPU the last, on a GPU any.
        state_block_table: (B, max_blocks) int32; only entries of windows are followed.
        norm_weight: (D,) float32 or bfloat16.
        norm_eps: at least 0, finite as float32.
        cos_sin_cache: (max_position, rope_dim) float32 or bfloat16: [cos | sin], half each.
        k_cache: (num_blocks, block_size, row bytes) uint8, written in place. Row bytes: D / 2 +
            D / 32 for mxfp4, D + 4 for fp8_e4m3. The shape is nominal: a block holds the values of
            all its rows, then their scales (docs/formats.md). The stride between blocks and the
            storage offset are free.
        compress_ratio: positions for each row, 1 to 2^30 - 1.
        cache_format: "mxfp4" or "fp8_e4m3".

    k_cache shares no memory with what is read, nor its blocks with each other; this is checked in
    the first call with such shapes.

    On CUDA tensors a kernel runs: nothing synchronises, no device tensor is read on the host, and
    the call can be captured in a graph (call once before, so that the kernel is compiled); what
    lies outside the tables takes their nearest entry, and its row is undefined. What no kernel
    serves (head sizes above 512, compute capability below 9.0) runs the torch definition: slowly,
    with a host synchronisation and a warning.

    Raises:
        ValueError: an argument not as above; where the torch definition runs, also a window outside
            the tables. Nothing is written.
        NotImplementedError: CUDA tensors under graph capture that no kernel serves. In grad mode,
            a tensor that requires a gradient: there is no backward pass.
    """
    arguments = (
        state_cache, token_to_seq, positions, slot_mapping, state_block_table, norm_weight,
        norm_eps, cos_sin_cache, k_cache, compress_ratio, cache_format,
    )  # fmt: skip
    tensors = _k_tensors(arguments)
    key, launch = _PREPARED_K.find(tensors, (norm_eps, compress_ratio, cache_format))
    if launch is not None and launch.go(*tensors):
        return
    call = check_k(*arguments)
    refuse_gradients("compress_norm_rope_insert", dict(zip(K_TENSORS, tensors, strict=True)))
    if not is_traced(k_cache):
        _run_k(call, key)
        return
    torch.ops.cute_kernels.compress_norm_rope_insert(*arguments)


def _k_tensors(call: IndexerK | tuple) -> tuple[torch.Tensor, ...]:
    return (*call[:6], *call[7:9])


_PREPARED_Q, _PREPARED_K = PreparedCalls(), PreparedCalls()


def _run_q(
    call: IndexerQ, key: Hashable | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """key: to keep the launch by, for further calls of the same shapes."""
    if call.index_q.numel() == 0:
        codes, scales, weights = _fake_q(*call)
        return codes, scales if call.use_fp4 else None, weights
    reason = op.why_not(call)
    if reason is None:
        queries = aligned(call.index_q, len(call.index_q))
        launch = op.prepare_q(call._replace(index_q=queries))
        if queries is call.index_q:
            _PREPARED_Q.keep(key, launch)
        return launch.go(call.positions, queries, *call[2:4])
    _warn_or_refuse("fused_indexer_q_rope_quant", call.index_q.device, reason)
    with torch.no_grad():  # a graph's op is not asked about gradients again
        return indexer_q(call)


def _run_k(call: IndexerK, key: Hashable | None = None) -> None:
    if call.slot_mapping.numel() == 0 or call.k_cache.numel() == 0:
        return
    reason = op.why_not(call)
    if reason is None:
        launch = op.prepare_k(call)
        _PREPARED_K.keep(key, launch)
        launch.go(*_k_tensors(call))
        return
    _warn_or_refuse("compress_norm_rope_insert", call.k_cache.device, reason)
    with torch.no_grad():
        indexer_k(call)


def _warn_or_refuse(name: str, device: torch.device, reason: str) -> None:
    """Before the torch definition runs: on a GPU it is slow, and synchronises."""
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{name}: no kernel serves this call ({reason}), and the torch definition cannot be "
            "captured in a CUDA graph"
        )
    warnings.warn(f"{name} runs the slow torch definition: {reason}", stacklevel=4)


# ---- traced calls ------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("cute_kernels", "FRAGMENT")
_LIBRARY.define(
    "fused_indexer_q_rope_quant(Tensor positions, Tensor index_q, Tensor cos_sin_cache,"
    " Tensor index_weights, float softmax_scale, float head_scale, bool use_fp4)"
    " -> (Tensor codes, Tensor scales, Tensor weights)"
)
_LIBRARY.define(
    "compress_norm_rope_insert(Tensor state_cache, Tensor token_to_seq, Tensor positions,"
    " Tensor slot_mapping, Tensor state_block_table, Tensor norm_weight, float norm_eps,"
    " Tensor cos_sin_cache, Tensor(a!) k_cache, int compress_ratio, str cache_format) -> ()"
)


# Both ops check again, because an exported graph may be fed other shapes than it was traced with.
def _op_q(*arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, weights = _run_q(check_q(*arguments))
    # An op's result has a fixed number of tensors: fp8_e4m3 has an empty one.
    return codes, codes.new_empty(0, dtype=torch.uint8) if scales is None else scales, weights


def _op_k(*arguments) -> None:
    _run_k(check_k(*arguments))


def _fake_q(positions, index_q, cos_sin_cache, index_weights, softmax_scale, head_scale, use_fp4):
    tokens, heads, head_size = index_q.shape
    weights = index_q.new_empty((tokens, heads), dtype=torch.float32)
    if use_fp4:
        codes = index_q.new_empty((tokens, heads, head_size // 2), dtype=torch.uint8)
        scales = index_q.new_empty((tokens, heads, head_size // 32), dtype=torch.uint8)
    else:
        codes = index_q.new_empty((tokens, heads, head_size), dtype=torch.float8_e4m3fn)
        scales = index_q.new_empty(0, dtype=torch.uint8)
    return codes, scales, weights


_LIBRARY.impl("fused_indexer_q_rope_quant", _op_q, "CompositeExplicitAutograd")
_LIBRARY.impl("compress_norm_rope_insert", _op_k, "CompositeExplicitAutograd")
torch.library.register_fake("cute_kernels::fused_indexer_q_rope_quant", _fake_q, lib=_LIBRARY)
torch.library.register_fake(
    "cute_kernels::compress_norm_rope_insert", lambda *args: None, lib=_LIBRARY
)
