"""Several processes, crashes and unusual directories: real processes, signals and permissions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from cute_kernels.compile.key import installed_toolchain
from cute_kernels.compile.store import Store
from tests.compile_cache.helpers import (
    ROOT,
    UNIT,
    UNITS,
    ask,
    copy_store,
    environment,
    finish,
    libraries,
    slow_compiler,
    start,
    wait_for,
)

# Of no user here.
FOREIGN = 54321
CLEAN = {"error": "", "warnings": []}


def is_stored(directory, unit=UNIT) -> bool:
    return Store(directory).has(unit.key, installed_toolchain())


def scratch(directory) -> list[str]:
    return [path.name for path in directory.glob(".building-*")]


def test_eight_cold_processes_compile_each_key_once(tmp_path):
    """Half of them in the other order, so that waiting for one key must not block another."""
    cache = tmp_path / "cache"
    orders = (UNITS, UNITS[::-1])
    reports = [finish(child) for child in [start(cache, *orders[i % 2]) for i in range(8)]]
    compiled = Counter(name for report in reports for name in report["compiled"])
    assert compiled == {unit.config.name: 1 for unit in UNITS}
    assert all(report.items() >= CLEAN.items() for report in reports)
    assert all(is_stored(cache, unit) for unit in UNITS) and not scratch(cache)
    assert ask(cache, *UNITS) == {"compiled": [], **CLEAN}


def test_one_of_eight_is_killed_in_mid_export(tmp_path):
    cache, begun = tmp_path / "cache", tmp_path / "begun"
    compiler = slow_compiler(tmp_path, f"echo $$ > {begun}; sleep 600")
    victim = start(cache, UNIT, CC=compiler)
    wait_for(begun.exists, "the victim's export")
    others = [start(cache, UNIT) for _ in range(7)]
    assert scratch(cache) and not libraries(cache)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    os.kill(int(begun.read_text()), signal.SIGKILL)
    reports = [finish(child) for child in others]
    assert sum(report["compiled"] == [UNIT.config.name] for report in reports) == 1
    assert all(report.items() >= CLEAN.items() for report in reports)
    assert is_stored(cache) and not scratch(cache), "the dead process's scratch files are left"


def test_a_stopped_process_does_not_stop_the_others(tmp_path):
    cache, begun = tmp_path / "cache", tmp_path / "begun"
    compiler = slow_compiler(tmp_path, f"echo $$ > {begun}; sleep 600")
    holder = start(cache, UNIT, CC=compiler)
    wait_for(begun.exists, "the holder's export")
    holder.send_signal(signal.SIGSTOP)
    impatient = "from cute_kernels.compile import store; store.LOCK_TIMEOUT_S = 1.0"
    report = ask(cache, UNIT, code=impatient)
    assert report["compiled"] == [UNIT.config.name] and report["error"] == ""
    (warning,) = report["warnings"]
    assert "held for 1 s; compiling without it" in warning
    assert is_stored(cache) and scratch(cache), "a living process's scratch files are its own"
    holder.kill()
    holder.communicate()
    os.kill(int(begun.read_text()), signal.SIGKILL)


def test_a_truncated_entry_is_rebuilt_with_one_warning(built, tmp_path):
    cache = copy_store(built, tmp_path / "cache")
    (library,) = cache.glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    report = ask(cache, UNIT)
    assert report["compiled"] == [UNIT.config.name] and report["error"] == ""
    assert report["warnings"] == [f"{library}: not loaded: its checksum is not the manifest's"]
    assert is_stored(cache)


@pytest.mark.parametrize("fault", ("read-only", "in a closed directory"))
def test_a_directory_that_cannot_be_written_degrades_to_memory(tmp_path, fault):
    above = tmp_path / "above"
    cache = above / "cache"
    cache.mkdir(parents=True)
    closed, mode = (cache, 0o555) if fault == "read-only" else (above, 0)
    closed.chmod(mode)
    report = ask(cache, UNIT, plain=True)
    closed.chmod(0o755)
    assert list(cache.iterdir()) == []
    assert report["compiled"] == [UNIT.config.name] and report["error"] == ""
    (warning,) = report["warnings"]
    assert "cannot keep compiled kernels, they stay in memory" in warning
    assert "Permission denied" in warning


def test_what_a_read_only_directory_has_is_used(built, tmp_path):
    cache = copy_store(built, tmp_path / "cache")
    cache.chmod(0o555)
    assert ask(cache, UNIT, plain=True) == {"compiled": [], **CLEAN}


def test_a_full_disk_degrades_to_memory(tmp_path):
    """A file system of 64 KiB; where none may be mounted, files of at most 64 KiB."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    mount = f"mount -t tmpfs -o size=64k,mode=755 full {cache}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode == 0:
        shell, expected = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" "$@"'], "No space"
    else:
        shell, expected = ["sh", "-c", 'ulimit -f 128 && exec "$0" "$@"'], ""
    command = [*shell, sys.executable, "-m", "tests.compile_cache.child", UNIT.config.name]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(cache), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["compiled"] == [UNIT.config.name] and report["error"] == ""
    (warning,) = report["warnings"]
    assert "they stay in memory" in warning and expected in warning


