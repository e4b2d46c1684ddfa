"""``flash_attn_varlen_func``: validate, choose a kernel, run.

Eager calls on plain tensors go straight to the implementation (a dispatcher round trip costs more
than the launch); traced calls (torch.compile, export, fake tensors) go through the custom op
``torch.ops.cute_kernels.flash_attn_varlen``, which has a fake implementation.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import torch

from cute_kernels.attention import route_sm90
from cute_kernels.attention.arguments import AttentionProblem, validate
from cute_kernels.attention.prepared import (
    PREPARED,
    find_launch,
    launch_again,
    new_lse,
    new_output,
    say_nothing,
)
from cute_kernels.calls import is_traced
from cute_kernels.reference.attention import attention_reference


def flash_attn_varlen_func(  # noqa: PLR0913 - the calling convention of serving engines
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int | torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    s_aux: torch.Tensor | None = None,
    deterministic: bool = False,
    fa_version: int | None = 4,
    v_scale_layout: str = "linear",
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch of sequences over a paged (or ragged) KV cache.

    B sequences, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), head size D.

    Args:
        q: (total_q, Hq, D) bf16 or fp16, the queries of all sequences one after the other; any
            strides with a contiguous last dim.
        k, v: (num_blocks, block_size, Hkv, D) with ``block_table``, else (total_k, Hkv, D);
            float8_e4m3fn, or q's dtype; any strides with a contiguous last dim. Of an nvfp4 cache
            uint8 with a last dim of D / 2 (`split_nvfp4` gives such views of a side).
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, tokens; an int or a 0-d tensor
            (one on the device is not read). They choose kernels and the size of workspace; in calls
            with long queries, keys beyond max_seqlen_k may not be seen.
        cu_seqlens_q: (B + 1,) int32, where each sequence's queries start in q.
        cu_seqlens_k: (B + 1,) int32, where each sequence's keys start in ragged k and v; with a
            block table, and without seqused_k, its differences are the key lengths.
        seqused_k: (B,) int32, keys of each sequence. 0 is legal. With ragged k and v at most what
            cu_seqlens_k gives a sequence, which is checked on CPU tensors only.
        softmax_scale: factor of the scores, finite and > 0 as float32; None means D ** -0.5.
        causal: query i of q_len sees keys up to i + kv_len - q_len (bottom-right aligned).
        window_size: (left, right) keys visible beside a query's own position; -1 is unlimited.
        softcap: scores become softcap * tanh(scores / softcap), after descaling, before the mask;
            0 is none, else from 2^-100 to 2^100.
        block_table: (B, max_blocks) int32 page ids. Entries past a sequence's last page, and
            before its window, are never followed.
        return_softmax_lse: also return the LSE.
        out: written instead of a new tensor; q's shape and dtype. Rows past cu_seqlens_q[-1] are
            left as they are (in a new tensor on the GPU: undefined). It is q itself or shares no
            element with what is read (views of one packed QKV do not), which is checked in the
            first call with such shapes.
        k_descale, v_descale: float32 factors of an FP8 cache, global scales of an nvfp4 one: (),
            (1,), (Hkv,) or (B, Hkv), any strides; None means 1.
        k_block_scale, v_block_scale: of an nvfp4 cache, and of no other: as k and v with a last dim
            of D / 16, float8_e4m3fn or uint8, any strides with a contiguous last dim. K is
            e2m1(code) * e4m3(block scale) * k_descale.
        num_splits: an int >= 0, accepted for callers that choose it. The decode kernel deals key
            tiles evenly over the device on its own and does not need the hint.
        s_aux: (Hq,) attention sinks, natural log units, added to each row's softmax denominator.
        deterministic: a sequence's bits do not depend on the rest of the batch. They may depend on
            its own query tokens: with another number of them in the call, or others beside a token,
            a token's bits may be others. Sequences with unlike numbers of query tokens are served
            by several launches then, so that no sequence's number decides for another; where q has
            B * max_seqlen_q rows (padding counts), all are taken to have max_seqlen_q query tokens,
            and shorter ones get the bits of that launch. (The same call gives the same bits in any
            case.)
        fa_version: None or 4.
        v_scale_layout: order of v_block_scale in a page; "linear". (What a store wrote as "sm100"
            is refused: nothing in the bytes tells the two apart.)
        others: accepted with neutral values, see the README.

    Returns:
        out, or (out, lse): (total_q, Hq, D) in q's dtype and (Hq, total_q) float32, the natural
        log of the row's sum of exponentials (sink included). A row that sees no key has output 0
        and LSE -inf, or its sink's value.

    A NaN among the values of a token makes rows of its sequence NaN, those that the causal mask
    hides it from included; past a sequence's end any byte may stand (docs/numerics.md).

    On CUDA the call does not synchronise, reads no device tensor on the host and can be captured
    in a graph (call once before, so that the kernel is compiled); a replay serves other lengths
    within the captured maxima. What no kernel here covers (head sizes other than 64, 128, 256 and
    512; block sizes that are no multiple of 16; GPUs other than SM90) runs the torch reference
    instead, slowly and with a host synchronisation, and warns once with the reason; under capture
    it raises.

    Raises:
        ValueError: an argument that cannot be right; the message says what was given and what is
            accepted.
        NotImplementedError: an argument of other engines' functions that is not implemented. In
            grad mode, a tensor that requires a gradient: there is no backward pass.
    """
    key = None
    if not others or say_nothing(others):
        tensors = (
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, k_descale, v_descale,
            s_aux, out, k_block_scale, v_block_scale,
        )  # fmt: skip
        key, launch = find_launch(
            tensors,
            (max_seqlen_q, max_seqlen_k),
            (softmax_scale, causal, window_size, softcap, return_softmax_lse, num_splits,
             deterministic, fa_version, v_scale_layout),
        )  # fmt: skip
        if launch is not None:
            result = launch_again(launch, tensors, return_softmax_lse)
            if result is not None:
                return result
    problem = validate(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        block_table=block_table, return_softmax_lse=return_softmax_lse, out=out,
        k_descale=k_descale, v_descale=v_descale, k_block_scale=k_block_scale,
        v_block_scale=v_block_scale, num_splits=num_splits, s_aux=s_aux,
        deterministic=deterministic, fa_version=fa_version, v_scale_layout=v_scale_layout,
        **others,
    )  # fmt: skip
    if is_traced(q):
        return _traced(problem, max_seqlen_q, max_seqlen_k)
    return run(problem, key if problem.sinks is s_aux else None)


