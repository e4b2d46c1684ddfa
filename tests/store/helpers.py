"""What the store tests share: comparing with the oracle, and errors of whole tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cute_kernels.reference.store import quantize_nvfp4
from tests.store import oracle

SEARCHES = ("nvfp4", "nvfp4_4over6", "nvfp4_mse")
DATA = Path(__file__).resolve().parent.parent / "data" / "minilm_kv.safetensors"


def nibbles(data: torch.Tensor) -> np.ndarray:
    """(..., D / 2) bytes to (..., D) codes, the low nibble first."""
    pairs = data.numpy()
    return np.stack((pairs & 15, pairs >> 4), -1).reshape(*pairs.shape[:-1], -1)


def assert_is_the_definition(x: torch.Tensor, scale: float | torch.Tensor, dtype: str) -> None:
    """Quantize groups x (n, 16) and compare every bit with the oracle."""
    data, block_scale = quantize_nvfp4(x, scale, dtype)
    scales, codes = block_scale.view(torch.uint8).flatten().tolist(), nibbles(data).tolist()
    for i, group in enumerate(x.float().numpy()):
        expected = oracle.nvfp4_group(group, np.float32(scale), dtype)
        assert (scales[i], codes[i]) == expected, f"{dtype}, scale {scale}, group {group.tolist()}"


def stored_errors(x: torch.Tensor, scale: float, dtype: str) -> np.ndarray:
    """The float32 error of each group of x (n, 16) as stored, in the order of the definition."""
    data, block_scale = quantize_nvfp4(x, scale, dtype)
    scales = block_scale.view(torch.uint8).flatten().tolist()
    rows = zip(x.float().numpy(), nibbles(data).tolist(), scales, strict=True)
    return np.array([oracle.group_error(*row, np.float32(scale)) for row in rows])
