"""What is installed, which of it is broken, and how to mend it: the findings of `kvcache doctor`.

Nothing here initialises CUDA or imports torch or the DSL into this process.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cute_kernels.compile.bundle import layers
from cute_kernels.compile.store import Entry, Store
from cute_kernels.env import bundle_directories, c_compiler, cache_directory

# The releases that are tested; the same ranges as in pyproject.toml (a test compares them).
TESTED = {
    "apache-tvm-ffi": ">=0.1.11,<0.2",
    "nvidia-cutlass-dsl": ">=4.8.0,<4.9",
    "torch": ">=2.11",
}
# Libraries are linked to the CUDA 13 runtime, which wants this driver or a newer one.
MIN_CUDA_DRIVER = 13000
MIN_DRIVER_NAME = "580"
_IMPORT_TIMEOUT_S = 120


@dataclass(frozen=True)
class Finding:
    """status: "ok", "warning" (something cannot be done here, which may be meant) or "broken".
    mend: what to do about it, else "".
    """

    check: str
    status: Literal["ok", "warning", "broken"]
    found: str
    mend: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which a reader wants them."""
    return [finding for check in CHECKS for finding in check()]


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name, tested in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "nvidia-cutlass-dsl":
                yield Finding(
                    name,
                    "warning",
                    "not installed: kernels come from bundles only, nothing can be compiled",
                    f"pip install 'nvidia-cutlass-dsl[cu13]{tested}'",
                )
            else:
                mend = f"pip install '{name}{tested}'"
                yield Finding(name, "broken", "not installed", mend)
            continue
        if Version(version) in SpecifierSet(tested, prereleases=True):
            yield Finding(name, "ok", version)
        else:
            yield Finding(
                name,
                "broken",
                f"{version}, outside the tested range {tested}",
                f"pip install '{name}{tested}'",
            )


def _torch_build() -> Iterator[Finding]:
    """Libraries take the runtime that torch loads, which is a wheel beside torch's own.

    Wheels of the project's own index name their build in the version, those of PyPI do not.
    """
    names = {(distribution.name or "").lower() for distribution in metadata.distributions()}
    try:
        build = Version(metadata.version("torch")).local or ""
    except metadata.PackageNotFoundError:
        return
    cuda = re.match(r"cu(\d+)(\d)", build)
    problem = ""
    if cuda is not None and int(cuda[1]) < 13:
        problem = f"torch is a build for CUDA {cuda[1]}.{cuda[2]}"
    elif build.startswith(("rocm", "xpu")):
        problem = f"torch is a build for {build}"
    elif build == "cpu" and cuda_driver() is not None:
        problem = "torch is a build without CUDA, and this machine has a driver"
    elif (
        cuda is None and "nvidia-cuda-runtime-cu12" in names and "nvidia-cuda-runtime" not in names
    ):
        problem = "torch is a build for CUDA 12"
    if problem:
        found = f"{problem}; the kernels need CUDA 13's runtime, which torch brings"
        yield Finding("torch build", "broken", found, "install a build of torch for CUDA 13")


def _dsl_files() -> Iterator[Finding]:
    """Wheels of one release for CUDA 12 and 13 can hold different files of the same path."""
    owners: dict[Path, dict[str, metadata.PackagePath]] = {}
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = (distribution.name or "").lower().replace("_", "-")
        if not name.startswith("nvidia-cutlass-dsl"):
            continue
        versions[name] = distribution.version
        for file in distribution.files or ():
            if file.hash is not None:
                owners.setdefault(Path(str(file.locate())), {})[name] = file
    if not versions:
        return
    check = "nvidia-cutlass-dsl files"
    reinstall = (
        f"pip uninstall {' '.join(sorted(versions))}; "
        f"pip install --no-cache-dir 'nvidia-cutlass-dsl[cu13]{TESTED['nvidia-cutlass-dsl']}'"
    )
    problems = []
    if len(set(versions.values())) > 1:
        parts = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        problems.append(f"parts of several releases: {parts}")
    for path, claims in sorted(owners.items()):
        problem = _file_problem(path, claims)
        if problem is not None:
            problems.append(f"{path}: {problem}")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        yield Finding(check, "broken", "; ".join(problems[:3]) + more, reinstall)
    elif "nvidia-cutlass-dsl-libs-cu13" not in versions:
        yield Finding(check, "broken", "the libraries for CUDA 13 are missing", reinstall)
    else:
        yield Finding(check, "ok", f"{len(owners)} files as their wheels have them")


def _file_problem(path: Path, claims: dict[str, metadata.PackagePath]) -> str | None:
    try:
        content = path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    digests = {}
    for name, file in claims.items():
        digest = hashlib.new(file.hash.mode, content).digest()
        digests[name] = base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value
    if all(digests.values()):
        return None
    if len(claims) == 1:
        return "changed since it was installed"
    written = ", ".join(name for name, same in digests.items() if same) or "none of them"
    return f"{' and '.join(sorted(claims))} differ in it, on disk is that of {written}"


