"""KV cache formats: what a cache holds (storage) and what a user asks for (dtype names).

The two are never merged. Several user-facing dtypes share one storage format: `nvfp4_4over6` writes
other bytes than `nvfp4`, from a search over block scales, and any `nvfp4` reader reads both. So the
store needs the dtype and readers need the storage format.

A leaf: standard library only; torch is imported when a `torch_dtype` is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class QuantMode(Enum):
    """Which scales undo a format's quantization."""

    NONE = "none"
    SCALED = "scaled"  # one float32 factor a layer, or a KV head
    BLOCK_SCALED = "block_scaled"  # a scale in the cache for each group, times such a factor


class ScaleSearch(Enum):
    """How a store chooses the scale of a group of a block-scaled format."""

    DEFAULT = "default"  # the group's largest magnitude becomes the element's largest
    FOUR_OVER_SIX = "four_over_six"  # it becomes 4 where that has the smaller squared error
    FOUR_OVER_SIX_K_ONLY = "four_over_six_k_only"  # FOUR_OVER_SIX for keys, DEFAULT for values
    MSE = "mse"  # the smallest squared error over the codes from that for 4 to that for 7


class ScaleLayout(Enum):
    """The order of the V scales in a page of a block-scaled format (K scales are always linear)."""

    LINEAR = "linear"  # [token][group]
    SM100 = "sm100"  # swizzled within 4 tokens, for the SM100 trtllm-gen reader


@dataclass(frozen=True)
class StorageFormat:
    """What the bytes of a cache mean.

    name: "bf16", "fp16", "fp8_e4m3", "nvfp4".
    torch_dtype_name: dtype of the cache tensor, an attribute of torch.
    element_bits: bits of one stored element.
    quant_mode: which scales undo the quantization.
    max_magnitude: the largest value that a scale of 1 stores; None for unquantized formats.
    group: consecutive head elements that share a scale in the cache; 0 for none.
    scale_type: format of those scales, 8 bits each; None for none.
    scale_layouts: orders that the V scales may have; empty for none.
    """

    name: str
    torch_dtype_name: str
    element_bits: int
    quant_mode: QuantMode = QuantMode.NONE
    max_magnitude: float | None = None
    group: int = 0
    scale_type: str | None = None
    scale_layouts: tuple[ScaleLayout, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.torch_dtype_name)

    @property
    def bits_per_element(self) -> Fraction:
        """Bits of an element, its share of the scale in the cache included."""
        scale_bits = Fraction(8, self.group) if self.group else 0
        return Fraction(self.element_bits) + scale_bits

    def side_bytes(self, num_kv_heads: int, head_size: int) -> int:
        """Bytes that one token's K (or V) takes, scales in the cache included.

        Raises:
            ValueError: a head size that is no multiple of the group.
        """
        if self.group and head_size % self.group:
            raise ValueError(
                f"head_size: got {head_size}; {self.name} needs a multiple of {self.group}"
            )
        # The group is even and wide enough for whole bytes: nothing is rounded here.
        return int(num_kv_heads * head_size * self.bits_per_element / 8)


E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E2M1_MAX = 6.0

# Head elements that share a block scale of nvfp4.
NVFP4_GROUP = 16

STORAGE_FORMATS: dict[str, StorageFormat] = {
    storage.name: storage
    for storage in (
        StorageFormat("bf16", "bfloat16", 16),
        StorageFormat("fp16", "float16", 16),
        StorageFormat("fp8_e4m3", "float8_e4m3fn", 8, QuantMode.SCALED, E4M3_MAX),
        StorageFormat(
            "nvfp4",
            "uint8",
            4,
            QuantMode.BLOCK_SCALED,
            E2M1_MAX * E4M3_MAX,
            group=NVFP4_GROUP,
            scale_type="e4m3",
            scale_layouts=(ScaleLayout.LINEAR, ScaleLayout.SM100),
        ),
    )
}


@dataclass(frozen=True)
class KVCacheDType:
    """A KV cache dtype as users name it.

    name: what the user writes. storage: the format of the bytes, a key of `STORAGE_FORMATS`.
    scale_search: how the store chooses block scales; None where there are none.
    """

    name: str
    storage: str
    scale_search: ScaleSearch | None = None

    @property
    def format(self) -> StorageFormat:
        return STORAGE_FORMATS[self.storage]

    @property
    def quant_mode(self) -> QuantMode:
        return self.format.quant_mode

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.format.torch_dtype

    @property
    def bits_per_element(self) -> Fraction:
        return self.format.bits_per_element

    @property
    def group(self) -> int:
        return self.format.group

    @property
    def scale_type(self) -> str | None:
        return self.format.scale_type

    @property
    def scale_layout(self) -> ScaleLayout | None:
        """The order that V scales have unless a cache is tagged otherwise; None without scales."""
        return self.format.scale_layouts[0] if self.format.scale_layouts else None


# In order of preference where two names are equally good: the plain name of a format comes first.
KV_CACHE_DTYPES: dict[str, KVCacheDType] = {
    dtype.name: dtype
    for dtype in (
        KVCacheDType("bfloat16", "bf16"),
        KVCacheDType("bf16", "bf16"),
        KVCacheDType("float16", "fp16"),
        KVCacheDType("fp16", "fp16"),
        KVCacheDType("fp8", "fp8_e4m3"),
        KVCacheDType("fp8_e4m3", "fp8_e4m3"),
        KVCacheDType("nvfp4", "nvfp4", ScaleSearch.DEFAULT),
        KVCacheDType("nvfp4_4over6", "nvfp4", ScaleSearch.FOUR_OVER_SIX),
        KVCacheDType("nvfp4_4over6_k", "nvfp4", ScaleSearch.FOUR_OVER_SIX_K_ONLY),
        KVCacheDType("nvfp4_mse", "nvfp4", ScaleSearch.MSE),
    )
}


def get_kv_cache_dtype(name: str) -> KVCacheDType:
    """The dtype of exactly this name: no prefix, no other case, no surrounding space.

    Raises:
        ValueError: an unknown name; the message has the nearest known ones. Also "auto", which
            means the model's dtype and so needs the model.
    """
    if name == "auto":
        raise ValueError(
            "kv_cache_dtype: got 'auto', which is the model's own dtype; "
            "resolve_kv_cache_dtype(name, query_dtype) resolves it"
        )
    if not isinstance(name, str) or name not in KV_CACHE_DTYPES:
        raise ValueError(unknown_name("kv_cache_dtype", name, ("auto", *KV_CACHE_DTYPES)))
    return KV_CACHE_DTYPES[name]


def unknown_name(what: str, given: object, known: Iterable[str]) -> str:
    """The message that refuses `given`: the nearest known names if any is near, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(given).strip().lower(), known, n=3, cutoff=0.5)
    nearest = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    return f"{what}: got {given!r}{nearest}; known: {', '.join(map(repr, known))}"
