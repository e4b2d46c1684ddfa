"""Bundles: what is loaded, what is refused, and that the compiler is not needed. No GPU.

That a loaded kernel computes the right thing is what the GPU tests prove, when they run with
CUTE_KERNELS_BUNDLE set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cute_kernels.attention.decode_sm90.config import make_config
from cute_kernels.compile import bundle, key
from cute_kernels.compile.key import compile_key

CONFIG = make_config(64, 8, "bf16", 64)
TARGET = "sm_90a"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with one real kernel, built as a user builds it."""
    directory = tmp_path_factory.mktemp("bundle")
    command = [sys.executable, "-m", "cute_kernels.compile.build", "--out", str(directory)]
    command += ["--match", f"{CONFIG.name}$", "--workers", "1"]
    subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    return directory


@pytest.fixture
def copy(built, tmp_path, monkeypatch) -> Path:
    """A copy of the bundle that a test may spoil, named by the environment variable."""
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tmp_path.chmod(0o755)
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path))
    return tmp_path


def library(directory: Path) -> Path:
    return directory / f"{compile_key(CONFIG, TARGET).file_stem}.so"


def test_the_bundle_holds_the_kernel_and_its_manifest(built):
    assert library(built).exists()
    manifest = json.loads(library(built).with_suffix(".json").read_text())
    assert manifest["name"] == CONFIG.name
    assert manifest["target"] == TARGET
    assert manifest["parameters"]["head_size"] == 64
    assert {file.suffix for file in built.iterdir()} == {".so", ".json"}, "scratch files are left"


def test_a_kernel_is_found_and_checks_its_arguments(copy):
    launch = bundle.find(compile_key(CONFIG, TARGET))
    with pytest.raises(TypeError, match="Expects 5 parameters"):
        launch(1, 2)


def test_neither_the_compiler_nor_its_package_is_needed(copy):
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
from cute_kernels.attention.decode_sm90.config import make_config
from cute_kernels.attention.decode_sm90.op import compiled
launch = compiled(make_config(64, 8, "bf16", 64), {TARGET!r})
try:
    launch(1, 2)
except TypeError as error:
    print("called:", error)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "called: Expects 5 parameters" in done.stdout, done.stderr


def test_without_the_variable_nothing_is_looked_up(built, monkeypatch):
    monkeypatch.delenv("CUTE_KERNELS_BUNDLE", raising=False)
    assert bundle.find(compile_key(CONFIG, TARGET)) is None


def test_the_first_directory_that_has_it_wins(copy, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", os.pathsep.join(["", str(empty), str(copy)]))
    assert bundle.find(compile_key(CONFIG, TARGET)) is not None


def refused(copy: Path, reason: str) -> None:
    with pytest.warns(UserWarning, match=reason):
        assert bundle.find(compile_key(CONFIG, TARGET)) is None


def test_a_truncated_library_is_refused(copy):
    whole = library(copy).read_bytes()
    library(copy).write_bytes(whole[: len(whole) // 2])
    refused(copy, "checksum")


def test_a_library_without_a_manifest_is_refused(copy):
    library(copy).with_suffix(".json").unlink()
    refused(copy, "no readable manifest")


def test_a_broken_manifest_is_refused(copy):
    library(copy).with_suffix(".json").write_text('{"digest": ')
    refused(copy, "no readable manifest")


def test_another_kernels_manifest_is_refused(copy):
    path = library(copy).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "0" * 64}))
    refused(copy, "that of another kernel")


def test_another_tvm_ffi_is_refused(copy):
    path = library(copy).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "tvm_ffi": "9.9.0"}))
    refused(copy, "built for TVM-FFI 9.9.0")


@pytest.mark.parametrize("mode", (0o777, 0o775))
def test_a_directory_that_others_can_write_is_refused(copy, mode):
    copy.chmod(mode)
    refused(copy, "others can write")


def test_a_library_that_others_can_write_is_refused(copy):
    library(copy).chmod(0o666)
    refused(copy, "others can write")


def test_a_foreign_owner_is_refused(copy, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if copy.stat().st_uid == 0:  # root's files are everybody's, so give the library away
        os.chown(library(copy), 54321, 54321)
    refused(copy, "belongs to user")


def test_keys_differ_in_every_parameter_and_in_the_sources(monkeypatch):
    base = compile_key(CONFIG, TARGET)
    others = [
        compile_key(replace(CONFIG, rows=16), TARGET),
        compile_key(replace(CONFIG, stages=CONFIG.stages - 1), TARGET),
        compile_key(replace(CONFIG, q_dtype="fp16"), TARGET),
        compile_key(CONFIG, "sm_100a"),
    ]
    monkeypatch.setattr(key, "source_fingerprint", lambda: "another")
    others.append(compile_key(CONFIG, TARGET))
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert compile_key(CONFIG, TARGET).name == base.name
