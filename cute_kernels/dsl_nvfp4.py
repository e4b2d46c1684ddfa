"""Inline PTX of the kernels that read NVFP4 caches: E2M1 to fp16 on SM90, which has no instruction
for it, and asynchronous copies of block scales.

A continuation of ``dsl.py``, which has the facts about the DSL.
"""

from __future__ import annotations

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.dsl import _asm

# ---- conversions ---------------------------------------------------------------------------


@dsl_user_op
def e2m1x8_to_e4m3x8(word: Int32, *, loc=None, ip=None):
    """Eight E2M1 codes -> (the four of the low nibbles, the four of the high ones) as E4M3 bytes.

    The bytes are worth 2^-6 of the codes, exactly: sign, exponent and mantissa of E2M1 go where
    E4M3 has its sign, its low exponent bits and its top mantissa bit (subnormals included).
    """
    ptx = (
        "{ .reg .b32 b, x, y, z; and.b32 b, $2, 0x88888888; shr.u32 x, $2, 2; shl.b32 y, $2, 2;"
        " shl.b32 z, b, 4; lop3.b32 $1, x, b, 0x1C1C1C1C, 0xE4;"
        " lop3.b32 $0, y, z, 0x1C1C1C1C, 0xE4; }"
    )
    return _asm([Int32] * 2, [word], ptx, "=r,=r,r", False, loc, ip)


@dsl_user_op
def e2m1x8_to_f16x8(word: Int32, *, loc=None, ip=None):
    """Eight E2M1 codes -> four f16x2 of codes (i, i + 4), i = 0 .. 3, worth 2^-14 of the codes.

    Exact: sign, exponent and mantissa go where fp16 has its sign, its low exponent bits and its top
    mantissa bit (subnormals included).
    """
    ptx = (
        "{ .reg .b32 b, x, y, z, o, e; and.b32 b, $4, 0x88888888; shr.u32 x, $4, 3;"
        " shl.b32 y, $4, 1; shl.b32 z, b, 4; lop3.b32 o, x, b, 0x0E0E0E0E, 0xE4;"
        " lop3.b32 e, y, z, 0x0E0E0E0E, 0xE4; prmt.b32 $0, e, 0, 0x2404;"
        " prmt.b32 $1, o, 0, 0x2404; and.b32 $2, e, 0xFF00FF00; and.b32 $3, o, 0xFF00FF00; }"
    )
    return _asm([Int32] * 4, [word], ptx, "=r,=r,=r,=r,r", False, loc, ip)


@dsl_user_op
def e4m3x2_to_f16x2(word: Int32, *, loc=None, ip=None):
    """The two low bytes. Exact; NaN stays NaN."""
    ptx = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }"
    return _asm([Int32], [word], ptx, "=r,r", False, loc, ip)


@dsl_user_op
def mul_f16x2(x: Int32, y: Int32, *, loc=None, ip=None):
    return _asm([Int32], [x, y], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def mul_f16x2_by_low(x: Int32, y: Int32, *, loc=None, ip=None):
    """Both halves of x times the low half of y: the hardware broadcasts it for nothing."""
    ptx = (
        "{ .reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, $2; mov.b32 d, {l, l};"
        " mul.rn.f16x2 $0, $1, d; }"
    )
    return _asm([Int32], [x, y], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def mul_f16x2_by_high(x: Int32, y: Int32, *, loc=None, ip=None):
    ptx = (
        "{ .reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, $2; mov.b32 d, {h, h};"
        " mul.rn.f16x2 $0, $1, d; }"
    )
    return _asm([Int32], [x, y], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def permute_bytes(x: Int32, y: Int32, selector: Int32, *, loc=None, ip=None):
    """Four bytes of x (0 to 3) and y (4 to 7), one a nibble of the selector, lowest first."""
    return _asm([Int32], [x, y, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", False, loc, ip)


# ---- global memory -------------------------------------------------------------------------


@dsl_user_op
def ld_global_u8(address: Int64, *, loc=None, ip=None):
    """In program order, but without a memory clobber: several of these may be in flight."""
    return _asm([Int32], [address], "ld.global.u8 $0, [$1];", "=r,l", True, loc, ip)


# ---- shared memory -------------------------------------------------------------------------


@dsl_user_op
def ld_shared_b16(address: Int32, *, loc=None, ip=None):
    ptx = "{ .reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t; }"
    return _asm([Int32], [address], ptx, "=r,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_u8(address: Int32, *, loc=None, ip=None):
    return _asm([Int32], [address], "ld.shared.u8 $0, [$1];", "=r,r,~{memory}", True, loc, ip)


@dsl_user_op
def copy_async_or_zero(
    shared: Int32, source: Int64, size: int, live_bytes: Int32, *, loc=None, ip=None
):
    """Begin to copy ``size`` (4, 8 or 16) bytes to shared memory: the first ``live_bytes`` come
    from global memory, which is not read for 0 of them, the others are zeros."""
    cache = "cg" if size == 16 else "ca"
    ptx = f"cp.async.{cache}.shared.global [$0], [$1], {size}, $2;"
    _asm([], [shared, source, live_bytes], ptx, "r,l,r,~{memory}", True, loc, ip)


@dsl_user_op
def copy_bulk(shared: Int32, source: Int64, size: int, barrier: Int32, *, loc=None, ip=None):
    """Begin to copy ``size`` bytes to shared memory, by one thread; they count as transactions of
    an mbarrier. Size and addresses are multiples of 16."""
    ptx = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f" [$0], [$1], {size}, [$2];"
    )
    _asm([], [shared, source, barrier], ptx, "r,l,r,~{memory}", True, loc, ip)


@dsl_user_op
def arrive_after_copies(barrier: Int32, *, loc=None, ip=None):
    """One more arrival for the mbarrier's current phase to wait for, which comes when this thread's
    copies so far are complete."""
    ptx = "cp.async.mbarrier.arrive.shared.b64 [$0];"
    _asm([], [barrier], ptx, "r,~{memory}", True, loc, ip)


@dsl_user_op
def wait_for_copies(*, loc=None, ip=None):
    _asm([], [], "cp.async.wait_all;", "~{memory}", True, loc, ip)