def run(
    problem: AttentionProblem, key: Hashable | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Serve a validated problem: the kernel that can, else the torch reference.

    key: where to keep the launch for calls like this one, see prepared.py; None: nowhere.
    """
    q = problem.q
    reason = route_sm90.can_run(problem)
    if reason is not None:
        return _run_reference(problem, reason)
    out = new_output(q) if problem.out is None else problem.out
    lse = new_lse(q) if problem.return_lse else None
    if q.numel() and problem.cu_seqlens_q.shape[0] > 1:
        PREPARED.keep(key, route_sm90.run(problem, out, lse))
    return out if lse is None else (out, lse)


def _run_reference(problem: AttentionProblem, reason: str):
    if problem.q.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                f"flash_attn_varlen_func: no kernel for this call ({reason}), and the torch "
                "reference cannot be captured in a CUDA graph"
            )
        warnings.warn(
            f"flash_attn_varlen_func runs the slow torch reference: {reason}", stacklevel=3
        )
    out, lse = attention_reference(problem)
    return (out, lse) if problem.return_lse else out


# ---- traced calls ------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("cute_kernels", "FRAGMENT")
_LIBRARY.define(
    "flash_attn_varlen(Tensor q, Tensor k, Tensor v, SymInt max_seqlen_q, Tensor cu_seqlens_q,"
    " SymInt max_seqlen_k, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor(a!) out,"
    " Tensor(b!)? lse, float? softmax_scale, bool causal, int window_left, int window_right,"
    " float softcap, Tensor? block_table, Tensor? k_descale, Tensor? v_descale, int num_splits,"
    " Tensor? s_aux, bool deterministic, Tensor? k_block_scale, Tensor? v_block_scale) -> ()"
)


def _op(  # noqa: PLR0913 - the schema above
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k, out, lse,
    softmax_scale, causal, window_left, window_right, softcap, block_table, k_descale, v_descale,
    num_splits, s_aux, deterministic, k_block_scale, v_block_scale,
) -> None:  # fmt: skip
    problem = validate(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k,
        softmax_scale=softmax_scale, causal=causal, window_size=(window_left, window_right),
        softcap=softcap, block_table=block_table, return_softmax_lse=lse is not None, out=out,
        k_descale=k_descale, v_descale=v_descale, num_splits=num_splits, s_aux=s_aux,
        deterministic=deterministic, k_block_scale=k_block_scale, v_block_scale=v_block_scale,
    )  # fmt: skip
    result = run(problem)
    if lse is not None:
        lse.copy_(result[1])


_LIBRARY.impl("flash_attn_varlen", _op, "CompositeExplicitAutograd")
torch.library.register_fake("cute_kernels::flash_attn_varlen", lambda *args: None, lib=_LIBRARY)


def _traced(problem: AttentionProblem, max_seqlen_q, max_seqlen_k):
    """The call as one op of the traced graph; out and LSE are allocated in the graph.

    ``validate`` has run in the trace, so that refusals (gradients among them) come at trace time;
    the op validates again, because a graph may be fed other shapes than it was traced with. For the
    same reason it gets the caller's max_seqlen_q, not the smaller bound of the traced shapes.
    """
    p, q = problem, problem.q
    out = new_output(q) if p.out is None else p.out
    lse = new_lse(q) if p.return_lse else None
    bound_q = q.shape[0] if isinstance(max_seqlen_q, torch.Tensor) else max_seqlen_q
    bound_k = max_seqlen_k
    if max_seqlen_k is None or isinstance(max_seqlen_k, torch.Tensor):
        bound_k = 0
    torch.ops.cute_kernels.flash_attn_varlen(
        q, p.k, p.v, bound_q, p.cu_seqlens_q, bound_k, p.cu_seqlens_k, p.seqused_k, out, lse,
        p.softmax_scale, False, p.window_left, p.window_right, p.softcap, p.block_table,
        p.k_descale, p.v_descale, p.num_splits, p.sinks, p.deterministic, p.k_block_scale,
        p.v_block_scale,
    )  # fmt: skip
    return out if lse is None else (out, lse)
