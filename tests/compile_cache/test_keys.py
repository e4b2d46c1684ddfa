"""Keys: every parameter and every source counts, nothing else does, and none collide."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels.compile import key
from cute_kernels.compile.plans import KERNELS, CompileUnit, all_units
from tests.compile_cache.helpers import TARGET, UNIT

PACKAGE = Path(cute_kernels.__file__).parent


def test_a_change_in_any_source_invalidates(tmp_path):
    package = tmp_path / "cute_kernels"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, package, ignore=ignored)
    base = key.fingerprint(package)
    assert base == key.fingerprint(PACKAGE), "where the package lies does not count"
    seen = {base}
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".c")]
    for path in sources:
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        seen.add(key.fingerprint(package))
        path.write_bytes(content)
    assert len(seen) == 1 + len(sources)
    assert key.fingerprint(package) == base
    (package / "compile" / "runtime_stub.c").rename(package / "compile" / "stub.c")
    seen.add(key.fingerprint(package))
    (package / "new.py").write_text("")
    seen.add(key.fingerprint(package))
    assert len(seen) == 3 + len(sources)


def test_no_two_units_share_a_key_or_a_file():
    units = all_units()
    assert len({unit.key.digest for unit in units}) == len(units) > 0
    assert len({unit.key.file_stem for unit in units}) == len(units)
    # Two architectures of one variant, too.
    other = CompileUnit(UNIT.kernel, UNIT.config, "sm_100a")
    assert other.key.digest != UNIT.key.digest and other.key.file_stem != UNIT.key.file_stem


def test_file_names_are_readable_and_safe():
    for unit in all_units():
        assert unit.key.file_stem.startswith(f"{unit.config.name}-{unit.target}-")
        assert re.fullmatch(r"[\w.-]+", unit.key.file_stem)
        label = key.Toolchain("4.8.1/../x", "0.1 rc").label
        assert re.fullmatch(r"[\w.]+", label) and "/" not in label


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_every_field_of_a_variant_counts(kernel):
    config = kernel.variants()[0]
    base = key.compile_key(config, TARGET)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        other = f"{value}x" if isinstance(value, str) else value + 1
        changed = dataclasses.replace(config, **{field.name: other})
        assert key.compile_key(changed, TARGET).digest != base.digest, field.name


def test_a_key_is_the_same_in_every_process():
    """No hash of a set, an address or an insertion order comes in."""
    (parameters,) = {unit.key.parameters for unit in (UNIT, CompileUnit.from_json(UNIT.to_json()))}
    assert json.dumps(json.loads(parameters), sort_keys=True, separators=(",", ":")) == parameters


def test_what_cannot_be_part_of_a_key_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Config:
        name: str = "x"
        shape: tuple = (1, 2)

    with pytest.raises(TypeError, match=r"Config.shape: \(1, 2\) cannot be part of a key"):
        key.compile_key(Config(), TARGET)


@pytest.mark.parametrize("unit", all_units()[::7], ids=lambda unit: unit.config.name)
def test_units_survive_json(unit):
    assert CompileUnit.from_json(json.loads(json.dumps(unit.to_json()))) == unit
