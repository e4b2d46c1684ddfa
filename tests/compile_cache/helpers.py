"""Processes, users and directories for the tests of the compile cache."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.attention.decode_sm90.config import make_config
from cute_kernels.compile.plans import CompileUnit

ROOT = Path(__file__).resolve().parents[2]
TARGET = "sm_90a"
# The smallest kernels: 2 to 3 seconds each.
UNITS = tuple(
    CompileUnit("decode_sm90", make_config(64, 8, dtype, 64), TARGET) for dtype in ("bf16", "fp16")
)
UNIT = UNITS[0]
PR_CAPBSET_DROP = 24


def environment(cache: Path, **others: str) -> dict[str, str]:
    """This process's, with this user cache and no bundles."""
    kept = {name: value for name, value in os.environ.items() if "CUTE_KERNELS" not in name}
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUTE_KERNELS_CACHE_DIR": str(cache)}
    return {**kept, **ours, **others}


def start(
    cache: Path, *units: CompileUnit, code: str = "", plain: bool = False, **others: str
) -> subprocess.Popen[str]:
    """A `child` that asks for these units; `code` runs in it before that. plain: permissions stop
    it, also where the tests run as root.
    """
    run = "from tests.compile_cache.child import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}\n{run}", *(unit.config.name for unit in units)],
        cwd=ROOT,
        env=environment(cache, **others),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_drop_capabilities if plain and os.getuid() == 0 else None,
    )


def finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The child's report."""
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def ask(cache: Path, *units: CompileUnit, **options: Any) -> dict[str, Any]:
    return finish(start(cache, *units, **options))


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.02)


def slow_compiler(folder: Path, body: str) -> str:
    """A C compiler for CC that runs this shell code first."""
    path = folder / "slow-cc"
    path.write_text(f'#!/bin/sh\n{body}\nexec cc "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _drop_capabilities() -> None:
    """Root without capabilities: permissions then stop it as they do everybody."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) and ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), "cannot drop a capability")


def copy_store(source: Path, target: Path) -> Path:
    """The kernels of a store in another directory."""
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy2(file, target)
    return target


def libraries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.so"))
