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


def select_kernels(config: AttentionConfig) -> tuple[KernelContract, ...]:
    """The kernels that share the calls of this configuration, fewest rows per pass first.

    A sequence is served by the first whose pass over K and V holds its rows (GQA group x query
    tokens), by the last where none does; but by no kernel that is chosen for more rows only
    (`least_rows`). Of kernels with equal passes the first declared is named.
    On the device two things are different: a call with too few rows to fill the GPU is served whole
    by a kernel that splits keys, if there is one among them, and so is one whose copies of keys
    would need too much memory.

    Raises:
        NotImplementedError: with the reason of `can_run`.
    """
    reason = can_run(config)
    if reason is not None:
        raise NotImplementedError(reason)
    by_rows: dict[int, KernelContract] = {}
    for contract in contracts.readers():
        if not contracts.refusals(contract, config):
            by_rows.setdefault(contract.max_packed_rows(config.head_size), contract)
    return tuple(by_rows[rows] for rows in sorted(by_rows))


def select_kernel(config: AttentionConfig, query_tokens: int = 1) -> KernelContract:
    """The kernel that serves sequences of so many query tokens; see `select_kernels`.

    Raises:
        ValueError: query_tokens < 1. NotImplementedError: with the reason of `can_run`.
    """
    check_type("query_tokens", query_tokens, int, "an int >= 1")
    if query_tokens < 1:
        raise ValueError(f"query_tokens: got {query_tokens}; accepted: >= 1")
    kernels, rows = select_kernels(config), config.group * query_tokens
    limits = zip(kernels[:-1], _most_rows(config, kernels), strict=True)
    return next((kernel for kernel, most in limits if rows <= most), kernels[-1])


def _most_rows(config: AttentionConfig, kernels: tuple[KernelContract, ...]) -> list[int]:
    """Of all kernels but the last: the most packed rows of a sequence that it serves."""
    most = []
    for kernel, following in zip(kernels[:-1], kernels[1:], strict=True):
        least = dict(following.least_rows).get(config.head_size)
        most.append(kernel.max_packed_rows(config.head_size) if least is None else least - 1)
    return most


def decode_caveat(config: AttentionConfig) -> str | None:
    """What to know before decoding where no kernel splits the keys of a sequence, or None.

    Raises:
        NotImplementedError: no kernel serves this configuration.
    """
    kernels = select_kernels(config)
    if any("split_keys" in kernel.features for kernel in kernels):
        return None
    return (
        f"{kernels[0].name} does not split a sequence's keys over CTAs: decoding is right, but "
        "slow for few sequences with long contexts"
    )


def prefill_caveat(config: AttentionConfig) -> str | None:
    """What to know before prefilling where only kernels for few query rows read the cache, or None.

    Raises:
        NotImplementedError: no kernel serves this configuration.
    """
    kernels = select_kernels(config)
    if any("split_keys" not in kernel.features for kernel in kernels):
        return None
    rows = kernels[-1].max_packed_rows(config.head_size)
    return (
        f"{kernels[-1].name} reads all keys again for every {rows} query rows (GQA group x query "
        "tokens): long prefill is right, but slow"
    )


def caveats(config: AttentionConfig) -> list[str]:
    """What to know about a configuration that is served.

    Raises:
        NotImplementedError: no kernel serves it.
    """
    return [text for text in (decode_caveat(config), prefill_caveat(config)) if text]


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
    """Whether the kernels take queries quantized as the cache is.

    False for a cache that is not quantized, and where K and V are dequantized in the kernel and the
    queries keep 16 bits: quantizing them would lose accuracy and gain nothing.

    Raises:
        NotImplementedError: no kernel serves this configuration.
    """
    kernels = select_kernels(config)
    return config.dtype.quant_mode is not QuantMode.NONE and all(
        config.dtype.storage in kernel.q_dtypes for kernel in kernels
    )


@dataclass(frozen=True)
class BatchClass:
    """kind: "decode" or "prefill". packed_rows: query rows a KV head (GQA group x query tokens).
    kernel: the name of the one that serves them. passes: how often it reads K and V for them.
    """

    kind: Literal["decode", "prefill"]
    packed_rows: int
    passes: int
    kernel: str


