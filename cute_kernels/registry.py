"""What each kernel of this package accepts, as plain data.

Planners, capability checks and the README's support table read it here. The facts themselves stand
beside the kernels (each kernel's ``config.py``); nothing here needs a GPU, the DSL or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.attention.decode_sm90 import config as decode_sm90
from cute_kernels.attention.prefill_sm90 import config as prefill_sm90
from cute_kernels.attention.widen_sm90 import config as widen_sm90
from cute_kernels.formats import KV_CACHE_DTYPES
from cute_kernels.indexer import config as indexer
from cute_kernels.indexer.formats import HEAD_MULTIPLE, INDEXER_FORMATS
from cute_kernels.store import config as store


@dataclass(frozen=True)
class PageSizes:
    """A set of page sizes, in tokens: ``sizes``, and every positive multiple of ``multiple_of``.

    ``sizes`` may name members of the second set again: some planners split pages only to sizes that
    are named one by one.
    """

    sizes: tuple[int, ...]
    multiple_of: int

    def __contains__(self, page_size: int) -> bool:
        return page_size in self.sizes or (page_size > 0 and page_size % self.multiple_of == 0)


@dataclass(frozen=True)
class KernelContract:
    """What one kernel can be asked for. Its ``op.can_run`` decides about a concrete call.

    name: the kernel's folder; with an ending for a second policy of the same kernel.
    architectures: compile targets ("sm_90a").
    head_sizes: elements of a head. kv_cache_formats: storage formats ("fp8_e4m3").
    q_dtypes: "bf16", "fp16"; the output has the queries' dtype.
    cache_in_q_dtype: of `kv_cache_formats` only that of the queries' own name goes with them.
    tile_tokens: keys that one step of the kernel takes.
    page_sizes: what the kernel can read. A planner that is offered a set tends to choose its
        smallest member, so only ``advertised_page_sizes``, which take the fewest loads, are to be
        offered; ``preferred_page_size`` is the one to take when all are free.
    rows_per_pass: (head size, packed rows) pairs: query rows, GQA group x query tokens, that share
        one pass over K and V. More rows than that take more passes.
    kv_layouts: token and head order of a page ("NHD", "HND"), or K and V side by side in one row of
        2 * D elements ("interleaved"); all by strides.
    features: see ``FEATURES``.
    least_rows: (head size, packed rows) pairs: sequences of fewer rows are left to another kernel,
        however many passes it takes. Empty: as soon as the other takes more than one.
    copied_from_rows: (head size, packed rows) pairs: where a call's bound of a sequence's rows is
        so many or more, all sequences that the kernel serves are read from 16-bit copies of their
        keys, unless `batch_invariant` is asked for; in other calls, and those whose copies would
        need too much memory, from the cache itself. Without the pair of a head size all are served
        from the one or the other.
    max_copy_bytes: the most memory for the copies of a call's keys. A call that would need more is
        left to another kernel where this one reads nothing but copies. 0: it makes none.
    """

    name: str
    architectures: tuple[str, ...]
    head_sizes: tuple[int, ...]
    kv_cache_formats: tuple[str, ...]
    q_dtypes: tuple[str, ...]
    cache_in_q_dtype: bool
    tile_tokens: int
    page_sizes: PageSizes
    advertised_page_sizes: PageSizes
    preferred_page_size: int
    rows_per_pass: tuple[tuple[int, int], ...]
    kv_layouts: tuple[str, ...]
    features: tuple[str, ...]
    least_rows: tuple[tuple[int, int], ...] = ()
    copied_from_rows: tuple[tuple[int, int], ...] = ()
    max_copy_bytes: int = 0

    def max_packed_rows(self, head_size: int) -> int:
        """Query rows (GQA group x query tokens) that one pass over K and V serves.

        Raises:
            ValueError: a head size that the kernel does not have.
        """
        for known, rows in self.rows_per_pass:
            if known == head_size:
                return rows
        raise ValueError(f"head_size: got {head_size}; {self.name} has {self.head_sizes}")


# Every feature that a contract may name, in words for the support table.
FEATURES = {
    "paged": "paged cache",
    "ragged": "ragged keys and values",
    "causal": "causal mask",
    "sliding_window": "sliding window",
    "softcap": "softcap",
    "sinks": "attention sinks",
    "lse": "LSE",
    "cuda_graph": "CUDA graphs",
    # A sequence's keys are dealt to many CTAs. Without, few long sequences leave SMs idle.
    "split_keys": "keys split over CTAs",
    # On request (`deterministic=True`): a sequence's bits are those of any call with the same query
    # tokens of it. Which query tokens those are does matter.
    "batch_invariant": "bits independent of the batch",
}
# What the SM90 kernels share: masks, operands and output are the same code.
_SM90_FEATURES = (
    "paged",
    "ragged",
    "causal",
    "sliding_window",
    "softcap",
    "sinks",
    "lse",
    "cuda_graph",
)


def contracts() -> tuple[KernelContract, ...]:
    """The contract of every attention kernel.

    Several may take the same call. A sequence is then served by the one whose pass over K and V
    holds its packed rows with the fewest to spare, see ``attention/route_sm90.py``.
    """
    # Not those that read copies of an FP8 or nvfp4 cache.
    prefill = [each for each in prefill_sm90.support_table() if not each.reads_copies]
    return (
        _decode_sm90("decode_sm90", decode_sm90.QUANTIZED_FORMATS),
        _decode_sm90("decode_sm90_16_bits", decode_sm90.Q_DTYPES),
        replace(
            _prefill_sm90("prefill_sm90", [each for each in prefill if each.converts]),
            copied_from_rows=tuple(sorted(widen_sm90.MIN_ROWS["fp8_e4m3"].items())),
            max_copy_bytes=widen_sm90.MAX_BYTES,
        ),
        _prefill_sm90("prefill_sm90_16_bits", [each for each in prefill if not each.converts]),
        _prefill_sm90_nvfp4(),
    )


def _decode_sm90(name: str, kv_formats: tuple[str, ...]) -> KernelContract:
    config = decode_sm90
    return KernelContract(
        name=name,
        architectures=("sm_90a",),
        head_sizes=config.HEAD_SIZES,
        kv_cache_formats=kv_formats,
        q_dtypes=config.Q_DTYPES,
        cache_in_q_dtype=kv_formats == config.Q_DTYPES,
        tile_tokens=config.TILE_TOKENS,
        page_sizes=PageSizes((), min(config.BOX_TOKENS)),
        advertised_page_sizes=PageSizes((config.TILE_TOKENS,), config.TILE_TOKENS),
        preferred_page_size=config.TILE_TOKENS,
        rows_per_pass=tuple((size, config.row_buckets(size)[-1]) for size in config.HEAD_SIZES),
        kv_layouts=("NHD", "HND", "interleaved"),
        features=(*_SM90_FEATURES, "split_keys", "batch_invariant"),
    )


def _prefill_sm90(name: str, variants: list[prefill_sm90.PrefillConfig]) -> KernelContract:
    config = prefill_sm90
    rows = {each.head_size: each.rows for each in variants}
    return KernelContract(
        name=name,
        architectures=("sm_90a",),
        head_sizes=tuple(sorted(rows)),
        kv_cache_formats=tuple(dict.fromkeys(each.kv_format for each in variants)),
        q_dtypes=tuple(dict.fromkeys(each.q_dtype for each in variants)),
        cache_in_q_dtype=all(each.kv_format == each.q_dtype for each in variants),
        tile_tokens=config.TILE_TOKENS,
        page_sizes=PageSizes((), min(each.box_tokens for each in variants)),
        advertised_page_sizes=PageSizes((config.HALF_TOKENS,), config.HALF_TOKENS),
        preferred_page_size=config.HALF_TOKENS,
        rows_per_pass=tuple(sorted(rows.items())),
        kv_layouts=("NHD", "HND", "interleaved"),
        features=(*_SM90_FEATURES, "batch_invariant"),
    )


def _prefill_sm90_nvfp4() -> KernelContract:
    """The 16-bit kernel on fp16 copies of an nvfp4 cache."""
    name, storage = "prefill_sm90_nvfp4", "nvfp4"
    sizes = widen_sm90.head_sizes(storage)
    variants = [
        prefill_sm90.widened_config(size, q_dtype, storage)
        for size in sizes
        for q_dtype in decode_sm90.Q_DTYPES
    ]
    return replace(
        _prefill_sm90(name, variants),
        kv_cache_formats=(storage,),
        cache_in_q_dtype=False,
        page_sizes=PageSizes((), min(decode_sm90.BOX_TOKENS)),
        # The copies' room for each sequence, and so the way, follows from the batch.
        features=_SM90_FEATURES,
        least_rows=tuple((size, widen_sm90.MIN_ROWS[storage][size]) for size in sizes),
        max_copy_bytes=widen_sm90.MAX_BYTES,
    )


def support_table_markdown() -> str:
    """The README's support table: one column a kernel."""
    rows: dict[str, list[str]] = {}
    for contract in contracts():
        for title, cell in _column(contract).items():
            rows.setdefault(title, []).append(cell)
    titles = iter(rows)
    head = next(titles)
    lines = [(head, *rows[head]), *((title, *rows[title]) for title in titles)]
    table = [f"| {' | '.join(line)} |" for line in lines]
    table.insert(1, "|---" * len(lines[0]) + "|")
    return "\n".join(table)


