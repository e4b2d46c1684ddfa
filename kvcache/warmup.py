"""Which kernels a model needs, from its `config.json`: the plan that `kvcache warmup` compiles.

A frameworks' provider of compile units takes `plan_warmup(...).compile_units`: each has a `key`, by
which equal ones are recognised, and `compile()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cute_kernels import registry
from cute_kernels.compile.plans import (
    KERNELS,
    AttentionWorkload,
    CompileUnit,
    IndexerWorkload,
    StoreWorkload,
    Workload,
    units_for,
    why_no_indexer,
)
from cute_kernels.formats import QuantMode
from kvcache.blocks import get_preferred_block_size_for_config
from kvcache.checks import check_all, check_positive
from kvcache.config import AttentionConfig, capability_of
from kvcache.models import LayerKind, dtype_of, layer_kinds, text_of

# Other models have fields of the same names for indexers that compute something else: that of
# DeepSeek-V3.2 neither compresses nor norms keys as ours does.
_INDEXER_MODELS = {"deepseek_v4"}
_NOT_COMPILED = "no kernel here is compiled for it"
_READ = {target for contract in registry.contracts() for target in contract.architectures}
_TARGETS = {capability_of(target): target for each in KERNELS.values() for target in each.targets}


@dataclass(frozen=True)
class PlannedUnit:
    """A compile unit, and what asks for it, in words."""

    unit: CompileUnit
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class WarmupPlan:
    """units: without doubles, in the order of layers, architectures and tensor-parallel sizes.
    unserved: what of the model no kernel here serves, and why; it does not stop the rest.
    """

    units: tuple[PlannedUnit, ...]
    unserved: tuple[str, ...]

    @property
    def compile_units(self) -> tuple[CompileUnit, ...]:
        return tuple(planned.unit for planned in self.units)


def plan_warmup(
    model: Mapping[str, Any],
    architectures: Iterable[str],
    kv_cache_dtype: str,
    *,
    tp_sizes: Iterable[int] = (1,),
    max_query_tokens: int = 8192,
    page_sizes: Iterable[int] = (),
    query_dtype: str | None = None,
    text_only: bool = False,
    batch_invariant: bool = False,
) -> WarmupPlan:
    """Every compile unit that serving this model asks for, whatever the traffic.

    Decoding, verifying draft tokens and prefilling differ in query tokens only, so a plan covers
    every number of them up to the most.

    Args:
        model: the parsed `config.json`.
        architectures: compile targets, like "sm_90a"; "sm_90" is the same device.
        kv_cache_dtype: as in `AttentionConfig`.
        tp_sizes: tensor-parallel sizes; fewer KV heads than devices are replicated.
        max_query_tokens: the most tokens of one sequence in a batch: the engine's token budget, or
            its longest sequence if that is shorter.
        page_sizes: tokens of a page, as the kernel is given it; what the kernels prefer if empty.
            One that no kernel reads is unserved, the others are planned.
        query_dtype: what the model computes in, where that is not what its file says.
        text_only: no images are sent.
        batch_invariant: calls are made with deterministic=True.

    Raises:
        ValueError: a field of the file or an argument that cannot be right.
        TypeError: one name or number in the place of several, or of another type.
    """
    asked = _Asked({}, {})
    architectures = check_all("architectures", architectures, str, "names like ['sm_90a']")
    pages = tuple(check_all("page_sizes", page_sizes, int, "ints, like [16, 64]"))
    sizes = tuple(check_all("tp_sizes", tp_sizes, object, "ints, like [1, 2]"))
    check_positive("max_query_tokens", max_query_tokens)
    for size in sizes:
        _check_tp_size(size)
    # A device's name without the "a" has one compile target; asked for twice it is planned once.
    targets = [_TARGETS.get(capability_of(each), each) for each in architectures]
    for architecture in dict.fromkeys(targets):
        kinds = layer_kinds(
            model,
            kv_cache_dtype,
            capability_of(architecture),
            text_only=text_only,
            batch_invariant=batch_invariant,
        )
        kinds = [_as_asked(kind, query_dtype) for kind in kinds]
        for size in sizes:
            if any(kind.config is None and kind.has_kv_cache for kind in kinds):
                _check_shares(model, size)
            for kind, workload, refusal in _workloads(kinds, size, pages, max_query_tokens):
                units = [] if workload is None else units_for(workload, architecture)
                what = f"{kind.name} ({len(kind.layers)} layers)"
                asked.note(what, architecture, size, units, refusal)
            if architecture not in _READ:
                for what, store in _stores(kinds):
                    units = units_for(store, architecture)
                    if units:
                        asked.note(what, architecture, size, units)
            for what, indexer, refusal in _indexers(model):
                units = [] if indexer is None else units_for(indexer, architecture)
                asked.note(what, architecture, size, units, refusal)
    units = tuple(PlannedUnit(unit, _sentences(who)) for unit, who in asked.units.items())
    return WarmupPlan(units, _sentences(asked.unserved))


def _check_tp_size(size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"tp_sizes: got {size!r}; accepted: ints >= 1")


def _check_shares(model: Mapping[str, Any], size: int) -> None:
    """Of layers that are not known here, so that `on_one_device` does not see them."""
    heads = text_of(model).get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        raise ValueError(f"tp_sizes: {size} devices cannot share {heads} query heads")


class _Asked(NamedTuple):
    """What asks for a unit, and what for none: words, each with the tensor-parallel sizes."""

    units: dict[CompileUnit, dict[str, list[int]]]
    unserved: dict[str, list[int]]

    def note(
        self,
        what: str,
        architecture: str,
        tp_size: int,
        units: list[CompileUnit],
        refusal: str = _NOT_COMPILED,
    ) -> None:
        on = f"{what} on {architecture}, TP %s"
        for unit in units:
            self.units.setdefault(unit, {}).setdefault(on, []).append(tp_size)
        if not units:
            reason = refusal.replace("%", "%%")
            self.unserved.setdefault(f"{on}: {reason}", []).append(tp_size)


def _sentences(sizes_by_text: dict[str, list[int]]) -> tuple[str, ...]:
    return tuple(text % "/".join(map(str, sizes)) for text, sizes in sizes_by_text.items())


def _as_asked(kind: LayerKind, query_dtype: str | None) -> LayerKind:
    if kind.config is None or query_dtype is None:
        return kind
    return replace(kind, config=replace(kind.config, query_dtype=query_dtype))


def _workloads(
    kinds: list[LayerKind], tp_size: int, pages: tuple[int, ...], max_query_tokens: int
) -> Iterable[tuple[LayerKind, Workload | None, str]]:
    """(kind, what it asks for on one device, why it is not served) of all that need a kernel."""
    for kind in kinds:
        if kind.config is None:
            if kind.has_kv_cache:
                yield kind, None, kind.note
            continue
        config = on_one_device(kind.config, tp_size)
        reasons = {
            size: kind.why_unserved(replace(config, page_size=size)) for size in pages or (None,)
        }
        fitting = tuple(size for size in pages if reasons[size] is None)
        refusal = "; ".join(dict.fromkeys(filter(None, reasons.values())))
        if refusal:
            yield kind, None, refusal
        if refusal and not fitting:
            continue
        workload = AttentionWorkload(
            head_size=config.head_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            q_dtype=config.query_dtype,
            kv_cache_dtype=config.dtype.name,
            page_sizes=fitting or (get_preferred_block_size_for_config(1, config),),
            max_query_tokens=max_query_tokens,
            deterministic=config.batch_invariant,
        )
        yield kind, workload, _NOT_COMPILED


def on_one_device(config: AttentionConfig, tp_size: int) -> AttentionConfig:
    """The configuration of one of `tp_size` devices that divide the heads among them."""
    _check_tp_size(tp_size)
    q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
    if q_heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise ValueError(
            f"tp_sizes: {tp_size} devices cannot share {q_heads} query and {kv_heads} KV heads"
        )
    return replace(config, num_q_heads=q_heads // tp_size, num_kv_heads=max(1, kv_heads // tp_size))


def _stores(kinds: list[LayerKind]) -> Iterable[tuple[str, StoreWorkload]]:
    """(words, what it asks for) of layers that others read on this architecture, from a cache that
    our stores write there."""
    for kind in kinds:
        config = kind.config
        if config is not None and config.dtype.quant_mode is not QuantMode.NONE:
            what = f"the store of {kind.name} ({len(kind.layers)} layers)"
            yield what, StoreWorkload(config.query_dtype, config.dtype.name)


def explain_indexers(model: Mapping[str, Any], architecture: str) -> list[str]:
    """Whether kernels make the queries and keys of the model's sparse-attention indexer, in words;
    nothing of a model without one."""
    target = _TARGETS.get(capability_of(architecture), architecture)
    lines = []
    for what, indexer, refusal in _indexers(model):
        served = indexer is not None and units_for(indexer, target)
        lines.append(
            f"{what}: {'kernels make its Q and K' if served else f'not served: {refusal}'}"
        )
    return lines


def _indexers(model: Mapping[str, Any]) -> Iterable[tuple[str, IndexerWorkload | None, str]]:
    """(words, what it asks for, why it is not served) of the sparse-attention indexer of a model
    that has one; it is not divided among devices.

    Raises:
        ValueError: a number of heads, or their size, that is no positive int.
    """
    text = text_of(model)
    heads, size, model_type = (
        text.get(name) for name in ("index_n_heads", "index_head_dim", "model_type")
    )
    if heads is None or size is None:
        return
    check_positive("index_n_heads", heads)
    check_positive("index_head_dim", size)
    what = f"indexer ({heads} heads of {size})"
    dtype = dtype_of(text)
    if model_type in _INDEXER_MODELS:
        indexer = IndexerWorkload(heads, size, dtype)
        yield what, indexer, why_no_indexer(indexer) or _NOT_COMPILED
    else:
        yield what, None, f"that of model_type {model_type!r} is not known here"
