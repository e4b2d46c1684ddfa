"""Compiled kernels of this process: one compile per key, whatever the number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any


class KernelCache:
    """Maps a compile key to a compiled kernel.

    The key holds everything that changes the code (variant and target architecture) and nothing
    that does not (pointers, lengths, log levels). The DSL's compiler is not known to be safe for
    concurrent use, so one lock serves all keys.
    """

    def __init__(self) -> None:
        self._kernels: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self.compiles = 0

    def get(self, key: Hashable, compile_kernel: Callable[[], Any]) -> Any:
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = compile_kernel()
                    self._kernels[key] = kernel
                    self.compiles += 1
        return kernel


KERNELS = KernelCache()
