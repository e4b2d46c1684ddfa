"""Configurations, contracts and layers that the kvcache tests share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cute_kernels import registry
from cute_kernels.registry import KernelContract, PageSizes
from kvcache import contracts
from kvcache.config import AttentionConfig

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
DECODE_SM90, DECODE_16_BITS, PREFILL_SM90, PREFILL_16_BITS, PREFILL_NVFP4 = registry.contracts()


def config(**fields) -> AttentionConfig:
    """Gemma-4's full layers with an fp8 cache on Hopper, unless told otherwise."""
    defaults = {"head_size": 512, "num_q_heads": 32, "num_kv_heads": 4, "kv_cache_dtype": "fp8"}
    return AttentionConfig(**{**defaults, **fields})


def contract(**fields) -> KernelContract:
    """The decode kernel's contract with some fields replaced."""
    return dataclasses.replace(DECODE_SM90, **fields)


def pages(*sizes: int, multiple_of: int) -> dict[str, object]:
    """Fields of a contract that reads and advertises these page sizes."""
    both = PageSizes(sizes, multiple_of)
    return {
        "page_sizes": both,
        "advertised_page_sizes": both,
        "preferred_page_size": min((*sizes, multiple_of)),
    }


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, *kernels: KernelContract) -> None:
    """As if `cute_kernels` had these attention kernels."""
    monkeypatch.setattr(registry, "contracts", lambda: kernels)


def pretend_writers(monkeypatch: pytest.MonkeyPatch, *writers: contracts.Writer) -> None:
    """As if these, besides `kvcache.paged`, stored caches: our store kernels are not there."""
    monkeypatch.setattr(contracts, "WRITERS", (contracts.WRITERS[0], *writers))


class Layer(torch.nn.Module):
    """An attention layer of a serving engine, as far as scales go."""

    def __init__(
        self,
        scale: float | list[float] = 1.0,
        *,
        shape: tuple[int, ...] | None = None,
        registration: str = "buffer",
        dtype: torch.dtype = torch.float32,
        num_kv_heads: int = 4,
        head_size: int = 256,
        extra: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        for number, base in enumerate(("_k_scale", "_v_scale", *extra)):
            # K's and V's scales differ, so that an exchange is seen.
            value = torch.tensor(scale, dtype=dtype) * (1 + number)
            if shape is not None:
                # (1,) keeps the stride 0 of the expansion, as some engines' scales have.
                value = value.expand(shape).clone()
            if registration == "parameter":
                setattr(self, base, torch.nn.Parameter(value, requires_grad=False))
            elif registration == "buffer":
                self.register_buffer(base, value)
            else:
                setattr(self, base, value)
            setattr(self, base + "_float", value.max().item())
            setattr(self, base + "_cpu", value.clone())


def snapshot(layer: torch.nn.Module) -> dict[str, object]:
    """Everything that a layer holds; tensors as (object, bytes, shape, dtype)."""
    found: dict[str, object] = {}
    for name in sorted({*vars(layer), *layer._parameters, *layer._buffers}):
        value = getattr(layer, name)
        if isinstance(value, torch.Tensor):
            flat = value.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
            raw = None if value.is_meta else flat.view(torch.uint8).tolist()
            found[name] = (id(value), raw, value.shape, value.dtype, value.requires_grad)
        elif name.endswith("_float"):
            found[name] = value
    return found
