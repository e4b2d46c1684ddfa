"""Says so where the tests against vLLM cannot run."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from kvcache.integrations.vllm import VLLM_VERSION
from tests.requires import requires


@pytest.mark.parametrize("package", ("vllm", "flashinfer"))
def test_what_these_tests_stand_on_is_installed(package):
    requires(package=package, no_gpu=True)


def test_this_vllm_is_the_one_the_integration_is_for():
    requires(package="vllm")
    assert version("vllm").startswith(f"{VLLM_VERSION}.")
