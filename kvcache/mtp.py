"""Scales of a draft (MTP) model that reads the target model's KV cache.

A draft layer that shares a target layer's cache must dequantize with that layer's scales. Sharing
only the cache leaves the draft at scale 1: its output stays right, because rejection sampling
repairs it, and only the acceptance rate collapses. So the mapping is derived from what the layers
are, scales are validated before anything is written, and a wired model can be checked at every
start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from cute_kernels.formats import QuantMode, get_kv_cache_dtype
from kvcache.checks import check_type
from kvcache.layer_scales import (
    CACHE_SCALES,
    FORMS,
    OTHER_SCALES,
    check_values,
    float_agrees,
    read_scale,
    same_values,
)
from kvcache.writes import Transaction, overlap

_ADVICE = "; kvcache.sync_host_copies makes the copies follow the device"


class StaleScale(NamedTuple):
    """One scale of a draft layer that is not its target layer's."""

    draft: str
    target: str
    attribute: str
    problem: str

    def __str__(self) -> str:
        return f"{self.draft}: {self.attribute} {self.problem} (target layer {self.target})"


class StaleScalesError(ValueError):
    """Raised by `check_mtp_scales`; `stale` has every finding, the message too."""

    def __init__(self, stale: Sequence[StaleScale]) -> None:
        self.stale = tuple(stale)
        super().__init__("; ".join(map(str, stale)))


def copy_target_kv_scales(
    draft_layer: Any,
    target_layer: Any,
    *,
    draft_name: str = "draft layer",
    target_name: str = "target layer",
) -> None:
    """Give one draft layer the scales of the target layer whose cache it reads.

    For K and V: the device tensors `_k_scale`, `_v_scale`, the floats `_k_scale_float`,
    `_v_scale_float` and the host tensors `_k_scale_cpu`, `_v_scale_cpu` (made where the draft has
    none). For queries and probabilities, `_q_scale` and `_prob_scale`: what both layers have.

    The draft's tensors get the target's shape, dtype and bytes, on the device where they are. They
    stay the same tensors where shape and dtype allow (host tensors: also where only the shape
    differs), stay Parameters (frozen) or buffers, and never share memory with the target's.

    Args:
        draft_layer, target_layer: modules, or any objects with these attributes and, for scales per
            head, with `num_kv_heads`.
        draft_name, target_name: for messages.

    Raises:
        ValueError: naming layer and attribute: one is missing; a shape other than (), (1,) and
            (num_kv_heads,); different `num_kv_heads`, `head_size` or, where both have a
            `kv_cache_dtype`, storage formats; a scale that is not finite and positive; target
            copies on host and device that disagree; a layer as its own target. Nothing is written
            then.
    """
    if draft_layer is target_layer:
        raise ValueError(f"{draft_name}: is the same layer as {target_name}")
    transaction = Transaction(_scale_tensors(target_layer))
    _plan_copy(transaction, draft_layer, target_layer, draft_name, target_name)
    transaction.commit()


def propagate_mtp_scales(
    draft_layers: Mapping[str, Any],
    target_layers: Mapping[str, Any],
    draft_to_target: Mapping[str, str],
) -> None:
    """`copy_target_kv_scales` for every pair, all or nothing.

    Args:
        draft_layers, target_layers: attention layers by name.
        draft_to_target: names; see `map_draft_to_target`.

    Raises:
        ValueError: as `copy_target_kv_scales`; a draft layer that is not mapped; a name in the map
            that is no layer; a target layer that is itself a draft's, or one draft layer with two
            targets. No layer is changed then.
    """
    transaction = Transaction(
        tensor for layer in target_layers.values() for tensor in _scale_tensors(layer)
    )
    for names, (draft, target) in _pairs(draft_layers, target_layers, draft_to_target):
        _plan_copy(transaction, draft, target, *names)
    transaction.commit()


