"""What single layers of a model have in the place of what its `config.json` says of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Head size of the full layers where the file does not say it.
_GLOBAL_HEAD_SIZES = dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), 512)
# Full layers have KV heads of their own number only where the file has `attention_k_eq_v` as well.
_GLOBAL_HEADS_ON_REQUEST = set(_GLOBAL_HEAD_SIZES)
# What `per_layer_config` may say of a layer: what attention takes from it, and what it does not.
_PER_LAYER = {"head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window"}
_PER_LAYER_ELSEWHERE = {
    "hidden_act",
    "hidden_activation",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "top_k_experts",
}
ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
# Lists with a field's value of each layer.
_LISTS = {
    "num_attention_heads_per_layer": "num_attention_heads",
    "num_key_value_heads_per_layer": "num_key_value_heads",
}
# Fields of all sliding layers.
_SLIDING = {"num_sliding_attention_heads": "num_attention_heads"}
# Objects with the heads of sliding layers, by what transformers reads in their place.
_OBJECTS = {"attention_other_setting": "num_sliding_attention_heads"}
# Words of fields that say more of the heads of some layers.
_LISTS_OF_HEADS = re.compile(r"(?=.*head)(?:per_layer_(?P<after>\w+)|(?P<before>\w+)_per_layer)")
_SLIDING_HEADS = re.compile(r"(?=.*head)(?P<num>num_)?(?:swa|sliding|local)_(?P<rest>\w+)")


def layer_fields(text: Mapping[str, Any], types: list[str]) -> list[dict[str, Any]]:
    """For each layer, the fields that it has in the place of the model's.

    Raises:
        ValueError: a field that cannot be right, or of heads that only some layers have and whose
            meaning is not known; the message names it.
    """
    _refuse_unknown_heads(text, types)
    listed = _listed_fields(text, types)
    given = text.get("per_layer_config")
    if given is not None:
        return _given_layer_fields(given, text, types, listed)
    # Older files of Gemma-4 say so of all full layers together.
    model_type = text.get("model_type")
    own: dict[str, Any] = {}
    head_size = optional(text, "global_head_dim", _GLOBAL_HEAD_SIZES.get(model_type))
    heads = optional(text, "num_global_key_value_heads", None)
    if head_size is not None:
        own["head_dim"] = head_size
    if heads and text.get("attention_k_eq_v", model_type not in _GLOBAL_HEADS_ON_REQUEST):
        own["num_key_value_heads"] = heads
    return [
        {**(own if name == "full_attention" else {}), **fields}
        for name, fields in zip(types, listed, strict=True)
    ]


def _listed_fields(text: Mapping[str, Any], types: list[str]) -> list[dict[str, Any]]:
    """What `_LISTS` and `_SLIDING` say of each layer that is attention, where it differs."""
    own: list[dict[str, Any]] = [{} for _ in types]
    for source, name in _SLIDING.items():
        heads = optional(text, source, None)
        for index, kind in enumerate(types):
            if kind == "sliding_attention" and heads not in (None, text.get(name)):
                own[index][name] = heads
    for source, name in _LISTS.items():
        values = text.get(source)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != len(types):
            raise ValueError(f"{source}: got {values!r}; accepted: a list of {len(types)} ints > 0")
        for index, kind in enumerate(types):
            if kind in ATTENTION:
                where = f"{source}[{index}]"
                value = field({where: values[index]}, where)
                if own[index].get(name, value) != value:
                    raise ValueError(f"{where}: got {value}; another field has {own[index][name]}")
                if value != text.get(name):
                    own[index][name] = value
    return own


def _refuse_unknown_heads(text: Mapping[str, Any], types: list[str]) -> None:
    """Fields that may give some layers other heads, unless what they say is the model's anyway."""
    slides = "sliding_attention" in types
    for source, value in text.items():
        if value is None or source in _LISTS or source in _SLIDING:
            continue
        if source in _OBJECTS and text.get(_OBJECTS[source]) is None and slides:
            raise ValueError(f"{source}: not read; accepted: null, with {_OBJECTS[source]} given")
        listed, sliding = _LISTS_OF_HEADS.fullmatch(source), _SLIDING_HEADS.fullmatch(source)
        if listed:
            name = listed["after"] or listed["before"]
        elif sliding and slides:
            name = (sliding["num"] or "") + sliding["rest"]
        else:
            continue
        common = text.get(name)
        same = all(each == common for each in value) if isinstance(value, list) else value == common
        if not same:
            raise ValueError(
                f"{source}: what it means for attention is not known here; accepted: null, or "
                f"{name}, {common!r}, for all layers"
            )


def _given_layer_fields(
    given: Any, text: Mapping[str, Any], types: list[str], listed: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`per_layer_config` maps indices, which JSON has as strings like "05", to fields.

    listed: what other fields say of the layers, which must not be something else.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"per_layer_config: got a {type(given).__name__}; accepted: an object")
    count = len(types)
    own = [dict(fields) for fields in listed]
    for key, fields in given.items():
        where = f"per_layer_config[{key!r}]"
        if not re.fullmatch("[0-9]{1,9}", str(key)) or int(key) >= count:
            raise ValueError(f"{where}: accepted: indices of layers, 0 to {count - 1}")
        if not isinstance(fields, Mapping):
            raise ValueError(f"{where}: got a {type(fields).__name__}; accepted: an object")
        unknown = sorted(set(fields) - _PER_LAYER - _PER_LAYER_ELSEWHERE)
        if unknown:
            raise ValueError(
                f"{where}.{unknown[0]}: what it means for attention is not known here; "
                f"accepted: {', '.join(sorted(_PER_LAYER))}"
            )
        for name in sorted(_PER_LAYER & set(fields)):
            value = fields[name]
            if value is not None:
                try:
                    field(fields, name)
                except ValueError as error:
                    raise ValueError(f"{where}.{error}") from error
            if listed[int(key)].get(name, value) != value:
                raise ValueError(
                    f"{where}.{name}: got {value}; another field has {listed[int(key)][name]}"
                )
            matters = name != "sliding_window" or types[int(key)] == "sliding_attention"
            if matters and value != text.get(name):
                own[int(key)][name] = value
    return own


def field(text: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: got {value!r}; accepted: an int > {least - 1}")
    return value


def optional(
    text: Mapping[str, Any], name: str, default: int | None, most: int | None = None
) -> int | None:
    """A count that may be missing or null; 0 is one where the default is 0."""
    value = text.get(name)
    if value is None:
        return default
    least = 0 if default == 0 else 1
    wrong = not isinstance(value, int) or isinstance(value, bool) or value < least
    if wrong or (most is not None and value > most):
        bound = "" if most is None else f" and <= {most}"
        raise ValueError(f"{name}: got {value!r}; accepted: an int >= {least}{bound}")
    return value
