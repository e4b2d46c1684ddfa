"""A directory of compiled kernels that several processes may read, write and crash in.

Layout: `<name>-<target>-<digest>-<toolchain>.so` and `.json` (see `library`); `.locks/`, one lock
file a key, which the kernel of the operating system unlocks when its holder dies; scratch
directories `.building-<host>-...` whose files are renamed into place when they are whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.compile import library as libraries
from cute_kernels.compile.errors import warn_once
from cute_kernels.compile.key import CompileKey, Toolchain, source_fingerprint

LOGGER = logging.getLogger("cute_kernels.compile")
# A compile takes seconds. A holder that was stopped, not killed, must not stop the others too.
LOCK_TIMEOUT_S = 120.0
# A scratch directory this old belongs to nobody, on whichever host.
_LEFTOVER_S = 3600.0


def _is_ours(path: Path) -> bool:
    """Whether a file is named as `Store.path` names kernels."""
    return re.search(r"-sm_\w+-[0-9a-f]{16}-dsl[\w.]+_ffi[\w.]+$", path.stem) is not None


def _is_lone(path: Path) -> bool:
    """Whether it is a kernel's manifest without the library."""
    library = path.with_suffix(".so")
    return path.suffix == ".json" and _is_ours(path) and not os.path.lexists(library)


@dataclass(frozen=True)
class Entry:
    """A kernel in a store. problem: why it would not be loaded, or None. manifest: None then.

    path: its library, or its manifest where there is no library.
    distrusted: the problem is who owns it or can write it; its contents may be whole.
    """

    path: Path
    manifest: dict[str, Any] | None
    problem: str | None
    distrusted: bool
    size: int
    modified: float

    @property
    def of_other_sources(self) -> bool:
        """Whether it is whole, and no call of this version asks for it."""
        return self.manifest is not None and self.manifest["sources"] != source_fingerprint()


