"""Argument validation of ``flash_attn_varlen_func``: host code only.

``validate`` turns the public arguments into one :class:`AttentionProblem` or raises. It reads
shapes, strides, dtypes and devices, never the contents of a device tensor, and makes views, not
copies (sinks that are not contiguous float32 excepted). Every refusal names the argument, what was
given and what is accepted.

It runs on every eager call, so the accepted path is written for speed: attributes of a tensor cost
0.05 to 0.2 us each and are read once, abstract-base-class checks come after exact type checks.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from cute_kernels.attention.cache_arguments import (
    check_block_scales,
    check_descale,
    check_kv,
    check_last_dim,
    describe,
    refuse,
)
from cute_kernels.calls import as_number, check_tensor, is_int, refuse_gradients
from cute_kernels.memory import overlapping, shares_elements
from cute_kernels.numerics import FLOAT32_END, FLOAT32_ZERO_UP_TO

# Window bounds from here on mean "unlimited": 2^30 keys are more than any sequence has, and
# `position + bound` then stays inside int32 in the kernels.
WINDOW_UNLIMITED_FROM = 2**30

# Of softcaps: the kernels divide by them and multiply them by log2(e) in float32.
_CAPS = (2.0**-100, 2.0**100)
_Q_DTYPES = (torch.bfloat16, torch.float16)
_KV_FORMATS = {
    torch.uint8: "nvfp4",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_INT_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_DEVICES = ("cpu", "cuda")
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Arguments that other engines' functions of this name have and that are not implemented here.
# They pass with a neutral value.
OTHER_ARGUMENTS = frozenset(
    {
        "alibi_slopes",
        "attention_chunk",
        "aux_tensors",
        "batch_invariant",
        "block_sparse_tensors",
        "cp_rank",
        "cp_tot_seqused_k",
        "cp_world_size",
        "cu_seqlens_k_new",
        "dropout_p",
        "leftpad_k",
        "mask_mod",
        "output_block_scale",
        "output_scale",
        "pack_gqa",
        "page_table",
        "q_descale",
        "q_v",
        "qv",
        "return_attn_probs",
        "scheduler_metadata",
        "score_mod",
        "seqused_q",
        "sm_margin",
    }
)


class AttentionProblem(NamedTuple):
    """The validated arguments of one attention call.

    B sequences, Hq query heads, Hkv KV heads, head size D. With ``block_table``, ``k`` and ``v``
    are paged, ``(num_blocks, block_size, Hkv, D)``; without, ragged, ``(total_k, Hkv, D)``. Query
    ``i`` of a sequence sees key ``j`` when
    ``-window_left <= j - (i + kv_len - q_len) <= window_right``; -1 lifts a bound, and ``causal``
    is folded in as ``window_right = 0``. Lengths of keys come from ``seqused_k``, where that is
    None from the differences of ``cu_seqlens_k``.
    """

    q: torch.Tensor  # (total_q, Hq, D) bf16 or fp16
    k: torch.Tensor  # float8_e4m3fn, q's dtype, or uint8: nvfp4, whose last dim is D / 2
    v: torch.Tensor  # as k
    cu_seqlens_q: torch.Tensor  # (B + 1,) int32
    max_seqlen_q: int  # upper bound of the query lengths, at most total_q
    max_seqlen_k: int  # upper bound of the key lengths, 0 where it is not known
    block_table: torch.Tensor | None  # (B, max_blocks) int32
    seqused_k: torch.Tensor | None  # (B,) int32
    cu_seqlens_k: torch.Tensor | None  # (B + 1,) int32
    k_descale: torch.Tensor | None  # (B, Hkv) float32, any strides; None means 1
    v_descale: torch.Tensor | None  # as k_descale
    sinks: torch.Tensor | None  # (Hq,) float32, contiguous
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float  # 0.0: no soft cap
    num_splits: int  # 0: automatic
    deterministic: bool
    out: torch.Tensor | None  # q's shape and dtype
    return_lse: bool
    k_block_scale: torch.Tensor | None = None  # nvfp4: as k, float8_e4m3fn, its last dim D / 16
    v_block_scale: torch.Tensor | None = None

    @property
    def kv_format(self) -> str:
        """The storage format of k and v: "nvfp4", "fp8_e4m3", "bf16" or "fp16"."""
        return _KV_FORMATS[self.k.dtype]


def validate(  # noqa: PLR0913 - the parameters of the public function
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
) -> AttentionProblem:
    """Check every argument of ``flash_attn_varlen_func`` and return them normalised.

    The signature is that of the public function, hence its length.

    Raises:
        ValueError: a wrong dtype, rank, shape, stride, device or value.
        NotImplementedError: what other engines' functions of this name accept and this one does
            not implement; inputs that need a gradient.
        TypeError: an argument name that no known variant of this function has.
    """
    if others:
        _check_others(others)
    given = {"q": q, "k": k, "v": v, "block_table": block_table, "seqused_k": seqused_k, "out": out}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "s_aux": s_aux}
    given |= {"k_descale": k_descale, "v_descale": v_descale}
    given |= {"k_block_scale": k_block_scale, "v_block_scale": v_block_scale}
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            check_tensor(f"flash_attn_varlen_func: {name}", x)
    if fa_version is not None and not (is_int(fa_version) and fa_version == 4):
        refuse("fa_version", describe(fa_version), "None or 4, an int")
    if not isinstance(q, torch.Tensor) or q.dtype not in _Q_DTYPES or q.dim() != 3:
        refuse("q", describe(q), "a bfloat16 or float16 (total_q, Hq, D) tensor")
    device, (total_q, num_q_heads, head_size) = q.device, q.shape
    if device.type not in _DEVICES and type(q) is torch.Tensor:
        refuse("q", describe(q), "a tensor on cpu or cuda")
    check_last_dim("q", q)
    batch = _check_index("cu_seqlens_q", cu_seqlens_q, device) - 1
    block_scaled = k_block_scale is not None or v_block_scale is not None
    num_kv_heads = check_kv(q, k, v, block_table is not None, block_scaled)
    check_block_scales(k, v, k_block_scale, v_block_scale, v_scale_layout)
    if block_table is not None:
        _check_block_table(block_table, device, batch)
    elif cu_seqlens_k is None:
        refuse("cu_seqlens_k", None, "an int32 (B + 1,) tensor, where there is no block_table")
    if seqused_k is not None:
        _check_index("seqused_k", seqused_k, device, batch)
    elif cu_seqlens_k is None:
        refuse("seqused_k", None, "an int32 (B,) tensor; with cu_seqlens_k also None")
    if cu_seqlens_k is not None:
        _check_index("cu_seqlens_k", cu_seqlens_k, device, batch + 1)
    if k_descale is not None:
        k_descale = check_descale("k_descale", k_descale, k, batch, num_kv_heads)
    if v_descale is not None:
        v_descale = check_descale("v_descale", v_descale, v, batch, num_kv_heads)
    if s_aux is not None:
        s_aux = _check_sinks(s_aux, device, num_q_heads)
    if out is not None:
        _check_out(out, q)
        read = {"k": k, "v": v, "k_block_scale": k_block_scale, "v_block_scale": v_block_scale}
        read |= {"block_table": block_table, "seqused_k": seqused_k, "s_aux": s_aux}
        read |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        _check_apart(out, q, read | {"k_descale": k_descale, "v_descale": v_descale})
    needing = {"q": q, "k": k, "v": v, "k_descale": k_descale, "v_descale": v_descale}
    refuse_gradients("flash_attn_varlen_func", needing | {"s_aux": s_aux, "out": out})
    bound_k = 0 if max_seqlen_k is None else _check_max_seqlen("max_seqlen_k", max_seqlen_k, 0)
    _check_flags(causal, return_softmax_lse, deterministic)
    window_left, window_right = _check_window(window_size, causal)
    return AttentionProblem(
        q, k, v, cu_seqlens_q,
        min(_check_max_seqlen("max_seqlen_q", max_seqlen_q, total_q), total_q),
        bound_k, block_table, seqused_k, cu_seqlens_k, k_descale, v_descale, s_aux,
        head_size**-0.5 if softmax_scale is None else _check_scale(softmax_scale),
        window_left, window_right,
        0.0 if softcap is None else _check_softcap(softcap),
        _check_num_splits(num_splits), bool(deterministic), out, bool(return_softmax_lse),
        k_block_scale, v_block_scale,
    )  # fmt: skip


def _check_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in OTHER_ARGUMENTS:
            raise TypeError(f"flash_attn_varlen_func: unexpected keyword argument {name!r}")
        # A tensor is never neutral: to compare it would read it from the device.
        if value is None or (isinstance(value, (int, float)) and value == 0):
            continue
        is_world_size = name == "cp_world_size"
        if is_world_size and isinstance(value, int) and value == 1:
            continue
        neutral = "None, 0, False" + (" or 1" if is_world_size else "")
        refuse(name, describe(value), f"{neutral} (not implemented)", NotImplementedError)


def _check_index(name: str, x: torch.Tensor, device: torch.device, length: int = -1) -> int:
    """Check an int32 vector, of `length` entries unless that is -1; return its length."""
    if (
        not isinstance(x, torch.Tensor)
        or x.dtype is not torch.int32
        or x.dim() != 1
        or x.device != device
    ):
        refuse(name, describe(x), f"a one-dimensional int32 tensor on q's device, {device}")
    size = x.shape[0]
    if length == -1:
        if size < 1:
            refuse(name, describe(x), "shape (B + 1,)")
    elif size != length:
        refuse(name, describe(x), f"shape ({length},), as cu_seqlens_q has B + 1 entries")
    if not x.is_contiguous():
        refuse(name, describe(x), "a contiguous tensor")
    return size


def _check_block_table(table: torch.Tensor, device: torch.device, batch: int) -> None:
    if not isinstance(table, torch.Tensor) or table.dtype is not torch.int32 or table.dim() != 2:
        refuse("block_table", describe(table), "an int32 (B, max_blocks) tensor")
    if table.device != device or table.shape[0] != batch:
        accepted = f"shape ({batch}, max_blocks) on q's device, {device}"
        refuse("block_table", describe(table), accepted)
    check_last_dim("block_table", table)


def _check_sinks(sinks: torch.Tensor, device: torch.device, num_q_heads: int) -> torch.Tensor:
    if (
        not isinstance(sinks, torch.Tensor)
        or sinks.dtype not in _FLOAT_DTYPES
        or sinks.device != device
    ):
        refuse("s_aux", describe(sinks), f"None or a float tensor on q's device, {device}")
    if sinks.shape != (num_q_heads,):
        refuse("s_aux", describe(sinks), f"shape (Hq,) = ({num_q_heads},)")
    if sinks.dtype is not torch.float32:
        sinks = sinks.to(torch.float32)
    return sinks.contiguous()


def _check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    if (
        not isinstance(out, torch.Tensor)
        or out.shape != q.shape
        or out.dtype is not q.dtype
        or out.device != q.device
    ):
        accepted = f"q's shape, dtype and device: {tuple(q.shape)} {q.dtype} on {q.device}"
        refuse("out", describe(out), accepted)
    if not out.is_contiguous():
        check_last_dim("out", out)
        if shares_elements(out):
            refuse("out", describe(out), "a tensor whose elements do not share memory")


def _check_apart(
    out: torch.Tensor, q: torch.Tensor, read: Mapping[str, torch.Tensor | None]
) -> None:
    """What is written must not be what other sequences still read. Q itself may be overwritten: an
    output row is written when its query has been read."""
    found = overlapping({"out": out}, {**read, "q": q})
    if found is None or (found[1] == "q" and _are_one(out, q)):
        return
    accepted = (
        "all of q's memory, or none of it" if found[1] == "q" else "memory apart from what is read"
    )
    refuse("out", f"{describe(out)}, memory of {found[1]}", accepted)


def _are_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether each element of a tensor is the same element of another of its shape."""
    dims = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.data_ptr() == b.data_ptr() and all(n == m for size, n, m in dims if size > 1)


