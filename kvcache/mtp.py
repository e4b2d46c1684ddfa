"""Scales of a draft (MTP) model that reads the target model's KV cache.

A draft layer that shares a target layer's cache must dequantize with that layer's scales. Sharing
only the cache leaves the draft at scale 1: its output stays right, because rejection sampling
repairs it, and only the acceptance rate collapses. So the mapping is derived from what the layers
are, scales are validated before anything is written, and a wired model can be checked at every
start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from kvcache.checks import check_all, check_type
from kvcache.layer_scales import (
    CACHE_SCALES,
    FORMS,
    OTHER_SCALES,
    check_values,
    float_agrees,
    read_scale,
)
from kvcache.writes import Transaction, overlap

LayerTypes = Sequence[str] | Mapping[int, str]


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
            (num_kv_heads,); different `num_kv_heads` or `head_size`; a scale that is not finite and
            positive; target copies on host and device that disagree. Nothing is written then.
    """
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
            that is no layer. No layer is changed then.
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


def map_draft_to_target(
    draft_names: Sequence[str],
    target_names: Sequence[str],
    *,
    draft_layer_types: LayerTypes,
    target_layer_types: LayerTypes,
    num_kv_shared_layers: int = 0,
) -> dict[str, str]:
    """Which target layer's cache each draft layer reads, by name.

    A draft layer of type T reads the last target layer of type T that has a cache of its own.

    Args:
        draft_names, target_names: attention layers, with whatever prefixes the models have
            ("language_model.model.layers.5.self_attn.attn").
        draft_layer_types, target_layer_types: a type ("full_attention", "sliding_attention") by
            real layer index, the one in the name; a mapping where indices do not start at 0.
        num_kv_shared_layers: the last so many target layers read other layers' caches.

    Raises:
        ValueError: a name without a clear layer index, an index without a type, two names of one
            index, a draft type that no target layer with a cache has, or a target layer that should
            be read and is not in `target_names` (another pipeline stage has it).
    """
    types = dict(_by_index("target_layer_types", target_layer_types))
    if not 0 <= num_kv_shared_layers < max(len(types), 1):
        raise ValueError(
            f"num_kv_shared_layers: got {num_kv_shared_layers}; the target has {len(types)} layers"
        )
    with_cache = sorted(types)[: len(types) - num_kv_shared_layers]
    last_of_type = {types[index]: index for index in with_cache}
    targets = _names_by_index("target_names", target_names)
    drafts = _names_by_index("draft_names", draft_names)
    draft_types = dict(_by_index("draft_layer_types", draft_layer_types))
    mapping = {}
    for index, name in drafts.items():
        if index not in draft_types:
            raise ValueError(f"draft_layer_types: has no layer {index}, which {name} is")
        wanted = last_of_type.get(draft_types[index])
        if wanted is None:
            raise ValueError(
                f"{name}: is {draft_types[index]!r}; target layers with a cache of their own are "
                f"{', '.join(map(repr, last_of_type))}"
            )
        if wanted not in targets:
            raise ValueError(
                f"{name}: reads the cache of target layer {wanted}, which target_names lacks"
            )
        mapping[name] = targets[wanted]
    return mapping


def layer_index(name: str) -> int:
    """The layer index in a module path: 5 for "language_model.model.layers.5.self_attn.attn".

    The number after a component that ends in "layers", else the only number.

    Raises:
        ValueError: no number, or several and it is not clear which.
    """
    check_type("layer name", name, str, "a module path")
    after_layers = re.findall(r"(?:^|\.)\w*layers\.(\d+)(?=\.|$)", name)
    numbers = after_layers or [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"layer name: got {name!r}; accepted: one with one layer index")
    return int(numbers[0])


def _by_index(what: str, layer_types: LayerTypes) -> Iterator[tuple[int, str]]:
    if isinstance(layer_types, Mapping):
        return iter(layer_types.items())
    return enumerate(check_all(what, layer_types, str, "names of types, or a mapping of them"))


def _names_by_index(what: str, names: Sequence[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in check_all(what, names, str, "names of layers"):
        index = layer_index(name)
        if index in found:
            raise ValueError(f"{what}: {found[index]} and {name} are both layer {index}")
        found[index] = name
    return found


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
    for draft, target in draft_to_target.items():
        yield (draft, target), (draft_layers[draft], target_layers[target])


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
    heads = getattr(target, "num_kv_heads", None)
    return getattr(draft, "num_kv_heads", None) if heads is None else heads


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
            f"device is {value.tolist()}"
        )
    host = _tensor(target, base + "_cpu")
    if host is not None and not _same_values(host, value):
        raise ValueError(
            f"{name}: {base}_cpu: is {host.tolist()}, but {base} on the device is {value.tolist()}"
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
    if _same_values(ours, value):
        return None
    return f"is {ours.tolist()}, should be {value.tolist()}"


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Copies may differ in shape, () against (1,), and dtype, but not in values."""
    return torch.equal(a.detach().reshape(-1).double(), b.reshape(-1).double())


def _tensor(layer: Any, attribute: str) -> torch.Tensor | None:
    value = getattr(layer, attribute, None)
    return value if isinstance(value, torch.Tensor) else None
