"""`kvcache warmup` and `kvcache cache`, as an operator runs them. Real kernels, no GPU."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from cute_kernels.compile import store
from cute_kernels.compile.key import Toolchain, installed_toolchain
from kvcache import doctor
from kvcache.cli import main
from kvcache.warmup import plan_warmup
from tests.kvcache.helpers import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
# One decode kernel; other kernels may be asked for as well.
ONE = ("--model", str(CONFIGS / "gpt-oss-120b.json"), "--kv-cache-dtype", "fp8")
ONE_TOKEN = ("--max-model-len", "1")


@pytest.fixture(autouse=True)
def user_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "user-cache"))
    monkeypatch.delenv("CUTE_KERNELS_BUNDLE", raising=False)
    return tmp_path / "user-cache"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """What `kvcache warmup` writes, by the command in a process of its own."""
    out = tmp_path_factory.mktemp("warmup") / "bundle"
    command = [sys.executable, "-m", "kvcache", "warmup", *ONE, *ONE_TOKEN, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "decode_sm90_fp8_e4m3_d64_r8_bf16_box64" in done.stdout
    assert "0 were there, 0 failed in" in done.stdout and str(out) in done.stdout
    return out


def run(*arguments: str):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def loaded(*arguments: str):
    done = run(*arguments, "--json")
    assert "Traceback" not in done.output, done.output
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    """A bundle that a test may spoil."""
    folder = tmp_path / "copy"
    folder.mkdir(mode=0o755)
    for path in (*bundle.glob("*.so"), *bundle.glob("*.json")):
        (folder / path.name).write_bytes(path.read_bytes())
        (folder / path.name).chmod(0o644)
    return folder


def planned() -> int:
    model = json.loads((CONFIGS / "gpt-oss-120b.json").read_text())
    return len(plan_warmup(model, ["sm_90a"], "fp8", max_query_tokens=1).units)


def test_a_second_warmup_compiles_nothing(bundle):
    before = {path: path.stat().st_mtime_ns for path in bundle.iterdir()}
    code, report = loaded("warmup", *ONE, *ONE_TOKEN, "--out", bundle)
    assert code == 0
    assert (report["compiled"], report["present"], report["failed"]) == (0, planned(), 0)
    assert report["seconds"] < 30 and report["unserved"] == []
    assert {path: path.stat().st_mtime_ns for path in bundle.iterdir()} == before
    (unit,) = [unit for unit in report["units"] if unit["kernel"] == "decode_sm90"]
    assert unit["name"] == "decode_sm90_fp8_e4m3_d64_r8_bf16_box64" and unit["target"] == "sm_90a"
    assert Path(unit["path"]).exists() and len(unit["digest"]) == 64
    assert unit["reasons"] == [
        "sliding_attention (18 layers) on sm_90a, TP 1",
        "full_attention (18 layers) on sm_90a, TP 1",
    ]


def test_a_bundle_is_used_and_not_compiled_again(bundle, user_cache, monkeypatch):
    """As calls use it. With --out everything is to be in there."""
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(bundle))
    code, report = loaded("warmup", *ONE, *ONE_TOKEN)
    assert code == 0 and (report["compiled"], report["present"]) == (0, planned())
    assert {Path(unit["path"]).parent for unit in report["units"]} == {bundle}
    assert not user_cache.exists()
    monkeypatch.setattr("cute_kernels.compile.pool.installed_toolchain", lambda: None)
    assert loaded("warmup", *ONE, *ONE_TOKEN, "--out", bundle)[0] == 0
    done = run("warmup", *ONE, *ONE_TOKEN, "--out", user_cache)
    assert done.exit_code == 1 and f"{planned()} kernels are not in {user_cache}" in done.output
    assert "decode_sm90_fp8_e4m3_d64_r8_bf16_box64 for sm_90a" in done.output


def test_a_dry_run_writes_nothing(user_cache):
    code, report = loaded("warmup", *ONE, "--tp", "1,8", "--dry-run")
    assert code == 0 and report["directory"] == str(user_cache) and not user_cache.exists()
    names = [unit["name"] for unit in report["units"] if unit["kernel"] == "decode_sm90"]
    assert names == [f"decode_sm90_fp8_e4m3_d64_r{rows}_bf16_box64" for rows in (8, 16, 32, 64)]
    assert report["planned"] == len(report["units"])
    done = run("warmup", *ONE, "--tp", "1,8", "--dry-run")
    assert f"{len(report['units'])} kernels would be in {user_cache}" in done.output


def test_options_of_the_plan():
    options = ("--page-size", "16,64", "--dtype", "fp16", "--max-batched-tokens", "1", "--dry-run")
    _, report = loaded("warmup", *ONE, *options)
    names = {unit["name"] for unit in report["units"] if unit["kernel"] == "decode_sm90"}
    assert names == {f"decode_sm90_fp8_e4m3_d64_r8_fp16_box{box}" for box in (16, 64)}


def test_batch_invariant_calls_need_no_other_kernel():
    _, report = loaded("warmup", *ONE, *ONE_TOKEN, "--batch-invariant", "--dry-run")
    attention = [unit["name"] for unit in report["units"] if "store" not in unit["kernel"]]
    assert attention == ["decode_sm90_fp8_e4m3_d64_r8_bf16_box64"]


def test_a_models_folder_will_do(tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "llama-3-70b.json").read_text())
    done = run("warmup", "--model", tmp_path, "--kv-cache-dtype", "fp8", "--dry-run")
    assert done.exit_code == 0 and "_d128_r8_bf16_box64" in done.output


def test_what_is_not_served_fails_by_name():
    code, report = loaded("warmup", *ONE, "--arch", "sm_90a,sm_100a", "--dry-run")
    assert code == 1 and len(report["unserved"]) == 2 and report["planned"] >= 4
    done = run("warmup", *ONE, "--arch", "sm_100a", "--dry-run")
    assert (
        done.exit_code == 1
        and "not served: sliding_attention (18 layers) on sm_100a" in done.output
    )


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--tp", "1,x"), "'1,x' is no list of numbers like 1,2,4"),
        (("--tp", "0"), "'0' has a number below 1"),
        (("--tp", "3"), "3 devices cannot share 64 query and 8 KV heads"),
        (("--tp", ""), "'' has no number in it"),
        (("--tp", ","), "',' has no number in it"),
        (("--page-size", ","), "',' has no number in it"),
        (("--arch", ""), "capability: got ''"),
        (("--arch", ","), "capability: got ','"),
        (("--arch", "hopper"), "capability: got 'hopper'"),
        (("--kv-cache-dtype", "fp9"), "got 'fp9'"),
        (("--out", "a:b"), "'a:b' has a ':', which separates directories in CUTE_KERNELS_BUNDLE"),
    ),
)
def test_wrong_options(options, message):
    done = run("warmup", *ONE, *options, "--dry-run")
    assert done.exit_code != 0 and message in done.output and "Traceback" not in done.output


def test_json_of_a_command_that_fails(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    done = run("warmup", "--model", tmp_path, "--json")
    assert done.exit_code == 1
    assert "holds an object, this is a list" in json.loads(done.stdout)["error"]
    assert "Error: " in done.stderr


def test_a_path_that_is_no_text_is_printed_as_it_is(copy):
    folder = os.fsencode(copy.parent) + b"/by\xffte"
    os.rename(copy, folder)
    victim = sorted(path for path in os.listdir(folder) if path.endswith(b".json"))[0]
    os.unlink(os.path.join(folder, victim))
    for command in ("verify", "prune"):
        arguments = [sys.executable, "-m", "kvcache", "cache", command, folder]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, timeout=300)
        assert folder in done.stdout and b"Traceback" not in done.stderr


def test_ls_and_verify(bundle, monkeypatch):
    code, rows = loaded("cache", "ls", bundle)
    assert code == 0 and len(rows) == planned()
    row = next(row for row in rows if row["name"].startswith("decode_sm90"))
    assert row["loadable"] and row["state"] == "" and row["bytes"] > 50_000 and row["dsl"]
    done = run("cache", "ls", bundle)
    assert row["name"] in done.output and f"{len(rows)} kernels, " in done.output
    assert loaded("cache", "verify", bundle) == (
        0,
        {"checked": len(rows), "bad": [], "stale": [], "problems": []},
    )
    # Without folders: what calls look into.
    assert loaded("cache", "ls") == (0, [])
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(bundle))
    assert loaded("cache", "ls") == (0, rows)


def test_verify_and_prune_find_what_is_broken(copy):
    victim = sorted(copy.glob("*.so"))[0]
    victim.write_bytes(victim.read_bytes()[:1000])
    count = len(list(copy.glob("*.so")))
    code, report = loaded("cache", "verify", copy)
    assert code == 1 and report["checked"] == count
    (bad,) = report["bad"]
    assert bad["path"] == str(victim) and bad["state"] == "its checksum is not the manifest's"
    assert f"{count} checked, 1 bad" in run("cache", "verify", copy).output
    assert loaded("cache", "prune", copy, "--dry-run")[1] == [
        {"path": str(victim), "why": "its checksum is not the manifest's"}
    ]
    assert victim.exists()
    assert "1 removed" in run("cache", "prune", copy).output
    assert not victim.exists() and not victim.with_suffix(".json").exists()
    assert len(list(copy.glob("*.so"))) == count - 1
    assert loaded("cache", "verify", copy)[0] == 0


def swap_names(folder: Path) -> set[str]:
    """Each of two kernels, library and manifest, gets the name of the other."""
    first, second = sorted(folder.glob("*.so"))[:2]
    for suffix in (".so", ".json"):
        one, other = first.with_suffix(suffix), second.with_suffix(suffix)
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    return {str(first), str(second)}


def lose_a_library(folder: Path) -> set[str]:
    victim = sorted(folder.glob("*.so"))[0]
    victim.unlink()
    return {str(victim.with_suffix(".json"))}


@pytest.mark.parametrize(
    ("spoil", "why"),
    (
        (swap_names, "its manifest is that of another kernel"),
        (lose_a_library, "its library is missing"),
    ),
)
def test_what_no_call_can_load_is_bad(copy, monkeypatch, spoil, why):
    spoiled = spoil(copy)
    code, report = loaded("cache", "verify", copy)
    assert code == 1 and {row["path"] for row in report["bad"]} == spoiled
    assert {row["state"] for row in report["bad"]} == {why} and report["problems"] == []
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(copy))
    finding = list(doctor._directories())[-1]
    assert finding.check == "bundle" and finding.status == "broken"
    assert f"{len(spoiled)} of {planned()} kernels are refused: {why}" in finding.found
    _, removed = loaded("cache", "prune", copy)
    assert removed == [{"path": path, "why": why} for path in sorted(spoiled)]
    assert loaded("cache", "verify", copy)[0] == 0
    assert len(list(copy.glob("*.json"))) == planned() - len(spoiled)


def test_prune_removes_what_no_call_asks_for(copy, user_cache, monkeypatch):
    """From the user's cache. A bundle may serve hosts with another compiler or version."""
    newer = Toolchain("9.9.9", installed_toolchain().tvm_ffi)
    monkeypatch.setattr("kvcache.cli_cache.installed_toolchain", lambda: newer)
    assert loaded("cache", "prune", copy) == (0, [])
    monkeypatch.setattr(store, "source_fingerprint", lambda: "newer")
    assert loaded("cache", "prune", copy) == (0, [])
    copy.rename(user_cache)
    assert loaded("cache", "prune", "--dry-run") == loaded("cache", "prune", user_cache)
    assert list(user_cache.glob("*.so")) == list(user_cache.glob("*.json")) == []


