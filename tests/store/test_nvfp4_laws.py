"""A wider scale search never stores a group worse: err(MSE) <= err(4over6) <= err(default).

The error is float32, in the order of the definition, from the bytes that were stored. The real
activations also reproduce the relative errors that the formats are quoted with.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.reference.store import (
    dequantize_nvfp4,
    gather_kv,
    quantize_nvfp4,
    reshape_and_cache,
)
from tests.requires import requires_module
from tests.store.helpers import DATA, SEARCHES, stored_errors

hypothesis = requires_module("hypothesis")
st = hypothesis.strategies

ANY_FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Magnitudes of one group that are near enough to each other for the choice of a scale to matter.
NEAR = st.floats(-8.0, 8.0, width=32)
GROUP = st.one_of(*(st.lists(e, min_size=16, max_size=16) for e in (ANY_FLOAT32, NEAR)))
GLOBAL = st.floats(2.0**-100, 2.0**100, width=32) | st.sampled_from([1.0, 0.01, 2.0**-9])


def check_law(x: torch.Tensor, scale: float) -> list[float]:
    default, four_over_six, mse = (stored_errors(x, scale, dtype) for dtype in SEARCHES)
    assert (four_over_six <= default).all()
    assert (mse <= four_over_six).all()
    return [error.astype("float64").sum() for error in (default, four_over_six, mse)]


@hypothesis.given(GROUP, GLOBAL)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_on_arbitrary_groups(group, scale):
    check_law(torch.tensor([group]), scale)


@pytest.mark.parametrize("distribution", ("normal", "uniform", "heavy", "integer"))
def test_on_distributions(distribution):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(512, 16, generator=generator)
    if distribution == "uniform":
        x = torch.rand(512, 16, generator=generator)
    elif distribution == "heavy":
        x = x**5
    elif distribution == "integer":
        x = (4 * x).round()
    default, four_over_six, mse = check_law(x, 0.01)
    assert mse < four_over_six < default  # each search finds something


def layers() -> dict[str, torch.Tensor]:
    return requires_module("safetensors.torch").load_file(DATA)


def calibrated(x: torch.Tensor) -> float:
    return x.float().abs().max().item() / (6 * 448)


def test_on_real_activations():
    for x in layers().values():
        check_law(x[::4].reshape(-1, 16), calibrated(x))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    (
        ("nvfp4", 0.0091),
        ("nvfp4_4over6", 0.0076),
        ("nvfp4_4over6_k", 0.0078),
        ("nvfp4_mse", 0.0067),
    ),
)
def test_relative_error_of_real_activations(dtype, expected):
    """Through a paged cache; the quoted figures are for keys and values of six layers together."""
    data = layers()
    error = power = 0.0
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(8))
    for layer in ("layer0", "layer3"):
        tokens = [data[f"{layer}.key"], data[f"{layer}.value"]]
        scales = [calibrated(x) for x in tokens]
        pool = torch.full((8, 2, 16, 6, 36), 0x7F, dtype=torch.uint8)
        sides = [pool[:, 0], pool[:, 1]]
        reshape_and_cache(*tokens, *sides, slots, dtype, *scales)
        for x, side, scale, name in zip(tokens, sides, scales, "kv", strict=True):
            y = gather_kv(side, slots, "nvfp4", scale, dtype=torch.float64)
            direct = dequantize_nvfp4(*quantize_nvfp4(x, scale, dtype, side=name), scale)
            assert torch.equal(y.float(), direct)
            error += (y - x.double()).square().sum().item()
            power += x.double().square().sum().item()
    assert round(error / power, 4) == expected
