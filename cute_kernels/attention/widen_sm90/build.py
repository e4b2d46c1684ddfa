"""Compiling one variant of the widening kernel (imports the DSL; no GPU needed)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.attention.decode_sm90.build import addresses, zeros
from cute_kernels.attention.widen_sm90 import kernel as definition
from cute_kernels.attention.widen_sm90.config import WidenConfig


def compile_widen(config: WidenConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    # A tensor among the arguments tells TVM-FFI which device's stream to launch on.
    offsets = make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)
    return cute.compile(
        definition.WidenSm90(config),
        offsets,
        addresses(definition.Addresses, BFloat16),
        zeros(definition.Strides),
        zeros(definition.Sizes),
        zeros(definition.Target),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