def _column(contract: KernelContract) -> dict[str, str]:
    return {
        "kernel": f"`{contract.name}`",
        "compiled for": _code(contract.architectures),
        "KV cache": _code(contract.kv_cache_formats)
        + (", as the queries" if contract.cache_in_q_dtype else ""),
        "queries, output": _code(contract.q_dtypes),
        "head size": _listed(contract.head_sizes),
        "page size, tokens": (
            f"multiples of {contract.page_sizes.multiple_of}; {contract.preferred_page_size} "
            f"preferred: multiples of {contract.advertised_page_sizes.multiple_of} take the fewest "
            "loads"
        ),
        "page layout": f"{_listed(contract.kv_layouts)}, by strides",
        "query rows per pass over K and V (GQA group x query tokens)": _by_rows(
            contract.rows_per_pass
        ),
        "fewest rows of its sequences": _by_rows(contract.least_rows),
        "reads fp16 copies of the keys": _copies(contract),
        "features": _listed([FEATURES[name] for name in contract.features]),
    }


def _copies(contract: KernelContract) -> str:
    """When the kernel reads copies, in words; "" if never."""
    if not contract.max_copy_bytes:
        return ""
    most = f"of at most {contract.max_copy_bytes >> 20} MiB"
    from_rows = _by_rows(contract.copied_from_rows)
    if not from_rows:
        return f"{most}, always"
    return f"{most}, in calls whose longest sequence may have so many rows: {from_rows}"


