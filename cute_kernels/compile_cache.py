"""Control over when kernels are compiled: list them, have them all, then forbid any more.

A serving process calls `warmup` with its plan (`kvcache.warmup` makes one from a model's
``config.json``) and then `freeze`: from there on a kernel that was not planned is a named error
with the key and the call site, not a pause of seconds. Messages about compiling go to the logger
``cute_kernels.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from cute_kernels.compile import bundle, obtain
from cute_kernels.compile.errors import CompilerUnavailableError, UnplannedCompileError
from cute_kernels.compile.plans import (
    AttentionWorkload,
    CompileUnit,
    IndexerWorkload,
    all_units,
    units_for,
)
from cute_kernels.compile.pool import Outcome, compile_into, default_workers

__all__ = [
    "AttentionWorkload",
    "CompileUnit",
    "CompilerUnavailableError",
    "IndexerWorkload",
    "UnplannedCompileError",
    "all_units",
    "compiled",
    "freeze",
    "loaded",
    "unfreeze",
    "units_for",
    "warmup",
]


def freeze(action: Literal["raise", "warn"] = "raise") -> None:
    """From now on a compile in this process raises `UnplannedCompileError`, or warns and goes on.

    Loading from a cache or bundle stays allowed: it takes milliseconds. Children forked later are
    frozen too, spawned ones are not.

    Raises:
        ValueError: another action.
    """
    if action not in ("raise", "warn"):
        raise ValueError(f"action: got {action!r}; accepted: 'raise', 'warn'")
    obtain.STATE.frozen = action


def unfreeze() -> None:
    """Allow compiles again."""
    obtain.STATE.frozen = None


def loaded() -> tuple[CompileUnit, ...]:
    """The units that this process has, in the order in which they were first asked for."""
    return tuple(unit for unit in obtain.KERNELS.keys() if isinstance(unit, CompileUnit))


def compiled() -> tuple[CompileUnit, ...]:
    """The units that this process itself compiled, in order."""
    return tuple(obtain.STATE.compiled)


def warmup(
    units: Iterable[CompileUnit],
    *,
    workers: int | None = None,
    on_unit: Callable[[CompileUnit], None] = lambda unit: None,
) -> tuple[CompileUnit, ...]:
    """Load the units into this process, so that no call of theirs waits; those loaded.

    What no cache or bundle has is compiled, by several processes at a time into the user's cache
    where there is one to write, else here one after the other.

    Args:
        units: doubles count once.
        workers: compiling processes; None for as many as this process has processors.
        on_unit: called with each unit once it is loaded.

    Raises:
        UnplannedCompileError: after `freeze`. CompilerUnavailableError: the DSL is missing or
            broken and something must be compiled.
    """
    wanted = tuple(dict.fromkeys(units))
    _compile_missing(wanted, workers)
    for unit in wanted:
        obtain.launcher(unit)
        on_unit(unit)
    return wanted


def _compile_missing(units: tuple[CompileUnit, ...], workers: int | None) -> None:
    """Compile in parallel what is worth several processes; the rest is `launcher`'s, which names
    what cannot be compiled and where it was looked for."""
    # First: checking what is there reads all of it, and a server without a compiler loads it next.
    if obtain.STATE.frozen is not None or obtain.installed_toolchain() is None:
        return
    missing = [unit for unit in units if not bundle.has(unit.key)]
    store = obtain.writable_store() if len(missing) > 1 else None
    if store is None:
        return
    for unit in missing:
        obtain.LOGGER.info("compiling %s, in a process of its own", unit.name)
    compile_into(missing, store.directory, workers or default_workers(), _log)


def _log(outcome: Outcome) -> None:
    obtain.LOGGER.info("%s: %s %s", outcome.unit.name, outcome.result, outcome.error)
