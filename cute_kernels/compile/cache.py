"""Kernels of this process: one load or compile a key, whatever the number of threads and forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any


class ForkSafeLock:
    """A lock that is free in forked children: one that another thread held would stay held there.

    What it guards must be whole at any time, or unused by children.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


class KernelCache:
    """Maps a hashable key to a kernel.

    The key holds everything that changes the code (variant and target architecture) and nothing
    that does not (pointers, lengths, log levels). Devices share kernels: a library loads its code
    to every device of the process.
    """

    def __init__(self) -> None:
        self._kernels: dict[Hashable, Any] = {}
        self._lock = ForkSafeLock()
        self._key_locks: dict[Hashable, ForkSafeLock] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The kernel of ``key``; ``make`` is called if this process has none yet."""
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                key_lock = self._key_locks.setdefault(key, ForkSafeLock())
            with key_lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = make()
                    self._kernels[key] = kernel
        return kernel

    def keys(self) -> tuple[Hashable, ...]:
        return tuple(self._kernels)


KERNELS = KernelCache()