def _by_rows(pairs: tuple[tuple[int, int], ...]) -> str:
    """(head size, rows) pairs in words."""
    sizes: dict[int, list[int]] = {}
    for head_size, rows in pairs:
        sizes.setdefault(rows, []).append(head_size)
    return "; ".join(f"{rows} at head size {_listed(each)}" for rows, each in sizes.items())


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _listed(values: tuple[object, ...] | list[object]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class StoreContract:
    """What ``reshape_and_cache`` can be asked for on CUDA. Its ``op.can_run`` decides about a call.

    architectures: compile targets. kv_cache_dtypes: dtypes as users name them.
    x_dtypes: of the new keys and values. head_multiple: what divides every head size.
    head_sizes: the smallest and the largest that are tested. kv_layouts: as in `KernelContract`;
    nvfp4 has no interleaved one. v_scale_layouts: (dtype, layouts) of block-scaled dtypes.
    """

    name: str
    architectures: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    x_dtypes: tuple[str, ...]
    head_multiple: int
    head_sizes: tuple[int, int]
    kv_layouts: tuple[str, ...]
    v_scale_layouts: tuple[tuple[str, tuple[str, ...]], ...]


def store_contract() -> StoreContract:
    """The contract of the store kernels."""
    return StoreContract(
        name="store",
        architectures=store.TARGETS,
        kv_cache_dtypes=store.KV_CACHE_DTYPE_NAMES,
        x_dtypes=store.X_DTYPES,
        head_multiple=store.GROUP,
        head_sizes=(store.HEAD_SIZES[0], store.HEAD_SIZES[-1]),
        kv_layouts=("NHD", "HND", "interleaved"),
        v_scale_layouts=tuple(
            (name, tuple(layout.value for layout in layouts))
            for name in store.KV_CACHE_DTYPE_NAMES
            if (layouts := KV_CACHE_DTYPES[name].format.scale_layouts)
        ),
    )


def store_table_markdown() -> str:
    """The README's table of the store kernels."""
    contract = store_contract()
    layouts = dict.fromkeys(layouts for _, layouts in contract.v_scale_layouts)
    rows = {
        "kernel": f"`{contract.name}`",
        "compiled for": _code(contract.architectures),
        "KV cache dtypes": _code(contract.kv_cache_dtypes),
        "new keys and values": _code(contract.x_dtypes),
        "head size": (
            f"multiples of {contract.head_multiple} (tested: {contract.head_sizes[0]} to "
            f"{contract.head_sizes[1]})"
        ),
        "page size, tokens": "any; multiples of 4 for V scales in `sm100` order",
        "page layout": f"{_listed(contract.kv_layouts)} (nvfp4: the first two), by strides",
        "order of nvfp4 V scales": "; ".join(_code(names) for names in layouts),
    }
    return _two_columns(rows)


@dataclass(frozen=True)
class IndexerContract:
    """What the indexer's functions can be asked for on CUDA. Its ``op.why_not`` decides about a
    call.

    architectures: compile targets. formats: of Q's codes and of the K cache. q_dtypes: of the
    queries. head_multiple: what divides every head size; max_head_size: the largest.
    """

    name: str
    architectures: tuple[str, ...]
    formats: tuple[str, ...]
    q_dtypes: tuple[str, ...]
    head_multiple: int
    max_head_size: int


def indexer_contract() -> IndexerContract:
    """The contract of the indexer's kernels."""
    return IndexerContract(
        name="indexer",
        architectures=indexer.TARGETS,
        formats=tuple(INDEXER_FORMATS),
        q_dtypes=indexer.Q_DTYPES,
        head_multiple=HEAD_MULTIPLE,
        max_head_size=indexer.MAX_HEAD_SIZE,
    )


def indexer_table_markdown() -> str:
    """The README's table of the indexer's kernels."""
    contract = indexer_contract()
    rows = {
        "kernels": f"`{contract.name}`",
        "compiled for": _code(contract.architectures),
        "codes of Q, K cache": _code(contract.formats),
        "queries": _code(contract.q_dtypes),
        "head size": f"multiples of {contract.head_multiple} up to {contract.max_head_size}",
        "rotated elements": "the last 2 to all, even",
        "compression ratio": "any, with and without overlap",
        "cos and sin, head weights, norm weights": _code(("fp32", "bf16")),
    }
    return _two_columns(rows)


def _two_columns(rows: dict[str, str]) -> str:
    lines = [f"| {title} | {cell} |" for title, cell in rows.items()]
    return "\n".join([lines[0], "|---|---|", *lines[1:]])
