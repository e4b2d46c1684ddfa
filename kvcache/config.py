"""`AttentionConfig`: what one kind of attention layer asks of a kernel, as plain data.

Always passed explicitly: no planner function reads a global "current configuration".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cute_kernels.formats import KVCacheDType, ScaleLayout
from kvcache.checks import check_positive, check_type
from kvcache.dtypes import bytes_per_token, query_dtype_name, resolve_kv_cache_dtype

_FLAGS = ("softcap", "sinks", "mla", "bidirectional_spans", "chunked", "batch_invariant")


@dataclass(frozen=True)
class AttentionConfig:
    """One layer kind on one device.

    head_size: elements of a head, of K and of V.
    num_q_heads, num_kv_heads: the first a multiple of the second. On one device: divide by the
        tensor-parallel size first.
    kv_cache_dtype: a name of `KV_CACHE_DTYPES`, or "auto" for the query dtype.
    query_dtype: "bf16", "fp16" or "fp32"; a `torch.dtype` and torch's names are taken too.
    capability: (major, minor) of the device. A name like "sm_90a" or "sm_90" is taken too.
    sliding_window: keys that a query sees, itself included; None for all before it.
    page_size: tokens of a page as the kernel is given it; None while it is to be chosen.
    v_scale_layout: order of the V scales of a block-scaled cache ("linear", "sm100"); None is the
        dtype's default.
    softcap, sinks, mla: whether the layer has soft-capped scores, attention sinks, latent K and V.
    bidirectional_spans: whether some tokens (an image's) also see later ones.
    chunked: whether attention is local to chunks of the sequence.
    batch_invariant: whether a sequence's bits must not depend on the rest of the batch (calls with
        deterministic=True). On which of its query tokens share a call they may still depend.

    Raises:
        ValueError: a field that cannot be right. A configuration that is right and that no kernel
            serves is legal: `kvcache.can_run` says why.
    """

    head_size: int
    num_q_heads: int
    num_kv_heads: int
    kv_cache_dtype: str = "auto"
    query_dtype: str = "bf16"
    capability: tuple[int, int] = (9, 0)
    sliding_window: int | None = None
    page_size: int | None = None
    v_scale_layout: ScaleLayout | None = None
    softcap: bool = False
    sinks: bool = False
    mla: bool = False
    bidirectional_spans: bool = False
    chunked: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("head_size", "num_q_heads", "num_kv_heads"):
            check_positive(name, getattr(self, name))
        for name in ("sliding_window", "page_size"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; accepted: True or False")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: got {self.num_q_heads}; "
                f"accepted: multiples of num_kv_heads, {self.num_kv_heads}"
            )
        self._normalise("query_dtype", query_dtype_name(self.query_dtype))
        resolve_kv_cache_dtype(self.kv_cache_dtype, self.query_dtype)
        self._normalise("capability", _capability(self.capability))
        if self.v_scale_layout is not None:
            self._normalise("v_scale_layout", self._checked_layout())

    def _normalise(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone else

    def _checked_layout(self) -> ScaleLayout:
        layouts = self.dtype.format.scale_layouts
        for layout in layouts:
            if self.v_scale_layout in (layout, layout.value):
                return layout
        accepted = ", ".join(repr(layout.value) for layout in layouts) or "None"
        raise ValueError(
            f"v_scale_layout: got {self.v_scale_layout!r} with kv_cache_dtype "
            f"{self.kv_cache_dtype!r}; accepted: {accepted}"
        )

    @property
    def dtype(self) -> KVCacheDType:
        """The cache's dtype, "auto" resolved."""
        return resolve_kv_cache_dtype(self.kv_cache_dtype, self.query_dtype)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def device_name(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's K and V take, scales in the cache included."""
        return bytes_per_token(self.dtype.name, self.num_kv_heads, self.head_size)


def capability_of(name: str) -> tuple[int, int]:
    """(major, minor) of a compile target or device name: (9, 0) for "sm_90a", "sm_90" and "sm90".

    Raises:
        ValueError: a name of another form.
        TypeError: no name.
    """
    check_type("capability", name, str, "(major, minor), or like 'sm_90a'")
    match = re.fullmatch(r"sm_?([0-9]{1,2})([0-9])[af]?", name)
    if match is None:
        raise ValueError(f"capability: got {name!r}; accepted: (major, minor), or like 'sm_90a'")
    return int(match[1]), int(match[2])


def _capability(given: object) -> tuple[int, int]:
    if isinstance(given, str):
        return capability_of(given)
    # torch.cuda.get_device_capability gives a plain tuple; engines have named ones.
    if (
        isinstance(given, tuple)
        and len(given) == 2
        and all(
            isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in given
        )
    ):
        return tuple(given)
    raise ValueError(f"capability: got {given!r}; accepted: (major, minor), or like 'sm_90a'")