@pytest.mark.parametrize("fault", ("others can write", "belongs to user"))
def test_a_directory_where_others_can_put_code_is_neither_read_nor_written(built, tmp_path, fault):
    cache = copy_store(built, tmp_path / "cache")
    before, code = libraries(cache), ""
    if fault == "others can write":
        cache.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(cache, FOREIGN, -1)
    else:  # who cannot give it away, so the process is made to think that it is somebody else
        code = f"import os\nos.getuid = lambda: {FOREIGN}"
    report = ask(cache, UNIT, code=code)
    assert libraries(cache) == before and not (cache / ".locks").exists()
    assert report["compiled"] == [UNIT.config.name] and report["error"] == ""
    refusal, degraded = report["warnings"]
    assert "not loaded: " in refusal and fault in refusal
    assert "they stay in memory" in degraded and fault in degraded


def test_a_broken_dsl_is_unavailable_and_bundles_still_load(built, tmp_path):
    """A release that dropped a name which modules use when imported."""
    package = tmp_path / "broken" / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise AttributeError(\"module 'cutlass' has no attribute 'foo'\")"
    )
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r})"
    report = ask(tmp_path / "cache", UNIT, code=code)
    assert report["error"].startswith(f"CompilerUnavailableError: {UNIT.name} is unavailable: ")
    assert "AttributeError: module 'cutlass' has no attribute 'foo'" in report["error"]
    bundle = {"CUTE_KERNELS_BUNDLE": str(built)}
    assert ask(tmp_path / "cache", UNIT, code=code, **bundle) == {"compiled": [], **CLEAN}


def test_children_forked_after_a_compile_work(tmp_path):
    """Forked with the DSL loaded, and while another thread holds the locks."""
    cache = tmp_path / "cache"
    code = f"""
import os, threading
from cute_kernels.compile import obtain
from cute_kernels.compile.plans import all_units
units = {{unit.config.name: unit for unit in all_units()}}
obtain.launcher(units[{UNITS[0].config.name!r}])
held = threading.Event()
def hold():
    with obtain.KERNELS._lock, obtain.COMPILER:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
obtain.STATE.compiled.clear()
"""
    report = ask(cache, *UNITS, code=code)
    assert report == {"compiled": [UNITS[1].config.name], **CLEAN}
    assert all(is_stored(cache, unit) for unit in UNITS)


def test_children_forked_before_any_compile_work(tmp_path):
    code = "import cute_kernels, kvcache, torch, os\nif os.fork(): os._exit(os.wait()[1] >> 8)"
    assert ask(tmp_path / "cache", UNIT, code=code) == {"compiled": [UNIT.config.name], **CLEAN}


def test_a_daemonic_process_can_warm_up(tmp_path):
    """Serving engines run their workers so; multiprocessing lets those have no children."""
    code = f"""
import multiprocessing, sys
def work():
    from cute_kernels import compile_cache
    names = {[unit.config.name for unit in UNITS]!r}
    units = [unit for unit in compile_cache.all_units() if unit.config.name in names]
    assert compile_cache.warmup(units, workers=2) == tuple(units) == compile_cache.loaded()
    compile_cache.freeze()
    assert not compile_cache.compiled(), "in worker processes"
child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
child.start()
child.join()
if child.exitcode: sys.exit("the daemon failed")
"""
    assert ask(tmp_path / "cache", *UNITS, code=code) == {"compiled": [], **CLEAN}
