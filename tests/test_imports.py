"""Importing the packages is free of side effects, and the two layers depend one way only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cute_kernels

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "kvcache")
PUBLIC = [name for name in cute_kernels.__all__ if not name.startswith("__")]

DSL = ("cutlass", "tvm_ffi")
HEAVY = (*DSL, "cuda", "transformers", "triton")

# Run after the import under test. What torch itself loads is torch's business.
REPORT = f"""
import sys
heavy = {{name for name in sys.modules if name.split(".")[0] in {HEAVY!r}}} - before
assert not heavy, f"imported: {{sorted(heavy)}}"
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "CUDA is initialised"
"""
BEFORE = "import sys\nbefore = set(sys.modules)\n"
BEFORE_WITH_TORCH = f"import torch\n{BEFORE}"

BLOCK_THE_DSL = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {DSL!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def check(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_import_is_light(package):
    check(f"{BEFORE}import {package}\n{REPORT}\nassert torch is None, 'torch is imported'")


@pytest.mark.parametrize("name", PUBLIC)
def test_resolving_a_public_name_is_light(name):
    check(f"{BEFORE_WITH_TORCH}import cute_kernels\ncute_kernels.{name}\n{REPORT}")


@pytest.mark.parametrize("package", PACKAGES)
def test_star_import_without_the_dsl(package):
    check(f"{BLOCK_THE_DSL}\nfrom {package} import *")


def test_cpu_call_without_the_dsl():
    check(f"""{BLOCK_THE_DSL}{BEFORE_WITH_TORCH}
from cute_kernels import flash_attn_varlen_func
q, kv = torch.ones(1, 2, 64, dtype=torch.bfloat16), torch.ones(3, 1, 64, dtype=torch.bfloat16)
starts = [torch.tensor([0, n], dtype=torch.int32) for n in (1, 3)]
out = flash_attn_varlen_func(q, kv, kv, 1, starts[0], 3, cu_seqlens_k=starts[1])
assert torch.equal(out, q)
{REPORT}""")


def test_the_guards_of_this_file_see_a_heavy_import():
    for name in HEAVY:
        fake = f"import types\nsys.modules['{name}.part'] = types.ModuleType('part')\n"
        assert "imported: " in run(BEFORE + fake + REPORT).stderr
    for name in DSL:
        assert "blocked: " in run(f"{BLOCK_THE_DSL}\nimport {name}").stderr


def test_a_forked_child_can_import_and_resolve():
    check("""
import os, cute_kernels
child = os.fork()
if child == 0:
    import kvcache
    os._exit(0 if kvcache.__version__ == cute_kernels.__version__ else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'flash_attn'"):
        _ = cute_kernels.flash_attn


def test_public_names_are_listed_before_they_are_resolved():
    check("import cute_kernels\nassert set(cute_kernels.__all__) <= set(dir(cute_kernels))")


def imported_names(source: str) -> set[str]:
    """Modules named in import statements and in calls of `import_module` and `__import__`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names.add(first.value)
    return names


def test_cute_kernels_never_imports_kvcache():
    modules = sorted((ROOT / "cute_kernels").rglob("*.py"))
    assert modules
    for module in modules:
        tops = {name.split(".")[0] for name in imported_names(module.read_text(encoding="utf-8"))}
        assert "kvcache" not in tops, f"{module.relative_to(ROOT)} imports kvcache"


@pytest.mark.parametrize(
    "source",
    (
        "import kvcache.blocks as b",
        "def f():\n    from kvcache import blocks",
        "import importlib\nimportlib.import_module('kvcache')",
    ),
)
def test_every_way_to_import_is_seen(source):
    assert {"kvcache", "kvcache.blocks"} & imported_names(source)
