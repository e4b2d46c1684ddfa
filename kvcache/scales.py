"""The scales of a quantized KV cache as values: what they may be, what they are for, and which ones
use a format's whole range. Where layers keep them: see `kvcache.layer_scales`.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_kernels.formats import (
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    KVCacheDType,
    QuantMode,
    get_kv_cache_dtype,
)
from kvcache.checks import check_type, described

# 1 / scale and code * scale stay normal float32 numbers.
SCALE_RANGE = (2.0**-100, 2.0**100)
_E4M3_CLIPS_ABOVE = 464.0  # up to here, rounding to nearest gives 448 anyway


@dataclass(frozen=True)
class KVScales:
    """What the stored codes of one layer are multiplied by to give K and V.

    k, v: a number, or one per KV head, as a tensor () or (Hkv,) too; kept as tuples of float32
    values. For nvfp4 these are the global scales.
    kv_cache_dtype: what they were calibrated for; None where nobody said. Scales for another
    storage format are wrong by a constant factor (fp8's are 6 times nvfp4's), which nothing in
    their values shows.
    rotated_keys: whether they were calibrated on keys multiplied by the Hadamard matrix of
    `PagedKVCache(rotate_keys=True)`, whose largest elements are others.

    Raises:
        ValueError: none, or one that is not finite and within [2^-100, 2^100] as float32: a Python
            float can round to 0 or infinity on the way to the device. A tensor of more dimensions
            or on the meta device. K and V for different numbers of heads. A dtype without scales.
        TypeError: scales that are no numbers, a rotated_keys that is no bool.
    """

    k: tuple[float, ...]
    v: tuple[float, ...]
    kv_cache_dtype: str | None = None
    rotated_keys: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_type("rotated_keys", self.rotated_keys, bool, "True or False")
        for name in ("k", "v"):
            object.__setattr__(self, name, _checked_scales(name, getattr(self, name)))
        if len({len(self.k), len(self.v)} - {1}) > 1:
            raise ValueError(
                f"v scale: got {len(self.v)} and {len(self.k)} k scales; accepted: as many, or one"
            )
        if self.kv_cache_dtype is not None:
            check_has_scales(self.kv_cache_dtype)

    def of_rank(self, rank: int, world_size: int) -> KVScales:
        """The scales of the KV heads of one of `world_size` tensor-parallel ranks.

        Heads are dealt out in order, and repeated where there are fewer than ranks; one scale for
        all heads stays one.

        Raises:
            ValueError: a number of heads that neither is a multiple of the ranks' nor divides it; a
                rank that is none of them.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: got {rank}; accepted: 0 to {world_size - 1}")
        heads = max(len(self.k), len(self.v))
        if heads > 1 and heads % world_size and world_size % heads:
            raise ValueError(f"world_size: got {world_size} for the scales of {heads} KV heads")
        first, count = rank * heads // world_size, max(1, heads // world_size)
        k, v = (
            side if len(side) == 1 else side[first : first + count] for side in (self.k, self.v)
        )
        return replace(self, k=k, v=v)

    def check_dtype(self, kv_cache_dtype: str, what: str = "scales") -> None:
        """Refuse to be used with a cache of another storage format, or of any where none is known.

        Args:
            kv_cache_dtype: the cache's, a quantized dtype.
            what: how the message calls these scales.

        Raises:
            ValueError: naming both dtypes.
        """
        used = check_has_scales(kv_cache_dtype)
        if self.kv_cache_dtype is None:
            raise ValueError(
                f"{what}: do not say which kv_cache_dtype they are for, asked for were those of "
                f"{kv_cache_dtype!r}; accepted: KVScales(k, v, {kv_cache_dtype!r})"
            )
        if get_kv_cache_dtype(self.kv_cache_dtype).storage != used.storage:
            raise ValueError(
                f"{what}: these are for kv_cache_dtype {self.kv_cache_dtype!r}, asked for were "
                f"those of {kv_cache_dtype!r}"
            )

    def check_rotation(self, rotated_keys: bool, what: str = "scales") -> None:
        """Refuse to be used with a cache that holds keys otherwise rotated than the calibration's.

        Args:
            rotated_keys: whether the cache's keys are rotated.
            what: how the message calls these scales.

        Raises:
            ValueError: naming both.
        """
        if self.rotated_keys is not rotated_keys:
            words = {True: "rotated", False: "plain"}
            raise ValueError(
                f"{what}: rotated_keys is {self.rotated_keys}, these are for "
                f"{words[self.rotated_keys]} keys; the cache holds {words[rotated_keys]} ones"
            )

    def tensors(
        self, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K's and V's scales as float32: () for one value, else (Hkv,)."""
        k, v = (
            torch.tensor(side if len(side) > 1 else side[0], dtype=torch.float32, device=device)
            for side in (self.k, self.v)
        )
        return k, v


def check_has_scales(kv_cache_dtype: str) -> KVCacheDType:
    """The dtype of this name, if reading it takes scales.

    Raises:
        ValueError: an unknown name, or a dtype without scales.
    """
    dtype = get_kv_cache_dtype(kv_cache_dtype)
    if dtype.quant_mode is QuantMode.NONE:
        raise ValueError(f"kv_cache_dtype: got {kv_cache_dtype!r}; accepted: one that has scales")
    return dtype


def suggest_scales(
    k_absmax: float | Iterable[float],
    v_absmax: float | Iterable[float],
    kv_cache_dtype: str,
    current: KVScales | None = None,
    *,
    rotated_keys: bool = False,
) -> KVScales:
    """Scales that use a format's whole range: absmax / 448 for fp8, absmax / (6 * 448) for nvfp4.

    With the second, the largest block scale of a layer is about 448, so that groups 2^14 times
    smaller than the largest still have normal E4M3 block scales. With a global scale of 1 a layer
    of absmax 0.02 has subnormal block scales throughout, which have few bits or none.

    Args:
        k_absmax, v_absmax: the largest magnitudes seen, one number or one per KV head. Where it is
            0, nothing was seen and the scale is 1.
        kv_cache_dtype: a quantized dtype.
        current: scales in use; warned about where they lose accuracy on such data.
        rotated_keys: whether the keys seen were rotated; noted in the result.

    Raises:
        ValueError: an absmax that is negative, infinite or NaN, or so small or large that its
            scale is out of range; a dtype without scales; current scales of another storage format
            or rotation.
    """
    dtype = check_has_scales(kv_cache_dtype)
    absmax = {
        "k": _as_tuple("k_absmax", k_absmax),
        "v": _as_tuple("v_absmax", v_absmax),
    }
    if current is not None:
        check_type("current", current, KVScales, "KVScales or None")
        current.check_rotation(rotated_keys, "current")
        if current.kv_cache_dtype is not None:
            current.check_dtype(kv_cache_dtype, "current")
    for side, values in absmax.items():
        if not values or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{side}_absmax: got {values}; accepted: finite and >= 0")
    for side, values in absmax.items() if current is not None else ():
        _warn_about(side, getattr(current, side), values, kv_cache_dtype)
    largest = dtype.format.max_magnitude
    return KVScales(
        **{
            side: tuple(value / largest if value else 1.0 for value in values)
            for side, values in absmax.items()
        },
        kv_cache_dtype=kv_cache_dtype,
        rotated_keys=rotated_keys,
    )


def _as_tuple(name: str, values: Any) -> tuple[float, ...]:
    given = values
    if isinstance(values, torch.Tensor):
        if values.dim() > 1:
            raise ValueError(
                f"{name}: got a torch.Tensor of shape {tuple(values.shape)}; accepted: (), (1,) or "
                "(heads,)"
            )
        if values.is_meta:
            raise ValueError(f"{name}: is on the meta device; load the model first")
        values = values.detach().reshape(-1).tolist()
    elif not isinstance(values, Iterable) or getattr(values, "ndim", None) == 0:
        values = (values,)
    # Bytes are numbers in order, keys of a mapping and members of a set are in none of the heads';
    # text may be a number, and True counts as one. Rows of an array are no numbers.
    unordered = isinstance(values, (bytes, bytearray, memoryview, Mapping, Set))
    values = list(values)
    if unordered or any(
        isinstance(x, (str, bool))
        or getattr(x, "ndim", 0)
        or str(getattr(x, "dtype", "")) in ("bool", "torch.bool")
        or not hasattr(x, "__float__")
        for x in values
    ):
        raise TypeError(
            f"{name}: got {described(given)}; accepted: a number, or numbers, one per KV head"
        )
    try:
        return tuple(map(float, values))
    except OverflowError as error:
        raise ValueError(f"{name}: got a number too large for a float") from error


def _checked_scales(name: str, values: Any) -> tuple[float, ...]:
    given = _as_tuple(f"{name} scale", values)
    low, high = SCALE_RANGE
    stored = tuple(map(_as_float32, given))
    if not stored or not all(low <= value <= high for value in stored):
        raise ValueError(
            f"{name} scale: got {given}; accepted: finite, within [2^-100, 2^100] as float32"
        )
    return stored


def _as_float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _warn_about(
    side: str, scales: tuple[float, ...], absmax: tuple[float, ...], kv_cache_dtype: str
) -> None:
    """Warn where current scales clip the data or push all of it into E4M3's subnormals."""
    storage = get_kv_cache_dtype(kv_cache_dtype).format
    count = max(len(scales), len(absmax))
    if len({len(scales), len(absmax)} - {1}) > 1:
        raise ValueError(
            f"current: {side} has {len(scales)} scales and {side}_absmax {len(absmax)} values"
        )
    scales, absmax = (values * count if len(values) == 1 else values for values in (scales, absmax))
    # What is stored in E4M3: the elements themselves, or block scales 6 times smaller.
    divisor = storage.max_magnitude / E4M3_MAX
    what = "block scales" if storage.group else "codes"
    largest = [peak / divisor / scale for peak, scale in zip(absmax, scales, strict=True)]
    advice = f"; {side}_absmax / {storage.max_magnitude:g} uses the whole range"
    if any(0 < value < E4M3_MIN_NORMAL for value in largest):
        warnings.warn(
            f"{side} scale {scales} with absmax {absmax}: all {what} are E4M3 subnormals (below "
            f"2^-6) and have few bits or none{advice}",
            stacklevel=3,
        )
    if any(value > _E4M3_CLIPS_ABOVE for value in largest):
        warnings.warn(
            f"{side} scale {scales} with absmax {absmax}: values are clipped to "
            f"{storage.max_magnitude:g} times the scale{advice}",
            stacklevel=3,
        )