class Store:
    """The kernels in one directory; nothing is read or written before a method is called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def problem(self) -> str | None:
        """Why nothing in it can be seen, or None."""
        try:
            self._names()
        except (FileNotFoundError, NotADirectoryError):
            return f"{self.directory} is no directory"
        except OSError as error:
            return f"{self.directory} cannot be read: {error.strerror or error}"
        return None

    def _names(self) -> list[str]:
        """What is in it, sorted. Path.glob raises or not, as Python's version is.

        Raises:
            OSError: it is not there, or this user may not see it.
        """
        names = sorted(os.listdir(self.directory))
        os.stat(f"{self.directory}/.")  # to list is one right, to look at what is listed another
        return names

    def prepare(self, shared: bool = False) -> None:
        """Make the directory, for its owner alone to write, and see that it can be written.

        shared: others are to read it, so they may also pass the parents that are made for it.

        Raises:
            OSError: it cannot be made or written. PermissionError: others could have put code here.
        """
        if not os.path.isdir(self.directory):
            made = [each for each in self.directory.parents if not os.path.isdir(each)]
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o755, exist_ok=True)
            for parent in made if shared else ():
                Store(parent).share()
        if shared:
            self.share()
        reason = libraries.distrusted(self.directory)
        if reason is not None:
            raise PermissionError(reason)
        locks = self.directory / ".locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        if not (os.access(self.directory, os.W_OK) and os.access(locks, os.W_OK)):
            raise PermissionError(f"{self.directory} cannot be written")

    def share(self) -> None:
        """Let other users read it, whatever the umask was, where it is this user's.

        Files in it are readable already.
        """
        status = self.directory.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o055 != 0o055:
            self.directory.chmod(stat.S_IMODE(status.st_mode) | 0o055)

    def path(self, key: CompileKey, toolchain: Toolchain) -> Path:
        return self.directory / f"{key.file_stem}-{toolchain.label}.so"

    def candidates(self, key: CompileKey, toolchain: Toolchain | None) -> list[Path]:
        """Libraries that claim to be ``key``'s: by this toolchain, or by any if it is None.

        There are none in a directory that cannot be read: `problem` says why.
        """
        if toolchain is not None:
            path = self.path(key, toolchain)
            # Not Path.exists, which raises where a parent may not be searched.
            return [path] if os.path.exists(path) else []
        return self._libraries_named(f"{key.file_stem}-")

    def of_other_sources(self, key: CompileKey) -> list[Path]:
        """Libraries of the same variant and target, built from other sources than ``key``'s."""
        found = []
        for path in self._libraries_named(f"{key.name}-{key.target}-"):
            with suppress(OSError, ValueError):
                if libraries.read_manifest(path)["sources"] != key.sources:
                    found.append(path)
        return found

    def _libraries_named(self, prefix: str) -> list[Path]:
        try:
            names = self._names()
        except OSError:
            return []
        return [
            self.directory / name
            for name in names
            if name.startswith(prefix) and name.endswith(".so")
        ]

    def loadable(self, key: CompileKey, toolchain: Toolchain | None) -> Path | None:
        """A whole library of the key by this toolchain, or by any if it is None; else None."""
        candidates = self.candidates(key, toolchain)
        return next((path for path in candidates if not libraries.problem_with(path, key)), None)

    def has(self, key: CompileKey, toolchain: Toolchain) -> bool:
        """Whether a whole, loadable library of this key and toolchain is here."""
        return self.loadable(key, toolchain) is not None

    @contextmanager
    def lock(self, key: CompileKey, toolchain: Toolchain) -> Iterator[bool]:
        """Hold the key's lock among this host's processes; yields whether it is held.

        It is not where the file system has no locks, or when its holder did not release it within
        `LOCK_TIMEOUT_S`: the caller then compiles beside somebody else, which costs time only.
        """
        from filelock import FileLock, Timeout

        path = self.directory / ".locks" / f"{self.path(key, toolchain).stem}.lock"
        lock = FileLock(str(path))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            LOGGER.info("waiting for another process that compiles %s", key.name)
            try:
                lock.acquire(timeout=LOCK_TIMEOUT_S)
            except Timeout:
                warn_once(path, f"{path}: held for {LOCK_TIMEOUT_S:.0f} s; compiling without it")
        except (NotImplementedError, OSError) as error:
            warn_once(self.directory, f"{self.directory}: no file locks ({error}); not locking")
        held = lock.is_locked
        try:
            yield held
        finally:
            if held:
                lock.release()

    def write(self, key: CompileKey, toolchain: Toolchain, compiled: Any, locked: bool) -> Path:
        """Export a compiled kernel (cute.compile with TVM-FFI) into the store; returns its path.

        Readers see whole files or none: both are renamed into place, the manifest last. locked:
        the caller holds the key's lock, so that scratch directories of this host and key are a dead
        process's.

        Raises:
            OSError, subprocess.CalledProcessError: see `library.export`; nothing is left behind.
        """
        target = self.path(key, toolchain)
        prefix = f".building-{socket.gethostname()}-{target.stem}-"
        for dead in self.directory.glob(f"{prefix}*") if locked else ():
            shutil.rmtree(dead, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=self.directory, ignore_cleanup_errors=True
        ) as scratch:
            built = Path(scratch) / target.name
            libraries.export(compiled, built)
            described = built.with_suffix(".json")
            manifest = libraries.manifest_of(key, toolchain, built)
            described.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            # A umask that lets the group write would make files that are then distrusted.
            built.chmod(0o755)
            described.chmod(0o644)
            os.replace(built, target)
            os.replace(described, target.with_suffix(".json"))
        return target

    def entries(self) -> list[Entry]:
        """Everything that is named like a kernel here, by name, each read and checked.

        Other libraries are not ours to look at, still less to remove.

        Raises:
            OSError: the directory is not there, or cannot be read.
        """
        found = []
        for path in (self.directory / name for name in self._names()):
            if _is_lone(path):
                status = path.lstat()
                problem = "its library is missing"
                found.append(Entry(path, None, problem, False, status.st_size, status.st_mtime))
            if path.suffix != ".so" or not _is_ours(path):
                continue
            problem = libraries.problem_with(path)
            try:
                distrusted = libraries.distrusted_library(path) is not None
            except OSError:  # a link to nowhere
                distrusted = False
            status = path.lstat()
            manifest = libraries.read_manifest(path) if problem is None else None
            found.append(
                Entry(path, manifest, problem, distrusted, status.st_size, status.st_mtime)
            )
        return found

    def leftovers(self) -> list[Path]:
        """What crashes left: scratch directories that nobody uses any more.

        Raises:
            OSError: as `entries`.
        """
        now, paths = time.time(), [self.directory / name for name in self._names()]
        return [
            path
            for path in paths
            if path.name.startswith(".building-") and now - path.lstat().st_mtime > _LEFTOVER_S
        ]

    def remove(self, path: Path) -> None:
        """Delete an entry or a leftover; a process that has the library loaded keeps it.

        Raises:
            OSError: it cannot be deleted.
        """
        if path.suffix not in (".json", ".so"):
            shutil.rmtree(path)
            return
        # The manifest first: without it a library is never loaded.
        for part in (path.with_suffix(".json"), path.with_suffix(".so")):
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
