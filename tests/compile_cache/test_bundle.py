"""Bundles: what is loaded, what is refused, and that the compiler is not needed. No GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cute_kernels import compile_cache
from cute_kernels.compile import bundle, obtain
from cute_kernels.compile.key import installed_toolchain
from cute_kernels.compile.store import Store
from tests.compile_cache.helpers import ROOT, UNIT, UNITS, ask, copy_store, environment


@pytest.fixture
def copy(built, tmp_path, monkeypatch) -> Path:
    """A copy of the bundle that a test may spoil, named by the environment variable."""
    folder = copy_store(built, tmp_path / "bundle")
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(folder))
    return folder


def library(directory: Path) -> Path:
    return Store(directory).path(UNIT.key, installed_toolchain())


def test_a_bundle_holds_libraries_and_their_manifests(built):
    assert library(built).exists()
    manifest = json.loads(library(built).with_suffix(".json").read_text())
    assert manifest["name"] == UNIT.config.name and manifest["target"] == UNIT.target
    assert manifest["parameters"]["head_size"] == UNIT.config.head_size
    assert (manifest["dsl"], manifest["tvm_ffi"]) == installed_toolchain()
    assert manifest["digest"] == UNIT.key.digest and manifest["sources"] == UNIT.key.sources
    files = [path for path in built.iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".so", ".json"}, "scratch files are left"


def test_a_library_depends_on_tvm_ffi_and_cuda_only(built):
    """Not on the Python ABI, so that one bundle serves all Python versions, nor on the DSL."""
    command = ["nm", "-D", "--undefined-only", "--format=posix", str(library(built))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    symbols = {line.split()[0].split("@")[0] for line in done.stdout.splitlines()}
    known = re.compile(r"TVMFFI|cuda[A-Z]|_ITM_|__gmon_start__|__cxa_finalize")
    libc = {"abort", "fprintf", "free", "malloc", "printf", "snprintf", "stderr", "strlen"}
    assert {symbol for symbol in symbols if not known.match(symbol)} <= libc
    assert any(symbol.startswith("TVMFFI") for symbol in symbols)


def test_building_all_that_match_by_command(built, tmp_path):
    folder = copy_store(built, tmp_path / "bundle")
    command = [sys.executable, "-m", "cute_kernels.compile.build", "--out", str(folder)]
    command += ["--match", f"{UNIT.config.name}$", "--workers", "1", "--target", UNIT.target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"1 kernels in {folder}, 0 of them compiled now\n", done.stderr
    command[command.index("--match") + 1] = "no such"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "no variant has such a name" in done.stderr
    command[command.index("--match") + 1] = "("
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--match '(': " in done.stderr
    command[command.index("--match") + 1] = f"{UNIT.config.name}$"
    command[command.index("--out") + 1] = "/dev/null/none"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "/dev/null" in done.stderr
    command[command.index("--out") + 1] = "a:b"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "'a:b' has a ':'" in done.stderr
    command[command.index("--out") + 1] = str(folder)
    command[-1] = "sm_70"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "'sm_70'; accepted: sm_100a, sm_103a" in done.stderr


def test_a_kernel_is_found_and_checks_its_arguments(copy):
    launch = bundle.find(UNIT.key)
    with pytest.raises(TypeError, match="Expects 5 parameters"):
        launch(1, 2)
    assert bundle.has(UNIT.key)
    assert bundle.find(UNITS[1].key) is None and not bundle.has(UNITS[1].key)


def test_neither_the_compiler_nor_its_package_is_needed(copy, tmp_path):
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
from importlib import metadata
version = metadata.version
def hidden(name):
    if name == "nvidia-cutlass-dsl":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = hidden
from cute_kernels.compile.obtain import launcher
from cute_kernels.compile.plans import all_units
(unit,) = [unit for unit in all_units() if unit.config.name == {UNIT.config.name!r}]
try:
    launcher(unit)(1, 2)
except TypeError as error:
    print("called:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path / "cache", CUTE_KERNELS_BUNDLE=str(copy)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "called: Expects 5 parameters" in done.stdout, done.stderr
    assert not (tmp_path / "cache").exists(), "nothing was compiled, so nothing is to be kept"


def test_without_the_variable_nothing_is_looked_up(built):
    assert bundle.find(UNIT.key) is None


def test_the_first_directory_that_has_it_wins(copy, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", os.pathsep.join(["", str(empty), str(copy)]))
    assert bundle.find(UNIT.key) is not None


def refused(reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"not loaded: .*{reason}") as caught:
        assert bundle.find(UNIT.key) is None
        assert bundle.find(UNIT.key) is None
    assert len(caught) == 1, "one warning, not one a call"
    assert not bundle.has(UNIT.key)


def test_a_truncated_library_is_refused(copy):
    whole = library(copy).read_bytes()
    library(copy).write_bytes(whole[: len(whole) // 2])
    refused("checksum")


def test_one_flipped_bit_is_refused(copy):
    content = bytearray(library(copy).read_bytes())
    content[5000] ^= 1
    library(copy).write_bytes(content)
    refused("checksum")


def test_a_library_without_a_manifest_is_refused(copy):
    library(copy).with_suffix(".json").unlink()
    refused("no readable manifest")


@pytest.mark.parametrize(
    "text",
    ('{"digest": ', "[]", "null", "{}", '{"parameters": {}}', "\xff", "[" * 200_000),
    ids=lambda text: text[:16],
)
def test_a_broken_manifest_is_refused(copy, text):
    library(copy).with_suffix(".json").write_text(text, encoding="latin-1")
    refused("no readable manifest")


def rewrite(copy: Path, **fields) -> None:
    path = library(copy).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("field", ("name", "target", "sources", "digest", "sha256", "tvm_ffi"))
def test_a_manifest_with_a_number_for_a_string_is_refused(copy, field):
    rewrite(copy, **{field: 5})
    refused(f"no readable manifest .*{field}: got 5")


@pytest.mark.parametrize("suffix", (".so", ".json"))
@pytest.mark.parametrize("kind", ("loop", "pipe", "folder"))
def test_what_is_no_file_is_refused_and_can_be_removed(copy, suffix, kind):
    """Neither waited for nor raised from, by a call, by a listing or when it is removed."""
    path = library(copy).with_suffix(suffix)
    path.unlink()
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path, 0o644)
    else:
        path.mkdir(mode=0o755)
    refused("no readable manifest or library")
    (entry,) = Store(copy).entries()
    assert "no readable manifest or library" in entry.problem and not entry.distrusted
    Store(copy).remove(entry.path)
    assert not list(copy.glob("*.so")) and not list(copy.glob("*.json"))


def test_a_manifest_whose_parameters_were_changed_is_refused(copy):
    rewrite(copy, target="sm_100a")
    refused("its digest is not that of its parameters")


def test_another_kernels_library_is_refused(copy):
    other = UNITS[1].key
    path = Store(copy).path(other, installed_toolchain())
    for suffix in (".so", ".json"):
        library(copy).with_suffix(suffix).rename(path.with_suffix(suffix))
    with pytest.warns(RuntimeWarning, match="its manifest is that of another kernel"):
        assert bundle.find(other) is None
    (entry,) = Store(copy).entries()
    assert entry.problem == "its manifest is that of another kernel" and entry.manifest is None


def test_a_manifest_without_its_library_is_an_entry(copy):
    path = library(copy)
    path.unlink()
    (entry,) = Store(copy).entries()
    assert entry.path == path.with_suffix(".json") and entry.problem == "its library is missing"
    assert not entry.distrusted and Store(copy).leftovers() == []
    Store(copy).remove(entry.path)
    assert Store(copy).entries() == []


def test_another_tvm_ffi_is_refused(copy):
    rewrite(copy, tvm_ffi="9.9.0")
    refused("built for TVM-FFI 9.9.0")


@pytest.mark.parametrize("mode", (0o777, 0o775))
def test_a_directory_that_others_can_write_is_refused(copy, mode):
    copy.chmod(mode)
    refused("others can write")


@pytest.mark.parametrize("suffix", (".so", ".json"))
def test_a_file_that_others_can_write_is_refused(copy, suffix):
    library(copy).with_suffix(suffix).chmod(0o666)
    refused("others can write")


def test_a_link_into_a_directory_that_others_can_write_is_refused(copy, tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    moved = open_to_all / "kernel.so"
    library(copy).rename(moved)
    library(copy).symlink_to(moved)
    assert bundle.find(UNIT.key) is not None
    open_to_all.chmod(0o777)
    refused("others can write")


def test_a_foreign_owner_is_refused(copy, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if copy.stat().st_uid == 0:  # root's files are everybody's, so give the library away
        os.chown(library(copy), 54321, 54321)
    refused("belongs to user")


def test_a_library_that_the_loader_refuses_is_passed_over(copy):
    """Its checksum is right, so it is what was built, and this system cannot load it."""
    library(copy).write_bytes(b"no shared library")
    rewrite(copy, sha256=bundle.libraries.sha256(library(copy)))
    with pytest.warns(RuntimeWarning, match="not loaded: "):
        assert bundle.find(UNIT.key) is None


def other_sources(copy: Path) -> Path:
    """The bundle as another version of this package made it."""
    key = replace(UNIT.key, sources="0" * 64)
    path = Store(copy).path(key, installed_toolchain())
    for suffix in (".so", ".json"):
        library(copy).with_suffix(suffix).rename(path.with_suffix(suffix))
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest.update(sources=key.sources, digest=key.digest)
    path.with_suffix(".json").write_text(json.dumps(manifest))
    return path


def test_a_bundle_of_other_sources_is_said_to_be(copy, monkeypatch):
    """Once a bundle, and in the errors of what it would have served."""
    path = other_sources(copy)
    with pytest.warns(RuntimeWarning, match=f"{path}: built from other sources") as caught:
        assert bundle.find(UNIT.key) is None and bundle.find(UNIT.key) is None
    assert len(caught) == 1
    monkeypatch.setattr(obtain, "installed_toolchain", lambda: None)
    message = f"not installed; {path} is built from other sources .*build the bundle anew"
    with pytest.raises(obtain.CompilerUnavailableError, match=message):
        obtain.launcher(UNIT)
    monkeypatch.setattr(obtain.STATE, "frozen", "raise")
    with pytest.raises(obtain.UnplannedCompileError, match=f"; {path} is built from other"):
        obtain.launcher(UNIT)
    # Nothing is said of kernels that it never had.
    with pytest.raises(obtain.UnplannedCompileError) as error:
        obtain.launcher(UNITS[1])
    assert "other sources" not in str(error.value)


@pytest.mark.parametrize("has_compiler", (False, True))
def test_warmup_of_several_says_what_a_single_call_says(copy, monkeypatch, caplog, has_compiler):
    """They go to processes of their own, past what loads one after the other."""
    path = other_sources(copy)
    asked = []
    monkeypatch.setattr(compile_cache, "compile_into", lambda units, *args: asked.extend(units))
    if has_compiler:
        monkeypatch.setattr(obtain, "launcher", lambda unit: None)
    else:
        monkeypatch.setattr(obtain, "installed_toolchain", lambda: None)
    with pytest.warns(RuntimeWarning, match=f"{path}: built from other sources"):
        if has_compiler:
            with caplog.at_level("INFO", "cute_kernels.compile"):
                compile_cache.warmup(UNITS)
            assert asked == list(UNITS)
            assert all(f"compiling {unit.name}" in caplog.text for unit in UNITS)
        else:
            with pytest.raises(obtain.CompilerUnavailableError, match=f"{path} is built from"):
                compile_cache.warmup(UNITS)


def test_a_bundle_that_is_not_there_is_said_once(built, tmp_path, monkeypatch):
    missing = tmp_path / "mistyped"
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", f"{missing}:{built}")
    with pytest.warns(RuntimeWarning, match=f"CUTE_KERNELS_BUNDLE: {missing} is no dir") as caught:
        assert bundle.find(UNIT.key) and bundle.find(UNIT.key)
    assert len(caught) == 1


@pytest.mark.parametrize("mode", (0, 0o400), ids=oct)
@pytest.mark.parametrize("where", (".", ".."))
def test_a_bundle_that_may_not_be_read_is_said_and_passed_over(built, tmp_path, mode, where):
    """Its own directory or the one above it, which may be listed or not. With and without a
    compiler, in the way that this release of Python has of looking into directories."""
    folder = copy_store(built, tmp_path / "above" / "bundle")
    closed = folder if where == "." else folder.parent
    closed.chmod(mode)
    code = f"""
import warnings
from cute_kernels import compile_cache
from cute_kernels.compile import bundle, obtain
from tests.compile_cache.helpers import UNIT
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert bundle.find(UNIT.key) is None and not bundle.has(UNIT.key)
(said,) = [str(each.message) for each in caught]
assert said == "CUTE_KERNELS_BUNDLE: {folder} cannot be read: Permission denied", said
"""
    try:
        ask(tmp_path / "cache", code=code, plain=True, CUTE_KERNELS_BUNDLE=str(folder))
    finally:
        closed.chmod(0o755)
