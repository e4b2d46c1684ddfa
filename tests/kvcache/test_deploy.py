"""The operators' recipes agree with the package: requirements, options, variables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from kvcache.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
WHEELHOUSE = ROOT / "deploy" / "wheelhouse.sh"
# A host that only loads kernels has the first of its own and needs none of the others.
NOT_SERVING = {"torch", "nvidia-cutlass-dsl[cu13]", "cuda-python"}


def test_a_serving_host_installs_what_the_package_needs_less_the_compiler():
    text = (ROOT / "deploy" / "requirements-serve.txt").read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        requirement
        for requirement in project["dependencies"]
        if re.split("[<>=]", requirement)[0] not in NOT_SERVING
    ]
    assert listed == sorted(needed)
    assert len(needed) == len(project["dependencies"]) - len(NOT_SERVING)


def test_the_modules_of_a_serving_host_import_nothing_else():
    """`cuda` and the DSL are not there; torch is."""
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "cutlass", "nvidia_cutlass_dsl"):
            raise ImportError("not on a serving host: " + name)
sys.meta_path.insert(0, Blocker())
import cute_kernels, kvcache.cli, kvcache.doctor
from cute_kernels.compile import library
for name in cute_kernels.__all__:
    getattr(cute_kernels, name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_options_that_the_recipes_name_exist():
    known = CliRunner().invoke(main, ["warmup", "--help"]).output
    section = DOCUMENT.split("## Build a bundle")[1].split("## Install")[0]
    table = [line for line in section.splitlines() if line.startswith("| `--")]
    named = {option for line in table for option in re.findall(r"`(--[a-z-]+)`", line)}
    named |= set(re.findall(r"--[a-z-]+", DOCKERFILE.split("kvcache warmup")[1].split("&&")[0]))
    assert len(named) > 8
    assert {option for option in named if option not in known} == set()


def test_variables_that_the_document_lists_are_read():
    table = DOCUMENT.split("| variable |")[1].split("\n\n")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    source = (ROOT / "cute_kernels" / "env.py").read_text(encoding="utf-8")
    assert listed == {"CUTE_KERNELS_BUNDLE", "CUTE_KERNELS_CACHE_DIR", "CC"}
    assert listed <= set(re.findall(r'environ\.get\("(\w+)"', source))
    assert "ENV CUTE_KERNELS_BUNDLE=/opt/cute-kernels/bundle" in DOCKERFILE


def test_the_minimum_driver_is_the_doctors():
    from kvcache import doctor

    assert f"The minimum driver is {doctor.MIN_DRIVER_NAME} (CUDA 13.0)" in DOCUMENT
    assert doctor.MIN_CUDA_DRIVER == 13000


def test_the_wheelhouse_script_parses():
    script = ROOT / "deploy" / "wheelhouse.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert script.stat().st_mode & 0o111


def test_recipes_replace_a_build_of_the_same_version():
    """The version stays what it is between releases; pip would keep what is installed."""
    for text in (DOCKERFILE, WHEELHOUSE.read_text(encoding="utf-8")):
        (line,) = [
            line for line in text.splitlines() if "install" in line and "cute-kernels" in line
        ]
        assert "--no-deps" in line and "--force-reinstall" in line


def test_wheels_are_built_from_sources_alone(tmp_path):
    """Not from an old build/ of the checkout. A script in pip's place says what it is given."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    for name in ("cute_kernels", "kvcache", "deploy"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "build" / "lib" / "cute_kernels").mkdir(parents=True)
    (tree / "build" / "lib" / "cute_kernels" / "old.py").write_text("")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nlast=$(eval echo \\${$#})\n"
        f'test "$3" != wheel || (cd "$last" && find . -type f) > {tmp_path}/given\n'
    )
    python.chmod(0o755)
    command = [str(tree / "deploy" / "wheelhouse.sh"), str(out), str(python)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = set((tmp_path / "given").read_text().splitlines())
    packages = [tree / "cute_kernels", tree / "kvcache"]
    files = [path for package in packages for path in package.rglob("*") if path.is_file()]
    sources = {f"./{path.relative_to(tree)}" for path in files}
    assert given == sources | {"./pyproject.toml", "./README.md", "./LICENSE"}
    assert "./cute_kernels/compile/runtime_stub.c" in given


def test_the_image_is_built_from_what_git_keeps():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert {"build", ".venv", ".git", "dist"} <= set(ignored)
    kept = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    for name in kept:
        bare = name.strip("/")
        assert name == "*.py[cod]" or bare in ignored or f"**/{bare}" in ignored, name