def classify_batch(config: AttentionConfig, query_tokens: int) -> BatchClass:
    """Decode or prefill, for sequences with up to `query_tokens` query tokens each.

    A verify batch of k draft tokens has k + 1. Up to the most rows that a kernel with split keys
    packs at any head size (64) a batch is decode, whatever its own head size and cache; `kernel`
    and `passes` say what that means for it.

    Raises:
        ValueError: query_tokens < 1. NotImplementedError: no kernel serves the configuration.
    """
    kernel = select_kernel(config, query_tokens)
    rows = config.group * query_tokens
    splitting = (each for each in contracts.readers() if "split_keys" in each.features)
    limits = (limit for each in splitting for _, limit in each.rows_per_pass)
    most = max(limits, default=kernel.max_packed_rows(config.head_size))
    passes = -(-rows // kernel.max_packed_rows(config.head_size))
    return BatchClass("decode" if rows <= most else "prefill", rows, passes, kernel.name)


def explain(config: AttentionConfig, why: str | None = None) -> str:
    """Why each kernel is or is not usable for this configuration, in words, one line a fact.

    Args:
        why: it is not served, in the place of `can_run`'s reason; from who knows more about it.
    """
    reason = can_run(config)
    if reason is not None and why is not None:
        reason = why
    lines = [f"{describe(config)}:"]
    for contract in contracts.readers():
        found = contracts.refusals(contract, config)
        verdict = f"cannot read it: {'; '.join(found)}" if found else "reads it"
        lines.append(f"  {contract.name} {verdict}")
    names = [writer.name for writer in contracts.writers_for(config)]
    verb = "write" if len(names) > 1 else "writes"
    lines.append(f"  {' and '.join(names) or 'nothing here'} {verb} it")
    if reason is None:
        facts = (_shares(config), *_copies(config), *caveats(config))
        lines += [f"  {line}" for line in facts]
    lines.append("  served" if reason is None else f"  not served: {reason}")
    return "\n".join(lines)


def _shares(config: AttentionConfig) -> str:
    """Which kernel serves which sequences, in words."""
    kernels = select_kernels(config)
    shares, first = [], 1
    for kernel, rows in zip(kernels[:-1], _most_rows(config, kernels), strict=True):
        most = rows // config.group
        if most >= first:
            shares.append(f"{kernel.name} serves sequences of up to {most} query tokens")
            first = most + 1
    rest = "those of more" if shares else "serves sequences of any number of query tokens"
    return ", ".join((*shares, f"{kernels[-1].name} {rest}{_else(config, kernels)}"))


def _else(config: AttentionConfig, kernels: tuple[KernelContract, ...]) -> str:
    """Which calls the last kernel does not get, and who serves them, in words; "" if it gets all.

    Where bits must not depend on the batch, a call's size does not choose the kernel.
    """
    last = kernels[-1]
    splitting = [kernel for kernel in kernels if "split_keys" in kernel.features]
    if config.batch_invariant or not splitting or "split_keys" in last.features:
        return ""
    copies = f" and copies of its keys fit {last.max_copy_bytes >> 20} MiB"
    reads_copies = bool(last.max_copy_bytes and not last.copied_from_rows)
    rows = splitting[-1].max_packed_rows(config.head_size)
    return (
        f", where the call has enough rows for the GPU{copies if reads_copies else ''}; "
        f"else {splitting[-1].name} serves all of it in passes of {rows} rows"
    )


def _copies(config: AttentionConfig) -> list[str]:
    """Which calls are served from copies of their keys, by kernels that can do without."""
    if config.batch_invariant:
        return []
    lines = []
    for kernel in select_kernels(config):
        rows = dict(kernel.copied_from_rows).get(config.head_size)
        if rows is not None:
            lines.append(
                f"{kernel.name} reads fp16 copies of the keys (widened) in calls whose "
                f"max_seqlen_q is {-(-rows // config.group)} or more, where they fit "
                f"{kernel.max_copy_bytes >> 20} MiB"
            )
    return lines


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
        # Kernels for other caches have nothing to say about this one.
        found = {
            contract.name: contracts.shape_refusals(contract, config)
            for contract in readers
            if not contracts.cache_refusals(contract, config)
        }
        return _each(found) if all(found.values()) else None
    # Also what another dtype would not change.
    found = {
        contract.name: contracts.shape_refusals(contract, config)
        for contract in readers
        if contracts.runs_on(contract.architectures, config.capability)
    }
    if not all(found.values()):
        found = {}
    what = f"kv_cache_dtype {config.kv_cache_dtype!r} on {config.device_name}"
    return "; ".join(filter(None, (f"{what}: {' and '.join(halves)}", _each(found))))


def _checked(config: AttentionConfig) -> AttentionConfig:
    return check_type("config", config, AttentionConfig, "an AttentionConfig")


def _each(found: dict[str, list[str]]) -> str:
    """The reasons of each kernel; kernels with the same ones together."""
    names: dict[str, list[str]] = {}
    for name, reasons in found.items():
        names.setdefault("; ".join(reasons), []).append(name)
    return "; ".join(f"{', '.join(who)}: {reasons}" for reasons, who in names.items() if reasons)
