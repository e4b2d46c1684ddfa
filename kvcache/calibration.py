"""Scales of a model's layers in a safetensors file, under the names that serving engines read.

    scales = calibrate_scales(model, sample_ids)          # kvcache.integrations.transformers
    save_kv_scales("kv_scales.safetensors", scales)

Every layer has two float32 tensors, `model.layers.5.self_attn.k_scale` and `.v_scale`: () for one
scale a layer, (Hkv,) for one a KV head. Engines that read a checkpoint's scales take these names;
the file can stand beside the checkpoint's own. Its metadata says which dtype the scales are for
(files of engines do not, so there the caller must) and whether keys were rotated (files of engines
do not: theirs are not).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kvcache.checks import check_all, check_type, described
from kvcache.layer_scales import read_scale, same_values
from kvcache.scales import KVScales, check_has_scales
from kvcache.writes import Transaction

LAYER_NAME = "model.layers.{}.self_attn"
_DTYPE_KEY = "kv_cache_dtype"
_ROTATION_KEY = "rotated_keys"
_ROTATIONS = {"true": True, "false": False}
_SIDES = ("k", "v")


def save_kv_scales(
    path: str | os.PathLike,
    scales: Sequence[KVScales],
    kv_cache_dtype: str | None = None,
    *,
    layer_name: str = LAYER_NAME,
) -> None:
    """Write the scales of all layers.

    Args:
        path: of the new file; one that is there is replaced whole.
        scales: one a layer, in order. Pairs (k, v) of numbers, or of tuples of them, are taken too.
        kv_cache_dtype: what the scales are for, where they do not say so themselves.
        layer_name: with {} for the layer's index.

    Raises:
        ValueError: no layers, a scale out of range, a dtype without scales, a name without {};
            or one that names two layers alike; scales for no known dtype, or for dtypes of several
            storage formats; of rotated keys and of plain ones.
        TypeError: scales that are none.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    if kv_cache_dtype is not None:
        check_has_scales(kv_cache_dtype)
    if _with_index(layer_name, 0) == _with_index(layer_name, 1):
        raise ValueError(f"layer_name: got {layer_name!r}; accepted: with {{}} for the index")
    found = [
        each if isinstance(each, KVScales) else KVScales(*each)
        for each in check_all("scales", scales, (KVScales, tuple), "KVScales, one a layer")
    ]
    if not found:
        raise ValueError("scales: got none; accepted: one a layer")
    dtype = kv_cache_dtype or found[0].kv_cache_dtype
    if dtype is None:
        raise ValueError("kv_cache_dtype: got None, and the scales do not say what they are for")
    for index, each in enumerate(found):
        if each.kv_cache_dtype is not None:
            each.check_dtype(dtype, f"scales[{index}]")
        if each.rotated_keys is not found[0].rotated_keys:
            raise ValueError(
                f"scales[{index}]: rotated_keys is {each.rotated_keys}, scales[0] has "
                f"{found[0].rotated_keys}; accepted: the same for all layers of a file"
            )
    rotated = str(found[0].rotated_keys).lower()
    tensors = {
        f"{layer_name.format(index)}.{side}_scale": tensor
        for index, each in enumerate(found)
        for side, tensor in zip(_SIDES, each.tensors(), strict=True)
    }
    if len(tensors) != len(_SIDES) * len(found):
        raise ValueError(
            f"layer_name: got {layer_name!r}, which names several of {len(found)} layers alike"
        )
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        safetensors.torch.save_file(
            tensors, partial, metadata={_DTYPE_KEY: dtype, _ROTATION_KEY: rotated}
        )
        os.replace(partial, path)  # never half a file under the final name
    finally:
        partial.unlink(missing_ok=True)


def _with_index(layer_name: str, index: int) -> str | None:
    """None where the name has other fields than one for the index."""
    try:
        return layer_name.format(index)
    except (IndexError, KeyError, ValueError):
        return None


