"""From the times of sampled steps to the mean of all steps of their kind, and how sure that is.

Steps are sampled from equal shares of all steps in the order of their work (`perf.trace.sample`).
What a step must read and compute is known of every step, so the mean is read off the line through
the samples at the mean of all steps (a regression estimator), and its standard error is that of the
samples around the line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from perf import trace
from perf.serving_inputs import bytes_moved
from perf.timing import Timing
from perf.trace import Layers, Step

# Bytes a second and operations a second, to put both on one scale; what a line fits does not
# depend on them while one of the two prevails.
READING, COMPUTING = 4e12, 6e14
LEAST_SAMPLES = 3  # that leave a line something to miss


class Mean(NamedTuple):
    """Microseconds. standard_error: None where there are too few samples, or all do the same."""

    timing: Timing
    standard_error: float | None


class Steps:
    """Steps of one kind."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self._seen: dict[int | None, list[tuple[int, float]]] = {}

    @cached_property
    def queries(self) -> list[int]:
        return [sum(query for query, _ in step.work) for step in self.steps]

    @property
    def most_keys(self) -> int:
        """That a step holds."""
        return max(sum(keys for _, keys in step.work) for step in self.steps)

    def seen(self, window: int | None) -> list[tuple[int, float]]:
        """Of each step the keys that must be read, and about how many (query, key) pairs."""
        if window not in self._seen:
            self._seen[window] = [
                (trace.keys_read(step.work, window), trace.pairs_seen(step.work, window))
                for step in self.steps
            ]
        return self._seen[window]

    def moved(self, layers: Sequence[Layers], part: str) -> list[int]:
        """Bytes of each step, over all layers."""
        totals = [0] * len(self.steps)
        for layer in layers:
            seen = self.seen(layer.config.sliding_window)
            for i, ((keys, _), queries) in enumerate(zip(seen, self.queries, strict=True)):
                totals[i] += trace.calls_of(layer, part) * bytes_moved(layer, part, keys, queries)
        return totals

    def work(self, layers: Sequence[Layers], part: str) -> list[float]:
        """Seconds of each step at READING and COMPUTING, over all layers."""
        seconds = [moved / READING for moved in self.moved(layers, part)]
        for layer in layers if part == "attention" else ():
            rate = 4 * layer.config.num_q_heads * layer.config.head_size * layer.count / COMPUTING
            for i, (_, pairs) in enumerate(self.seen(layer.config.sliding_window)):
                seconds[i] += rate * pairs
        return seconds


def mean_of_all(timings: Sequence[Timing], work: Sequence[float], mean_work: float) -> Mean:
    """The mean over all steps, whose mean work is known, from samples and theirs."""
    medians = [timing.median_us for timing in timings]
    center, about = statistics.fmean(work), statistics.fmean(medians)
    spread = sum((x - center) ** 2 for x in work)
    shift, error = 0.0, None
    if len(timings) >= LEAST_SAMPLES and spread > 0:
        pairs = list(zip(work, medians, strict=True))
        slope = sum((x - center) * (y - about) for x, y in pairs) / spread
        shift = slope * (mean_work - center)
        missed = sum((y - about - slope * (x - center)) ** 2 for x, y in pairs)
        variance = missed / (len(timings) - 2)
        error = math.sqrt(variance * (1 / len(timings) + (mean_work - center) ** 2 / spread))
    names = ("median_us", "min_us", "max_us")
    means = (statistics.fmean(getattr(timing, name) for timing in timings) for name in names)
    return Mean(Timing(*(mean + shift for mean in means)), error)
