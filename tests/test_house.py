"""The house rules that a program can check: CONTRIBUTING.md says why each of them exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUILT = {"__pycache__", "build", "dist"}
MAX_LINES = 400
MAX_ENVIRONMENT_VARIABLES = 6


def repository_files() -> list[Path]:
    """Files of the work tree, less caches, build products and hidden folders other than .ci."""
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in BUILT
            and not name.endswith(".egg-info")
            and (name == ".ci" or not name.startswith("."))
        ]
        found += [Path(folder, name) for name in names if not name.endswith((".pyc", ".pyo"))]
    return sorted(found)


FILES = repository_files()
PYTHON_FILES = [path for path in FILES if path.suffix == ".py"]
PACKAGE_FILES = [
    path for path in PYTHON_FILES if path.relative_to(ROOT).parts[0] in ("cute_kernels", "kvcache")
]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=relative(path))


def test_the_walk_sees_the_repository():
    seen = {relative(path) for path in FILES}
    assert {".ci/run", "Makefile", "cute_kernels/__init__.py", "tests/test_house.py"} <= seen
    assert not any(name.startswith((".git/", ".venv/")) for name in seen)


def test_code_files_are_short():
    code = [path for path in FILES if path.suffix in (".py", ".sh") or path.name == "Makefile"]
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in code}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_file_names_a_path_of_the_workplace():
    # Spelled so that this file does not match itself.
    outside = re.compile(rb"\.\./" + rb"shared|(?<![\w./-])/" + rb"work/")
    assert [relative(path) for path in FILES if outside.search(path.read_bytes())] == []


def uses_of_raw_mlir(tree: ast.AST) -> list[int]:
    """Lines that import `cutlass._mlir` or call `inline_asm`."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            hit = any(alias.name.startswith("cutlass._mlir") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            hit = any(name.startswith("cutlass._mlir") for name in names)
        elif isinstance(node, ast.Call):
            hit = getattr(node.func, "attr", getattr(node.func, "id", None)) == "inline_asm"
        else:
            continue
        if hit:
            lines.append(node.lineno)
    return lines


def test_inline_ptx_and_mlir_live_in_dsl_py_only():
    found = {relative(path): uses_of_raw_mlir(parse(path)) for path in PYTHON_FILES}
    assert {name for name, lines in found.items() if lines} - {"cute_kernels/dsl.py"} == set()


@pytest.mark.parametrize(
    "source",
    (
        "from cutlass import _mlir",
        "from cutlass._mlir.dialects import llvm",
        "import cutlass._mlir.ir as ir",
        "def f():\n    llvm.inline_asm(None, [], 'nop;', '')",
    ),
)
def test_every_use_of_mlir_is_seen(source):
    assert uses_of_raw_mlir(ast.parse(source))


def test_the_linter_skips_nothing():
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    settings = {*ruff, *ruff.get("lint", {}), *ruff.get("format", {})}
    skipping = {name for name in settings if "exclude" in name or "per-file" in name}
    assert skipping == set()
    assert not [relative(path) for path in FILES if path.name in ("ruff.toml", ".ruff.toml")]
    switch = re.compile(r"#\s*(ruff|flake8)\s*:\s*noqa|#\s*fmt\s*:\s*off", re.IGNORECASE)
    switched_off = [p for p in PYTHON_FILES if switch.search(p.read_text(encoding="utf-8"))]
    assert [relative(path) for path in switched_off] == []


def between(text: str, name: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    assert text.count(begin) == text.count(end) == 1, f"README.md needs one {begin} and one {end}"
    return text.split(begin)[1].split(end)[0].strip()


def test_the_readme_support_table_is_the_registry():
    from cute_kernels.registry import support_table_markdown

    table = support_table_markdown().strip()
    assert between(README, "support-table") == table, f"paste this into README.md:\n{table}"


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE))


@pytest.mark.parametrize("name", ("README.md", "CONTRIBUTING.md", ".ci/run"))
def test_every_make_command_that_we_name_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`|exec )make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named
    assert named <= make_targets()


def test_readme_links_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", *map(relative, (ROOT / "docs").glob("*.md"))):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def test_the_readme_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run(
        [sys.executable, "-c", blocks[0]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([2, 16, 128]) torch.Size([16, 2])\n"


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that reach for `os.environ` or `os.getenv`, however they are imported."""
    names = {"environ", "environb", "getenv", "getenvb"}
    lines = []
    for node in ast.walk(tree):
        by_attribute = isinstance(node, ast.Attribute) and node.attr in names
        by_import = isinstance(node, ast.ImportFrom) and names & {a.name for a in node.names}
        if by_attribute or by_import:
            lines.append(node.lineno)
    return lines


def test_environment_variables_are_read_in_one_place():
    readers = {relative(path) for path in PACKAGE_FILES if environment_reads(parse(path))}
    assert readers <= {"cute_kernels/env.py"}


def test_environment_variables_are_few():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE_FILES)
    assert len(set(re.findall(r"\bCUTE_KERNELS_[A-Z_]+", text))) <= MAX_ENVIRONMENT_VARIABLES


@pytest.mark.parametrize("source", ("os.environ['A']", "os.getenv('A')", "from os import environ"))
def test_every_environment_read_is_seen(source):
    assert environment_reads(ast.parse(source))


def test_one_version():
    import cute_kernels
    import kvcache

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert kvcache.__version__ == cute_kernels.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(cute_kernels.__version__)}\b", changelog, re.MULTILINE)
