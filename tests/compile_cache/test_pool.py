"""Compiling with several processes: real ones, which the tests kill."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cute_kernels.compile import pool
from cute_kernels.compile.errors import CompilerUnavailableError
from cute_kernels.compile.pool import compile_into
from tests.compile_cache.helpers import UNIT, UNITS, copy_store, libraries, slow_compiler


def results(outcomes) -> dict[str, str]:
    return {outcome.unit.config.name: outcome.result for outcome in outcomes}


def test_only_what_is_missing_is_compiled(built, tmp_path):
    store = copy_store(built, tmp_path / "store")
    told = []
    outcomes = compile_into([*UNITS, UNIT], store, 2, told.append)
    names = [unit.config.name for unit in UNITS]
    assert results(outcomes) == {names[0]: "present", names[1]: "compiled"}
    assert told == outcomes and all(outcome.path.exists() for outcome in outcomes)
    assert len(libraries(store)) == 2


def test_a_second_run_starts_no_process(built, tmp_path, monkeypatch):
    store = copy_store(built, tmp_path / "store")
    monkeypatch.setattr(pool.subprocess, "Popen", None)
    assert results(compile_into([UNIT], store, 2)) == {UNIT.config.name: "present"}


def test_a_worker_that_is_killed_is_replaced(tmp_path, monkeypatch):
    """As the kernel kills processes when memory runs out."""
    once = f"if mkdir {tmp_path}/killed 2>/dev/null; then kill -9 $PPID; fi"
    monkeypatch.setenv("CC", slow_compiler(tmp_path, once))
    outcomes = compile_into([UNIT], tmp_path / "store", 1)
    assert results(outcomes) == {UNIT.config.name: "compiled"}
    assert (tmp_path / "killed").exists()
    assert not list((tmp_path / "store").glob(".building-*")), "the dead worker's files are left"


def test_a_unit_that_kills_its_workers_fails_alone(built, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", slow_compiler(tmp_path, "kill -9 $PPID"))
    store = copy_store(built, tmp_path / "store")
    outcomes = {outcome.unit: outcome for outcome in compile_into(UNITS, store, 2)}
    assert outcomes[UNIT].result == "present"
    failed = outcomes[UNITS[1]]
    assert (failed.result, failed.path) == ("failed", None)
    assert failed.error == "2 compiling processes died of it"


def test_a_compile_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", slow_compiler(tmp_path, "echo no room >&2; exit 1"))
    (outcome,) = compile_into([UNIT], tmp_path / "store", 1)
    assert outcome.result == "failed" and "no room" in outcome.error


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        compile_into([UNIT], tmp_path, 1)


def test_without_a_compiler_what_is_there_will_do(built, tmp_path, monkeypatch):
    """Whichever made it, also where nothing can be written; what is missing is named."""
    store = copy_store(built, tmp_path / "store")
    monkeypatch.setattr(pool, "installed_toolchain", lambda: None)
    monkeypatch.setattr(pool.Store, "prepare", None)
    assert results(compile_into([UNIT], store, 2)) == {UNIT.config.name: "present"}
    with pytest.raises(CompilerUnavailableError, match=f"{store}.*: {UNITS[1].name}$"):
        compile_into(UNITS, store, 2)


def test_what_is_elsewhere_is_not_compiled(built, tmp_path, monkeypatch):
    monkeypatch.setattr(pool.subprocess, "Popen", None)
    store, found = tmp_path / "store", Path("/elsewhere/kernel.so")
    (outcome,) = compile_into([UNIT], store, 1, elsewhere=lambda key: found)
    assert (outcome.result, outcome.path) == ("present", found) and not store.exists()


def test_a_shared_directory_is_readable_whatever_the_umask(built, tmp_path, monkeypatch):
    monkeypatch.setattr(pool._Worker, "drain", lambda *arguments: None)
    before = os.umask(0o077)
    try:
        for name, shared, mode in (("own", False, 0o700), ("a/b/shared", True, 0o755)):
            compile_into([UNIT], tmp_path / name, 1, shared=shared)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
    # One that has everything already is opened, too.
    store = copy_store(built, tmp_path / "store")
    store.chmod(0o700)
    compile_into([UNIT], store, 1, shared=True)
    assert stat.S_IMODE(store.stat().st_mode) == 0o755
