"""Torch definitions of nvfp4 and mxfp4: floats to codes and block scales, and back.

Elements are E2M1 codes, two a byte, element 2i in the low nibble. nvfp4 has an E4M3 scale for each
16 consecutive elements below one float32 scale for a whole tensor or head (the format of
https://arxiv.org/abs/2509.25149); mxfp4 has a power of two for each 32 (OCP Microscaling Formats
1.0). The order of the float32 operations is part of the definition: the kernels repeat it, each
operation rounded to nearest, none contracted, no subnormal flushed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from cute_kernels.calls import as_number, check_tensor, refuse_gradients
from cute_kernels.formats import KV_CACHE_DTYPES, NVFP4_GROUP, ScaleSearch
from cute_kernels.numerics import e2m1, e4m3, ue8m0, widened

MXFP4_GROUP = 32
# Constants of the definition: float32(1 / d), exact as Python floats.
_INVERSE = {4: 0.25, 6: float.fromhex("0x1.555556p-3"), 7: float.fromhex("0x1.24924ap-3")}
_MSE_CANDIDATES = 8
_MXFP4_MIN_AMAX = 6.0 * 2.0**-126
_SCALE_RANGE = (2.0**-100, 2.0**100)
# What rounds to them as float32, half an ulp outside.
_SCALE_ENDS = (2.0**-100 - 2.0**-125, 2.0**100 + 2.0**76)


# The searches by name. FOUR_OVER_SIX also tries 4 as the largest magnitude, beside which the grid
# is finer, and keeps the smaller error (https://arxiv.org/abs/2512.02010).
NVFP4_SCALE_SEARCH = {
    name: dtype.scale_search for name, dtype in KV_CACHE_DTYPES.items() if dtype.storage == "nvfp4"
}


def quantize_nvfp4(
    x: torch.Tensor,
    global_scale: float | torch.Tensor,
    kv_cache_dtype: str = "nvfp4",
    *,
    side: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to nvfp4.

    Args:
        x: (..., D) float32, bfloat16 or float16, D a multiple of 16. A NaN becomes +6 and does not
            count in its group's largest magnitude.
        global_scale: what a reader multiplies by: a float, or a float32 tensor of one element or
            of a shape that broadcasts to x.shape[:-1], such as (Hkv,) for x (tokens, Hkv, D).
        kv_cache_dtype: "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k" or "nvfp4_mse": the scale search.
        side: "k" or "v": which of them x is. Only "nvfp4_4over6_k" needs it.

    Returns:
        data: (..., D / 2) uint8.
        block_scale: (..., D / 16) float8_e4m3fn.

    Raises:
        ValueError: an argument not as above, or a float scale that, as float32, is not finite and
            within [2^-100, 2^100]. Scales in tensors are not checked: the formula decides.
        NotImplementedError: in grad mode, a tensor that requires a gradient.
    """
    search = NVFP4_SCALE_SEARCH[known("kv_cache_dtype", kv_cache_dtype, NVFP4_SCALE_SEARCH)]
    if side is not None:
        known("side", side, ("k", "v"))
    if search is ScaleSearch.FOUR_OVER_SIX_K_ONLY:
        if side is None:
            raise ValueError(f"side: got None; {kv_cache_dtype!r} needs 'k' or 'v'")
        search = ScaleSearch.FOUR_OVER_SIX if side == "k" else ScaleSearch.DEFAULT
    check_tensor("x", x)
    groups = _grouped("x", widened(x), NVFP4_GROUP)
    scale = _scale_per_row(global_scale, x).unsqueeze(-1)
    refuse_gradients("quantize_nvfp4", {"x": x, "global_scale": scale})
    sf, codes = _search_scale(groups, scale, search)
    return e2m1.pack(codes.flatten(-2)), sf.view(torch.float8_e4m3fn)


