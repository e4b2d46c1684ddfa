"""Compiling one variant of the widening kernel (imports the DSL; no GPU needed)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.attention.decode_sm90.build import addresses, query_offsets, zeros
from cute_kernels.attention.widen_sm90 import kernel as definition
from cute_kernels.attention.widen_sm90.config import WidenConfig


def compile_widen(config: WidenConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    addresses_type, strides_type = definition.operand_types(config)
    return cute.compile(
        definition.WidenSm90(config),
        query_offsets(),
        addresses(addresses_type, BFloat16),
        zeros(strides_type),
        zeros(definition.Sizes),
        zeros(definition.Target),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
