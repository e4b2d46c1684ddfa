"""Which target layer's KV cache each layer of a draft model reads, from what the layers are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kvcache.checks import check_all, check_type, described
from kvcache.models import LayerKind

LayerTypes = Sequence[str] | Mapping[int, str]


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
            be read and is not in `target_names` (another pipeline stage has it); a draft of a type
            that keeps no keys and values ("linear_attention").
        TypeError: names or types that are no strings, indices that are no ints.
    """
    types = dict(_by_index("target_layer_types", target_layer_types))
    _check_index("num_kv_shared_layers", num_kv_shared_layers)
    if not 0 <= num_kv_shared_layers < max(len(types), 1):
        raise ValueError(
            f"num_kv_shared_layers: got {num_kv_shared_layers}; the target has {len(types)} layers"
        )
    with_cache = sorted(types)[: len(types) - num_kv_shared_layers]
    last_of_type = {types[index]: index for index in with_cache if _has_kv_cache(types[index])}
    targets = _names_by_index("target_names", target_names)
    drafts = _names_by_index("draft_names", draft_names)
    draft_types = dict(_by_index("draft_layer_types", draft_layer_types))
    for what, names, known in (
        ("target_layer_types", targets, types),
        ("draft_layer_types", drafts, draft_types),
    ):
        for index, name in names.items():
            if index not in known:
                raise ValueError(f"{what}: has no layer {index}, which {name} is")
    mapping = {}
    for index, name in drafts.items():
        if not _has_kv_cache(draft_types[index]):
            raise ValueError(
                f"{name}: is {draft_types[index]!r}, which keeps no keys and values to share"
            )
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
        for index, kind in layer_types.items():
            _check_index(f"{what}: index {index!r}", index)
            check_type(f"{what}[{index}]", kind, str, "a name of a type")
        return iter(layer_types.items())
    return enumerate(check_all(what, layer_types, str, "names of types, or a mapping of them"))


def _check_index(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {described(value)}; accepted: an int")


def _has_kv_cache(layer_type: str) -> bool:
    return LayerKind(layer_type, (), None).has_kv_cache


def _names_by_index(what: str, names: Sequence[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in check_all(what, names, str, "names of layers"):
        index = layer_index(name)
        if index in found:
            raise ValueError(f"{what}: {found[index]} and {name} are both layer {index}")
        found[index] = name
    return found
