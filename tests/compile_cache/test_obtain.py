"""One process: where a kernel comes from, what is refused, threads, and `freeze`. No GPU."""

from __future__ import annotations

import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from cute_kernels import compile_cache
from cute_kernels.compile import bundle, obtain
from cute_kernels.compile.cache import KernelCache
from cute_kernels.compile.key import Toolchain, installed_toolchain
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.compile.store import Store
from tests.compile_cache.helpers import UNIT, UNITS, copy_store, libraries, slow_compiler


class Compiled:
    """In a compiled kernel's place: to be called, or exported as a function that does nothing."""

    def __init__(self, unit: CompileUnit) -> None:
        self.unit = unit

    def export_to_c(self, path: str, function_name: str) -> None:
        source = Path(path).with_suffix(".c")
        source.write_text(f"int __tvm_ffi_{function_name}() {{ return 0; }}", encoding="utf-8")
        subprocess.run(["cc", "-fPIC", "-c", "-o", path, str(source)], check=True)

    def __call__(self) -> str:
        return self.unit.name


@pytest.fixture
def compiler(monkeypatch) -> list[CompileUnit]:
    """Stands in for the DSL; returns the units that it is given."""
    given: list[CompileUnit] = []

    def compile_unit(unit: CompileUnit) -> Compiled:
        given.append(unit)
        return Compiled(unit)

    monkeypatch.setattr(CompileUnit, "compile", compile_unit)
    return given


def calls_itself(launch) -> bool:
    with pytest.raises(TypeError, match="Expects 5 parameters"):
        launch(1, 2)
    return True


def test_the_order_is_memory_cache_bundles_compiler(built, fresh, tmp_path, monkeypatch, compiler):
    bundled = copy_store(built, tmp_path / "bundle")
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", f"{tmp_path / 'none'}:{bundled}")
    loads = []
    monkeypatch.setattr(
        bundle.libraries, "load", lambda path: loads.append(path.parent) or (lambda: path)
    )
    first = obtain.launcher(UNIT)
    assert obtain.launcher(UNIT) is first and loads == [bundled]
    monkeypatch.setattr(obtain, "KERNELS", KernelCache())
    copy_store(built, fresh)
    obtain.launcher(UNIT)
    assert loads == [bundled, fresh], "the user's cache lies on top of the bundles"
    assert compiler == []
    obtain.launcher(UNITS[1])
    assert compiler == [UNITS[1]]


def test_a_real_kernel_is_loaded(built, monkeypatch, compiler):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(built))
    assert calls_itself(obtain.launcher(UNIT)) and compiler == []
    assert compile_cache.loaded() == (UNIT,) and compile_cache.compiled() == ()


def test_kernels_of_another_architecture_are_not_mixed_up(built, fresh, compiler):
    copy_store(built, fresh)
    other = CompileUnit(UNIT.kernel, UNIT.config, "sm_100a")
    assert bundle.find(other.key) is None and bundle.find(UNIT.key) is not None
    (library,) = fresh.glob("*.so")
    other_path = Store(fresh).path(other.key, installed_toolchain())
    library.rename(other_path)
    library.with_suffix(".json").rename(other_path.with_suffix(".json"))
    with pytest.warns(RuntimeWarning, match="its manifest is that of another kernel"):
        assert bundle.find(other.key) is None


def test_a_new_dsl_compiles_anew_beside_the_old_entry(built, fresh, monkeypatch, compiler):
    """In the user's cache. A bundle serves whichever compiler made it."""
    copy_store(built, fresh)
    before = libraries(fresh)
    newer = Toolchain("9.9.9", installed_toolchain().tvm_ffi)
    for module in (bundle, obtain):
        monkeypatch.setattr(module, "installed_toolchain", lambda: newer)
    assert bundle.find(UNIT.key) is None
    assert obtain.launcher(UNIT) and compiler == [UNIT]
    (new,) = set(libraries(fresh)) - set(before)
    assert new == Store(fresh).path(UNIT.key, newer).name and len(libraries(fresh)) == 2
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(built))
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(fresh.parent / "another"))
    assert calls_itself(bundle.find(UNIT.key))


def test_without_the_dsl_any_compilers_entry_serves_and_misses_are_named(built, fresh, monkeypatch):
    copy_store(built, fresh)
    for module in (bundle, obtain):
        monkeypatch.setattr(module, "installed_toolchain", lambda: None)
    assert calls_itself(obtain.launcher(UNIT))
    message = f"{UNITS[1].name} is unavailable: .*{fresh}.* nvidia-cutlass-dsl is not installed"
    with pytest.raises(compile_cache.CompilerUnavailableError, match=message):
        obtain.launcher(UNITS[1])