def check_mtp_scales(
    draft_layers: Mapping[str, Any],
    target_layers: Mapping[str, Any],
    draft_to_target: Mapping[str, str],
) -> None:
    """Verify that every draft layer dequantizes with its target layer's scales; writes nothing.

    Reads each scale from the device once: cheap enough for every start-up.

    Args: as `propagate_mtp_scales`.

    Raises:
        StaleScalesError: a ValueError that lists every attribute that differs, is missing on the
            draft or shares the target's memory.
        ValueError: what `propagate_mtp_scales` would refuse.
    """
    stale: list[StaleScale] = []
    for names, (draft, target) in _pairs(draft_layers, target_layers, draft_to_target):
        for attribute, value in _wanted(draft, target, *names):
            problem = _problem(names[0], draft, target, attribute, value)
            if problem is not None:
                stale.append(StaleScale(*names, attribute, problem))
    if stale:
        raise StaleScalesError(stale)


def _pairs(
    draft_layers: Mapping[str, Any],
    target_layers: Mapping[str, Any],
    draft_to_target: Mapping[str, str],
) -> Iterator[tuple[tuple[str, str], tuple[Any, Any]]]:
    for what, mapping in (
        ("draft_layers", draft_layers),
        ("target_layers", target_layers),
        ("draft_to_target", draft_to_target),
    ):
        check_type(what, mapping, Mapping, "a mapping by layer name")
    unmapped = sorted(set(draft_layers) - set(draft_to_target))
    if unmapped:
        raise ValueError(f"draft_to_target: lacks the draft layers {', '.join(unmapped)}")
    for what, names, layers in (
        ("draft_layers", draft_to_target, draft_layers),
        ("target_layers", draft_to_target.values(), target_layers),
    ):
        unknown = sorted(set(names) - set(layers))
        if unknown:
            raise ValueError(f"draft_to_target: names {', '.join(unknown)}, not in {what}")
    _check_roles(draft_layers, target_layers, draft_to_target)
    for draft, target in draft_to_target.items():
        yield (draft, target), (draft_layers[draft], target_layers[target])


def _check_roles(
    draft_layers: Mapping[str, Any],
    target_layers: Mapping[str, Any],
    draft_to_target: Mapping[str, str],
) -> None:
    """A layer is a draft, of one target, or a target: scales written to it are never read again."""
    written: dict[int, tuple[str, str]] = {}
    for draft, target in draft_to_target.items():
        known, known_target = written.setdefault(id(draft_layers[draft]), (draft, target))
        if target_layers[known_target] is not target_layers[target]:
            raise ValueError(
                f"draft_to_target: {known} and {draft} are one layer, mapped to {known_target} and "
                f"to {target}"
            )
    for draft, target in draft_to_target.items():
        if id(target_layers[target]) in written:
            other, its_target = written[id(target_layers[target])]
            raise ValueError(
                f"{draft}: is mapped to {target}, which is draft layer {other} and reads the cache "
                f"of {its_target}; accepted: a layer that has a cache of its own"
            )


def _plan_copy(
    transaction: Transaction, draft: Any, target: Any, draft_name: str, target_name: str
) -> None:
    for attribute, value in _wanted(draft, target, draft_name, target_name):
        transaction.set(draft, attribute, value, resize=attribute.endswith("_cpu"))


def _scale_tensors(layer: Any) -> list[torch.Tensor]:
    found = [
        _tensor(layer, base + form) for base in (*CACHE_SCALES, *OTHER_SCALES) for form in FORMS
    ]
    return [tensor for tensor in found if tensor is not None]


