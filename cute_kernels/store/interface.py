"""``reshape_and_cache``: check, then the kernels on CUDA tensors and the torch reference on others.

Eager calls on plain tensors go straight to the implementation; traced calls (torch.compile,
export, fake tensors) go through the custom op ``torch.ops.cute_kernels.reshape_and_cache``.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from cute_kernels.calls import is_traced, refuse_gradients
from cute_kernels.prepared import PreparedCalls
from cute_kernels.reference import store as reference
from cute_kernels.store import op

PREPARED = PreparedCalls()
_NAMES = (
    "key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale",
    "v_scale", "v_scale_layout",
)  # fmt: skip


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
        key, value: (num_tokens, Hkv, D) bfloat16 or float16. Any strides; rows whose elements are
            not contiguous and 16-byte aligned are copied first. Rows from len(slot_mapping) on
            are padding and are not stored.
        key_cache, value_cache: (num_blocks, block_size, Hkv, F), written in place. fp8: F = D,
            float8_e4m3fn or uint8, any strides with a contiguous last dim. nvfp4: F = 9 D / 16,
            uint8, each block dense NHD or HND, its data before its block scales
            (`split_nvfp4`); the stride between blocks and the storage offset are free. The two
            may share an allocation, not their elements: caches that overlap, or whose own elements
            do (expanded ones), are refused. So is memory of the cache in any other argument, in
            the first call with such shapes.
        slot_mapping: (n,) int64, n <= num_tokens; slot s is token s % block_size of block
            s // block_size. Negative slots are skipped; slots beyond the capacity are never
            written. Of tokens with the same slot one is stored, whole: the last one on the CPU
            and up to 1024 slots, an unspecified one in longer calls on the GPU.
        kv_cache_dtype: "fp8" ("fp8_e4m3"), "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k" or
            "nvfp4_mse". The nvfp4 dtypes differ in how block scales are chosen; every nvfp4
            reader reads all of them.
        k_scale, v_scale: what a reader multiplies by: a float, or a float32 tensor (), (1,) or
            (Hkv,) on key's device.
        v_scale_layout: order of the V block scales in a page: "linear", or "sm100" for an nvfp4
            cache with block_size a multiple of 4 and D of 64. Nothing in the bytes tells the two
            apart: a reader must be told.

    The bytes are those of `cute_kernels.reference.store`, which defines them, on every input. On
    CUDA the call does not synchronise, reads no device tensor on the host, and can be captured in
    a graph (call once before, so that the kernel is compiled).

    Raises:
        ValueError: an argument not as above, or a float scale that, as float32, is not finite and
            within [2^-100, 2^100]. Scales in tensors are not checked: the formula decides.
        NotImplementedError: CUDA tensors that no kernel serves: compute capability below 9.0, a
            head size that is no multiple of 16, 2^31 slots or more. In grad mode, a tensor that
            requires a gradient: there is no backward pass.
    """
    arguments = (
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale,
        v_scale_layout,
    )  # fmt: skip
    key_of_call, launch = _find(arguments)
    if launch is not None and launch.go(*arguments[:5], k_scale, v_scale):
        return
    storage = _check(*arguments)
    tensors = zip(_NAMES, arguments, strict=True)
    needing = {name: x for name, x in tensors if isinstance(x, torch.Tensor)}
    refuse_gradients("reshape_and_cache", needing)
    if is_traced(key):
        k_tensor, k_float = _split(k_scale)
        v_tensor, v_float = _split(v_scale)
        torch.ops.cute_kernels.reshape_and_cache(
            *arguments[:6], k_tensor, v_tensor, k_float, v_float, v_scale_layout
        )
    else:
        PREPARED.keep(key_of_call, _run(op.StoreCall(*arguments, storage)))


def _find(arguments: tuple) -> tuple[Hashable | None, op.StoreLaunch | None]:
    """(key, launch) as of ``PreparedCalls.find``."""
    tensors, scalars = list(arguments[:5]), list(arguments[5:])
    for i in (1, 2):  # the scales
        if isinstance(scalars[i], torch.Tensor):
            tensors.append(scalars[i])
            scalars[i] = None
    return PREPARED.find(tensors, tuple(scalars))


def _check(*arguments) -> str:
    """`reference.check_store`, and what is asked of tensors together."""
    storage = reference.check_store(*arguments)
    key, *others = (x for x in arguments if isinstance(x, torch.Tensor))
    for x in others:
        if x.device != key.device:
            raise ValueError(
                f"tensors: got {x.device} and {key.device}; accepted: one device for all of them, "
                "scales included"
            )
    return storage


def _run(call: op.StoreCall) -> op.StoreLaunch | None:
    if call.key.device.type != "cuda":
        reference.reshape_and_cache(*call[:-1])
        return None
    reason = op.can_run(call)
    if reason is not None:
        raise NotImplementedError(
            f"reshape_and_cache: no kernel for this call ({reason}); "
            "cute_kernels.reference.store.reshape_and_cache does it in torch, slowly and with a "
            "host synchronisation"
        )
    return op.run(call)


# ---- traced calls ------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("cute_kernels", "FRAGMENT")
_LIBRARY.define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str kv_cache_dtype, Tensor? k_scale, Tensor? v_scale,"
    " float k_scale_float, float v_scale_float, str v_scale_layout) -> ()"
)


def _split(scale: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    return (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, float(scale))


def _op(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale,
    k_scale_float, v_scale_float, v_scale_layout,
) -> None:  # fmt: skip
    # Checked again, because an exported graph may be fed other shapes than it was traced with.
    arguments = (
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,
        k_scale_float if k_scale is None else k_scale,
        v_scale_float if v_scale is None else v_scale,
        v_scale_layout,
    )  # fmt: skip
    _run(op.StoreCall(*arguments, _check(*arguments)))


_LIBRARY.impl("reshape_and_cache", _op, "CompositeExplicitAutograd")
torch.library.register_fake("cute_kernels::reshape_and_cache", lambda *args: None, lib=_LIBRARY)