def test_verify_tells_a_bundle_of_other_sources(copy, user_cache, monkeypatch):
    monkeypatch.setattr(store, "source_fingerprint", lambda: "newer")
    code, report = loaded("cache", "verify", copy)
    assert code == 1 and report["bad"] == [] and len(report["stale"]) == planned()
    assert report["problems"] == [
        f"{copy} has kernels of other sources only: build it anew with this version"
    ]
    done = run("cache", "verify", copy)
    assert f"{planned()} checked, 0 bad, {planned()} of other sources" in done.output
    # In the user's cache they are its past.
    copy.rename(user_cache)
    assert loaded("cache", "verify")[0] == 0


def test_a_directory_without_kernels_is_no_bundle(tmp_path, monkeypatch):
    (tmp_path / "decode_x-sm_90a-0123456789abcdef-dsl4_ffi0.json").write_text("{}")
    code, report = loaded("cache", "verify", tmp_path)
    assert code == 1 and report["problems"] == [f"{tmp_path} has no kernels"]
    assert loaded("cache", "verify")[0] == 0, "an empty user's cache is none to complain of"
    missing = tmp_path / "mistyped"
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(missing))
    code, report = loaded("cache", "verify")
    assert code == 1 and report["problems"] == [f"{missing} is no directory"]
    done = run("cache", "ls")
    assert done.exit_code == 1 and f"{missing} is no directory" in done.output


