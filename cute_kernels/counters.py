"""Device memory that a launch shares with no other: counters, zero between launches, and workspace.

A kernel whose CTAs wait for each other counts arrivals in global memory and clears the counters
itself; one whose CTAs must not store the same row claims rows there. Such words must be zero before
the first launch, and two launches that can run at the same time must not share them. So each
(device, stream) has its own slice for eager calls, and each call recorded in a CUDA graph gets a
slice of its own that is never handed out again: graphs captured on one stream may be replayed on
several.

Workspace holds nothing between launches, so a stream's launches use one piece of memory in turn. A
graph has its own, from its own pool.
"""

from __future__ import annotations

import threading

import torch

# Slices of 2 KiB (528 CTAs) for 2000 recorded calls fit one arena.
_ARENA_COUNTERS = 1 << 20
# Slices begin at lines of 128 bytes: the indexer clears its table 16 bytes at a time.
_LINE = 32
# An eager call leaves room for so many recorded ones of its size, or for this many counters.
_RECORDED_CALLS, _MOST_ROOM = 256, 1 << 22
# cudaStreamPerThread: one handle for as many streams as there are threads.
_PER_THREAD_STREAM = 2


def _thread_of(stream: int) -> int:
    """What tells streams of one handle apart."""
    return threading.get_ident() if stream == _PER_THREAD_STREAM else 0


def _lines(count: int) -> int:
    """The counters of the lines that so many take."""
    return -(-count // _LINE) * _LINE


class CounterArena:
    """Hands out zeroed int32 slices of one device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._lock = threading.Lock()
        # All arenas are kept: recorded graphs know only addresses.
        self._arenas: list[torch.Tensor] = []
        # Of the last one, what has not been handed out.
        self._left = 0
        self._by_stream: dict[tuple[int, int, int], torch.Tensor] = {}

    def slice_for(self, stream: int, count: int) -> torch.Tensor:
        """``count`` zeroed counters for a launch on the raw stream handle ``stream``; they begin a
        line."""
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                if count <= self._left:
                    return self._cut(count)
            # An allocation made now belongs to the graph, which zeroes it in each replay.
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        key = (stream, _thread_of(stream), count)
        counters = self._by_stream.get(key)
        whole = _lines(count)
        room = min(_RECORDED_CALLS * whole, _MOST_ROOM)
        if counters is None or self._left < room:
            with self._lock:
                if self._left < room + whole:
                    self._begin(room + whole)
                counters = self._by_stream.get(key)
                if counters is None:
                    counters = self._by_stream[key] = self._cut(count)
        return counters

    def _begin(self, count: int) -> None:
        """A new arena for so many counters, or more."""
        size = max(_ARENA_COUNTERS, count)
        self._arenas.append(torch.zeros(size, dtype=torch.int32, device=self._device))
        self._left = size
        # Other streams may use their slices at once.
        torch.cuda.synchronize(self._device)

    def _cut(self, count: int) -> torch.Tensor:
        arena = self._arenas[-1]
        first = arena.shape[0] - self._left
        self._left -= _lines(count)
        return arena[first : first + count]


_ARENAS: dict[int, CounterArena] = {}


def counters_for(device: torch.device, stream: int, count: int) -> torch.Tensor:
    """Zeroed int32 counters for one launch; see ``CounterArena``."""
    arena = _ARENAS.get(device.index)
    if arena is None:
        arena = _ARENAS.setdefault(device.index, CounterArena(device))
    return arena.slice_for(stream, count)


_WORKSPACES: dict[tuple[int, int, int], torch.Tensor] = {}


def workspace_for(device: torch.device, stream: int, elements: int) -> torch.Tensor:
    """At least ``elements`` float32, of any contents, for one launch on the raw stream handle."""
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(elements, dtype=torch.float32, device=device)
    key = (device.index, stream, _thread_of(stream))
    workspace = _WORKSPACES.get(key)
    if workspace is None or workspace.shape[0] < elements:
        # The old one, if any, goes back to the allocator, which knows that this stream used it.
        workspace = torch.empty(elements, dtype=torch.float32, device=device)
        _WORKSPACES[key] = workspace
    return workspace
