"""Compiling the store kernels (imports the DSL; no GPU needed)."""

from __future__ import annotations

from typing import get_type_hints

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.store import kernel as definition
from cute_kernels.store.config import ClaimConfig, StoreConfig


def ones(group):
    """A NamedTuple of numbers, each of its annotated type (values do not matter for compiling)."""
    kinds = get_type_hints(group).values()
    return group(*(ones(kind) if hasattr(kind, "_fields") else kind(1) for kind in kinds))


def slots():
    return make_fake_compact_tensor(Int64, (cute.sym_int64(),), assumed_align=8)


def compile_store(config: StoreConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    side = ones(definition.Side)
    return cute.compile(
        definition.StoreKv(config),
        slots(),
        side,
        side,
        ones(definition.Shape),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )


def compile_claim(config: ClaimConfig, options: str):
    """The compiled launch function of ``ClaimSlots``."""
    return cute.compile(
        definition.ClaimSlots(),
        slots(),
        Int32(1),
        Int64(1),
        Int64(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
