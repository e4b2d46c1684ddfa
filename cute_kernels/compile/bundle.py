"""Where kernels are looked for before they are compiled: a stack of directories.

On top the user's cache (CUTE_KERNELS_CACHE_DIR), below it the read-only bundles that
CUTE_KERNELS_BUNDLE lists, such as one baked into an image; ``kvcache warmup`` and ``python -m
cute_kernels.compile.build`` write those on machines without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cute_kernels.compile import library as libraries
from cute_kernels.compile.errors import warn_once
from cute_kernels.compile.key import CompileKey, installed_toolchain
from cute_kernels.compile.store import Store
from cute_kernels.env import bundle_directories, cache_directory

Found = TypeVar("Found")

OTHER_SOURCES = (
    "built from other sources of cute_kernels than those installed, so it is not used; build the "
    "bundle anew with this version"
)


def check_name(directory: Path) -> None:
    """Raises ValueError for a directory that CUTE_KERNELS_BUNDLE cannot name."""
    if os.pathsep in str(directory):
        raise ValueError(
            f"{str(directory)!r} has a {os.pathsep!r}, which separates directories in "
            "CUTE_KERNELS_BUNDLE"
        )


def layers() -> list[Path]:
    """The directories, top first, whether they exist or not."""
    cache = cache_directory()
    return [*([] if cache is None else [cache]), *bundle_directories()]


def find(key: CompileKey) -> Callable[..., Any] | None:
    """The launch function of ``key`` from the first directory that has it, or None.

    The user's cache serves this environment's compiler only: a new release of the DSL compiles
    anew. A bundle serves whichever compiler made it. A library that is there and cannot be trusted
    or loaded is passed over, with one warning; so is a bundle that cannot be read, and one warning
    says that a bundle has the kernel from other sources only.
    """
    return _first(key, load_or_warn)


def has(key: CompileKey) -> bool:
    """Whether `find` would find it, short of the loader's refusal; nothing is loaded."""
    return locate(key) is not None


def locate(key: CompileKey) -> Path | None:
    """The library that `find` would load first, or None after the warnings that `find` gives."""
    return _first(key, lambda path, key: path if _is_sound_or_warn(path, key) else None)


def _first(key: CompileKey, take: Callable[[Path, CompileKey], Found | None]) -> Found | None:
    """What `take` makes of the first candidate that it makes something of."""
    for directory in bundle_directories():
        problem = Store(directory).problem()
        if problem is not None:
            warn_once(("bundle", directory), f"CUTE_KERNELS_BUNDLE: {problem}")
    for path in _candidates(key):
        found = take(path, key)
        if found is not None:
            return found
    for path in of_other_sources(key):
        warn_once(("other sources", path.parent), f"{path}: {OTHER_SOURCES}")
    return None


def of_other_sources(key: CompileKey) -> list[Path]:
    """What bundles have of this kernel, built from other sources than these."""
    return [path for each in bundle_directories() for path in Store(each).of_other_sources(key)]


def _candidates(key: CompileKey) -> Iterator[Path]:
    cache, toolchain = cache_directory(), installed_toolchain()
    for directory in layers():
        wanted = toolchain if directory == cache else None
        yield from Store(directory).candidates(key, wanted)


def load_or_warn(path: Path, key: CompileKey) -> Callable[..., Any] | None:
    """The launch function of a library, or None after one warning that says what is wrong."""
    if not _is_sound_or_warn(path, key):
        return None
    try:
        return libraries.load(path)
    except (RuntimeError, OSError, AttributeError, ValueError) as error:
        _warn_not_loaded(path, str(error))
        return None


def _is_sound_or_warn(path: Path, key: CompileKey) -> bool:
    problem = libraries.problem_with(path, key)
    if problem is not None:
        _warn_not_loaded(path, problem)
    return problem is None


def _warn_not_loaded(path: Path, problem: str) -> None:
    warn_once(path, f"{path}: not loaded: {problem}")
