"""One compiled kernel on disk: a shared library and its manifest, `<stem>.so` and `<stem>.json`.

A library needs TVM-FFI and the CUDA runtime that torch has loaded, not the DSL. It is loaded only
if its manifest's checksum is right, and only if it, its manifest and their directory belong to this
user or root and nobody else can write them: loading it runs it. Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cute_kernels.compile.key import CompileKey, Toolchain, tvm_ffi_version
from cute_kernels.env import c_compiler

_FUNCTION = "launch"
_TEXTS = ("name", "target", "sources", "digest", "sha256", "dsl", "tvm_ffi")
_STUB = Path(__file__).with_name("runtime_stub.c")


def manifest_of(key: CompileKey, toolchain: Toolchain, library: Path) -> dict[str, Any]:
    """What stands beside a library."""
    return {
        "name": key.name,
        "parameters": json.loads(key.parameters),
        "target": key.target,
        "sources": key.sources,
        "digest": key.digest,
        "sha256": sha256(library),
        "dsl": toolchain.dsl,
        "tvm_ffi": toolchain.tvm_ffi,
    }


def read_manifest(library: Path) -> dict[str, Any]:
    """The manifest beside a library.

    Raises:
        OSError: it cannot be read. ValueError: it is none, or not its digest's.
    """
    try:
        manifest = json.loads(_content(library.with_suffix(".json")).decode("utf-8"))
        texts = {name: manifest[name] for name in _TEXTS}
        key = _key_of(manifest)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name}: got {text!r}, no string")
    if texts["digest"] != key.digest:
        raise ValueError("its digest is not that of its parameters")
    return manifest


def _key_of(manifest: dict[str, Any]) -> CompileKey:
    parameters = json.dumps(manifest["parameters"], sort_keys=True, separators=(",", ":"))
    return CompileKey(manifest["name"], parameters, manifest["target"], manifest["sources"])


def _content(path: Path) -> bytes:
    """What is in a file.

    Raises:
        OSError: it cannot be read, or is none: opening a pipe would wait for who writes to it.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def export(compiled: Any, library: Path) -> None:
    """Write a compiled kernel (cute.compile with TVM-FFI) as a shared library.

    Raises:
        OSError: a file cannot be written, or there is no C compiler.
        subprocess.CalledProcessError: the C compiler failed.
    """
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


def distrusted(path: Path) -> str | None:
    """Why code in this file or directory must not run, or None: others may have put it there.

    Raises:
        OSError: it cannot be looked at.
    """
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write {path}"
    return None


def distrusted_library(library: Path) -> str | None:
    """Why code in a library must not run, or None: it, its manifest, or what is beside the files
    that links lead to.

    Raises:
        OSError: it or its manifest cannot be looked at.
    """
    for path in (library, library.with_suffix(".json")):
        # Not Path.resolve, which raises a RuntimeError for a loop of links before Python 3.13.
        real = Path(os.path.realpath(path, strict=True))
        for part in (path.parent, real.parent, real):
            reason = distrusted(part)
            if reason is not None:
                return reason
    return None


def problem_with(library: Path, key: CompileKey | None = None) -> str | None:
    """Why a library must not be loaded (as ``key``'s, or as that of its name), or None."""
    try:
        reason = distrusted_library(library)
        if reason is not None:
            return reason
        manifest = read_manifest(library)
        checksum = sha256(library)
    except (OSError, ValueError) as error:
        return f"no readable manifest or library ({type(error).__name__}: {error})"
    if key is None:
        ours = library.name.startswith(f"{_key_of(manifest).file_stem}-")
    else:
        ours = manifest["digest"] == key.digest
    if not ours:
        return "its manifest is that of another kernel"
    if manifest["sha256"] != checksum:
        return "its checksum is not the manifest's"
    built_for, here = manifest["tvm_ffi"], tvm_ffi_version()
    if built_for.split(".")[:2] != here.split(".")[:2]:
        return f"built for TVM-FFI {built_for}, this is {here}"
    return None


def load(library: Path) -> Callable[..., Any]:
    """The launch function of a library that `problem_with` has passed; it stays loaded.

    Raises:
        RuntimeError: the loader refuses it, on a `noexec` mount for instance.
        AttributeError: the function is not in it.
    """
    import tvm_ffi

    _share_cuda_runtime()
    return getattr(tvm_ffi.load_module(str(library.resolve())), _FUNCTION)


@cache
def _share_cuda_runtime() -> None:
    """Let libraries see the CUDA runtime that torch loads for itself alone (RTLD_LOCAL).

    Their symbols are bound at the first call, where one that is missing ends the process.
    """
    import torch  # noqa: F401 - it brings the runtime

    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in mapped:
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith("libcudart.so"):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return


def sha256(path: Path) -> str:
    return hashlib.sha256(_content(path)).hexdigest()
