"""The public names of `kvcache`: complete, lazy and light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache

WITH_TENSORS = {".calibration", ".layer_scales", ".mtp", ".scales"}
LIGHT = sorted(name for name, home in kvcache._HOME.items() if home not in WITH_TENSORS)


def test_the_lists_agree():
    assert sorted(kvcache.__all__) == sorted({"__version__", *kvcache._HOME})
    assert set(kvcache.__all__) <= set(dir(kvcache))
    source = ast.parse(Path(kvcache.__file__).read_text(encoding="utf-8"))
    for_type_checkers = {
        alias.name: f".{node.module}"
        for block in source.body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    }
    assert for_type_checkers == kvcache._HOME


@pytest.mark.parametrize("name", sorted(kvcache._HOME))
def test_every_name_resolves(name):
    value = getattr(kvcache, name)
    assert getattr(value, "__module__", "kvcache").split(".")[0] in ("kvcache", "cute_kernels")
    assert kvcache.__dict__[name] is value


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'get_dtype'"):
        _ = kvcache.get_dtype


def test_planning_needs_no_torch():
    code = f"""
import sys, kvcache
for name in {LIGHT!r}:
    getattr(kvcache, name)
config = kvcache.AttentionConfig(512, 32, 4, "fp8")
kvcache.explain(config), kvcache.select_common_block_size([config], 256)
kvcache.plan_pages([kvcache.LayerGroup("all", config, 2)])
print({{"torch", "numpy", "cutlass", "tvm_ffi", "cuda", "transformers"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_no_name_loads_the_dsl_or_initialises_cuda():
    code = """
import sys, torch
before = set(sys.modules)
from kvcache import *
import kvcache
assert all(name in globals() for name in kvcache.__all__)
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(new & {"cutlass", "tvm_ffi", "cuda", "transformers"}, torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "set() False\n"), done.stderr