def _check_max_seqlen(name: str, value: int | torch.Tensor, device_bound: int) -> int:
    """An int, or a 0-d integer tensor; one on an accelerator, or in a trace, is not read."""
    if type(value) is int and value >= 0:
        return value
    accepted = "an int >= 0 or a 0-d integer tensor"
    if isinstance(value, torch.Tensor):
        if value.dim() != 0 or value.dtype not in _INT_DTYPES:
            refuse(name, describe(value), accepted)
        traced = torch.compiler.is_compiling() or type(value) is not torch.Tensor
        if traced or value.device.type != "cpu":
            return device_bound
        value = value.item()
    if isinstance(value, torch.SymInt):
        return value
    if not is_int(value) or value < 0:
        refuse(name, repr(value), accepted)
    return int(value)


def _check_flags(*flags: object) -> None:
    """Booleans and what stands for them: 0, 1, None. Truth of anything else is an accident."""
    for flag, name in zip(flags, ("causal", "return_softmax_lse", "deterministic"), strict=True):
        wrong = not isinstance(flag, numbers.Integral) or flag not in (0, 1)
        if flag is not True and flag is not False and flag is not None and wrong:
            refuse(name, describe(flag), "True or False")


def _check_window(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        refuse("window_size", repr(window), "None or (left, right)")
    left, right = (-1 if bound is None else bound for bound in window)
    for bound in (left, right):
        if not is_int(bound) or bound < -1:
            refuse("window_size", repr(window), "(left, right) of ints >= 0, or -1 (unlimited)")
    left = -1 if left >= WINDOW_UNLIMITED_FROM else int(left)
    right = -1 if right >= WINDOW_UNLIMITED_FROM else int(right)
    return left, 0 if causal else right


def _check_scale(scale: float) -> float:
    # The kernels take the row maximum before they scale; a negative factor would make it a minimum.
    number = as_number(scale)
    if number is None or not FLOAT32_ZERO_UP_TO < number < FLOAT32_END:
        accepted = "None (D**-0.5) or a Python number that is finite and > 0 as float32"
        refuse("softmax_scale", describe(scale), accepted)
    return number


def _check_softcap(softcap: float) -> float:
    number = as_number(softcap)
    if number is None or not (number == 0.0 or _CAPS[0] <= number <= _CAPS[1]):
        refuse("softcap", describe(softcap), "0 (none) or a Python number from 2^-100 to 2^100")
    return number


def _check_num_splits(num_splits: int) -> int:
    if not is_int(num_splits) or num_splits < 0:
        refuse("num_splits", describe(num_splits), "an int >= 0 (0: automatic)")
    return int(num_splits)
