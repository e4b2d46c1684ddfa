"""What each kernel of this package accepts, as plain data.

Planners, capability checks and the README's support table read it here. The facts themselves stand
beside the kernels (each kernel's ``config.py``); nothing here needs a GPU, the DSL or torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.attention.decode_sm90 import config as decode_sm90


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

    name: the kernel's folder. architectures: compile targets ("sm_90a").
    head_sizes: elements of a head. kv_cache_formats: storage formats ("fp8_e4m3").
    q_dtypes: "bf16", "fp16"; the output has the queries' dtype.
    tile_tokens: keys that one step of the kernel takes.
    page_sizes: what the kernel can read. A planner that is offered a set tends to choose its
        smallest member, so only ``advertised_page_sizes``, one load a tile, are to be offered;
        ``preferred_page_size`` is the one to take when all are free.
    rows_per_pass: (head size, packed rows) pairs: query rows, GQA group x query tokens, that share
        one pass over K and V. More rows than that take more passes.
    kv_layouts: token and head order of a page ("NHD", "HND"), or K and V side by side in one row of
        2 * D elements ("interleaved"); all by strides.
    features: see ``FEATURES``.
    """

    name: str
    architectures: tuple[str, ...]
    head_sizes: tuple[int, ...]
    kv_cache_formats: tuple[str, ...]
    q_dtypes: tuple[str, ...]
    tile_tokens: int
    page_sizes: PageSizes
    advertised_page_sizes: PageSizes
    preferred_page_size: int
    rows_per_pass: tuple[tuple[int, int], ...]
    kv_layouts: tuple[str, ...]
    features: tuple[str, ...]

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
}


def contracts() -> tuple[KernelContract, ...]:
    """The contract of every attention kernel, in no order of preference."""
    return (_decode_sm90(),)


def _decode_sm90() -> KernelContract:
    config = decode_sm90
    return KernelContract(
        name="decode_sm90",
        architectures=("sm_90a",),
        head_sizes=config.HEAD_SIZES,
        kv_cache_formats=("fp8_e4m3",),
        q_dtypes=config.Q_DTYPES,
        tile_tokens=config.TILE_TOKENS,
        page_sizes=PageSizes((), min(config.BOX_TOKENS)),
        advertised_page_sizes=PageSizes((config.TILE_TOKENS,), config.TILE_TOKENS),
        preferred_page_size=config.TILE_TOKENS,
        rows_per_pass=tuple((size, config.row_buckets(size)[-1]) for size in config.HEAD_SIZES),
        kv_layouts=("NHD", "HND", "interleaved"),
        features=(
            "paged",
            "ragged",
            "causal",
            "sliding_window",
            "softcap",
            "sinks",
            "lse",
            "cuda_graph",
        ),
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
    by_rows: dict[int, list[int]] = {}
    for head_size, rows in contract.rows_per_pass:
        by_rows.setdefault(rows, []).append(head_size)
    return {
        "kernel": f"`{contract.name}`",
        "compiled for": _code(contract.architectures),
        "KV cache": _code(contract.kv_cache_formats),
        "queries, output": _code(contract.q_dtypes),
        "head size": _listed(contract.head_sizes),
        "page size, tokens": (
            f"multiples of {contract.page_sizes.multiple_of}; {contract.preferred_page_size} "
            f"preferred: multiples of {contract.advertised_page_sizes.multiple_of} take one load "
            "per tile"
        ),
        "page layout": f"{_listed(contract.kv_layouts)}, by strides",
        "query rows per pass over K and V (GQA group x query tokens)": "; ".join(
            f"{rows} at head size {_listed(sizes)}" for rows, sizes in by_rows.items()
        ),
        "features": _listed([FEATURES[name] for name in contract.features]),
    }


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _listed(values: tuple[object, ...] | list[object]) -> str:
    return ", ".join(map(str, values))
