"""What the kernels accept, held against what a configuration asks for.

Readers are the attention kernels of `cute_kernels.registry`; nothing about them is repeated here.
Writers: see `WRITERS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels import registry
from cute_kernels.formats import ScaleLayout
from cute_kernels.registry import KernelContract
from kvcache.config import AttentionConfig, capability_of

# What a configuration can need, in words. Names that no contract's `features` has are needs that
# no kernel serves; they are listed so that the refusal can say what it is about.
NEEDS = {
    **registry.FEATURES,
    "bidirectional_spans": "bidirectional spans",
    "chunked": "chunked attention",
    "mla": "latent K and V (MLA)",
}


@dataclass(frozen=True)
class Writer:
    """Something that stores K and V in a cache.

    name: where it is. kv_cache_dtypes: the dtypes, not only the storage formats, that it writes.
    architectures: compile targets; None for any device.
    v_scale_layouts: orders in which it can store the V scales of a block-scaled dtype.
    """

    name: str
    kv_cache_dtypes: tuple[str, ...]
    architectures: tuple[str, ...] | None = None
    v_scale_layouts: tuple[ScaleLayout, ...] = ()


def _store() -> Writer:
    contract = registry.store_contract()
    layouts = {name for _, names in contract.v_scale_layouts for name in names}
    return Writer(
        "cute_kernels.reshape_and_cache",
        contract.kv_cache_dtypes,
        contract.architectures,
        tuple(layout for layout in ScaleLayout if layout.value in layouts),
    )


WRITERS = (
    # In plain torch; a test holds these names against its formats. Serving engines store them
    # themselves, with the same bytes.
    Writer("kvcache.paged", ("bfloat16", "bf16", "float16", "fp16", "fp8", "fp8_e4m3")),
    _store(),
)


def readers() -> tuple[KernelContract, ...]:
    """The contract of every attention kernel."""
    return registry.contracts()


def needs(config: AttentionConfig) -> tuple[str, ...]:
    """Keys of `NEEDS` that a paged, causal layer of this configuration has."""
    wanted = {
        "paged": True,
        "causal": True,
        "sliding_window": config.sliding_window is not None,
        "softcap": config.softcap,
        "sinks": config.sinks,
        "bidirectional_spans": config.bidirectional_spans,
        "chunked": config.chunked,
        "batch_invariant": config.batch_invariant,
        "mla": config.mla,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code compiled for one of these targets runs on the device.

    Targets are architecture-specific ("sm_90a"), so exactly their own capability counts.
    """
    return capability in map(capability_of, architectures)


def cache_refusals(contract: KernelContract, config: AttentionConfig) -> list[str]:
    """Why the kernel reads no cache like this on this device, whatever the shapes."""
    found = []
    if not runs_on(contract.architectures, config.capability):
        found.append(
            f"device {config.device_name}, the kernel is for {_any(contract.architectures)}"
        )
    if config.dtype.storage not in contract.kv_cache_formats:
        found.append(
            f"cache format {config.dtype.storage}, the kernel reads "
            f"{_any(contract.kv_cache_formats)}"
        )
    # No kernel here reads the swizzled order: it is another library's reader that wants it.
    if config.v_scale_layout not in (None, ScaleLayout.LINEAR):
        found.append(
            f"V scales in {config.v_scale_layout.value} order, the kernel reads linear ones"
        )
    return found


def shape_refusals(contract: KernelContract, config: AttentionConfig) -> list[str]:
    """What else the kernel cannot do that this configuration needs."""
    found = []
    if config.query_dtype not in contract.q_dtypes:
        found.append(
            f"query dtype {config.query_dtype}, the kernel takes {_any(contract.q_dtypes)}"
        )
    elif (
        contract.cache_in_q_dtype
        and config.dtype.storage in contract.kv_cache_formats
        and config.dtype.storage != config.query_dtype
    ):
        found.append(
            f"a {config.dtype.storage} cache with {config.query_dtype} queries, the kernel reads "
            "the queries' dtype"
        )
    if config.head_size not in contract.head_sizes:
        found.append(f"head size {config.head_size}, the kernel has {_any(contract.head_sizes)}")
    if config.page_size is not None and config.page_size not in contract.page_sizes:
        found.append(f"page size {config.page_size}, the kernel reads {_pages(contract)}")
    found += [
        f"{NEEDS[name]}, which the kernel does not implement"
        for name in needs(config)
        if name not in contract.features
    ]
    return found


def refusals(contract: KernelContract, config: AttentionConfig) -> list[str]:
    """Everything for which the kernel cannot read this configuration's cache; empty if it can."""
    return cache_refusals(contract, config) + shape_refusals(contract, config)


def writers_for(config: AttentionConfig) -> tuple[Writer, ...]:
    """What can store this configuration's dtype, in its scale layout, on its device."""
    layout = config.v_scale_layout or config.dtype.scale_layout
    return tuple(
        writer
        for writer in WRITERS
        if config.dtype.name in writer.kv_cache_dtypes
        and (layout is None or layout in writer.v_scale_layouts)
        and (writer.architectures is None or runs_on(writer.architectures, config.capability))
    )


def _any(values: tuple[object, ...]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _pages(contract: KernelContract) -> str:
    pages = contract.page_sizes
    return _any((*pages.sizes, f"multiples of {pages.multiple_of}"))