def dequantize_nvfp4(
    data: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: float | torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(e2m1(code) * e4m3(block scale)) * global, the first product being exact in float32.

    Args:
        data: (..., D / 2) uint8.
        block_scale: (..., D / 16) float8_e4m3fn or uint8.
        global_scale: as in `quantize_nvfp4`.
        dtype: of the result. Float64 holds the exact value; any other is rounded to float32 first.

    Returns:
        (..., D).

    Raises:
        ValueError: shapes or dtypes that do not belong together, or a scale out of range.
    """
    _check_bytes("block_scale", block_scale, torch.float8_e4m3fn, data)
    check_dtype(dtype)
    groups = _unpacked(data, block_scale.shape, NVFP4_GROUP)
    blocks = groups * e4m3.decode(block_scale).unsqueeze(-1)
    scale = _scale_per_row(global_scale, data)[..., None, None]
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    return (blocks.to(exact) * scale).flatten(-2).to(dtype)


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to mxfp4, the scale rounded up so that no finite element exceeds 6.

    Args:
        x: (..., D) float32, bfloat16 or float16, D a multiple of 32. A NaN becomes +6 and does not
            count in its block's largest magnitude.

    Returns:
        data: (..., D / 2) uint8.
        scale_ue8m0: (..., D / 32) uint8, the exponent plus 127.

    Raises:
        ValueError: an argument not as above.
        NotImplementedError: in grad mode, an x that requires a gradient.
    """
    check_tensor("x", x)
    groups = _grouped("x", widened(x), MXFP4_GROUP)
    refuse_gradients("quantize_mxfp4", {"x": x})
    e = ue8m0.ceil_exponent(largest_magnitude(groups).clamp(min=_MXFP4_MIN_AMAX) * _INVERSE[6])
    codes = e2m1.encode(groups * ue8m0.power_of_two(-e).unsqueeze(-1))
    return e2m1.pack(codes.flatten(-2)), ue8m0.encode(e)


def dequantize_mxfp4(
    data: torch.Tensor, scale_ue8m0: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """e2m1(code) * 2^(scale - 127).

    Args:
        data: (..., D / 2) uint8.
        scale_ue8m0: (..., D / 32) uint8 or float8_e8m0fnu; 255 is NaN.
        dtype: of the result, computed in float64 where that is asked for, else in float32.

    Returns:
        (..., D).

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    _check_bytes("scale_ue8m0", scale_ue8m0, torch.float8_e8m0fnu, data)
    check_dtype(dtype)
    groups = _unpacked(data, scale_ue8m0.shape, MXFP4_GROUP)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    blocks = groups.to(exact) * ue8m0.decode(scale_ue8m0).unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


def known(name: str, value: str, accepted: Iterable[str]) -> str:
    """`value`, if it is one of the accepted ones, exactly.

    Raises:
        ValueError: it is not; the message has the nearest of them.
    """
    accepted = list(accepted)
    if value in accepted:
        return value
    near = difflib.get_close_matches(str(value), accepted, n=2)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    raise ValueError(f"{name}: got {value!r}; accepted: {', '.join(map(repr, accepted))}{hint}")


def as_scale(scale: float | torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """A scale argument as a float32 tensor on `device`; a float is checked after the cast.

    Raises:
        ValueError: a float that is not finite and within [2^-100, 2^100], another dtype or type.
    """
    if isinstance(scale, torch.Tensor):
        if scale.dtype is not torch.float32:
            raise ValueError(f"{name}: got dtype {scale.dtype}; accepted: float32")
        return scale.reshape(()) if scale.numel() == 1 else scale
    number = as_number(scale)
    if number is None:
        raise ValueError(f"{name}: got {scale!r}; accepted: a float or a float32 tensor")
    if not _SCALE_ENDS[0] <= number <= _SCALE_ENDS[1]:
        low, high = _SCALE_RANGE
        raise ValueError(f"{name}: got {_with_float32(scale)}; accepted: {low!r} to {high!r}")
    return torch.full((), number, dtype=torch.float32, device=device)


def _with_float32(scale: float) -> str:
    try:
        # By way of float64: the direct cast refuses values beyond float32.
        single = torch.tensor(float(scale), dtype=torch.float64, device="cpu").float().item()
    except OverflowError:
        return "an int too large for a float"
    return f"{scale!r}, {single!r} as float32"


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x by IEEE division."""
    return torch.ones_like(x) / x


def _search_scale(
    x: torch.Tensor, scale: torch.Tensor, search: ScaleSearch
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes (..., G) and E2M1 codes (..., G, 16) of groups `x` (..., G, 16)."""
    amax = largest_magnitude(x)
    inv_scale = reciprocal(scale)
    code = {d: e4m3.encode((amax * inv_d) * inv_scale).int() for d, inv_d in _INVERSE.items()}
    best = code[6]
    elements, error = _trial(x, best, scale)
    if search is ScaleSearch.DEFAULT:
        return best.to(torch.uint8), elements
    if search is ScaleSearch.FOUR_OVER_SIX:
        candidates = [(code[4], torch.ones_like(amax, dtype=torch.bool))]
    else:
        lowest = code[7].clamp(min=1)
        candidates = [(code[4] - k, code[4] - k >= lowest) for k in range(_MSE_CANDIDATES)]
    # A strict comparison from the larger code down: ties stay with 6, then with the larger code,
    # and an error that is NaN never wins.
    for candidate, allowed in candidates:
        trial_elements, trial_error = _trial(x, candidate.clamp(min=0), scale)
        better = allowed & (trial_error < error)
        best = torch.where(better, candidate, best)
        error = torch.where(better, trial_error, error)
        elements = torch.where(better.unsqueeze(-1), trial_elements, elements)
    return best.to(torch.uint8), elements


def _trial(
    x: torch.Tensor, sf_code: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes of the groups under given block scales, and the squared error of each group."""
    sf = e4m3.decode(sf_code.to(torch.uint8))
    dec = sf * scale
    inv_dec = reciprocal(dec)
    enc = torch.where((sf != 0) & inv_dec.isfinite(), inv_dec, 0.0)
    codes = e2m1.encode(x * enc.unsqueeze(-1))
    delta = e2m1.decode(codes) * dec.unsqueeze(-1) - x  # -x where the scale is 0
    squares = delta * delta
    pairs = (squares[..., 0::2] + squares[..., 1::2]).unflatten(-1, (2, 4))
    half = pairs[..., 0]
    for i in range(1, 4):
        half = half + pairs[..., i]
    return codes, half[..., 0] + half[..., 1]


def largest_magnitude(groups: torch.Tensor) -> torch.Tensor:
    """max |x| over the last dim; a NaN does not count, and NaNs alone have 0."""
    return groups.abs().masked_fill(groups.isnan(), 0.0).amax(-1)


def _grouped(name: str, x: torch.Tensor, group: int) -> torch.Tensor:
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % group:
        shape = tuple(x.shape)
        raise ValueError(f"{name}: got shape {shape}; accepted: (..., D), D a multiple of {group}")
    return x.unflatten(-1, (x.shape[-1] // group, group))


def _unpacked(data: torch.Tensor, scales: torch.Size, group: int) -> torch.Tensor:
    """The values (..., G, group) of packed E2M1 codes."""
    if data.dtype is not torch.uint8:
        raise ValueError(f"data: got {data.dtype}; accepted: uint8")
    if data.dim() == 0 or tuple(scales) != (*data.shape[:-1], data.shape[-1] * 2 // group):
        raise ValueError(
            f"data {tuple(data.shape)} does not belong to scales {tuple(scales)}: "
            f"(..., D / 2) and (..., D / {group}) are needed"
        )
    return _grouped("data", e2m1.decode(e2m1.unpack(data)), group)


def _check_bytes(name: str, scales: torch.Tensor, dtype: torch.dtype, data: torch.Tensor) -> None:
    check_tensor("data", data)
    check_tensor(name, scales)
    if scales.dtype not in (torch.uint8, dtype):
        raise ValueError(f"{name}: got {scales.dtype}; accepted: {dtype}, uint8")
    if scales.device != data.device:
        raise ValueError(f"{name}: got {scales.device}; accepted: {data.device}, as data")


def check_dtype(dtype: torch.dtype) -> None:
    """
    Raises:
        ValueError: no dtype that values are read in.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}; accepted: a torch dtype of floating-point numbers")


def _scale_per_row(scale: float | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The global scale as a tensor that broadcasts to x.shape[:-1]."""
    rows = x.shape[:-1]
    scale = as_scale(scale, "global_scale", x.device)
    try:
        fits = torch.broadcast_shapes(scale.shape, rows) == rows
    except RuntimeError:
        fits = False
    if not fits:
        shape = tuple(scale.shape)
        raise ValueError(f"global_scale: got shape {shape}; it must broadcast to {tuple(rows)}")
    return scale
