"""How a call gets its kernel: from this process, from disk, or by compiling it once a host."""

from __future__ import annotations

import logging
import os
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from cute_kernels.compile import bundle
from cute_kernels.compile.cache import KERNELS, ForkSafeLock
from cute_kernels.compile.errors import (
    CompilerUnavailableError,
    UnplannedCompileError,
    warn_once,
)
from cute_kernels.compile.key import Toolchain, installed_toolchain
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.compile.store import Store
from cute_kernels.env import cache_directory

LOGGER = logging.getLogger("cute_kernels.compile")
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class _State:
    """frozen: what a compile does since `freeze`. compiled: units that this process compiled."""

    frozen: Literal["raise", "warn"] | None = None
    compiled: list[CompileUnit] = []


STATE = _State()
# The DSL's compiler is not known to be safe for concurrent use.
COMPILER = ForkSafeLock()


def launcher(unit: CompileUnit) -> Callable[..., Any]:
    """The launch function of a unit, the same object each time; callers may keep it.

    It comes from the first of: this process, the user's cache, the bundles, the compiler.

    Raises:
        UnplannedCompileError: it would have to be compiled, after `freeze`.
        CompilerUnavailableError: it would have to be compiled, and the DSL is missing or broken.
    """
    return KERNELS.get(unit, lambda: _obtain(unit))


def _obtain(unit: CompileUnit) -> Callable[..., Any]:
    found = bundle.find(unit.key)
    if found is not None:
        return found
    _check_not_frozen(unit)
    toolchain = installed_toolchain()
    if toolchain is None:
        raise CompilerUnavailableError(
            f"{unit.name} is unavailable: it is in none of {_searched()} and "
            f"nvidia-cutlass-dsl is not installed{_of_other_sources(unit)}"
        )
    store = writable_store()
    return _compile(unit) if store is None else _compile_once(unit, store, toolchain)


def _compile_once(unit: CompileUnit, store: Store, toolchain: Toolchain) -> Callable[..., Any]:
    """Compile into the user's cache, or load what another process has put there meanwhile."""
    key = unit.key
    path = store.path(key, toolchain)
    with store.lock(key, toolchain) as locked:
        if store.has(key, toolchain):
            found = bundle.load_or_warn(path, key)
            if found is not None:
                return found
        compiled = _compile(unit)
        try:
            store.write(key, toolchain, compiled, locked)
        except (OSError, subprocess.CalledProcessError) as error:
            _warn_in_memory(store.directory, error)
            return compiled
    # Where renames are seen late (NFS) the next process may compile again, this one need not.
    return (os.path.exists(path) and bundle.load_or_warn(path, key)) or compiled


def _compile(unit: CompileUnit) -> Callable[..., Any]:
    with COMPILER:
        start = time.monotonic()
        LOGGER.info("compiling %s", unit.name)
        compiled = unit.compile()
        STATE.compiled.append(unit)
        LOGGER.info("compiled %s in %.1f s", unit.name, time.monotonic() - start)
    return compiled


def writable_store() -> Store | None:
    """The user's cache, or None where it cannot be written, after one warning."""
    directory = cache_directory()
    if directory is None:
        warn_once("no home", "no home directory: kernels compiled here are kept in memory only")
        return None
    store = Store(directory)
    try:
        store.prepare()
    except OSError as error:
        _warn_in_memory(directory, error)
        return None
    return store


def _warn_in_memory(directory: Path, error: Exception) -> None:
    detail = str(error).strip()
    if isinstance(error, subprocess.CalledProcessError):
        detail = f"{detail}: {error.stderr.strip()}"
    warn_once(
        ("in memory", directory),
        f"{directory} cannot keep compiled kernels, they stay in memory: {detail}",
    )


def _check_not_frozen(unit: CompileUnit) -> None:
    if STATE.frozen is None:
        return
    key = unit.key
    message = (
        f"unplanned compile of {unit.name} after freeze(): parameters {key.parameters}, key "
        f"{key.digest[:16]}, asked for at {_call_site()}; not found in {_searched()}"
        f"{_of_other_sources(unit)}"
    )
    if STATE.frozen == "raise":
        raise UnplannedCompileError(message)
    warn_once(("unplanned", unit), message)


def _searched() -> str:
    return ", ".join(map(str, bundle.layers())) or "any cache or bundle (none is configured)"


def _of_other_sources(unit: CompileUnit) -> str:
    """An addition to a message, "" where no bundle has it from other sources."""
    found = bundle.of_other_sources(unit.key)
    return f"; {found[0]} is {bundle.OTHER_SOURCES}" if found else ""


def _call_site() -> str:
    """The caller's line: the last one outside this package."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_PACKAGE):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown place"
