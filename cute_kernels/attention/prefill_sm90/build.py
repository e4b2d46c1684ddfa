"""Compiling one variant of the prefill kernel (imports the DSL; no GPU needed)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.attention.decode_sm90.build import addresses, query_offsets, zeros
from cute_kernels.attention.prefill_sm90 import kernel as definition
from cute_kernels.attention.prefill_sm90.config import PrefillConfig
from cute_kernels.attention.prefill_sm90.copying import Target
from cute_kernels.attention.prefill_sm90.kernel_16_bits import PrefillSm90For16Bits
from cute_kernels.attention.prefill_sm90.kernel_copying import PrefillSm90Copying


def compile_prefill(config: PrefillConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    kernel = definition.PrefillSm90 if config.converts else PrefillSm90For16Bits
    if config.copies_from:
        kernel = PrefillSm90Copying
    return cute.compile(
        kernel(config),
        query_offsets(),
        addresses(definition.Addresses, definition.Q_TYPES[config.q_dtype]),
        zeros(definition.Strides),
        zeros(definition.Sizes),
        zeros(definition.Scalars),
        *([zeros(Target)] if config.copies_from else []),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
