"""Kernels built ahead of time: one shared library and one manifest a kernel, in a directory.

A library needs TVM-FFI and the CUDA runtime that torch has loaded, not the DSL. Building needs the
DSL and a C compiler, no GPU. ``python -m cute_kernels.compile.build`` builds; the environment
variable CUTE_KERNELS_BUNDLE names the directories that calls look into before they compile.

A library is loaded only if its manifest's checksum is right, and only from a directory that nobody
but its owner can write and whose owner is this user or root: loading it runs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from cute_kernels.compile.key import CompileKey
from cute_kernels.env import bundle_directories, c_compiler

_FUNCTION = "launch"
_STUB = Path(__file__).with_name("runtime_stub.c")


def write(key: CompileKey, compiled: Any, directory: Path) -> Path:
    """Export a compiled kernel (cute.compile with TVM-FFI) as a library; returns its path.

    Readers see a whole file or none: both files are renamed into place, the manifest last.

    Raises:
        subprocess.CalledProcessError: the C compiler failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"{key.file_stem}.so"
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / library.name
        _export(compiled, built)
        manifest = {
            "name": key.name,
            "parameters": json.loads(key.parameters),
            "target": key.target,
            "digest": key.digest,
            "sha256": _sha256(built),
            "dsl": metadata.version("nvidia-cutlass-dsl"),
            "tvm_ffi": metadata.version("apache-tvm-ffi"),
        }
        described = Path(scratch) / "manifest.json"
        described.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        built.chmod(0o755)
        described.chmod(0o644)
        os.replace(built, library)
        os.replace(described, library.with_suffix(".json"))
    return library


def _export(compiled: Any, library: Path) -> None:
    object_file = library.with_suffix(".o")
    compiled.export_to_c(str(object_file), function_name=_FUNCTION)
    # The DSL ships one runtime a CUDA major version; its libraries are linked statically.
    import nvidia_cutlass_dsl

    root = Path(next(iter(nvidia_cutlass_dsl.__path__)))
    runtime = root / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
    command = [c_compiler(), "-shared", "-fPIC", "-O2", "-o", str(library)]
    command += [str(object_file), str(_STUB), str(runtime)]
    command += ["-Wl,--exclude-libs,ALL", "-lpthread", "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    object_file.unlink()


def find(key: CompileKey) -> Callable[..., Any] | None:
    """The launch function of ``key`` from the first directory that has it, or None.

    A library that is there and cannot be trusted is passed over with a warning.
    """
    for directory in bundle_directories():
        library = directory / f"{key.file_stem}.so"
        if not library.exists():
            continue
        problem = _problem(library, key)
        if problem is None:
            return _load(library)
        warnings.warn(f"{library}: not loaded: {problem}", stacklevel=2)
    return None


def _problem(library: Path, key: CompileKey) -> str | None:
    for path in (library.parent, library):
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to user {status.st_uid}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write {path}"
    try:
        manifest = json.loads(library.with_suffix(".json").read_text(encoding="utf-8"))
        digest, checksum, ffi = manifest["digest"], manifest["sha256"], manifest["tvm_ffi"]
    except (OSError, ValueError, KeyError) as error:
        return f"no readable manifest ({type(error).__name__})"
    if digest != key.digest:
        return "its manifest is that of another kernel"
    if checksum != _sha256(library):
        return "its checksum is not the manifest's"
    here = metadata.version("apache-tvm-ffi")
    if ffi.split(".")[:2] != here.split(".")[:2]:
        return f"built for TVM-FFI {ffi}, this is {here}"
    return None


def _load(library: Path) -> Callable[..., Any]:
    import tvm_ffi

    _share_cuda_runtime()
    return getattr(tvm_ffi.load_module(str(library)), _FUNCTION)


def _share_cuda_runtime() -> None:
    """Let libraries see the CUDA runtime that torch loaded for itself alone (RTLD_LOCAL)."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in mapped:
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith("libcudart.so"):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
