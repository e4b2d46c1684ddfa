"""Compiling many units into a directory, in several processes. No GPU needed.

The processes are plain children that get a unit a line (`worker`), not `multiprocessing`'s: serving
engines start from daemonic processes, which may have none of those, and from scripts that must not
be imported again.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cute_kernels.compile.errors import CompilerUnavailableError
from cute_kernels.compile.key import CompileKey, installed_toolchain
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.compile.store import Store

# A worker may be killed for memory through no fault of its unit; a unit that kills two is at fault.
_ATTEMPTS = 2
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cute_kernels.compile.worker import main; main()"
)


@dataclass(frozen=True)
class Outcome:
    """What became of a unit; path: its library, None if it failed; error: why, else ""."""

    unit: CompileUnit
    result: Literal["present", "compiled", "failed"]
    path: Path | None = None
    error: str = ""


def default_workers() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


def compile_into(
    units: Iterable[CompileUnit],
    directory: Path,
    workers: int,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    *,
    shared: bool = False,
    elsewhere: Callable[[CompileKey], Path | None] = lambda key: None,
) -> list[Outcome]:
    """Have every unit in ``directory``, compiling those that are not there; one outcome a unit.

    Processes that do the same at the same time share the work: one compile a unit. Without a
    compiler whichever toolchain's libraries are there will do.

    Args:
        units: doubles count once.
        workers: compiling processes, >= 1.
        on_outcome: called with each outcome as it comes, one call at a time.
        shared: other users are to read the directory.
        elsewhere: says where a unit is that need not be in the directory, or None.

    Raises:
        OSError: the directory cannot be made or written, or is not trusted, and it must be.
        CompilerUnavailableError: something must be compiled, and the DSL is not installed.
    """
    store = Store(directory)
    outcomes: list[Outcome] = []
    noting = threading.Lock()

    def note(outcome: Outcome) -> None:
        with noting:
            outcomes.append(outcome)
            on_outcome(outcome)

    toolchain = installed_toolchain()
    absent: list[CompileUnit] = []
    for unit in dict.fromkeys(units):
        path = store.loadable(unit.key, toolchain) or elsewhere(unit.key)
        if path is None:
            absent.append(unit)
        else:
            note(Outcome(unit, "present", path))
    if absent and toolchain is None:
        raise CompilerUnavailableError(
            f"{len(absent)} kernels are not in {directory}, nor found elsewhere, and "
            f"nvidia-cutlass-dsl is not installed: {', '.join(unit.name for unit in absent)}"
        )
    if not absent:
        if shared:
            store.share()
        return outcomes
    store.prepare(shared)
    missing: queue.SimpleQueue[tuple[CompileUnit, int]] = queue.SimpleQueue()
    for unit in absent:
        missing.put((unit, 1))
    crew = [_Worker(directory) for _ in range(min(workers, len(absent)))]
    with ThreadPoolExecutor(len(crew)) as threads:
        jobs = [threads.submit(worker.drain, missing, note) for worker in crew]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for worker in crew:
                worker.stop()
            raise
    return outcomes


class _Worker:
    """A child process that compiles what it is asked to; a new one takes a dead one's place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._child: subprocess.Popen[str] | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._child is not None:
            self._child.kill()

    def drain(
        self,
        missing: queue.SimpleQueue[tuple[CompileUnit, int]],
        note: Callable[[Outcome], None],
    ) -> None:
        """Compile units from the queue until it is empty."""
        while not self._stopped:
            try:
                unit, attempt = missing.get_nowait()
            except queue.Empty:
                break
            outcome = self._ask(unit)
            if outcome is not None:
                note(outcome)
            elif attempt < _ATTEMPTS:
                missing.put((unit, attempt + 1))
            else:
                note(Outcome(unit, "failed", error=f"{attempt} compiling processes died of it"))
        if self._child is not None:
            self._child.stdin.close()
            self._child.wait()

    def _ask(self, unit: CompileUnit) -> Outcome | None:
        """The unit's outcome, or None if the child died."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        request = {"unit": unit.to_json(), "directory": str(self._directory)}
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            reply = json.loads(self._child.stdout.readline())
        except (BrokenPipeError, ValueError):
            self._child.kill()
            self._child.wait()
            self._child = None
            return None
        path = reply["path"] and Path(reply["path"])
        return Outcome(unit, reply["result"], path, reply["error"])
