"""Device conversions applied to float32 bit patterns in order, for the exhaustive tests."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels import dsl
from cute_kernels.numerics import e2m1_device, e4m3_device

FLOATS = 8  # that one thread converts
_THREADS = 256


class Patterns:
    """mOut[i] = the words that `convert` makes of the patterns first + 8 i .. first + 8 i + 7."""

    def __init__(self, convert):
        self.convert = convert

    @cute.jit
    def __call__(self, mOut: cute.Tensor, first: Int32, stream):
        self.kernel(mOut, first).launch(
            grid=(cute.ceil_div(mOut.shape[0], _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mOut: cute.Tensor, first: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        i = cta * _THREADS + tid
        if i < mOut.shape[0]:
            x = [dsl.bits_to_f32(first + i * FLOATS + k) for k in range(FLOATS)]
            words = self.convert(x)
            for k in cutlass.range_constexpr(2):
                mOut[i, k] = words[k]


def e2m1_both(x):
    """Packed codes, and twice the rounded magnitudes (integers to 12) in their place."""
    doubled = Int32(0)
    for k, v in enumerate(x):
        doubled = doubled | Int32(e2m1_device.round_abs(v) * Float32(2.0)) << (4 * k)
    return e2m1_device.pack_x8(x, instruction=False), doubled


def e4m3_by_four(x):
    return e4m3_device.encode_x4(*x[:4]), e4m3_device.encode_x4(*x[4:])


def e4m3_by_one(x):
    words = [Int32(0), Int32(0)]
    for k, v in enumerate(x):
        words[k // 4] = words[k // 4] | e4m3_device.encode(v) << (8 * (k % 4))
    return words


def compiled(convert, target: str = "sm_90a"):
    """The launch function: (mOut (n, 2) int32, first)."""
    out = make_fake_compact_tensor(Int32, (cute.sym_int(), 2), stride_order=(1, 0))
    return cute.compile(
        Patterns(convert),
        out,
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch={target}",
    )
