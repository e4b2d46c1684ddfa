"""What a compiled kernel depends on, as a key that names files and never collides."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent.parent


@cache
def source_fingerprint() -> str:
    """SHA-256 over this package's Python files: a change in any of them makes other keys."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class CompileKey:
    """name: the variant, readable. parameters: its compile-time parameters. target: architecture.

    Compiler versions are not part of it: a host without the compiler must be able to form the key.
    A library's manifest records them.
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
    """The key of a variant: ``config`` is a frozen dataclass of numbers and strings with a name."""
    parameters = json.dumps(asdict(config), sort_keys=True, separators=(",", ":"))
    return CompileKey(config.name, parameters, target, source_fingerprint())
