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
from functools import cache
from typing import Any

from kvcache.calibration import has_kv_scales, load_kv_scales, plan_kv_scales
from kvcache.integrations.vllm import logger
from kvcache.integrations.vllm.counters import COUNTERS
from kvcache.integrations.vllm.options import KV_SCALES, options
from kvcache.layer_scales import ScaleWatch
from kvcache.mtp import StaleScalesError, check_mtp_scales, propagate_mtp_scales
from kvcache.scales import KVScales


def sharing(layers: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Of the layers named, those that read another layer's cache -> the layer that has it.

    Args:
        layers: attention layers by name: `compilation_config.static_forward_context`.

    Raises:
        ValueError: a layer that reads the cache of one that is not there, or in a circle its own.
    """
    found = {name: _owner(layers, name) for name in names if name in layers}
    return {name: owner for name, owner in found.items() if name != owner}


def _owner(layers: Mapping[str, Any], name: str) -> str:
    """The layer that has the cache which this one reads, through any number of others."""
    way = [name]
    while True:
        read = getattr(layers[way[-1]], "kv_sharing_target_layer_name", None)
        if read is None:
            return way[-1]
        if read not in layers:
            raise ValueError(f"{way[-1]}: reads the cache of {read}, which is no attention layer")
        way.append(read)
        if read in way[:-1]:
            raise ValueError(f"{name}: reads its own cache: {' -> '.join(way)}")


def configured_scales(vllm_config: Any) -> dict[str, KVScales]:
    """The scales of the file that the user named, by vLLM's name of the layer's module.

    Raises:
        ValueError, TypeError: see `options` and `kvcache.calibration.load_kv_scales`; scales of
            rotated keys, which vLLM does not store.
    """
    path = options(vllm_config).get(KV_SCALES)
    if path is None:
        return {}
    scales = load_kv_scales(path, vllm_config.cache_config.cache_dtype)
    for name, each in scales.items():
        each.check_rotation(False, f"kv_scales: {path}: {name}")
    return scales


class GroupScales:
    """Keeps the scales of one group's layers right; a metadata builder asks it for each batch.

    What the host can see of a change (`kvcache.layer_scales.ScaleWatch`) is looked at for each
    batch, without a device access. Only where there is one, which is once after loading and after
    each reload or refit, scales are read from the device, checked, and written where they are
    stale.

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
        self._parallel = getattr(vllm_config, "parallel_config", None)
        self._from_file = configured_scales(vllm_config)
        self._warn_of_others()
        self._names, self._changed = names, changed
        self._seen = 0
        self._shared: dict[str, str] = {}
        self._calibrated: dict[str, KVScales] = {}
        self._watches: list[ScaleWatch] = []

    def refresh(self) -> list[str]:
        """Write what is stale; returns the layers that were written.

        Raises:
            ValueError: a scale that cannot be right, by layer and attribute; layers that do not fit
                each other or the file. No layer is changed then.
        """
        if len(self._names) != self._seen:
            self._look_up()
        if not any(watch.changed() for watch in self._watches):
            return []
        written = self._repair()
        for watch in self._watches:
            watch.accept()
        if written and self._changed is not None:
            self._changed(written)
        return written

    def _look_up(self) -> None:
        self._shared = sharing(self._layers, self._names)
        own = {name: _file_name(name) for name in self._names if name not in self._shared}
        self._calibrated = {
            name: self._of_this_rank(name, self._from_file[listed])
            for name, listed in own.items()
            if listed in self._from_file
        }
        missing = [name for name in own if name not in self._calibrated]
        if self._from_file and missing:
            raise ValueError(
                f"kv_scales: the file has no scales of {', '.join(missing)}; it has "
                f"{', '.join(self._from_file)}"
            )
        watched = {**self._calibrated, **self._shared, **dict.fromkeys(self._shared.values())}
        self._watches = [ScaleWatch(self._layers[name]) for name in watched]
        self._seen = len(self._names)

    def _warn_of_others(self) -> None:
        """A file may be another model's; under pipeline parallelism others have the layers."""
        here = set(map(_file_name, self._layers))
        others = [name for name in self._from_file if name not in here]
        if others and getattr(self._parallel, "pipeline_parallel_size", 1) == 1:
            _warn_once(f"kv_scales: the file has scales of no layer here: {', '.join(others)}")

    def _of_this_rank(self, name: str, scales: KVScales) -> KVScales:
        """A file has the scales of all KV heads, a layer under tensor parallelism some of them."""
        ranks = getattr(self._parallel, "tensor_parallel_size", 1)
        if ranks == 1:
            return scales
        heads = max(len(scales.k), len(scales.v))
        own = getattr(self._layers[name], "num_kv_heads", None)
        if heads > 1 and own not in (None, max(1, heads // ranks)):
            raise ValueError(
                f"{name}: got the scales of {heads} KV heads; tensor parallelism over {ranks} "
                f"ranks leaves {own} to each"
            )
        try:
            return scales.of_rank(_rank(), ranks)
        except ValueError as error:
            raise ValueError(f"{name}: tensor parallelism: {error}") from error

    def _repair(self) -> list[str]:
        layers = {name: self._layers[name] for name in self._calibrated}
        plan_kv_scales(
            layers, self._calibrated
        )  # refuses what does not fit, also where it is equal
        stale = {
            name: scales
            for name, scales in self._calibrated.items()
            if not has_kv_scales(layers[name], scales)
        }
        applied = plan_kv_scales({name: layers[name] for name in stale}, stale)
        applied.commit()
        try:
            shared = self._share()
        except BaseException:
            applied.undo()
            raise
        if stale:
            logger.info("cute_kernels: scales from the file: %s", ", ".join(stale))
        return [*stale, *shared]

    def _share(self) -> list[str]:
        drafts = {name: self._layers[name] for name in self._shared}
        targets = {name: self._layers[name] for name in self._shared.values()}
        try:
            check_mtp_scales(drafts, targets, self._shared)
        except StaleScalesError as error:
            written = list(dict.fromkeys(each.draft for each in error.stale))
        else:
            return []
        propagate_mtp_scales(drafts, targets, self._shared)
        COUNTERS.propagated += len(written)
        logger.info("cute_kernels: scales of the layers that share a cache: %s", written)
        return written


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


@cache
def _warn_once(message: str) -> None:
    logger.warning("cute_kernels: %s", message)


def _file_name(name: str) -> str:
    """ "model.layers.5.self_attn" for vLLM's "language_model.model.layers.5.self_attn.attn"."""
    return name.removesuffix(".attn").removeprefix("language_model.")
