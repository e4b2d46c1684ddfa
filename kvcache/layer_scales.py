"""The places where attention layers keep their scales, and the life of what is in them.

An attention layer of a serving engine holds each scale three times: a device tensor `_k_scale` that
kernels read, a Python float `_k_scale_float`, and a host tensor `_k_scale_cpu`; the same for V, and
for queries and probabilities where the engine quantizes them. Scales are state as weights are: they
survive sleep and wake bit for bit, and host copies follow the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kvcache.checks import check_type
from kvcache.writes import Transaction

CACHE_SCALES = ("_k_scale", "_v_scale")
OTHER_SCALES = ("_q_scale", "_prob_scale")
FORMS = ("", "_float", "_cpu")  # device tensor, Python float, host tensor


def save_scales(model: torch.nn.Module) -> dict[str, Any]:
    """Every scale of a model's attention layers: `{layer name + attribute: tensor or float}`.

    Taken before weights or caches are discarded (sleep); `restore_scales` puts it back. Tensors are
    copies on the host, so they outlive the device memory.

    Raises:
        ValueError: a model without scales.
    """
    state = {}
    for name, layer in _layers(model):
        for attribute in _attributes(layer):
            value = getattr(layer, attribute)
            if isinstance(value, torch.Tensor):
                # A new tensor also where the scale is on the host already.
                value = read_scale(name, attribute, value).clone()
            state[_key(name, attribute)] = value
    if not state:
        raise ValueError("model: no layer has a _k_scale or _v_scale")
    return state


def restore_scales(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Put saved scales back, bit for bit, into the tensors that the layers have.

    Host tensors may have another shape than when they were saved: an engine's reload makes them
    anew. Where attributes share a tensor now and have different scales to get, all but the first
    get one of their own: CUDA graphs that were captured while they shared it must be captured
    again. Nothing is written unless everything can be.

    Raises:
        ValueError: a layer or attribute that only one of `model` and `state` has, or a tensor of
            another dtype or, on the device, shape; the message names it.
    """
    check_type("state", state, Mapping, "what save_scales returned")
    places = {
        _key(name, attribute): (layer, attribute)
        for name, layer in _layers(model)
        for attribute in _attributes(layer)
    }
    for what, missing in (
        ("model", sorted(set(state) - set(places))),
        ("state", sorted(set(places) - set(state))),
    ):
        if missing:
            raise ValueError(f"{what}: has no {', '.join(missing)}")
    transaction = Transaction()
    written: dict[Any, torch.Tensor] = {}
    for key, (layer, attribute) in places.items():
        here, saved = getattr(layer, attribute), state[key]
        on_host = attribute.endswith("_cpu")
        if _kind(here, on_host) != _kind(saved, on_host):
            raise ValueError(f"{key}: the layer has {_kind(here)}, saved was {_kind(saved)}")
        if isinstance(here, torch.Tensor) and here.numel() and not here.is_meta:
            # Attributes that share a tensor go on sharing it where they get the same.
            place = (here.device, here.data_ptr(), here.shape, here.stride())
            if place in written and same_bits(written[place], saved):
                continue
            written.setdefault(place, saved)
        transaction.set(layer, attribute, saved, resize=on_host)
    transaction.commit()


def sync_host_copies(model: torch.nn.Module) -> list[str]:
    """Make Python floats and host tensors follow the device tensors, after a refit changed those.

    Reads each layer's scales from the device once. Layers without host copies are left so, and so
    is a float within the range of its heads' scales; a stale one becomes the largest of them.

    Returns:
        The attributes that were stale, with their layers' names.

    Raises:
        ValueError: a device scale that is empty, or not finite and positive; nothing is written
            then.
    """
    transaction = Transaction()
    stale = []
    for name, layer in _layers(model):
        for base in (*CACHE_SCALES, *OTHER_SCALES):
            device = getattr(layer, base, None)
            if device is None:
                continue
            value = read_scale(name, base, device)
            check_values(name, base, value)
            if getattr(layer, base + "_float", None) is not None and not float_agrees(
                layer, base, value
            ):
                transaction.set(layer, base + "_float", value.max().item())
                stale.append(_key(name, base + "_float"))
            if isinstance(getattr(layer, base + "_cpu", None), torch.Tensor) and not same_bits(
                getattr(layer, base + "_cpu"), value
            ):
                transaction.set(layer, base + "_cpu", value, resize=True)
                stale.append(_key(name, base + "_cpu"))
    transaction.commit()
    return stale


