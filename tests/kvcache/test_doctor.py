"""`kvcache doctor`: each fault that it names, made on purpose."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cute_kernels.compile import store
from kvcache import doctor
from kvcache.cli import main
from tests.compile_cache.helpers import ask

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def user_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "user-cache"))
    monkeypatch.delenv("CUTE_KERNELS_BUNDLE", raising=False)
    return tmp_path / "user-cache"


def findings(check) -> dict[str, doctor.Finding]:
    return {finding.check: finding for finding in check()}


def only(check) -> doctor.Finding:
    (finding,) = check()
    return finding


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A distribution as pip leaves it; later ones overwrite files of the same path."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record.append(f"{path},sha256={digest.rstrip('=')},{len(text)}")
    (info / "RECORD").write_text("\n".join(record) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """An environment of its own, as far as its distributions go."""
    folder = tmp_path / "site"
    folder.mkdir()
    found = metadata.distributions
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: found(path=[str(folder)]))
    return folder


CU12, CU13 = "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"


def test_the_tested_ranges_are_those_that_we_require():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, tested in doctor.TESTED.items():
        (required,) = [
            text
            for text in project["dependencies"]
            if text.split(">")[0].split("[")[0].strip() == name
        ]
        assert required.endswith(tested)


def test_this_environment():
    packages = findings(doctor._packages)
    assert packages["nvidia-cutlass-dsl"].status == "ok"
    assert packages["nvidia-cutlass-dsl"].found == metadata.version("nvidia-cutlass-dsl")
    files = only(doctor._dsl_files)
    assert files.status == "ok" and "files as their wheels have them" in files.found


@pytest.mark.parametrize("version", ("4.7.0", "4.9.0", "5.0.0"))
def test_a_dsl_outside_the_tested_range(monkeypatch, version):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    finding = findings(doctor._packages)["nvidia-cutlass-dsl"]
    assert finding.status == "broken"
    assert finding.found == f"{version}, outside the tested range >=4.8.0,<4.9"
    assert finding.mend == "pip install 'nvidia-cutlass-dsl>=4.8.0,<4.9'"


@pytest.mark.parametrize("version", ("4.8.0", "4.8.2", "4.8.0.dev1+cu13"))
def test_a_dsl_inside_the_range(monkeypatch, version):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    expected = "broken" if "dev" in version else "ok"  # a preview of the first release is older
    assert findings(doctor._packages)["nvidia-cutlass-dsl"].status == expected


def test_a_torch_for_cuda_12(site, monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0")
    assert list(doctor._torch_build()) == []
    install(site, "nvidia-cuda-runtime-cu12", "12.8.90", {"a": "x"})
    assert "torch is a build for CUDA 12;" in only(doctor._torch_build).found
    install(site, "nvidia-cuda-runtime", "13.0.96", {"b": "x"})
    assert list(doctor._torch_build()) == []


@pytest.mark.parametrize(
    ("build", "driver", "problem"),
    (
        ("+cu130", 13000, None),
        ("+cu132", None, None),
        ("", 13000, None),
        ("+cpu", None, None),
        ("+cpu", 13000, "a build without CUDA, and this machine has a driver"),
        ("+cu126", 13000, "a build for CUDA 12.6"),
        ("+cu118", None, "a build for CUDA 11.8"),
        ("+rocm6.4", 13000, "a build for rocm6.4"),
    ),
)
def test_builds_of_torch(site, monkeypatch, build, driver, problem):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: f"2.13.0{build}")
    monkeypatch.setattr(doctor, "cuda_driver", lambda: driver)
    found = list(doctor._torch_build())
    assert [finding.status for finding in found] == ["broken"] * (problem is not None)
    assert problem is None or f"torch is {problem}; " in found[0].found


def test_missing_packages(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    found = findings(doctor._packages)
    assert found["torch"].status == found["apache-tvm-ffi"].status == "broken"
    assert found["nvidia-cutlass-dsl"].status == "warning"
    assert "kernels come from bundles only" in found["nvidia-cutlass-dsl"].found
    assert list(doctor._dsl_import()) == list(doctor._torch_build()) == []


def test_whole_files_of_one_release(site):
    install(site, CU12, "4.8.0", {"dsl/cu12/lib.so": "twelve"})
    install(site, CU13, "4.8.0", {"dsl/cu13/lib.so": "thirteen"})
    assert only(doctor._dsl_files).status == "ok"


def test_files_of_the_same_path_from_both_cuda_releases(site):
    install(site, CU13, "4.8.0", {"dsl/runtime.so": "thirteen"})
    install(site, CU12, "4.8.0", {"dsl/runtime.so": "twelve"})
    finding = only(doctor._dsl_files)
    assert finding.status == "broken"
    said = f"{CU12} and {CU13} differ in it, on disk is that of {CU12}"
    assert finding.found == f"{site / 'dsl/runtime.so'}: {said}"
    assert f"pip uninstall {CU12} {CU13}" in finding.mend


def test_equal_files_of_the_same_path_are_no_fault(site):
    install(site, CU13, "4.8.0", {"dsl/__init__.py": "same"})
    install(site, CU12, "4.8.0", {"dsl/__init__.py": "same"})
    assert only(doctor._dsl_files).status == "ok"


def test_parts_of_several_releases(site):
    install(site, CU13, "4.8.1", {"dsl/cu13/lib.so": "x"})
    install(site, "nvidia-cutlass-dsl", "4.8.0", {"dsl/a.py": "x"})
    finding = only(doctor._dsl_files)
    assert "parts of several releases: nvidia-cutlass-dsl 4.8.0" in finding.found


@pytest.mark.parametrize("fault", ("changed since it was installed", "No such file"))
def test_files_that_are_not_as_installed(site, fault):
    install(site, CU13, "4.8.0", {f"dsl/{i}.so": "x" for i in range(5)})
    for i in range(5):
        if fault == "No such file":
            (site / f"dsl/{i}.so").unlink()
        else:
            (site / f"dsl/{i}.so").write_text("y")
    finding = only(doctor._dsl_files)
    assert finding.status == "broken" and fault in finding.found
    assert finding.found.endswith("; and 2 more")


def test_no_libraries_for_cuda_13(site):
    install(site, CU12, "4.8.0", {"dsl/cu12/lib.so": "twelve"})
    assert only(doctor._dsl_files).found == "the libraries for CUDA 13 are missing"


def test_a_dsl_that_does_not_import(tmp_path, monkeypatch):
    package = tmp_path / "broken" / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AttributeError('no foo')")
    monkeypatch.chdir(package.parent)  # comes first on the child's path
    finding = only(doctor._dsl_import)
    assert (finding.status, finding.found) == ("broken", "unavailable: AttributeError: no foo")


@pytest.mark.parametrize(
    ("version", "status", "text"),
    (
        (12080, "broken", "too old: it serves CUDA 12.8, the kernels need CUDA 13.0"),
        (13000, "ok", "serves CUDA 13.0"),
        (None, "warning", "none: kernels can be compiled here, not run"),
    ),
)
def test_drivers(monkeypatch, version, status, text):
    monkeypatch.setattr(doctor, "cuda_driver", lambda: version)
    finding = findings(doctor._driver)["driver"]
    assert (finding.status, finding.found) == (status, text)
    assert ("580" in finding.mend) == (status == "broken")


def test_devices(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 580.1'\necho 'NVIDIA H200, 9.0, 580.1'\n")
    smi.chmod(0o755)
    found = only(doctor._devices).found
    assert found == "NVIDIA H200, compute capability 9.0, driver 580.1"
    smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    finding = only(doctor._devices)
    assert (finding.status, finding.found) == ("broken", "No devices were found")


def test_no_c_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    finding = only(doctor._compiler)
    assert finding.status == "warning" and "'no-such-cc' is not there" in finding.found


def test_directories(user_cache, tmp_path, monkeypatch):
    found = findings(doctor._directories)
    assert found["cache"].status == found["bundle"].status == "ok"
    assert found["cache"].found == f"{user_cache}, not there yet"
    user_cache.mkdir()
    user_cache.chmod(0o777)
    finding = findings(doctor._directories)["cache"]
    assert finding.status == "warning" and "others can write" in finding.found
    user_cache.chmod(0o755)
    assert findings(doctor._directories)["cache"].found == f"{user_cache}, 0 kernels"
    kernel = user_cache / "x-sm_90a-0123456789abcdef-dsl4_ffi0.so"
    kernel.write_bytes(b"")
    finding = findings(doctor._directories)["cache"]
    assert finding.status == "broken" and "1 of 1 kernels are refused" in finding.found
    assert "cache prune" in finding.mend
    # What is whole must not be thrown away for its mode.
    kernel.chmod(0o666)
    finding = findings(doctor._directories)["cache"]
    assert "others can write" in finding.found and "chmod go-w" in finding.mend
    assert "prune" not in finding.mend
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "none"))
    assert findings(doctor._directories)["bundle"].found == f"{tmp_path / 'none'} is no directory"
    (tmp_path / "none").mkdir(mode=0o755)
    finding = findings(doctor._directories)["bundle"]
    assert finding.status == "warning" and "0 kernels" in finding.found


KERNEL = "x-sm_90a-0123456789abcdef-dsl4_ffi0"


def bundle_finding(monkeypatch, folder: Path, sources: tuple[str, ...] = ()) -> doctor.Finding:
    """Of a bundle with whole kernels that were built from these sources."""
    entries = [
        store.Entry(folder / KERNEL, {"sources": each}, None, False, 1, 0.0) for each in sources
    ]
    monkeypatch.setattr(store.Store, "entries", lambda self: entries)
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(folder))
    return findings(doctor._directories)["bundle"]


def test_bundles_of_other_sources(tmp_path, monkeypatch):
    ours = store.source_fingerprint()
    assert bundle_finding(monkeypatch, tmp_path, (ours, ours)).status == "ok"
    finding = bundle_finding(monkeypatch, tmp_path, (ours, "older"))
    assert finding.status == "warning" and "1 of 2 kernels are built from other" in finding.found
    finding = bundle_finding(monkeypatch, tmp_path, ("older", "older"))
    assert finding.status == "broken" and "2 of 2 kernels are built from other" in finding.found
    assert "build the bundle anew" in finding.mend


def test_a_bundle_on_a_noexec_mount(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    flags = SimpleNamespace(f_flag=real.f_flag | os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    finding = bundle_finding(monkeypatch, tmp_path, (store.source_fingerprint(),))
    assert finding.status == "broken" and "noexec" in finding.found


@pytest.mark.parametrize("where", ("bundle", "."))
def test_a_bundle_that_this_user_may_not_look_into(tmp_path, where):
    """A folder of mode 700 whose owner is another, or one below it; in a process of its own."""
    closed = tmp_path / where
    (tmp_path / "bundle").mkdir()
    code = """
