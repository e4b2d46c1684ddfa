"""Collected where the package vllm is installed; see the Makefile for how it gets there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

HAS_VLLM = find_spec("vllm") is not None and not torch.cuda.is_available()
# Files that cannot be imported, or would find a real device; test_installed.py says why.
collect_ignore_glob = [] if HAS_VLLM else ["test_[!i]*.py"]
if find_spec("flashinfer") is None:
    collect_ignore_glob.append("test_nvfp4_sm100.py")

if HAS_VLLM:
    from kvcache.integrations import vllm as plugin

    @pytest.fixture(scope="session", autouse=True)
    def _registered() -> None:
        assert plugin.register() is None

    @pytest.fixture(autouse=True)
    def _bf16_models():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(before)
