"""Compiling one variant of the prefill kernel (imports the DSL; no GPU needed)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.attention.decode_sm90.build import addresses, query_offsets, zeros
from cute_kernels.attention.prefill_sm90 import kernel as definition
from cute_kernels.attention.prefill_sm90.config import PrefillConfig
from cute_kernels.attention.prefill_sm90.kernel_16_bits import PrefillSm90For16Bits
from cute_kernels.attention.prefill_sm90.kernel_copying import PrefillSm90Copying, operand_types
from cute_kernels.attention.widen_sm90.copier import Target


def compile_prefill(config: PrefillConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    kernel = definition.PrefillSm90 if config.converts else PrefillSm90For16Bits
    addresses_type, strides_type, target = definition.Addresses, definition.Strides, ()
    if config.copies_from:
        kernel, target = PrefillSm90Copying, (zeros(Target),)
        addresses_type, strides_type = operand_types(config)
    return cute.compile(
        kernel(config),
        query_offsets(),
        addresses(addresses_type, definition.Q_TYPES[config.q_dtype]),
        zeros(strides_type),
        zeros(definition.Sizes),
        zeros(definition.Scalars),
        *target,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
