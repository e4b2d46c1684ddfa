"""One timer for every contender.

Three figures a contender: microseconds per call with several calls in one CUDA graph that rotate
over input sets (what a kernel costs inside a captured decode step, launch gaps hidden), with one
call per graph replay (a few microseconds of launch floor inside), and the host's cost of an eager
call. Contenders take turns within each round, so that a drift of clocks or temperature meets all
of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
# A graph holds at least this many calls, so that its launch weighs little.
MIN_CALLS_PER_GRAPH = 4
MAX_SINGLE_GRAPHS = 8
MAX_NAME = 160  # of a kernel; templates have names of kilobytes


@dataclass(frozen=True)
class Contender:
    """calls: one nullary callable per input set; each writes an output of its own."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over all rounds."""

    median_us: float
    min_us: float
    max_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        return cls(statistics.median(samples), min(samples), max(samples))


def calls_per_graph(num_sets: int) -> int:
    """A multiple of the number of sets, so that each is read equally often."""
    return num_sets * -(-MIN_CALLS_PER_GRAPH // num_sets)


def rotation(turn: int, contender: int, num_contenders: int, num_sets: int) -> int:
    """The input set that a contender takes in a turn, far from what the others just read."""
    return (turn + contender * num_sets // num_contenders) % num_sets


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some calls. They run once eagerly before, to compile what compiles lazily."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_us(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Microseconds of one replay of each graph, enqueued back to back."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
    for graph, (start, end) in zip(graphs, events, strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def _turns(count: int, turn: int) -> list[int]:
    """Contenders in the order of a turn: everyone goes first equally often."""
    return [(turn + i) % count for i in range(count)]


def time_rotating(contenders: Sequence[Contender], rounds: int = 20) -> list[Timing]:
    """Per-call time inside one graph of `calls_per_graph` calls, contenders interleaved."""
    graphs, counts = [], []
    for contender in contenders:
        repeats = calls_per_graph(len(contender.calls)) // len(contender.calls)
        graphs.append(capture(contender.calls * repeats))
        counts.append(len(contender.calls) * repeats)
    samples: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds + 2):
        order = _turns(len(graphs), turn)
        times = _replay_us([graphs[i] for i in order])
        if turn >= 2:  # the first replays upload the graphs
            for i, microseconds in zip(order, times, strict=True):
                samples[i].append(microseconds / counts[i])
    return [Timing.of(values) for values in samples]


def time_single(contenders: Sequence[Contender], rounds: int = 20) -> list[Timing]:
    """Time of a graph of one call; successive replays read different input sets."""
    graphs = [[capture([call]) for call in c.calls[:MAX_SINGLE_GRAPHS]] for c in contenders]
    num_sets = len(graphs[0])
    for of_contender in graphs:
        _replay_us(of_contender)
    samples: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds):
        order = _turns(len(graphs), turn)
        sets = [rotation(turn, i, len(graphs), num_sets) for i in order]
        times = _replay_us([graphs[i][s] for i, s in zip(order, sets, strict=True)])
        for i, microseconds in zip(order, times, strict=True):
            samples[i].append(microseconds)
    return [Timing.of(values) for values in samples]


def time_host(contenders: Sequence[Contender], rounds: int = 50, calls: int = 20) -> list[float]:
    """Median microseconds that the host spends on one eager call, over all calls.

    A few calls at a time, so that the launch queue never fills: a full queue would make the host
    wait for the device.
    """
    samples: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds):
        for i in _turns(len(contenders), turn):
            own = contenders[i].calls
            torch.cuda.synchronize()
            for n in range(calls):
                call = own[n % len(own)]
                start = time.perf_counter()
                call()
                samples[i].append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(values) for values in samples]


def kernels_of(call: Call) -> list[str] | None:
    """Names of the kernels that a call launches, the longest running first; None where the
    profiler sees none. What a dispatcher chose is known from here, not from what was asked for."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    names = [event.key[:MAX_NAME] for event in found if event.self_device_time_total > 0]
    return names or None


def median_us(call: Call, rounds: int = 10) -> float:
    """Median device time of one callable, several calls per graph."""
    return time_rotating([Contender("call", (call,))], rounds)[0].median_us
