"""A compiling process of `pool`: requests come as JSON lines on stdin, replies go to stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cute_kernels.compile.key import installed_toolchain
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.compile.store import Store


def main() -> None:
    """Serve until stdin ends, which it does when the parent dies, too."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the compiler prints is not a reply
    for line in sys.stdin:
        request = json.loads(line)
        unit = CompileUnit.from_json(request["unit"])
        reply: dict[str, Any] = {"result": "failed", "path": None, "error": ""}
        try:
            result, path = compile_one(unit, Path(request["directory"]))
            reply.update(result=result, path=str(path))
        except subprocess.CalledProcessError as error:
            reply["error"] = f"{error}: {error.stderr.strip()}"
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def compile_one(unit: CompileUnit, directory: Path) -> tuple[str, Path]:
    """("compiled" or "present", library): whoever holds the key's lock compiles, others find it."""
    store, toolchain, key = Store(directory), installed_toolchain(), unit.key
    path = store.path(key, toolchain)
    with store.lock(key, toolchain) as locked:
        if store.has(key, toolchain):
            return "present", path
        store.write(key, toolchain, unit.compile(), locked)
    return "compiled", path
