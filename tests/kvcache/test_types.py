"""Arguments of the wrong kind get a TypeError (or ValueError) that names them, nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvcache
from kvcache.models import layer_kinds
from tests.kvcache.helpers import Layer, config

TABLE = np.zeros((2, 3), dtype=np.int32)
FIELDS = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2}
NVFP4 = kvcache.get_kv_cache_dtype("nvfp4")
CONFIG_TAKERS = (
    kvcache.can_run,
    kvcache.explain,
    kvcache.get_supported_kernel_block_sizes_for_config,
    kvcache.nearest_kv_cache_dtype,
    kvcache.select_kernel,
    kvcache.supports_quant_query_input,
    lambda given: kvcache.classify_batch(given, 1),
    lambda given: kvcache.get_preferred_block_size_for_config(64, given),
    lambda given: kvcache.largest_kernel_block_within(given, 1, 1, 1),
)
MTP = (kvcache.propagate_mtp_scales, kvcache.check_mtp_scales)


def mapped(**changes):
    given = {
        "draft_names": ["layers.0"],
        "target_names": ["layers.0"],
        "draft_layer_types": ["full_attention"],
        "target_layer_types": ["full_attention"],
    }
    return kvcache.map_draft_to_target(**(given | changes))


CALLS = {
    "table is a list": (
        lambda: kvcache.split_block_table([[1]], 128, 64),
        "block_table: got a list",
    ),
    "table is numpy": (
        lambda: kvcache.split_block_table(TABLE, 128, 64),
        "block_table: got a numpy.ndarray; accepted: a tensor",
    ),
    "block is numpy": (
        lambda: kvcache.split_block_table(torch.zeros(1, 1).int(), np.int64(128), 64),
        "manager_block: got",
    ),
    "query tokens are a bool": (
        lambda: kvcache.select_kernel(config(), True),
        "query_tokens: got a bool; accepted: an int",
    ),
    "most tokens of a page are text": (
        lambda: kvcache.plan_pages([kvcache.LayerGroup("a", config(), 1)], max_block_size="64"),
        "max_block_size: got a str; accepted: an int",
    ),
    "dtypes are names": (
        lambda: kvcache.check_same_cache_format(("nvfp4", None), ("nvfp4", None)),
        r"writer\[0\]: got a str; accepted: a KVCacheDType and a ScaleLayout or None",
    ),
    "a layout is a name": (
        lambda: kvcache.check_same_cache_format((NVFP4, None), (NVFP4, "linear")),
        r"reader\[1\]: got a str",
    ),
    "a dtype without a layout": (
        lambda: kvcache.check_same_cache_format(NVFP4, NVFP4),
        "writer: got a cute_kernels.formats.KVCacheDType",
    ),
    "one config": (lambda: kvcache.select_common_block_size(config()), "configs: got a"),
    "configs are dicts": (
        lambda: kvcache.select_common_block_size([FIELDS]),
        r"configs\[0\]: got a dict; accepted: AttentionConfigs",
    ),
    "draft is a dict": (
        lambda: kvcache.can_share_cache(config(), FIELDS),
        "draft: got a dict; accepted: an AttentionConfig",
    ),
    "groups are configs": (
        lambda: kvcache.plan_pages([config()]),
        r"groups\[0\]: got a kvcache.config.AttentionConfig; accepted: LayerGroups",
    ),
    "query tokens": (lambda: kvcache.classify_batch(config(), [1]), "query_tokens: got a list"),
    "capability": (lambda: kvcache.capability_of(90), "capability: got a int"),
    "capability list": (
        lambda: kvcache.AttentionConfig(**FIELDS, capability=[9, 0]),
        r"capability: got \[9, 0\]",
    ),
    "capability of truths": (
        lambda: kvcache.AttentionConfig(**FIELDS, capability=(True, False)),
        r"capability: got \(True, False\)",
    ),
    "capability of four digits": (
        lambda: kvcache.capability_of("sm_1000"),
        "capability: got 'sm_1000'",
    ),
    "capability in other digits": (lambda: kvcache.capability_of("sm_\u0669\u0660"), "capability"),
    "sinks are text": (
        lambda: kvcache.AttentionConfig(**FIELDS, sinks="no"),
        "sinks: got 'no'; accepted: True or False",
    ),
    "softcap is its value": (
        lambda: kvcache.AttentionConfig(**FIELDS, softcap=float("nan")),
        "softcap: got nan; accepted: True or False",
    ),
    "half a layer": (
        lambda: kvcache.LayerGroup("a", config(), 1.5),
        "num_layers: got a float; accepted: an int",
    ),
    "layers are a truth": (
        lambda: kvcache.LayerGroup("a", config(), True),
        "num_layers: got a bool; accepted: an int",
    ),
    "a group of a dict": (lambda: kvcache.LayerGroup("a", FIELDS, 1), "config: got a dict"),
    "heads are text": (
        lambda: kvcache.bytes_per_token("fp8", "4", 64),
        "num_kv_heads: got a str; accepted: an int > 0",
    ),
    "dtype is a torch dtype": (
        lambda: kvcache.get_kv_cache_dtype(torch.float8_e4m3fn),
        "kv_cache_dtype: got torch.float8_e4m3fn",
    ),
    "dtype is a list": (lambda: kvcache.is_quantized_kv_cache(["fp8"]), "kv_cache_dtype: got"),
    "scales are text": (lambda: kvcache.KVScales("0.5", 1.0), "k scale: got a str"),
    "scales are None": (lambda: kvcache.KVScales(None, 1.0), "k scale: got a NoneType"),
    "scales are rows": (
        lambda: kvcache.KVScales(np.ones((2, 2)), 1.0),
        "k scale: got a numpy.ndarray; accepted: a number, or numbers",
    ),
    "absmax is a dict": (
        lambda: kvcache.suggest_scales({"a": 1.0}, 1.0, "fp8"),
        "k_absmax: got a dict",
    ),
    "current scales": (
        lambda: kvcache.suggest_scales(1.0, 1.0, "fp8", (1.0, 1.0)),
        "current: got a tuple; accepted: KVScales or None",
    ),
    "model is a list": (lambda: kvcache.save_scales([Layer()]), "model: got a list"),
    "model is a dict": (lambda: kvcache.sync_host_copies({}), "model: got a dict"),
    "state is a list": (lambda: kvcache.restore_scales(Layer(), []), "state: got a list"),
    "layers are a list": (lambda: MTP[0]([], {}, {}), "draft_layers: got a list"),
    "targets are a module": (lambda: MTP[1]({}, Layer(), {}), "target_layers: got a"),
    "map is a list": (lambda: MTP[0]({}, {}, []), "draft_to_target: got a list"),
    "one name": (lambda: mapped(draft_names="layers.0"), "draft_names: got a str"),
    "names are ints": (lambda: mapped(target_names=[0]), r"target_names\[0\]: got a int"),
    "types are None": (lambda: mapped(draft_layer_types=None), "draft_layer_types: got a NoneType"),
    "indices are text": (
        lambda: mapped(target_layer_types={"0": "full_attention"}),
        "target_layer_types: index '0': got a str; accepted: an int",
    ),
    "types by index are None": (
        lambda: mapped(draft_layer_types={0: None}),
        r"draft_layer_types\[0\]: got a NoneType",
    ),
    "shared layers": (
        lambda: mapped(num_kv_shared_layers=0.5),
        "num_kv_shared_layers: got a float; accepted: an int",
    ),
    "a path": (lambda: layer_kinds("config.json", "fp8", "sm_90a"), "model: got a str"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_wrong_kinds_of_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    "given", (FIELDS, None, "fp8", np.zeros(3)), ids=("dict", "None", "str", "np")
)
@pytest.mark.parametrize("function", CONFIG_TAKERS)
def test_a_configuration_must_be_one(function, given):
    with pytest.raises(TypeError, match=r"^config: got a .*; accepted: an AttentionConfig$"):
        function(given)


@pytest.mark.parametrize(
    "values",
    ((0.5, 0.25), [0.5, 0.25], np.array([0.5, 0.25]), torch.tensor([0.5, 0.25])),
    ids=("tuple", "list", "numpy", "tensor"),
)
def test_arrays_of_every_library_are_scales(values):
    assert kvcache.KVScales(values, np.float32(0.5)) == kvcache.KVScales((0.5, 0.25), 0.5)
    assert kvcache.suggest_scales(values, np.array(448.0), "fp8").v == (1.0,)


@pytest.mark.parametrize(
    "given",
    (
        b"\x01\x02",
        bytearray(b"\x01"),
        memoryview(b"\x01"),
        {0: 0.5, 1: 0.25},
        {0.5, 0.25},
        True,
        [0.5, True],
        np.array([True]),
        np.True_,
        torch.tensor([True]),
    ),
    ids=lambda given: f"{type(given).__module__}.{type(given).__name__}",
)
def test_scales_are_no_bytes_no_mappings_and_no_truth_values(given):
    accepted = r"accepted: a number, or numbers, one per KV head$"
    with pytest.raises(TypeError, match=rf"^v scale: got a .*; {accepted}"):
        kvcache.KVScales(0.5, given)
    with pytest.raises(TypeError, match=rf"^k_absmax: got a .*; {accepted}"):
        kvcache.suggest_scales(given, 0.5, "fp8")
