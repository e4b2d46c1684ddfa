"""vLLM's own planner and selector over our backend's answers."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

from kvcache import AttentionConfig, bytes_per_token
from kvcache.integrations.vllm.backend import CuteAttentionBackend
from kvcache.integrations.vllm.dtypes import config_of_spec
from tests.vllm.helpers import layer, pretend_device, vllm_config

HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)
NVFP4 = ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
ASKED = {
    "head_size": 512,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "fp8",
    "block_size": None,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": HOPPER,
    "attn_type": AttentionType.DECODER,
}


def reasons(**changes) -> list[str]:
    return CuteAttentionBackend.validate_configuration(**(ASKED | changes))


def spec(head_size: int, kv_heads: int, block_size: int = 64, **fields):
    cls = SlidingWindowSpec if "sliding_window" in fields else FullAttentionSpec
    common = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    return cls(
        block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, **(common | fields)
    )


@pytest.mark.parametrize("head_size", (64, 128, 256, 512))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kv_cache_dtype", ("fp8", "fp8_e4m3", *NVFP4))
def test_what_the_contract_has_is_valid(head_size, dtype, kv_cache_dtype):
    given = {"head_size": head_size, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    assert reasons(**given) == []
    assert reasons(**given, has_sink=True, use_per_head_quant_scales=True) == []
    assert reasons(**given, has_sliding_window=True, use_kv_connector=True) == []


@pytest.mark.parametrize(
    ("changes", "names"),
    (
        ({"head_size": 96}, ("head_size not supported", "head size 96, the kernel has")),
        ({"dtype": torch.float32}, ("dtype not supported",)),
        ({"kv_cache_dtype": "fp8_e5m2"}, ("kv_cache_dtype not supported", "got 'fp8_e5m2'")),
        ({"kv_cache_dtype": "auto"}, ("kv_cache_dtype not supported", "the store is missing")),
        # Our kernels read these; our store, which each step needs, does not write them.
        *(
            (
                {"kv_cache_dtype": name, "head_size": 128},
                ("the store is missing (cute_kernels.reshape_and_cache does not write bf16",),
            )
            for name in (None, "auto", "bfloat16")
        ),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, ("kv_cache_dtype not supported",)),
        (
            {"kv_cache_dtype": "nvfp4_mse", "device_capability": BLACKWELL},
            ("compute capability not", "'nvfp4_mse' on sm_100: the reader is missing"),
        ),
        ({"block_size": 16}, ("block_size not supported", "accepted: multiples of 64")),
        ({"block_size": 528}, ("block_size not supported", "accepted: multiples of 64")),
        ({"use_mla": True}, ("MLA not supported", "latent K and V (MLA), which the kernel does")),
        (
            {"use_mla": True, "kv_cache_dtype": "nvfp4_4over6"},
            ("MLA not supported", "one latent vector a token that is both K and V"),
        ),
        ({"use_sparse": True}, ("sparse not supported",)),
        ({"use_mm_prefix": True}, ("partial multimodal", "bidirectional spans, which")),
        (
            {"device_capability": BLACKWELL},
            ("compute capability not", "on sm_100: the reader is missing"),
        ),
        ({"attn_type": AttentionType.ENCODER_ONLY}, ("attention type",)),
        ({"use_non_causal": True}, ("non-causal attention not supported",)),
        ({"use_batch_invariant": True}, ("batch invariance not supported",)),
        ({"use_dcp": True}, ("DCP not supported",)),
        ({"use_pcp": True}, ("PCP not supported",)),
        ({"use_rswa": True}, ("R-SWA not supported",)),
        ({"use_adaptive_verification": True}, ("device-cpu query lens mismatch",)),
    ),
    ids=lambda each: ",".join(each) if isinstance(each, dict) else "",
)
def test_what_it_has_not_is_refused_by_name(changes, names):
    found = "\n".join(reasons(**changes))
    for name in names:
        assert name in found


def test_a_reason_for_every_kv_cache_dtype_of_vllm_that_we_do_not_read():
    from vllm.config.cache import KV_CACHE_DTYPES

    ours = set(CuteAttentionBackend.supported_kv_cache_dtypes)
    assert ours == {"fp8", "fp8_e4m3", *NVFP4}
    for name in KV_CACHE_DTYPES:
        assert bool(reasons(kv_cache_dtype=name)) == (name not in ours), name


@pytest.mark.parametrize(
    ("manager", "kernel"),
    ((64, 64), (128, 128), (256, 256), (1600, 1600), (1056, None), (16, None)),
)
def test_vllms_planner_picks_a_kernel_block(manager, kernel):
    """Sizes that it may pick are whole manager blocks: any multiple of 64 is one load a tile."""
    specs = [spec(512, 4, manager), spec(256, 16, manager, sliding_window=1024)]
    backends = [CuteAttentionBackend] * 2
    if kernel is None:
        with pytest.raises(ValueError, match=r"CUSTOM: \[64, MultipleOf\(64\)\]"):
            select_common_block_size(manager, backends, specs)
    else:
        assert select_common_block_size(manager, backends, specs) == kernel


def test_a_manager_block_is_split_where_another_backend_needs_64():
    class Only64(CuteAttentionBackend):
        @classmethod
        def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
            return [64]

    specs = [spec(512, 4, 1600)] * 2
    assert select_common_block_size(1600, [CuteAttentionBackend, Only64], specs) == 64


def test_the_sizes_are_vllms_own_type():
    for asked in (None, spec(512, 4), spec(256, 16, sliding_window=1024)):
        assert CuteAttentionBackend.get_supported_kernel_block_sizes(asked) == [64, MultipleOf(64)]


def test_the_smallest_size_of_a_sliding_window_layer_is_one_that_the_kernel_wants():
    """A planner starts sliding-window layers from the smallest size that is advertised."""
    sliding = customize_attention_spec(
        CuteAttentionBackend, spec(256, 16, block_size=1, sliding_window=1024)
    )
    per_token = sliding.real_page_size_bytes
    assert per_token == bytes_per_token("fp8", 16, 256)
    for budget, size in ((1, 64), (64 * per_token, 64), (130 * per_token, 128)):
        got = _largest_kernel_block_within(CuteAttentionBackend, per_token, budget, 16, sliding)
        assert got == size


@pytest.mark.parametrize(("default", "preferred"), ((16, 64), (64, 64), (256, 256), (80, 64)))
def test_the_preferred_block_size(default, preferred):
    assert CuteAttentionBackend.get_preferred_block_size(default) == preferred


def test_specs_of_real_layers_become_configurations():
    """Gemma-4's two kinds of layers: the second has other heads, size and window."""
    config = vllm_config()
    full = layer(config, 0, heads=(32, 4), head_size=512).get_kv_cache_spec(config)
    sliding = layer(config, 1, heads=(32, 16), head_size=256, per_layer_sliding_window=1024)
    sliding = sliding.get_kv_cache_spec(config)
    assert config_of_spec(full) == AttentionConfig(512, 4, 4, "fp8")
    assert config_of_spec(sliding) == AttentionConfig(256, 16, 16, "fp8", sliding_window=1024)
    assert (full.block_size, sliding.block_size) == (64, 64)
    for made in (full, sliding):
        used = config_of_spec(made).bytes_per_token * made.block_size
        assert made.page_size_bytes == used


def test_a_spec_that_no_kernel_serves_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(NotImplementedError, match="INT8_PER_TOKEN_HEAD"):
        config_of_spec(spec(64, 1, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD))
    bf16 = spec(64, 1, dtype=torch.bfloat16, kv_quant_mode=KVQuantMode.NONE)
    with pytest.raises(NotImplementedError, match="'bf16': the store is missing"):
        CuteAttentionBackend.get_supported_kernel_block_sizes(bf16)
    pretend_device(monkeypatch, 10)
    with pytest.raises(NotImplementedError, match="'fp8' on sm_100"):
        CuteAttentionBackend.get_supported_kernel_block_sizes(spec(64, 1))


def test_custom_mode_would_be_another_formats():
    """Why our extra dtypes do not use KVQuantMode.CUSTOM: vLLM 0.33 has given its number twice."""
    assert KVQuantMode.CUSTOM is KVQuantMode.OCTAVE_K3V4
    assert not get_kv_quant_mode("nvfp4_mse").is_octave