def _dsl_import() -> Iterator[Finding]:
    """In a process of its own: a broken one may end it."""
    try:
        metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return
    check = "nvidia-cutlass-dsl import"
    command = [sys.executable, "-c", "import cutlass.cute, cutlass.cute.runtime"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding(check, "broken", f"not done after {_IMPORT_TIMEOUT_S} s")
        return
    if done.returncode == 0:
        yield Finding(check, "ok", "imports")
        return
    lines = done.stderr.strip().splitlines()
    yield Finding(
        check,
        "broken",
        f"unavailable: {lines[-1] if lines else f'exit status {done.returncode}'}",
        f"pip install 'nvidia-cutlass-dsl[cu13]{TESTED['nvidia-cutlass-dsl']}'",
    )


def _compiler() -> Iterator[Finding]:
    command = c_compiler()
    path = shutil.which(command)
    if path is None:
        yield Finding(
            "C compiler",
            "warning",
            f"{command!r} is not there: bundles cannot be built here, and what is compiled here "
            "is not kept",
            "install gcc or clang, or let CC name one",
        )
    else:
        yield Finding("C compiler", "ok", path)


def cuda_driver() -> int | None:
    """The CUDA release that the driver serves, like 13000; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    # Needs no cuInit, so the process may still fork.
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _driver() -> Iterator[Finding]:
    version = cuda_driver()
    if version is None:
        yield Finding("driver", "warning", "none: kernels can be compiled here, not run")
        return
    release = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if version < MIN_CUDA_DRIVER:
        yield Finding(
            "driver",
            "broken",
            f"too old: it serves {release}, the kernels need CUDA 13.0",
            f"install NVIDIA driver {MIN_DRIVER_NAME} or later on the host",
        )
    else:
        yield Finding("driver", "ok", f"serves {release}")
    yield from _devices()


def _devices() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        yield Finding("devices", "broken", "nvidia-smi does not answer")
        return
    if done.returncode:
        yield Finding("devices", "broken", done.stdout.strip() or done.stderr.strip())
        return
    for line in dict.fromkeys(done.stdout.strip().splitlines()):
        name, capability, driver = (part.strip() for part in line.split(",")[:3])
        yield Finding("devices", "ok", f"{name}, compute capability {capability}, driver {driver}")


def _directories() -> Iterator[Finding]:
    cache = cache_directory()
    if cache is None:
        yield Finding(
            "cache",
            "warning",
            "no home directory: what is compiled here is not kept",
            "let CUTE_KERNELS_CACHE_DIR name a directory of this user",
        )
    for directory in layers():
        yield _directory("cache" if directory == cache else "bundle", directory)
    if not bundle_directories():
        yield Finding("bundle", "ok", "none (CUTE_KERNELS_BUNDLE is not set)")


def _is_kernel_view(path: Path) -> bool:
    """Whether nothing can be made in it, although root is said to have access: /proc and /sys."""
    return path.resolve().parts[:2] in (("/", "proc"), ("/", "sys"))


def _directory(check: str, directory: Path) -> Finding:
    if check == "cache" and not os.path.isdir(directory):
        return _cache_to_be_made(directory)
    store = Store(directory)
    if check == "cache":
        try:
            store.prepare()
        except OSError as error:
            mend = "chown or chmod it, or let CUTE_KERNELS_CACHE_DIR name another"
            return Finding(check, "warning", f"cannot keep kernels: {error}", mend)
    problem = store.problem()
    if problem is not None:
        mend = "let this user look into it and what it is in (chmod a+rx)"
        if not problem.endswith(("denied", "permitted")):
            mend = "correct CUTE_KERNELS_BUNDLE"
        return Finding(check, "broken", problem, mend)
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        found = f"{directory} is on a noexec mount: no kernel can be loaded from there"
        return Finding(check, "broken", found, "mount it without noexec, or name another directory")
    return _kernels(check, directory, store.entries())


def _cache_to_be_made(directory: Path) -> Finding:
    parent = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    writable = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
    if writable and not _is_kernel_view(parent):
        return Finding("cache", "ok", f"{directory}, not there yet")
    found = f"{directory} cannot be made: {parent} is no directory that this user can write"
    return Finding("cache", "warning", found, "let CUTE_KERNELS_CACHE_DIR name another")


def _kernels(check: str, directory: Path, entries: list[Entry]) -> Finding:
    bad = [entry for entry in entries if entry.problem is not None]
    if bad:
        found = f"{directory}: {len(bad)} of {len(entries)} kernels are refused: {bad[0].problem}"
        mend = f"kvcache cache prune {directory}"
        if check == "bundle":
            mend += ", then build anew what it removed"
        if all(entry.distrusted for entry in bad):
            mend = "chown it to this user or root, and chmod go-w it"
        return Finding(check, "broken", found, mend)
    # Other versions' kernels in the user's cache are its past, in a bundle they are its fault.
    stale = [entry for entry in entries if check == "bundle" and entry.of_other_sources]
    if stale:
        found = (
            f"{directory}: {len(stale)} of {len(entries)} kernels are built from other sources of "
            "cute_kernels than those installed and are not used"
        )
        mend = "build the bundle anew with this version, or install the version that built it"
        return Finding(check, "broken" if len(stale) == len(entries) else "warning", found, mend)
    if check == "bundle" and not entries:
        mend = "build it: kvcache warmup --model config.json --out DIR"
        return Finding(check, "warning", f"{directory}, 0 kernels: all would be compiled", mend)
    return Finding(check, "ok", f"{directory}, {len(entries)} kernels")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _torch_build,
    _dsl_files,
    _dsl_import,
    _compiler,
    _driver,
    _directories,
)
