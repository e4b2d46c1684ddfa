"""The scales of a group's layers: from a calibration file, or from the layer whose cache they read.

Layers that read another layer's KV cache (Gemma-4 MTP drafts, shared-KV layers) are given the cache
by vLLM (`kv_sharing_target_layer_name`); their scales are their own attributes, 1.0 after loading
and again after each reload of weights. vLLM's V2 runner copies the target's when a Gemma-4 draft is
wired, its V1 runner does not, and after a reload neither does.

Other layers have 1.0 unless the checkpoint brings scales or the user names a file of them,
`--additional-config '{"cute_kernels": {"kv_scales": "kv_scales.safetensors"}}'`, which then counts
more than the checkpoint (see `kvcache.calibration`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcache.calibration import apply_kv_scales, load_kv_scales
from kvcache.integrations.vllm import logger
from kvcache.integrations.vllm.counters import COUNTERS
from kvcache.layer_scales import CACHE_SCALES
from kvcache.mtp import check_mtp_scales, propagate_mtp_scales
from kvcache.scales import KVScales


def sharing(layers: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Of the layers named, those that read another layer's cache -> that layer."""
    found = {
        name: getattr(layers[name], "kv_sharing_target_layer_name", None)
        for name in names
        if name in layers
    }
    return {name: target for name, target in found.items() if target is not None}


def propagate(layers: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Give the layers named the scales of the layers whose cache they read, all or nothing.

    Args:
        layers: attention layers by name: `compilation_config.static_forward_context`.

    Returns:
        The layers that read another's cache.

    Raises:
        ValueError: see `kvcache.propagate_mtp_scales`; nothing has been written then.
    """
    mapping = sharing(layers, names)
    if mapping:
        drafts = {name: layers[name] for name in mapping}
        targets = {name: layers[name] for name in mapping.values()}
        propagate_mtp_scales(drafts, targets, mapping)
        check_mtp_scales(drafts, targets, mapping)
    return list(mapping)


def configured_scales(vllm_config: Any) -> dict[str, KVScales]:
    """The scales of the file that the user named, by vLLM's name of the layer's module.

    Raises:
        ValueError: see `kvcache.calibration.load_kv_scales`; scales of rotated keys, which vLLM
            does not store.
    """
    extra = vllm_config.additional_config
    ours = extra.get("cute_kernels", {}) if isinstance(extra, dict) else {}
    path = ours.get("kv_scales")
    if path is None:
        return {}
    scales = load_kv_scales(path, vllm_config.cache_config.cache_dtype)
    for name, each in scales.items():
        each.check_rotation(False, f"kv_scales: {path}: {name}")
    return scales


class GroupScales:
    """Keeps the scales of one group's layers right; a metadata builder asks it for each batch.

    Comparing what the host has costs a microsecond or two a layer and no device access. Scales are
    written where that differs: once after loading, and after each reload.

    Args:
        vllm_config: with the layers in `compilation_config.static_forward_context`.
        names: the group's layers; the list may still grow, as vLLM's does.
        changed: called with the names of layers whose scales were written.
    """

    def __init__(
        self,
        vllm_config: Any,
        names: Sequence[str],
        changed: Callable[[list[str]], None] | None = None,
    ) -> None:
        self._layers = vllm_config.compilation_config.static_forward_context
        self._from_file = configured_scales(vllm_config)
        self._names, self._changed = names, changed
        self._seen = 0
        self._pairs: list[tuple[Any, Any]] = []
        self._calibrated: dict[str, KVScales] = {}

    def refresh(self) -> list[str]:
        """Write what is stale; returns the layers that were written.

        Raises:
            ValueError: a scale that cannot be right, by layer and attribute.
        """
        if len(self._names) != self._seen:
            self._look_up()
        written = self._calibrate() + self._share()
        if written and self._changed is not None:
            self._changed(written)
        return written

    def _look_up(self) -> None:
        mapping = sharing(self._layers, self._names)
        self._pairs = [(self._layers[name], self._layers[to]) for name, to in mapping.items()]
        own = {name: _file_name(name) for name in self._names if name not in mapping}
        self._calibrated = {
            name: self._from_file[listed]
            for name, listed in own.items()
            if listed in self._from_file
        }
        missing = [name for name in own if name not in self._calibrated]
        if self._from_file and missing:
            raise ValueError(
                f"kv_scales: the file has no scales of {', '.join(missing)}; it has "
                f"{', '.join(self._from_file)}"
            )
        self._seen = len(self._names)

    def _calibrate(self) -> list[str]:
        stale = {
            name: scales
            for name, scales in self._calibrated.items()
            if _on_host(self._layers[name])
            != ((max(scales.k), len(scales.k)), (max(scales.v), len(scales.v)))
        }
        if stale:
            apply_kv_scales({name: self._layers[name] for name in stale}, stale)
            logger.info("cute_kernels: scales from the file: %s", ", ".join(stale))
        return list(stale)

    def _share(self) -> list[str]:
        if all(_on_host(draft) == _on_host(target) for draft, target in self._pairs):
            return []
        written = propagate(self._layers, self._names)
        COUNTERS.propagated += len(written)
        logger.info("cute_kernels: scales of the layers that share a cache: %s", written)
        return written


def _on_host(layer: Any) -> tuple[tuple[float | None, int], ...]:
    """Of K's and V's scale the Python float and the number of scales, as the host has them."""
    found = []
    for name in CACHE_SCALES:
        tensor = getattr(layer, f"{name}_cpu", None)
        count = 0 if tensor is None else tensor.numel()
        found.append((getattr(layer, f"{name}_float", None), count))
    return tuple(found)


def _file_name(name: str) -> str:
    """ "model.layers.5.self_attn" for vLLM's "language_model.model.layers.5.self_attn.attn"."""
    return name.removesuffix(".attn").removeprefix("language_model.")