def test_a_missing_c_compiler_degrades_to_memory(fresh, tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.warns(RuntimeWarning, match="they stay in memory: .*no-such-compiler") as caught:
        launches = [obtain.launcher(unit) for unit in UNITS]
    assert [launch() for launch in launches] == [unit.name for unit in UNITS]
    assert len(caught) == 1, "one warning for all"
    assert libraries(fresh) == [] and not list(fresh.glob(".building-*"))


def test_a_c_compiler_that_fails_is_quoted(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CC", slow_compiler(tmp_path, "echo no room for an object >&2; exit 1"))
    with pytest.warns(RuntimeWarning, match="they stay in memory: .*no room for an object"):
        assert obtain.launcher(UNIT)() == UNIT.name


def test_a_user_without_a_home_degrades_to_memory(monkeypatch, compiler):
    """As in containers that run under a user number that nobody has heard of."""
    for name in ("CUTE_KERNELS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.warns(RuntimeWarning, match="no home directory: .* in memory only"):
        assert obtain.launcher(UNIT)() == UNIT.name


def test_home_directories_and_relative_ones(monkeypatch, tmp_path):
    """Files of variables have a `~` that no shell replaces. XDG has relative paths ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", "~/a:/b/~:~nobody-of-this-name/c")
    expected = [tmp_path / "a", Path("/b/~"), Path("~nobody-of-this-name/c")]
    assert bundle.bundle_directories() == expected
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "~/kernels")
    assert bundle.cache_directory() == tmp_path / "kernels"
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR")
    for relative in ("cache", "", "./x"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert bundle.cache_directory() == tmp_path / ".cache" / "cute_kernels" / "kernels"


def test_where_the_user_cache_is(monkeypatch):
    from cute_kernels.env import cache_directory

    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "/a")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/b/cute_kernels/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_directory() == Path("/c/.cache/cute_kernels/kernels")


def test_a_file_system_without_locks_compiles_all_the_same(monkeypatch, compiler):
    def refuse(lock, *args, **kwargs):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.warns(RuntimeWarning, match="no file locks .* not locking"):
        obtain.launcher(UNIT)
    assert compiler == [UNIT]


def test_a_rename_that_is_seen_late_costs_a_compile_only(fresh, monkeypatch, compiler):
    """On NFS another node's entry, or one's own, may not be there yet."""
    monkeypatch.setattr(Store, "write", lambda *arguments: None)
    assert obtain.launcher(UNIT)() == UNIT.name
    assert compiler == [UNIT] and libraries(fresh) == []


def test_threads_share_one_compile_a_key():
    cache, made, gate = KernelCache(), [], threading.Barrier(8)
    got: list[object] = []

    def make(key):
        made.append(key)
        return object()

    def work(order):
        gate.wait()
        got.extend((key, cache.get(key, partial(make, key))) for key in order)

    keys = range(50)
    orders = [keys, keys[::-1]] * 4
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(keys)
    assert len(set(got)) == len(keys) and len(got) == 8 * len(keys)


def test_a_failed_compile_is_tried_again():
    cache = KernelCache()
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 // 0)
    assert cache.get("key", lambda: 7) == 7 == cache.get("key", lambda: 1 // 0)


def test_freeze_names_the_key_and_the_call_site(fresh, compiler):
    compile_cache.freeze()
    with pytest.raises(compile_cache.UnplannedCompileError) as raised:
        obtain.launcher(UNIT)
    message = str(raised.value)
    assert f"unplanned compile of {UNIT.name} after freeze()" in message
    assert UNIT.key.parameters in message and UNIT.key.digest[:16] in message
    assert f"asked for at {__file__}:" in message and message.endswith(f"not found in {fresh}")
    assert compiler == []
    compile_cache.unfreeze()
    obtain.launcher(UNIT)
    assert compiler == [UNIT] == list(compile_cache.compiled())


def test_freeze_may_only_warn(compiler):
    compile_cache.freeze("warn")
    with pytest.warns(RuntimeWarning, match="unplanned compile"):
        assert obtain.launcher(UNIT)
    assert compiler == [UNIT]
    with pytest.raises(ValueError, match="action: got 'never'; accepted: 'raise', 'warn'"):
        compile_cache.freeze("never")


def test_freeze_allows_loading(built, monkeypatch, compiler):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(built))
    compile_cache.freeze()
    assert calls_itself(obtain.launcher(UNIT))
    with pytest.raises(compile_cache.UnplannedCompileError):
        compile_cache.warmup(UNITS)


def test_warmup_loads_what_is_there(built, fresh, compiler):
    copy_store(built, fresh)
    told = []
    assert compile_cache.warmup([UNIT, UNIT], on_unit=told.append) == (UNIT,)
    assert told == [UNIT] and compiler == [] and compile_cache.loaded() == (UNIT,)
