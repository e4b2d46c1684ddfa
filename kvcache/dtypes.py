"""KV cache dtypes as a framework asks about them; the table is `cute_kernels.formats`."""

from __future__ import annotations

from cute_kernels.formats import (
    KV_CACHE_DTYPES,
    STORAGE_FORMATS,
    KVCacheDType,
    QuantMode,
    ScaleLayout,
    ScaleSearch,
    StorageFormat,
    get_kv_cache_dtype,
    unknown_name,
)
from kvcache.checks import check_type

__all__ = [
    "KV_CACHE_DTYPES",
    "QUERY_DTYPES",
    "STORAGE_FORMATS",
    "KVCacheDType",
    "QuantMode",
    "ScaleLayout",
    "ScaleSearch",
    "StorageFormat",
    "bytes_per_token",
    "check_same_cache_format",
    "get_kv_cache_dtype",
    "is_quantized_kv_cache",
    "query_dtype_name",
    "resolve_kv_cache_dtype",
]

# Dtypes that models compute in -> the names that contracts use.
QUERY_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def query_dtype_name(dtype: object) -> str:
    """ "bf16", "fp16" or "fp32" for such a name, for torch's name of it or for a `torch.dtype`.

    Raises:
        ValueError: anything else.
    """
    name = str(dtype).removeprefix("torch.")
    if name in QUERY_DTYPES:
        return QUERY_DTYPES[name]
    if name not in QUERY_DTYPES.values():
        known = (*QUERY_DTYPES.values(), *QUERY_DTYPES)
        raise ValueError(unknown_name("query_dtype", dtype, known))
    return name


def resolve_kv_cache_dtype(name: str, query_dtype: object) -> KVCacheDType:
    """The dtype of this name; "auto" is the 16-bit dtype that the model computes in.

    Raises:
        ValueError: an unknown name, or "auto" for a model that computes in fp32.
    """
    if name != "auto":
        return get_kv_cache_dtype(name)
    query = query_dtype_name(query_dtype)
    if query not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype: got 'auto' with query_dtype {query}; caches of 16 bits and less exist"
        )
    return KV_CACHE_DTYPES[query]


def is_quantized_kv_cache(name: str) -> bool:
    """Whether reading this dtype takes scales. "auto" is the model's dtype, so it does not.

    Raises:
        ValueError: an unknown name.
    """
    return name != "auto" and get_kv_cache_dtype(name).quant_mode is not QuantMode.NONE


def bytes_per_token(name: str, num_kv_heads: int, head_size: int) -> int:
    """Bytes that one token's K and V of one layer take, scales in the cache included.

    Args:
        name: a KV cache dtype; "auto" has no size of its own.
        num_kv_heads, head_size: of the layer, > 0.

    Raises:
        ValueError: an unknown name, a size that is not positive, or a head size that is no
            multiple of the format's group.
    """
    for what, value in (("num_kv_heads", num_kv_heads), ("head_size", head_size)):
        check_type(what, value, int, "an int > 0")
        if value <= 0:
            raise ValueError(f"{what}: got {value}; accepted: > 0")
    return 2 * get_kv_cache_dtype(name).format.side_bytes(num_kv_heads, head_size)


def check_same_cache_format(
    writer: tuple[KVCacheDType, ScaleLayout | None],
    reader: tuple[KVCacheDType, ScaleLayout | None],
) -> None:
    """Refuse a reader that would misread what the writer stores.

    Dtypes of one storage format agree whatever their scale search. Scale layouts must be equal:
    both orders have the same size, so nothing else would notice.

    Args:
        writer, reader: a dtype and the layout of its V scales; None is the dtype's default.

    Raises:
        ValueError: naming what differs.
        TypeError: no such pairs, such as names in the place of dtypes and layouts.
    """
    for name, pair in (("writer", writer), ("reader", reader)):
        words = "a KVCacheDType and a ScaleLayout or None"
        check_type(name, pair, tuple, words)
        if len(pair) != 2:
            raise TypeError(f"{name}: got {len(pair)} things; accepted: {words}")
        check_type(f"{name}[0]", pair[0], KVCacheDType, words)
        check_type(f"{name}[1]", pair[1], (ScaleLayout, type(None)), words)
    (written, written_layout), (read, read_layout) = writer, reader
    if written.storage != read.storage:
        raise ValueError(
            f"kv_cache_dtype: the cache is written as {written.name!r} ({written.storage}) "
            f"and read as {read.name!r} ({read.storage})"
        )
    layouts = (written_layout or written.scale_layout, read_layout or read.scale_layout)
    if layouts[0] is not layouts[1]:
        raise ValueError(
            f"v_scale_layout: the cache is written in {_layout_name(layouts[0])} order "
            f"and read in {_layout_name(layouts[1])} order"
        )


def _layout_name(layout: ScaleLayout | None) -> str:
    return "no" if layout is None else layout.value
