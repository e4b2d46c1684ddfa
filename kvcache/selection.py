"""Which kernel serves a configuration, or why none does.

`can_run` is the one answer: block-size planners, selectors and constructors all ask it, so that
what one of them accepts another cannot refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cute_kernels.formats import KV_CACHE_DTYPES, QuantMode
from cute_kernels.registry import KernelContract
from kvcache import contracts
from kvcache.checks import check_type
from kvcache.config import AttentionConfig
from kvcache.dtypes import check_same_cache_format


def can_run(config: AttentionConfig) -> str | None:
    """Why this configuration cannot be served here, or None.

    Serving takes two halves, something that stores the dtype and a kernel that reads it. The
    reason names the missing half or both, what each reader refuses, and the nearest dtype that
    works with the rest of the configuration unchanged, if there is one.
    """
    reason = _missing(config)
    if reason is None:
        return None
    nearest = nearest_kv_cache_dtype(config)
    if nearest is None:
        return f"{reason}; no other kv_cache_dtype works with this configuration either"
    return f"{reason}; the nearest kv_cache_dtype that works is {nearest!r}"


def select_kernel(config: AttentionConfig) -> KernelContract:
    """The kernel that serves this configuration: the first whose contract accepts it.

    Raises:
        NotImplementedError: with the reason of `can_run`.
    """
    reason = can_run(config)
    if reason is not None:
        raise NotImplementedError(reason)
    return next(
        contract for contract in contracts.readers() if not contracts.refusals(contract, config)
    )


def nearest_kv_cache_dtype(config: AttentionConfig) -> str | None:
    """The other dtype, closest in bits per element, that works with this configuration, or None.

    Of several the first in `KV_CACHE_DTYPES`. Block scales are in their default layout.
    """
    bits = _checked(config).dtype.bits_per_element
    working = [
        dtype
        for dtype in KV_CACHE_DTYPES.values()
        if dtype.name != config.dtype.name
        and _missing(replace(config, kv_cache_dtype=dtype.name, v_scale_layout=None)) is None
    ]
    working.sort(key=lambda dtype: abs(dtype.bits_per_element - bits))
    return working[0].name if working else None


def mla_refusal(config: AttentionConfig) -> str | None:
    """Why no block-scaled dtype serves latent K and V, or None where it is not asked to."""
    if not config.mla or config.dtype.quant_mode is not QuantMode.BLOCK_SCALED:
        return None
    return (
        f"kv_cache_dtype {config.kv_cache_dtype!r} with latent K and V (MLA): the cache has one "
        f"latent vector a token that is both K and V, {config.dtype.storage} pages have a K side "
        "and a V side with a global scale and an order of block scales each, and no reader takes a "
        "latent vector in that layout"
    )


def can_share_cache(target: AttentionConfig, draft: AttentionConfig) -> str | None:
    """Why a draft layer cannot read the cache of a target layer, or None.

    Both must be served, and they must agree about the bytes: KV heads, head size, storage format,
    scale layout and page size. Query heads, query dtype and window may differ.
    """
    for who, config in (("target", target), ("draft", draft)):
        check_type(who, config, AttentionConfig, "an AttentionConfig")
        reason = can_run(config)
        if reason is not None:
            return f"the {who} cannot run: {reason}"
    for name in ("num_kv_heads", "head_size", "page_size"):
        ours, theirs = getattr(draft, name), getattr(target, name)
        if ours != theirs:
            return f"{name}: the draft has {ours}, the target {theirs}"
    try:
        check_same_cache_format(
            (target.dtype, target.v_scale_layout), (draft.dtype, draft.v_scale_layout)
        )
    except ValueError as error:
        return str(error)
    return None


def supports_quant_query_input(config: AttentionConfig) -> bool:
    """Whether the kernel takes queries quantized as the cache is.

    False where K and V are dequantized in the kernel and the queries keep 16 bits: quantizing them
    would lose accuracy and gain nothing.

    Raises:
        NotImplementedError: no kernel serves this configuration.
    """
    kernel = select_kernel(config)
    return config.dtype.storage in kernel.q_dtypes


@dataclass(frozen=True)
class BatchClass:
    """kind: "decode" or "prefill". packed_rows: query rows a KV head (GQA group x query tokens).
    passes: how often the kernel reads K and V for them.
    """

    kind: Literal["decode", "prefill"]
    packed_rows: int
    passes: int


def classify_batch(config: AttentionConfig, query_tokens: int) -> BatchClass:
    """Decode or prefill, for sequences with up to `query_tokens` query tokens each.

    A verify batch of k draft tokens has k + 1. Up to the most rows that the kernel packs at any
    head size (64) a batch is decode, whatever its own head size: at those where fewer fit, `passes`
    says how many passes over K and V it takes.

    Raises:
        ValueError: query_tokens < 1. NotImplementedError: no kernel serves the configuration.
    """
    check_type("query_tokens", query_tokens, int, "an int >= 1")
    if query_tokens < 1:
        raise ValueError(f"query_tokens: got {query_tokens}; accepted: >= 1")
    contract = select_kernel(config)
    rows = config.group * query_tokens
    most = max(limit for _, limit in contract.rows_per_pass)
    passes = -(-rows // contract.max_packed_rows(config.head_size))
    return BatchClass("decode" if rows <= most else "prefill", rows, passes)


def explain(config: AttentionConfig) -> str:
    """Why each kernel is or is not usable for this configuration, in words, one line a fact."""
    reason = can_run(config)
    lines = [f"{describe(config)}:"]
    for contract in contracts.readers():
        found = contracts.refusals(contract, config)
        verdict = f"cannot read it: {'; '.join(found)}" if found else "reads it"
        lines.append(f"  {contract.name} {verdict}")
    names = [writer.name for writer in contracts.writers_for(config)]
    verb = "write" if len(names) > 1 else "writes"
    lines.append(f"  {' and '.join(names) or 'nothing here'} {verb} it")
    lines.append("  served" if reason is None else f"  not served: {reason}")
    return "\n".join(lines)


def describe(config: AttentionConfig) -> str:
    """The configuration in one line."""
    extras = [contracts.NEEDS[name] for name in contracts.needs(config)]
    window = f" of {config.sliding_window} keys" if config.sliding_window else ""
    extras = [
        text + window if text == contracts.NEEDS["sliding_window"] else text for text in extras
    ]
    page = "" if config.page_size is None else f", page size {config.page_size}"
    return (
        f"head size {config.head_size}, {config.num_q_heads} query heads, "
        f"{config.num_kv_heads} KV heads, {config.query_dtype} queries, "
        f"kv_cache_dtype {config.kv_cache_dtype!r}{page} on {config.device_name} "
        f"({', '.join(extras)})"
    )


def _missing(config: AttentionConfig) -> str | None:
    """What `can_run` says, without advice."""
    _checked(config)
    refused = mla_refusal(config)
    if refused is not None:
        return refused
    readers = contracts.readers()
    halves = []
    if all(contracts.cache_refusals(contract, config) for contract in readers):
        known = ", ".join(
            f"{contract.name} reads {', '.join(contract.kv_cache_formats)} on "
            f"{', '.join(contract.architectures)}"
            for contract in readers
        )
        halves.append(f"the reader is missing ({known})")
    if not contracts.writers_for(config):
        halves.append("the store is missing (no kernel or page format here writes such a cache)")
    if not halves:
        found = {contract.name: contracts.refusals(contract, config) for contract in readers}
        return _each(found) if all(found.values()) else None
    # Also what another dtype would not change.
    found = {
        contract.name: contracts.shape_refusals(contract, config)
        for contract in readers
        if contracts.runs_on(contract.architectures, config.capability)
    }
    what = f"kv_cache_dtype {config.kv_cache_dtype!r} on {config.device_name}"
    return "; ".join(filter(None, (f"{what}: {' and '.join(halves)}", _each(found))))


def _checked(config: AttentionConfig) -> AttentionConfig:
    return check_type("config", config, AttentionConfig, "an AttentionConfig")


def _each(found: dict[str, list[str]]) -> str:
    return "; ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in found.items() if reasons)
