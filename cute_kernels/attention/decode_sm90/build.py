"""Compiling one variant of the decode kernel (imports the DSL; no GPU needed)."""

from __future__ import annotations

from typing import get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr

from cute_kernels.attention.decode_sm90 import kernel as definition
from cute_kernels.attention.decode_sm90.config import DecodeConfig
from cute_kernels.attention.decode_sm90.lane import TYPES

_POINTEES = {
    "k": (Uint8, 16),
    "v": (Uint8, 16),
    "lse": (Float32, 4),
    "sinks": (Float32, 4),
    "k_descale": (Float32, 4),
    "v_descale": (Float32, 4),
    "cu_q": (Int32, 4),
    "used_k": (Int32, 4),
    "cu_k": (Int32, 4),
    "table": (Int32, 4),
    "k_scale": (Uint8, 4),
    "v_scale": (Uint8, 4),
    "counters": (Int32, 4),
}


def _pointer(element, alignment: int):
    return make_ptr(element, alignment, cute.AddressSpace.gmem, assumed_align=alignment)


def addresses(group, q_type):
    """A NamedTuple of operand addresses, each of its operand's type and alignment."""
    pointees = {**_POINTEES, "q": (q_type, 16), "out": (q_type, 4)}
    return group(**{name: _pointer(*pointees[name]) for name in group._fields})


def zeros(group):
    """A NamedTuple of numbers, each of its annotated type (values do not matter for compiling)."""
    return group(*(kind(1) for kind in get_type_hints(group).values()))


def query_offsets():
    """cu_seqlens_q. A tensor among the arguments tells TVM-FFI which device's stream to use."""
    return make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)


def compile_decode(config: DecodeConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    addresses_type, strides_type = definition.operand_types(config)
    operands = addresses(addresses_type, TYPES[config.q_dtype])
    workspace = make_fake_compact_tensor(Float32, (cute.sym_int64(),), assumed_align=16)
    return cute.compile(
        definition.DecodeSm90(config),
        workspace,
        operands,
        zeros(strides_type),
        zeros(definition.Sizes),
        zeros(definition.Scalars),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