def load_kv_scales(
    path: str | os.PathLike, kv_cache_dtype: str | None = None
) -> dict[str, KVScales]:
    """The scales of each layer, by its name in the file, in the file's order of layers.

    Args:
        kv_cache_dtype: of the cache they are for; None for the one that the file names. A file of
            an engine names none: then this is what is believed.

    Raises:
        ValueError: scales for another storage format; None and a file that names no dtype; a layer
            with one scale only; one out of range, or of more than one dimension, or that are no
            floating-point numbers; no scales; a `rotated_keys` in the metadata that is not "true"
            or "false"; no safetensors file.
        OSError: a file that is not there, a directory.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    if kv_cache_dtype is not None:
        check_has_scales(kv_cache_dtype)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    try:
        file = safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: is no safetensors file: {error}") from error
    except OSError as error:
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path}: is a directory; accepted: a file") from error
        raise
    with file:
        metadata = file.metadata() or {}
        made_for = metadata.get(_DTYPE_KEY, kv_cache_dtype)
        if made_for is None:
            raise ValueError(
                f"{path}: does not say which kv_cache_dtype its scales are for; accepted with an "
                "explicit kv_cache_dtype"
            )
        rotated = metadata.get(_ROTATION_KEY, "false")
        if rotated not in _ROTATIONS:
            raise ValueError(
                f"{path}: {_ROTATION_KEY} is {rotated!r}; accepted: {', '.join(_ROTATIONS)}"
            )
        for key in file.keys():
            layer, _, last = key.rpartition(".")
            side = last.removesuffix("_scale")
            if last.endswith("_scale") and side in _SIDES:
                tensor = file.get_tensor(key)
                if not tensor.is_floating_point():
                    raise ValueError(
                        f"{path}: {key}: is {tensor.dtype}; accepted: floating-point numbers"
                    )
                sides.setdefault(layer, {})[side] = tensor.double()
    if not sides:
        raise ValueError(f"{path}: holds no k_scale and v_scale")
    for layer, found in sides.items():
        if len(found) != len(_SIDES):
            raise ValueError(f"{path}: {layer} has {', '.join(found)}_scale only")
    scales = {}
    for layer in sorted(sides, key=_natural):
        try:
            scales[layer] = KVScales(
                **sides[layer], kv_cache_dtype=made_for, rotated_keys=_ROTATIONS[rotated]
            )
        except ValueError as error:
            raise ValueError(f"{path}: {layer}: {error}") from error
    next(iter(scales.values())).check_dtype(kv_cache_dtype or made_for, f"{path}")
    return scales


def apply_kv_scales(
    layers: Mapping[str, Any], scales: Mapping[str, KVScales], *, rotated_keys: bool = False
) -> None:
    """Give an engine's attention layers these scales, all or nothing.

    Writes the device tensors `_k_scale`, `_v_scale`, the floats (of several heads the largest) and
    the host tensors, keeping what each attribute is, as `kvcache.copy_target_kv_scales` does.

    Args:
        layers: attention layers, by the name that the scales have.
        scales: of these layers and no others.
        rotated_keys: whether these layers store rotated keys. No engine's do by themselves.

    Raises:
        ValueError: a name that only one of the two has, or a number of heads that is not the
            layer's `num_kv_heads`; a layer whose `kv_cache_dtype` is not known here or takes no
            scales (where it has that attribute), or is of another storage format than the scales
            are for; scales of keys that are rotated where the layers' are not, or the reverse.
        TypeError: a name that is none, a layer that takes no attributes, scales that are no
            `KVScales`. No layer is changed then.
    """
    plan_kv_scales(layers, scales, rotated_keys=rotated_keys).commit()


def plan_kv_scales(
    layers: Mapping[str, Any], scales: Mapping[str, KVScales], *, rotated_keys: bool = False
) -> Transaction:
    """`apply_kv_scales`, checked but not yet done."""
    for what, mapping in (("layers", layers), ("scales", scales)):
        check_type(what, mapping, Mapping, "a mapping by layer name")
        for name in mapping:
            check_type(f"{what}: name {name!r}", name, str, "a str")
    for what, missing in (
        ("layers", sorted(set(scales) - set(layers))),
        ("scales", sorted(set(layers) - set(scales))),
    ):
        if missing:
            raise ValueError(f"{what}: has no {', '.join(missing)}")
    transaction = Transaction()
    for name, layer in layers.items():
        check_type(f"{name}: scales", scales[name], KVScales, "KVScales")
        if not (hasattr(layer, "__dict__") or hasattr(layer, "_k_scale")):
            raise TypeError(f"{name}: got {described(layer)}; accepted: an attention layer")
        scales[name].check_rotation(rotated_keys, name)
        dtype = getattr(layer, "kv_cache_dtype", None)
        if dtype is not None:
            try:
                check_has_scales(dtype)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            scales[name].check_dtype(dtype, name)
        for side, tensor in zip(_SIDES, scales[name].tensors(), strict=True):
            heads = getattr(layer, "num_kv_heads", None)
            if tensor.dim() and heads not in (None, len(tensor)):
                raise ValueError(
                    f"{name}: {side}_scale: got {len(tensor)} scales; the layer has {heads} "
                    "KV heads (under tensor parallelism those of its rank: KVScales.of_rank)"
                )
            transaction.set(layer, f"_{side}_scale", tensor)
            transaction.set(layer, f"_{side}_scale_float", tensor.max().item())
            transaction.set(layer, f"_{side}_scale_cpu", tensor, resize=True)
    return transaction


def has_kv_scales(layer: Any, scales: KVScales) -> bool:
    """Whether a layer has these scales in all three forms; reads two numbers or rows of the device.

    Raises:
        ValueError: scales on the meta device.
    """
    for side, tensor in zip(_SIDES, scales.tensors(), strict=True):
        device, host = (getattr(layer, f"_{side}_scale{form}", None) for form in ("", "_cpu"))
        if getattr(layer, f"_{side}_scale_float", None) != tensor.max().item():
            return False
        for held in (device, host):
            if not isinstance(held, torch.Tensor):
                return False
            if not same_values(read_scale("layer", f"_{side}_scale", held), tensor):
                return False
    return True


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files of scales need safetensors: pip install 'cute-kernels[scales]'"
        ) from error
    return safetensors


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