from kvcache import doctor
finding = list(doctor._directories())[-1]
assert finding.check == "bundle" and finding.status == "broken", finding
assert finding.found.endswith("bundle cannot be read: Permission denied"), finding
assert "chmod a+rx" in finding.mend
"""
    closed.chmod(0)
    try:
        ask(ROOT / "none", code=code, plain=True, CUTE_KERNELS_BUNDLE=str(tmp_path / "bundle"))
    finally:
        closed.chmod(0o755)


@pytest.mark.parametrize("where", ("/proc/none", "/dev/null/none", "file", "file/none"))
def test_a_cache_that_cannot_be_made(where, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / where))
    finding = findings(doctor._directories)["cache"]
    assert finding.status == "warning" and "cannot be made" in finding.found


def test_the_command(monkeypatch):
    checks = (lambda: [doctor.Finding("a", "ok", "fine")],)
    monkeypatch.setattr(doctor, "CHECKS", checks)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0 and done.output == "ok       a: fine\n"
    broken = doctor.Finding("b", "broken", "torn", "sew it")
    monkeypatch.setattr(doctor, "CHECKS", (*checks, lambda: [broken]))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1 and done.output.endswith("broken   b: torn\n         -> sew it\n")
    done = CliRunner().invoke(main, ["doctor", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 1 and report["broken"]
    assert report["findings"][1] == {
        "check": "b",
        "status": "broken",
        "found": "torn",
        "mend": "sew it",
    }
