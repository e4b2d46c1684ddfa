"""What the plugin puts into vLLM, and that it never takes vLLM down."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.config import CacheConfig, set_current_vllm_config
from vllm.config.attention import AttentionConfig
from vllm.config.cache import KV_CACHE_DTYPES, is_known_kv_cache_dtype
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from kvcache.integrations import vllm as plugin
from kvcache.integrations.vllm import dtypes
from tests.vllm.helpers import vllm_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = AttentionBackendEnum.CUSTOM


@pytest.fixture
def _restored():
    yield
    register_backend(CUSTOM, plugin.BACKEND)


def test_the_entry_point_is_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert points == {"cute_kernels": "kvcache.integrations.vllm:register"}


def test_custom_is_a_complete_backend():
    backend = CUSTOM.get_class()
    assert f"{backend.__module__}.{backend.__qualname__}" == plugin.BACKEND
    for cls, base in (
        (backend, AttentionBackend),
        (backend.get_impl_cls(), AttentionImpl),
        (backend.get_builder_cls(), AttentionMetadataBuilder),
    ):
        assert issubclass(cls, base)
        assert not cls.__abstractmethods__
    # vLLM looks an enum member up by this name for every layer.
    assert AttentionBackendEnum[backend.get_name()] is CUSTOM


def test_users_name_both_backends():
    assert AttentionConfig(backend="CUSTOM").backend is CUSTOM
    named = AttentionConfig(backend=plugin.NVFP4_NAME).backend
    assert named.get_path() == plugin.NVFP4_BACKEND


def test_registering_again_changes_nothing():
    names = list(KV_CACHE_DTYPES)
    assert plugin.register() is None
    assert names == KV_CACHE_DTYPES
    assert CUSTOM.get_path() == plugin.BACKEND


def test_the_switch_back_to_the_native_backend(monkeypatch, _restored):
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "native")
    plugin.register()
    assert CUSTOM.get_path() == plugin.NATIVE_BACKEND
    assert CUSTOM.get_class().get_name() == "FLASH_ATTN"
    assert CUSTOM.get_class().get_impl_cls() is FlashAttentionBackend.get_impl_cls()
    assert CUSTOM.get_class().full_cls_name() == FlashAttentionBackend.full_cls_name()
    monkeypatch.delenv("CUTE_KERNELS_VLLM")
    plugin.register()
    assert CUSTOM.get_path() == plugin.BACKEND


@pytest.mark.parametrize("options", ({}, {"kv_scales": "s.safetensors"}))
def test_the_native_backend_says_that_nothing_reads_the_scales(
    monkeypatch, caplog, _restored, options
):
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "native")
    plugin.register()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = vllm_config()
    config.additional_config = {"cute_kernels": options}
    with caplog.at_level(logging.WARNING, plugin.logger.name), set_current_vllm_config(config):
        for _ in range(2):
            CUSTOM.get_class().get_impl_cls()
    assert caplog.text.count("nothing reads kv_scales") == len(options)


@pytest.mark.parametrize("value", ("nativ", "ours", "1"))
def test_another_value_of_the_switch_registers_nothing(monkeypatch, _restored, value):
    monkeypatch.setenv("CUTE_KERNELS_VLLM", value)
    CUSTOM.clear_override()
    reason = plugin.register()
    assert reason == f"CUTE_KERNELS_VLLM: got {value!r}; accepted: native, or not set"
    assert not CUSTOM.is_overridden()


def test_another_plugins_backend_stays(caplog, monkeypatch, _restored):
    register_backend(CUSTOM, "somebody.elses.Backend")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, plugin.logger.name):
        assert plugin.register() is None
    assert CUSTOM.get_path() == "somebody.elses.Backend"
    assert "somebody.elses.Backend already" in caplog.text


@pytest.mark.parametrize("found", ("0.34.0", "0.3.3", "1.33.0"))
def test_another_vllm_is_left_alone_with_the_reason(monkeypatch, found):
    monkeypatch.setattr(plugin, "version", lambda name: found)
    assert plugin.register() == f"vllm {found} is installed, this integration is for 0.33"


@pytest.mark.parametrize("error", (ImportError, AttributeError, TypeError))
def test_a_missing_interface_is_a_reason_not_a_crash(monkeypatch, error):
    def broken():
        raise error("no register_kv_cache_dtype")

    monkeypatch.setattr(dtypes, "register_kv_cache_dtypes", broken)
    reason = plugin.register()
    assert reason == f"vllm has another interface: {error.__name__}: no register_kv_cache_dtype"


def test_the_module_imports_no_vllm():
    code = "import kvcache.integrations.vllm, sys; assert not {'vllm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("name", ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse"))
def test_our_dtypes_are_nvfp4_to_vllm(name):
    assert is_known_kv_cache_dtype(name)
    assert CacheConfig(cache_dtype=name).cache_dtype == name
    assert STR_DTYPE_TO_TORCH_DTYPE[name] is torch.uint8
    assert get_kv_quant_mode(name) is KVQuantMode.NVFP4
    with pytest.raises(ValueError, match="nvfp4_foo"):
        CacheConfig(cache_dtype="nvfp4_foo")
