"""What a compiled kernel depends on, as a key that names files and never collides."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parent.parent
# Our sources that end up in a library: the kernels, and the C file that is linked to them.
_SOURCES = ("*.py", "*.c")


@cache
def source_fingerprint() -> str:
    """SHA-256 over this package's sources: a change in any of them makes other keys."""
    return fingerprint(_PACKAGE)


def fingerprint(package: Path) -> str:
    """SHA-256 over the names and contents of a package's source files."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in package.rglob(pattern)):
        name, content = path.relative_to(package).as_posix(), path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True)
class CompileKey:
    """name: the variant, readable. parameters: its compile-time parameters, canonical JSON.
    target: architecture. sources: fingerprint of our sources.

    Compiler versions are no part of it: a host without the compiler must be able to form the key.
    They are the `Toolchain`, in the names and manifests of the files. The Python ABI is in neither:
    a library links to TVM-FFI's C interface only.
    """

    name: str
    parameters: str
    target: str
    sources: str

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file_stem(self) -> str:
        return f"{self.name}-{self.target}-{self.digest[:16]}"


def compile_key(config: Any, target: str) -> CompileKey:
    """The key of a variant: ``config`` is a frozen dataclass of numbers and strings with a name.

    Raises:
        TypeError: a parameter that is no number or string, such as a tensor or a set.
    """
    parameters = asdict(config)
    for name, value in parameters.items():
        if not isinstance(value, (int, str, float)):
            raise TypeError(f"{type(config).__name__}.{name}: {value!r} cannot be part of a key")
    text = json.dumps(parameters, sort_keys=True, separators=(",", ":"))
    return CompileKey(config.name, text, target, source_fingerprint())


class Toolchain(NamedTuple):
    """What compiles and what calls: releases of nvidia-cutlass-dsl and apache-tvm-ffi."""

    dsl: str
    tvm_ffi: str

    @property
    def label(self) -> str:
        """For file names."""
        return re.sub(r"[^\w.]", "_", f"dsl{self.dsl}_ffi{self.tvm_ffi}")


@cache
def tvm_ffi_version() -> str:
    return metadata.version("apache-tvm-ffi")


@cache
def installed_toolchain() -> Toolchain | None:
    """The toolchain of this environment, or None where the DSL is not installed."""
    try:
        return Toolchain(metadata.version("nvidia-cutlass-dsl"), tvm_ffi_version())
    except metadata.PackageNotFoundError:
        return None
