"""Misspelt options of the vLLM plugin are no missing ones."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvcache.integrations.vllm import logger
from kvcache.integrations.vllm.options import options


def given(additional_config):
    return options(SimpleNamespace(additional_config=additional_config))


@pytest.mark.parametrize(
    ("config", "kv_scales"),
    (
        ({}, None),
        ({"cute_kernels": {}}, None),
        ({"cute_kernels": {"kv_scales": None}}, None),
        ({"cute_kernels": {"kv_scales": "a"}, "other_plugin": {"x": 1}}, "a"),
        (object(), None),  # vLLM takes objects here too, of other plugins
    ),
)
def test_known_options_and_those_of_others_pass(config, kv_scales, caplog):
    with caplog.at_level(logging.WARNING, logger.name):
        assert given(config).get("kv_scales") == kv_scales
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "error", "message"),
    (
        (
            {"cute_kernels": {"kv_scale": "a"}},
            ValueError,
            r"additional_config\['cute_kernels'\]: got 'kv_scale'; accepted: kv_scales",
        ),
        ({"cute_kernels": {"kv_scales": "a", "kvscales": "a"}}, ValueError, ".*: got 'kvscales'"),
        ({"cute_kernels": {3: "a"}}, ValueError, ".*: got 3; accepted"),
        ({"cute_kernels": "a"}, TypeError, ".*: got a str; accepted: a mapping with kv_scales"),
        ({"cute_kernels": None}, TypeError, ".*: got a NoneType"),
        (
            {"cute_kernels": {"kv_scales": 3}},
            TypeError,
            r"additional_config\['cute_kernels'\]\['kv_scales'\]: got a int; accepted: the path",
        ),
        (
            {"cute-kernels": {"kv_scales": "a"}},
            ValueError,
            "additional_config: got 'cute-kernels'; accepted: cute_kernels",
        ),
        ({"CuteKernels": {}}, ValueError, "additional_config: got 'CuteKernels'"),
    ),
)
def test_what_is_not_known_is_refused_by_name(config, error, message):
    with pytest.raises(error, match=f"^{message}"):
        given(config)


@pytest.mark.parametrize("name", ("cute_kernel", "cute_kernals", "qute_kernels", "kv_scales"))
def test_a_section_that_is_almost_ours_is_warned_about(name, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger.name):
        assert given({name: {"kv_scales": "a"}}) == {}
    assert f"{name!r} is not read" in caplog.text