class ScaleWatch:
    """Notices on the host that a layer's K or V scale may have been written; reads no device.

    It sees another tensor, other memory, another float, another value on the host, and every write
    that counts up a tensor's version, which PyTorch's own operations do. It cannot see writes to
    the device that do not: through `tensor.data`, by kernels and collectives that take an address,
    inside a CUDA graph that is replayed, and all of a tensor made under `inference_mode`, which
    has no version. `kvcache.check_mtp_scales` and `kvcache.sync_host_copies` read the device.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._known: list[tuple[Any, ...]] | None = None

    def changed(self) -> bool:
        """Whether anything has changed since `accept`, or that was never called."""
        if self._known is None:
            return True
        for get, name, value, address, mark in self._known:
            if address is None:
                if get(name, None) != value:
                    return True
            elif get(name, None) is not value or value.data_ptr() != address:
                return True
            elif mark is not None and mark[0](value) != mark[1]:
                return True
        return False

    def accept(self) -> None:
        """Take what is there now as known."""
        self._known = []
        for name in (base + form for base in CACHE_SCALES for form in FORMS):
            value = getattr(self._layer, name, None)
            known = (None, None)
            if isinstance(value, torch.Tensor):
                known = (value.data_ptr(), _mark(value, on_host=name.endswith("_cpu")))
            self._known.append((_getter(self._layer, name), name, value, *known))


def _mark(scale: torch.Tensor, *, on_host: bool) -> tuple[Callable[..., Any], Any] | None:
    """What tells whether a tensor was written: a function of it, and its value now."""
    if on_host and scale.is_cpu:
        return torch.Tensor.tolist, scale.tolist()
    return None if scale.is_inference() else (_VERSION, scale._version)


_VERSION = torch.Tensor._version.__get__


def _getter(layer: Any, name: str) -> Callable[..., Any]:
    """`get(name, default)` of one attribute; a module finds its buffers at the very end."""
    fields = getattr(layer, "__dict__", {})
    for place in (fields, fields.get("_buffers", {}), fields.get("_parameters", {})):
        if name in place:
            return place.get
    return partial(getattr, layer)


def read_scale(layer_name: str, attribute: str, scale: torch.Tensor) -> torch.Tensor:
    """A scale on the host.

    Raises:
        ValueError: on the meta device there is none.
    """
    if scale.device.type == "meta":
        raise ValueError(f"{layer_name}: {attribute}: is on the meta device; load the model first")
    return scale.detach().cpu()


def check_values(layer_name: str, attribute: str, value: torch.Tensor) -> None:
    """Refuse scales (a host tensor) that are none, or not finite and positive.

    Raises:
        ValueError: naming the layer and the attribute.
    """
    wide = value.double()
    if not wide.numel() or not bool((wide.isfinite() & (wide > 0)).all()):
        raise ValueError(
            f"{layer_name}: {attribute}: got {value.tolist()}; accepted: finite and > 0"
        )


def float_agrees(layer: Any, base: str, value: torch.Tensor) -> bool:
    """Whether `<base>_float` is the device's value (given as a host tensor).

    One float cannot be several heads' scales; engines reduce them differently, so then any number
    from the smallest to the largest scale passes.
    """
    as_stored = torch.tensor(float(getattr(layer, base + "_float")), dtype=value.dtype)
    return bool(value.min() <= as_stored <= value.max())


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors on the host hold the same scales; () and (1,) and dtypes may differ."""
    return torch.equal(a.detach().reshape(-1).double(), b.detach().reshape(-1).double())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors on the host have the same shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    # A copy: a dimension of size 1 may have stride 0, which counts as contiguous and has no bytes
    # view.
    a, b = (x.detach().reshape(-1).clone(memory_format=torch.contiguous_format) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if any(getattr(layer, base, None) is not None for base in CACHE_SCALES)
    ]


def _attributes(layer: torch.nn.Module) -> list[str]:
    names = [base + form for base in (*CACHE_SCALES, *OTHER_SCALES) for form in FORMS]
    return [name for name in names if getattr(layer, name, None) is not None]


def _key(layer_name: str, attribute: str) -> str:
    return f"{layer_name}.{attribute}" if layer_name else attribute


def _kind(value: Any, any_shape: bool = False) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype) if any_shape else f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__
