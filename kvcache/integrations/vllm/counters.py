"""What the log says: which kernel serves which layers, and kernels that a batch waited for."""

from __future__ import annotations

from collections import Counter

from cute_kernels import compile_cache
from kvcache.integrations.vllm import logger

REFERENCE = "torch reference"


class Counters:
    """Of one process.

    kernels: layers by the kernel that serves them. propagated: layers that were given the scales of
    the layer whose cache they read. late: kernels that were compiled or loaded after warmup.
    """

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.propagated = 0
        self.late = 0
        self._layers: dict[str, str] = {}
        self._known: int | None = None

    def chosen(self, layer: str, kernel: str) -> None:
        """Note, once a layer, what serves it."""
        if self._layers.get(layer) != kernel:
            self._layers[layer] = kernel
            self.kernels[kernel] += 1
            logger.info("cute_kernels: %s is served by %s", layer, kernel)

    def warmed_up(self) -> None:
        """Called for each graph that is captured: what has come until then is not late."""
        known = len(compile_cache.loaded())
        if known != self._known:
            self._known = known
            logger.info("cute_kernels: %s", self)

    def batch(self) -> None:
        """Called for each batch: reports kernels that came since the last one."""
        if self._known is None:  # the first one: warmup has ended
            self.warmed_up()
        late = compile_cache.loaded()[self._known :]
        if late:
            self.late += len(late)
            self._known += len(late)
            names = ", ".join(unit.name for unit in late)
            logger.warning("cute_kernels: a batch waited for %s; %s", names, self)

    def __str__(self) -> str:
        served = ", ".join(f"{count} by {name}" for name, count in self.kernels.items())
        return (
            f"layers served: {served or 'none yet'}; kernels loaded: "
            f"{len(compile_cache.loaded())}, compiled here: {len(compile_cache.compiled())}, after "
            f"warmup: {self.late}; layers given shared scales: {self.propagated}"
        )


COUNTERS = Counters()
