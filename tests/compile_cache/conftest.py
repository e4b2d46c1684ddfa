"""One real kernel, compiled once a test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cute_kernels.compile import errors, obtain
from cute_kernels.compile.cache import KernelCache
from cute_kernels.compile.pool import compile_into
from tests.compile_cache.helpers import UNIT


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `UNIT`; tests that change it copy it."""
    directory = tmp_path_factory.mktemp("built")
    (outcome,) = compile_into([UNIT], directory, 1)
    assert outcome.result == "compiled", outcome.error
    return directory


@pytest.fixture(scope="session")
def given_bundles() -> str | None:
    """CUTE_KERNELS_BUNDLE as the caller of the tests set it."""
    return os.environ.get("CUTE_KERNELS_BUNDLE")


@pytest.fixture(autouse=True)
def fresh(given_bundles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a new process: nothing loaded, nothing warned of; an empty user cache, no bundles."""
    cache = tmp_path / "user-cache"
    monkeypatch.setattr(obtain, "KERNELS", KernelCache())
    monkeypatch.setattr(obtain.STATE, "compiled", [])
    monkeypatch.setattr(obtain.STATE, "frozen", None)
    monkeypatch.setattr(errors, "_GIVEN", set())
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(cache))
    monkeypatch.delenv("CUTE_KERNELS_BUNDLE", raising=False)
    return cache
