"""Inline PTX for global memory through which CTAs of one launch work together.

A continuation of ``dsl.py``, which has the facts about the DSL.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.dsl import _asm


@dsl_user_op
def ld_global_cg_f32x4(address: Int64, *, loc=None, ip=None):
    """From L2, because other SMs wrote it in this launch. In program order, but without a memory
    clobber: several of these may be in flight."""
    ptx = "ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];"
    return _asm([Float32] * 4, [address], ptx, "=f,=f,=f,=f,l", True, loc, ip)


@dsl_user_op
def ld_global_cg_f32x2(address: Int64, *, loc=None, ip=None):
    ptx = "ld.global.cg.v2.f32 {$0,$1}, [$2];"
    return _asm([Float32] * 2, [address], ptx, "=f,=f,l", True, loc, ip)


@dsl_user_op
def ld_global_cg_f32x4_below(address: Int64, part: Int32, count: Int32, *, loc=None, ip=None):
    """A part of ``count``; zeros where there is no such part."""
    ptx = (
        "{ .reg .pred p; setp.lt.s32 p, $5, $6; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
        " mov.b32 $3, 0; @p ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4]; }"
    )
    operands = [address, part, count]
    return _asm([Float32] * 4, operands, ptx, "=&f,=&f,=&f,=&f,l,r,r", True, loc, ip)


@dsl_user_op
def ld_global_cg_state_below(address: Int64, part: Int32, count: Int32, *, loc=None, ip=None):
    """A part's softmax state; (-inf, 0) where there is no such part."""
    ptx = (
        "{ .reg .pred p; setp.lt.s32 p, $3, $4; mov.b32 $0, 0xFF800000; mov.b32 $1, 0;"
        " @p ld.global.cg.v2.f32 {$0,$1}, [$2]; }"
    )
    return _asm([Float32] * 2, [address, part, count], ptx, "=&f,=&f,l,r,r", True, loc, ip)


@dsl_user_op
def ld_acquire_gpu_b32(address: Int64, *, loc=None, ip=None):
    ptx = "ld.acquire.gpu.global.b32 $0, [$1];"
    return _asm([Int32], [address], ptx, "=r,l,~{memory}", True, loc, ip)


@dsl_user_op
def red_add_release_gpu(address: Int64, x: Int32, *, loc=None, ip=None):
    """Add to global memory without waiting for the old value."""
    ptx = "red.add.release.gpu.global.s32 [$0], $1;"
    _asm([], [address, x], ptx, "l,r,~{memory}", True, loc, ip)


@dsl_user_op
def red_inc_gpu(address: Int64, last: Int32, *, loc=None, ip=None):
    """Count up in global memory, from ``last`` on to 0. Waits for nothing and orders nothing."""
    _asm([], [address, last], "red.inc.gpu.global.u32 [$0], $1;", "l,r,~{memory}", True, loc, ip)