def _wanted(
    draft: Any, target: Any, draft_name: str, target_name: str
) -> Iterator[tuple[str, Any]]:
    """(attribute, value) of all that the draft must have; tensors are on the host.

    Validates both layers on the way; nothing has been written when it raises.
    """
    num_kv_heads = _same_geometry(draft, target, draft_name, target_name)
    for base in (*CACHE_SCALES, *OTHER_SCALES):
        required = base in CACHE_SCALES
        if not required and _tensor(draft, base) is None:
            continue
        for name, layer in ((target_name, target), (draft_name, draft)):
            if _tensor(layer, base) is None and required:
                raise ValueError(f"{name}: {base}: is missing, or is no tensor")
            if required and not isinstance(getattr(layer, base + "_float", None), Real):
                raise ValueError(f"{name}: {base}_float: is missing, or is no number")
        if _tensor(target, base) is None:
            continue
        value = read_scale(target_name, base, _tensor(target, base))
        if required:
            _check_shape(target_name, base, value, num_kv_heads)
        check_values(target_name, base, value)
        if required:  # engines leave other floats as they were
            _check_host_copies(target_name, target, base, value)
        yield base, value
        if getattr(target, base + "_float", None) is not None and (
            required or hasattr(draft, base + "_float")
        ):
            yield base + "_float", getattr(target, base + "_float")
        if required or (_tensor(draft, base + "_cpu") is not None):
            yield base + "_cpu", value


def _same_geometry(draft: Any, target: Any, draft_name: str, target_name: str) -> int | None:
    """The layers' KV heads, if they say; a draft of another geometry reads another cache."""
    for attribute in ("num_kv_heads", "head_size"):
        ours, theirs = getattr(draft, attribute, None), getattr(target, attribute, None)
        if None not in (ours, theirs) and ours != theirs:
            raise ValueError(
                f"{draft_name}: {attribute}: got {ours}; {target_name}, whose cache it reads, "
                f"has {theirs}"
            )
    ours, theirs = (getattr(layer, "kv_cache_dtype", None) for layer in (draft, target))
    if None not in (ours, theirs) and _format_of(ours) != _format_of(theirs):
        raise ValueError(
            f"{draft_name}: kv_cache_dtype: got {ours!r}; {target_name}, whose cache it reads, has "
            f"{theirs!r}"
        )
    heads = getattr(target, "num_kv_heads", None)
    return getattr(draft, "num_kv_heads", None) if heads is None else heads


def _format_of(kv_cache_dtype: str) -> str | None:
    """What the bytes are; None where they have no scales, an unknown name as it is."""
    try:
        dtype = get_kv_cache_dtype(kv_cache_dtype)
    except (TypeError, ValueError):
        return None if kv_cache_dtype == "auto" else kv_cache_dtype
    return None if dtype.quant_mode is QuantMode.NONE else dtype.storage


def _check_shape(name: str, attribute: str, value: torch.Tensor, num_kv_heads: int | None) -> None:
    if value.shape in ((), (1,)) or (num_kv_heads and value.shape == (num_kv_heads,)):
        return
    heads = "num_kv_heads, which the layer does not say" if num_kv_heads is None else num_kv_heads
    raise ValueError(
        f"{name}: {attribute}: got shape {tuple(value.shape)}; accepted: (), (1,) or ({heads},)"
    )


def _check_host_copies(name: str, target: Any, base: str, value: torch.Tensor) -> None:
    if getattr(target, base + "_float", None) is not None and not float_agrees(target, base, value):
        raise ValueError(
            f"{name}: {base}_float: is {getattr(target, base + '_float')}, but {base} on the "
            f"device is {value.tolist()}{_ADVICE}"
        )
    host = _tensor(target, base + "_cpu")
    if host is not None and not same_values(host, value):
        raise ValueError(
            f"{name}: {base}_cpu: is {host.tolist()}, but {base} on the device is "
            f"{value.tolist()}{_ADVICE}"
        )


def _problem(draft_name: str, draft: Any, target: Any, attribute: str, value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        ours = getattr(draft, attribute)
        return None if ours == value else f"is {ours}, should be {value}"
    ours = _tensor(draft, attribute)
    if ours is None:
        return f"is missing, should be {value.tolist()}"
    if any(overlap(ours, theirs) for theirs in _scale_tensors(target)):
        return "shares the target's memory"
    ours = read_scale(draft_name, attribute, ours)
    if same_values(ours, value):
        return None
    return f"is {ours.tolist()}, should be {value.tolist()}"


def _tensor(layer: Any, attribute: str) -> torch.Tensor | None:
    value = getattr(layer, attribute, None)
    return value if isinstance(value, torch.Tensor) else None
