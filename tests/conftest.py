"""Options, skips and parametrization that all tests share."""

from __future__ import annotations

import pytest

from tests.cases import DEFAULT_CASES, FULL_CASES
from tests.requires import requires


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full grid of attention cases")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        requires(sm90=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`grid_case` runs over the default grid of cases, or the full one with --full."""
    if "grid_case" in metafunc.fixturenames:
        cases = FULL_CASES if metafunc.config.getoption("--full") else DEFAULT_CASES
        metafunc.parametrize("grid_case", cases, ids=[case.id for case in cases])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Run the test on CPU tensors and, where there is one, on the GPU."""
    return request.param
