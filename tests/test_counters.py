"""Counters that kernels find at zero: who shares a slice and who must not."""

from __future__ import annotations

import threading

import pytest
import torch

from cute_kernels import counters
from cute_kernels.counters import CounterArena


class Cuda:
    """What the arena asks torch.cuda, answered without a GPU."""

    capturing = False
    synchronized = 0


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    state = Cuda()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)

    def synchronize(device):
        state.synchronized += 1

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return state


@pytest.fixture
def arena(cuda) -> CounterArena:
    return CounterArena(torch.device("cpu"))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, last = a.data_ptr(), a.data_ptr() + 4 * a.numel()
    return b.data_ptr() < last and first < b.data_ptr() + 4 * b.numel()


def test_a_stream_keeps_its_slice(arena):
    mine = arena.slice_for(7, 132)
    assert mine.dtype is torch.int32 and mine.shape == (132,) and not mine.any()
    assert arena.slice_for(7, 132).data_ptr() == mine.data_ptr()


def test_streams_and_sizes_do_not_share(arena):
    slices = [arena.slice_for(*which) for which in ((7, 132), (8, 132), (7, 264))]
    assert not any(overlap(a, b) for i, a in enumerate(slices) for b in slices[:i])


def test_slices_begin_lines_whatever_others_have_taken(arena, cuda):
    """The indexer's claims need 16 bytes; 342 is what three CTAs on each of 114 SMs count in."""
    taken = [arena.slice_for(stream, count) for stream, count in ((7, 342), (7, 5), (8, 33))]
    cuda.capturing = True
    taken += [arena.slice_for(7, count) for count in (1, 342, 512 + 2 * 1024)]
    begin = arena._arenas[0].data_ptr()
    assert all((x.data_ptr() - begin) % 128 == 0 for x in taken)
    assert [x.numel() for x in taken] == [342, 5, 33, 1, 342, 2560]
    assert not any(overlap(a, b) for i, a in enumerate(taken) for b in taken[:i])


def test_each_recorded_call_has_its_own(arena, cuda):
    eager = arena.slice_for(7, 132)
    cuda.capturing = True
    recorded = [arena.slice_for(7, 132) for _ in range(3)]
    cuda.capturing = False
    every = [eager, *recorded, arena.slice_for(9, 132)]
    assert not any(overlap(a, b) for i, a in enumerate(every) for b in every[:i])


def test_a_full_arena_is_kept_for_the_graphs_that_know_it(arena, cuda, monkeypatch):
    monkeypatch.setattr(counters, "_ARENA_COUNTERS", 200)
    monkeypatch.setattr(counters, "_RECORDED_CALLS", 0)
    first = arena.slice_for(1, 132)
    second = arena.slice_for(2, 132)
    assert len(arena._arenas) == 2 and not overlap(first, second)
    assert cuda.synchronized == 2, "a new arena is used before it has been zeroed"


def test_a_full_arena_under_capture_leaves_it_to_the_graph(arena, cuda, monkeypatch):
    monkeypatch.setattr(counters, "_ARENA_COUNTERS", 200)
    monkeypatch.setattr(counters, "_RECORDED_CALLS", 0)
    arena.slice_for(1, 132)
    cuda.capturing = True
    recorded = arena.slice_for(1, 132)
    assert not recorded.any() and not overlap(recorded, arena._arenas[0])
    assert len(arena._arenas) == 1 and cuda.synchronized == 1


def test_an_eager_call_leaves_room_for_recorded_ones(arena, cuda, monkeypatch):
    """Also one that has its slice already: each batch size that is recorded is called before."""
    monkeypatch.setattr(counters, "_ARENA_COUNTERS", 200)
    monkeypatch.setattr(counters, "_RECORDED_CALLS", 3)
    recorded = [arena.slice_for(1, 1000)]
    for _ in range(2):
        cuda.capturing = True
        recorded += [arena.slice_for(1, 1000) for _ in range(3)]
        cuda.capturing = False
        assert arena.slice_for(1, 1000).data_ptr() == recorded[0].data_ptr()
    assert len(arena._arenas) == 3 and all(x.shape == (1000,) for x in recorded)
    assert all(any(overlap(x, y) for y in arena._arenas) for x in recorded)
    assert not any(overlap(a, b) for i, a in enumerate(recorded) for b in recorded[:i])


def test_threads_on_the_per_thread_stream_do_not_share(arena):
    slices = []
    threads = [
        threading.Thread(target=lambda: slices.append(arena.slice_for(2, 64))) for _ in range(2)
    ]
    # both alive at once, or the second may get the first one's identifier
    barrier = threading.Barrier(2)
    original = arena.slice_for

    def together(*which):
        barrier.wait()
        found = original(*which)
        barrier.wait()
        return found

    arena.slice_for = together
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlap(*slices)


def test_workspace_is_a_streams_own_and_grows(cuda, monkeypatch):
    monkeypatch.setattr(counters, "_WORKSPACES", {})
    device = torch.device("cpu")
    first = counters.workspace_for(device, 7, 100)
    assert first.dtype is torch.float32 and first.shape == (100,)
    assert counters.workspace_for(device, 7, 50) is first
    assert counters.workspace_for(device, 8, 100) is not first
    assert counters.workspace_for(device, 7, 200).shape == (200,)
    assert len(counters._WORKSPACES) == 2


def test_a_recorded_call_leaves_its_workspace_to_the_graph(cuda, monkeypatch):
    monkeypatch.setattr(counters, "_WORKSPACES", {})
    eager = counters.workspace_for(torch.device("cpu"), 7, 100)
    cuda.capturing = True
    recorded = [counters.workspace_for(torch.device("cpu"), 7, 100) for _ in range(2)]
    assert recorded[0] is not recorded[1] and all(x is not eager for x in recorded)
    assert [id(x) for x in counters._WORKSPACES.values()] == [id(eager)]