def test_names_are_whole_in_a_pipe(copy):
    done = run("cache", "ls", copy)
    assert all(path.name.split("-sm_")[0] in done.output for path in copy.glob("*.so"))


def test_commands_name_a_directory_that_cannot_be_read(copy, monkeypatch):
    def closed(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store.Store, "_names", closed)
    for command in ("ls", "verify", "prune"):
        done = run("cache", command, copy)
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
        assert f"{copy} cannot be read: Permission denied" in done.output


def test_prune_all_and_the_default_folder(copy, user_cache, monkeypatch):
    """Bundles are named or left alone."""
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(copy))
    assert loaded("cache", "prune", "--all") == (0, [])
    assert list(copy.glob("*.so"))
    copy.rename(user_cache)
    assert len(loaded("cache", "prune", "--all")[1]) == planned()
    assert not list(user_cache.glob("*.so"))


def test_prune_removes_what_crashes_left(copy):
    dead, alive = copy / ".building-host-x-1", copy / ".building-host-x-2"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "half.o").write_bytes(b"x")
    old = time.time() - 7200
    os.utime(dead, (old, old))
    lone = copy / "decode_x-sm_90a-0123456789abcdef-dsl4_ffi0.json"
    lone.write_text("{}")
    _, removed = loaded("cache", "prune", copy)
    assert {row["path"] for row in removed} == {str(dead), str(lone)}
    assert not dead.exists() and not lone.exists() and alive.exists()


