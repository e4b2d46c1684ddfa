"""Scales as values, and their suggestion from what a layer holds."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
import torch

from kvcache.scales import KVScales, suggest_scales


def test_scales_are_float32_values():
    scales = KVScales(0.1, [0.1, 0.2])
    assert scales.k == (float(np.float32(0.1)),)
    assert scales.v == (float(np.float32(0.1)), float(np.float32(0.2)))
    k, v = scales.tensors()
    assert (k.shape, v.shape, k.dtype, v.dtype) == ((), (2,), torch.float32, torch.float32)
    assert scales == KVScales(torch.tensor(0.1), torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize(
    "bad", (0.0, -0.003, math.nan, math.inf, 1e-50, 1e300, 2.0**-101, 2.0**101, [], [1.0, 0.0])
)
def test_scales_are_checked_as_float32(bad):
    """1e-50 is a fine Python float and 0 on the device."""
    with pytest.raises(ValueError, match="k scale: got "):
        KVScales(bad, 1.0)
    with pytest.raises(ValueError, match="v scale: got "):
        KVScales(1.0, bad)


@pytest.mark.parametrize("shape", ((2, 2), (1, 1), (4, 1)))
def test_tensors_of_more_dimensions_are_not_flattened(shape):
    accepted = r"accepted: \(\), \(1,\) or \(heads,\)"
    message = f"got a torch.Tensor of shape {re.escape(str(shape))}; {accepted}"
    with pytest.raises(ValueError, match=f"^k scale: {message}"):
        KVScales(torch.ones(shape), 1.0)
    with pytest.raises(ValueError, match=f"^v_absmax: {message}"):
        suggest_scales(1.0, torch.ones(shape), "fp8")
    assert KVScales(torch.ones(1), torch.ones(3)) == KVScales(1.0, (1.0,) * 3)


def test_tensors_on_the_meta_device_hold_no_scales():
    for shape in ((), (4,)):
        with pytest.raises(ValueError, match="^v scale: is on the meta device; load the model"):
            KVScales(1.0, torch.ones(shape, device="meta"))


def test_the_ends_of_the_range():
    KVScales(2.0**-100, 2.0**100)
    # Rounds to 2^100 in float32.
    KVScales(1.0, 2.0**100 * (1 + 2.0**-40))


# ---- what they are for -------------------------------------------------------------------------


def test_scales_are_refused_where_another_format_is_stored():
    scales = KVScales(1.0, 1.0, "fp8")
    scales.check_dtype("fp8_e4m3")
    with pytest.raises(ValueError, match="^here: .* for kv_cache_dtype 'fp8', .* 'nvfp4_mse'$"):
        scales.check_dtype("nvfp4_mse", "here")
    with pytest.raises(ValueError, match="'bf16'; accepted: one that has scales"):
        scales.check_dtype("bf16")
    with pytest.raises(ValueError, match=r"do not say .* accepted: KVScales\(k, v, 'fp8'\)"):
        KVScales(1.0, 1.0).check_dtype("fp8")
    with pytest.raises(ValueError, match="'bf16'; accepted: one that has scales"):
        KVScales(1.0, 1.0, "bf16")
    with pytest.raises(ValueError, match="^current: .* 'fp8', .* 'nvfp4'"):
        suggest_scales(1.0, 1.0, "nvfp4", current=scales)


# ---- suggestions -------------------------------------------------------------------------------


def test_suggestions_use_the_whole_range():
    assert suggest_scales(448.0, 44.8, "fp8") == KVScales(1.0, 0.1, "fp8")
    assert suggest_scales(2688.0, 26.88, "nvfp4") == KVScales(1.0, 0.01, "nvfp4")
    searched = suggest_scales(2688.0, 2688.0, "nvfp4_4over6")
    assert searched == KVScales(1.0, 1.0, "nvfp4_4over6")
    heads = suggest_scales(torch.tensor([448.0, 896.0]), [224.0, 0.0], "fp8_e4m3")
    assert heads == KVScales((1.0, 2.0), (0.5, 1.0), "fp8_e4m3")


@pytest.mark.parametrize("absmax", (0.02, 1.0, 3.7, 1e5))
def test_suggested_fp8_scales_neither_clip_nor_waste(absmax):
    (scale,) = suggest_scales(absmax, 1.0, "fp8").k
    code = torch.tensor(absmax / scale).to(torch.float8_e4m3fn).float().item()
    assert code == 448.0


def test_a_global_scale_of_1_is_warned_about():
    """absmax 0.02 under a global scale of 1: block scales are subnormal. It works, it is warned
    about, and the suggestion does not have it."""
    with pytest.warns(UserWarning, match="E4M3 subnormals .* k_absmax / 2688 uses") as caught:
        suggested = suggest_scales(0.02, 100.0, "nvfp4", current=KVScales(1.0, 1.0))
    assert len(caught) == 1
    assert suggested.k == KVScales(0.02 / (6 * 448), 1.0).k
    smallest_normal = torch.finfo(torch.float8_e4m3fn).smallest_normal
    assert 0.02 / 6 / 1.0 < smallest_normal <= 0.02 / 6 / suggested.k[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert suggest_scales(0.02, 100.0, "nvfp4", current=suggested) == suggested


@pytest.mark.parametrize(
    ("dtype", "absmax", "scale", "warning"),
    (
        ("fp8", 0.0156, 1.0, "all codes are E4M3 subnormals"),
        ("fp8", 0.0157, 1.0, None),
        ("fp8", 464.0, 1.0, None),
        ("fp8", 465.0, 1.0, "values are clipped to 448 times the scale"),
        ("nvfp4", 0.0937, 1.0, "all block scales are E4M3 subnormals"),
        ("nvfp4", 0.0938, 1.0, None),
        ("nvfp4", 6 * 464.0, 1.0, None),
        ("nvfp4", 6 * 465.0, 1.0, "values are clipped to 2688 times the scale"),
        ("nvfp4", 0.0, 1.0, None),
    ),
)
def test_where_warnings_begin(dtype, absmax, scale, warning):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        suggest_scales(1.0, absmax, dtype, current=KVScales(1.0, scale))
    messages = [str(each.message) for each in caught]
    assert len(messages) == (warning is not None)
    assert all(each.startswith("v scale ") and warning in each for each in messages)


def test_one_head_is_enough_to_warn():
    with pytest.warns(UserWarning, match="k scale .* clipped"):
        suggest_scales([1.0, 1000.0], 1.0, "fp8", current=KVScales(1.0, 1.0))
    with pytest.raises(ValueError, match="current: k has 3 scales and k_absmax 2 values"):
        suggest_scales([1.0, 2.0], 1.0, "fp8", current=KVScales([1.0] * 3, 1.0))


@pytest.mark.parametrize("absmax", (-1.0, math.nan, math.inf, [], [1.0, -0.5]))
def test_suggestions_refuse(absmax):
    with pytest.raises(ValueError, match="k_absmax: got "):
        suggest_scales(absmax, 1.0, "fp8")
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'bf16'; accepted: one that has"):
        suggest_scales(1.0, 1.0, "bf16")


def test_an_absmax_whose_scale_is_out_of_range():
    with pytest.raises(ValueError, match="v scale: got "):
        suggest_scales(1.0, 1e-35, "fp8")


# ---- state -------------------------------------------------------------------------------------


def test_scales_remember_whether_keys_were_rotated():
    assert KVScales(1.0, 1.0).rotated_keys is False
    found = suggest_scales(1.0, 1.0, "fp8", rotated_keys=True)
    assert found.rotated_keys and found != suggest_scales(1.0, 1.0, "fp8")
    with pytest.raises(ValueError, match="^current: rotated_keys is True, .* holds plain ones"):
        suggest_scales(1.0, 1.0, "fp8", found)
    with pytest.raises(TypeError, match="^rotated_keys: got a int; accepted: True or False"):
        KVScales(1.0, 1.0, rotated_keys=1)


def test_numbers_too_large_for_a_float_are_refused_as_others_are():
    with pytest.raises(ValueError, match="^k scale: got a number too large"):
        KVScales(10**400, 1.0)
    with pytest.raises(ValueError, match="^v_absmax: got a number too large"):
        suggest_scales(1.0, [10**400], "fp8")


def test_k_and_v_have_the_same_heads():
    with pytest.raises(ValueError, match="^v scale: got 3 and 2 k scales; accepted: as many, or"):
        KVScales((1.0, 2.0), (1.0, 2.0, 3.0))
    assert KVScales((1.0, 2.0), 1.0).v == (1.0,)


@pytest.mark.parametrize(
    ("heads", "ranks", "found"),
    (
        (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (4, 4, [(0,), (1,), (2,), (3,)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (2, 1, [(0, 1)]),
    ),
)
def test_a_rank_has_the_scales_of_its_heads(heads, ranks, found):
    scales = KVScales([2.0**i for i in range(heads)], 1.0, "fp8", rotated_keys=True)
    assert [scales.of_rank(rank, ranks) for rank in range(ranks)] == [
        KVScales([2.0**i for i in each], 1.0, "fp8", rotated_keys=True) for each in found
    ]


def test_ranks_that_heads_cannot_be_dealt_out_to():
    with pytest.raises(ValueError, match="^world_size: got 4 for the scales of 6 KV heads"):
        KVScales([1.0] * 6, 1.0).of_rank(0, 4)
    with pytest.raises(ValueError, match="^rank: got 4; accepted: 0 to 3"):
        KVScales([1.0] * 8, 1.0).of_rank(4, 4)
    assert KVScales(1.0, 2.0).of_rank(3, 4) == KVScales(1.0, 2.0)
