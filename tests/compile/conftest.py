"""The compiled variants, once a test run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.compile.variants import Report, compile_all


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What `compile_all` returns. One test process compiles, the others wait and read its file."""
    from filelock import FileLock

    shared: Path = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # pytest-xdist: a folder in that of the run
        shared = shared.parent
    path = shared / "compiled.json"
    with FileLock(shared / "compiled.lock"):
        if not path.exists():
            text = json.dumps(compile_all(tmp_path_factory.mktemp("variants")), indent=1)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
    return json.loads(path.read_text(encoding="utf-8"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first test to ask waits for all variants: minutes, on a machine that is busy."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.timeout(1500))
