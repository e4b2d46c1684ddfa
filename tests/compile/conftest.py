"""The compiled variants, once a test run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compile import indexer_variants, prefill_variants, store_variants, variants


def _once(
    name: str,
    compile_all: Callable[[Path], Any],
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
) -> Any:
    """What `compile_all` returns. One test process compiles, the others wait and read its file."""
    from filelock import FileLock

    shared: Path = folders.getbasetemp()
    if hasattr(request.config, "workerinput"):  # pytest-xdist: a folder in that of the run
        shared = shared.parent
    path = shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not path.exists():
            text = json.dumps(compile_all(folders.mktemp(name)), indent=1)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def report(request, tmp_path_factory) -> dict[str, Any]:
    """The decode kernel's variants, see variants.py."""
    return _once("decode", variants.compile_all, request, tmp_path_factory)


@pytest.fixture(scope="session")
def prefill_report(request, tmp_path_factory) -> dict[str, Any]:
    """The prefill kernel's variants, see prefill_variants.py."""
    return _once("prefill", prefill_variants.compile_all, request, tmp_path_factory)


@pytest.fixture(scope="session")
def store_report(request, tmp_path_factory) -> dict[str, Any]:
    """The store kernels' units, see store_variants.py."""
    return _once("stores", store_variants.compile_all, request, tmp_path_factory)


@pytest.fixture(scope="session")
def indexer_report(request, tmp_path_factory) -> dict[str, Any]:
    """The indexer kernels' units, see indexer_variants.py."""
    return _once("indexer", indexer_variants.compile_all, request, tmp_path_factory)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first test to ask waits for all variants: minutes, on a machine that is busy."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.timeout(1500))