def test_prune_leaves_what_is_not_ours(tmp_path):
    ours = tmp_path / "decode_x-sm_90a-0123456789abcdef-dsl4_8_1_ffi0.1.15.so"
    others = [tmp_path / name for name in ("libfoo.so", "libfoo.json", "a-0123456789abcdef-b.so")]
    for path in (ours, *others):
        path.write_bytes(b"x")
    for arguments in ((), ("--all",)):
        run("cache", "prune", *arguments, tmp_path)
        assert not ours.exists() and all(path.exists() for path in others)
    assert loaded("cache", "ls", tmp_path) == (0, [])


def test_prune_leaves_what_chmod_mends(copy):
    copy.chmod(0o777)
    assert loaded("cache", "verify", copy)[0] == 1
    assert loaded("cache", "prune", copy) == (0, [])
    copy.chmod(0o755)
    assert loaded("cache", "verify", copy)[0] == 0
    victim = sorted(copy.glob("*.so"))[0]
    victim.chmod(0o777)
    assert loaded("cache", "prune", copy) == (0, []) and victim.exists()


def test_ls_says_what_is_wrong_in_a_narrow_terminal(copy):
    victim = sorted(copy.glob("*.so"))[0]
    victim.with_suffix(".json").unlink()
    assert "no readable" in " ".join(run("cache", "ls", copy).output.split())


@pytest.mark.parametrize(
    "arguments",
    (
        ("warmup", *ONE, "--workers", "0"),
        ("warmup", "--model", "no/such/file"),
        ("cache", "verify", "no/such/folder"),
        ("doctor", "--frobnicate"),
    ),
)
def test_wrong_usage_is_said_on_stderr_only(arguments):
    done = run(*arguments, "--json")
    assert done.exit_code == 2 and done.stdout == "" and "Error: " in done.stderr


def test_commands_need_no_torch_and_no_dsl():
    code = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('kvcache', run_name='__main__')\n"
        "finally:\n"
        "    print({'torch', 'cutlass', 'tvm_ffi', 'cuda'} & set(sys.modules))"
    )
    for arguments in (("warmup", *ONE, "--dry-run"), ("cache", "ls"), ("doctor", "--help")):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.stdout.endswith("set()\n"), done.stderr
