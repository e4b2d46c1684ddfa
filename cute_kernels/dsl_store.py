"""Inline PTX of the store and indexer kernels: exact arithmetic, narrow formats, plain memory
accesses.

A continuation of ``dsl.py``, which has the facts about the DSL.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.dsl import _asm

# ---- exact float32 arithmetic --------------------------------------------------------------
# With an explicit `.rn` and without `.ftz` the assembler neither contracts nor flushes: what the
# store kernels need to agree with their torch definitions on every bit.


@dsl_user_op
def mul_rn(x: Float32, y: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x, y], "mul.rn.f32 $0, $1, $2;", "=f,f,f", False, loc, ip)


@dsl_user_op
def add_rn(x: Float32, y: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x, y], "add.rn.f32 $0, $1, $2;", "=f,f,f", False, loc, ip)


@dsl_user_op
def sub_rn(x: Float32, y: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x, y], "sub.rn.f32 $0, $1, $2;", "=f,f,f", False, loc, ip)


@dsl_user_op
def sub_abs_rn(x: Float32, y: Float32, *, loc=None, ip=None):
    """x - |y|."""
    ptx = "{ .reg .f32 a; abs.f32 a, $2; sub.rn.f32 $0, $1, a; }"
    return _asm([Float32], [x, y], ptx, "=f,f,f", False, loc, ip)


@dsl_user_op
def rcp_rn(x: Float32, *, loc=None, ip=None):
    """1 / x by IEEE division."""
    return _asm([Float32], [x], "rcp.rn.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def rcp(x: Float32, *, loc=None, ip=None):
    """1 / x within 2^-23."""
    return _asm([Float32], [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def rsqrt(x: Float32, *, loc=None, ip=None):
    """1 / sqrt(x) within 2^-22, subnormal x included."""
    return _asm([Float32], [x], "rsqrt.approx.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def divide_by_magic(n: Int32, magic: Int32, shift: Int32, *, loc=None, ip=None):
    """(2 n * magic) >> (32 + shift) of unsigned integers."""
    ptx = "{ .reg .b32 t; add.u32 t, $1, $1; mul.hi.u32 t, t, $2; shr.u32 $0, t, $3; }"
    return _asm([Int32], [n, magic, shift], ptx, "=r,r,r,r", False, loc, ip)


@dsl_user_op
def add_16_times(base: Int64, n: Int32, *, loc=None, ip=None):
    """base + 16 n, n unsigned."""
    return _asm([Int64], [n, base], "mad.wide.u32 $0, $1, 16, $2;", "=l,r,l", False, loc, ip)


@dsl_user_op
def min_s32(x: Int32, y: Int32, *, loc=None, ip=None):
    return _asm([Int32], [x, y], "min.s32 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def clamp_s32(x: Int32, last: Int32, *, loc=None, ip=None):
    """x within [0, last]."""
    ptx = "{ .reg .b32 t; max.s32 t, $1, 0; min.s32 $0, t, $2; }"
    return _asm([Int32], [x, last], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def below(x: Int32, limit: Int32, *, loc=None, ip=None):
    """x if it is less than the limit, else 0."""
    ptx = "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, $1, 0, p; }"
    return _asm([Int32], [x, limit], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def ones_below(x: Int32, limit: Int32, *, loc=None, ip=None):
    """All bits where x < limit, both unsigned, else 0."""
    return _asm([Int32], [x, limit], "set.lt.u32.u32 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def where_negative(x: Int32, then, otherwise, *, loc=None, ip=None):
    """`then` where x < 0, else `otherwise`; both Int32 or both Float32."""
    kind, r = type(then), "f" if type(then) is Float32 else "r"
    select = "selp.f32" if r == "f" else "selp.b32"
    ptx = f"{{ .reg .pred p; setp.lt.s32 p, $1, 0; {select} $0, $2, $3, p; }}"
    return _asm([kind], [x, then, otherwise], ptx, f"={r},r,{r},{r}", False, loc, ip)


@dsl_user_op
def where_negative_infinite(x: Float32, then: Float32, *, loc=None, ip=None):
    """x, or what is given where it is -infinity."""
    ptx = "{ .reg .pred p; setp.eq.f32 p, $1, 0fFF800000; selp.f32 $0, $2, $1, p; }"
    return _asm([Float32], [x, then], ptx, "=f,f,f", False, loc, ip)


@dsl_user_op
def shuffle_b64(x: Int64, lane: Int32, *, loc=None, ip=None):
    """x of a lane of the warp."""
    ptx = (
        "{ .reg .b32 l, h; mov.b64 {l, h}, $1; shfl.sync.idx.b32 l, l, $2, 0x1f, 0xffffffff;"
        " shfl.sync.idx.b32 h, h, $2, 0x1f, 0xffffffff; mov.b64 $0, {l, h}; }"
    )
    return _asm([Int64], [x, lane], ptx, "=l,l,r", True, loc, ip)


@dsl_user_op
def clamp_s64(x: Int64, last: Int64, *, loc=None, ip=None):
    """x within [0, last]."""
    ptx = "{ .reg .b64 t; max.s64 t, $1, 0; min.s64 $0, t, $2; }"
    return _asm([Int64], [x, last], ptx, "=l,l,l", False, loc, ip)


@dsl_user_op
def is_finite(x: Float32, *, loc=None, ip=None):
    ptx = "{ .reg .pred p; testp.finite.f32 p, $1; selp.b32 $0, 1, 0, p; }"
    return _asm([Int32], [x], ptx, "=r,f", False, loc, ip)


# ---- narrow formats ------------------------------------------------------------------------


@dsl_user_op
def bf16x2_to_f32(word: Int32, *, loc=None, ip=None):
    ptx = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return _asm([Float32] * 2, [word], ptx, "=&f,=f,r", False, loc, ip)


@dsl_user_op
def f16x2_to_f32(word: Int32, *, loc=None, ip=None):
    ptx = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return _asm([Float32] * 2, [word], ptx, "=f,=f,r", False, loc, ip)


@dsl_user_op
def largest_abs_bf16x2(running: Int32, word: Int32, *, loc=None, ip=None):
    """Lane-wise max(running, |word|) of bf16 pairs, NaN ignored, infinities not."""
    ptx = "{ .reg .b32 a; and.b32 a, $2, 0x7fff7fff; max.bf16x2 $0, $1, a; }"
    return _asm([Int32], [running, word], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def largest_abs_f16x2(running: Int32, word: Int32, *, loc=None, ip=None):
    """Lane-wise max(running, |word|) of f16 pairs, NaN ignored, infinities not."""
    ptx = "{ .reg .b32 a; and.b32 a, $2, 0x7fff7fff; max.f16x2 $0, $1, a; }"
    return _asm([Int32], [running, word], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def f32x4_to_e4m3x4(x: Float32, y: Float32, z: Float32, w: Float32, *, loc=None, ip=None):
    """Four float32 to e4m3 bytes, x lowest: to nearest even, saturating, NaN to 0x7F."""
    ptx = (
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
    )
    return _asm([Int32], [x, y, z, w], ptx, "=r,f,f,f,f", False, loc, ip)


@dsl_user_op
def f32_to_e4m3(x: Float32, *, loc=None, ip=None):
    """The e4m3 code of x, 0..255, rounded as in ``f32x4_to_e4m3x4``."""
    ptx = (
        "{ .reg .b16 l; .reg .f32 z; mov.f32 z, 0f00000000;"
        " cvt.rn.satfinite.e4m3x2.f32 l, z, $1; cvt.u32.u16 $0, l; }"
    )
    return _asm([Int32], [x], ptx, "=r,f", False, loc, ip)


@dsl_user_op
def e4m3_to_f32(code: Int32, *, loc=None, ip=None):
    """The value of an e4m3 code in the low byte: exact; NaN stays NaN."""
    ptx = (
        "{ .reg .b16 c, l, h; .reg .b32 p; cvt.u16.u32 c, $1;"
        " cvt.rn.f16x2.e4m3x2 p, c; mov.b32 {l, h}, p; cvt.f32.f16 $0, l; }"
    )
    return _asm([Float32], [code], ptx, "=f,r", False, loc, ip)


# ---- pairs of 16-bit numbers in a word -------------------------------------------------------


@dsl_user_op
def permute(x: Int32, y: Int32, bytes_: int, *, loc=None, ip=None):
    """Bytes 0..3 are those of x, 4..7 those of y; each digit of ``bytes_`` (hex) names one."""
    return _asm([Int32], [x, y], f"prmt.b32 $0, $1, $2, {bytes_:#x};", "=r,r,r", False, loc, ip)


@dsl_user_op
def max_bf16x2(x: Int32, y: Int32, *, loc=None, ip=None):
    return _asm([Int32], [x, y], "max.bf16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def max_or_nan_bf16x2(x: Int32, y: Int32, *, loc=None, ip=None):
    """Lane-wise; 0x7FFF where one is NaN."""
    return _asm([Int32], [x, y], "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def max_u16x2(x: Int32, y: Int32, *, loc=None, ip=None):
    return _asm([Int32], [x, y], "max.u16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def mul_bf16x2(x: Int32, y: Int32, *, loc=None, ip=None):
    """Rounded to nearest even, subnormals included; NaN becomes 0x7FFF whatever its sign."""
    return _asm([Int32], [x, y], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", False, loc, ip)


# ---- caches --------------------------------------------------------------------------------


@dsl_user_op
def prefetch_l2(address: Int64, *, loc=None, ip=None):
    """Bring the line that holds a byte to L2."""
    _asm([], [address], "prefetch.global.L2 [$0];", "l", True, loc, ip)


# ---- global memory, of kernels that are launched before their predecessor has ended ---------
# Volatile, in contrast to `ld_global_nc_b32x4`: they must not move above griddepcontrol.wait.


@dsl_user_op
def ld_global_b32x4(address: Int64, *, loc=None, ip=None):
    ptx = "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Int32] * 4, [address], ptx, "=r,=r,=r,=r,l", True, loc, ip)


@dsl_user_op
def ld_global_once_b32x4(address: Int64, *, loc=None, ip=None):
    """Of what nothing else will ask for: L1 does not keep it."""
    ptx = "ld.global.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Int32] * 4, [address], ptx, "=r,=r,=r,=r,l", True, loc, ip)


@dsl_user_op
def copy_bulk(shared: Int32, source: Int64, size: Int32, barrier: Int32, *, loc=None, ip=None):
    """As ``dsl_nvfp4.copy_bulk``, of a size that is known at run time."""
    ptx = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm([], [shared, source, size, barrier], ptx, "r,l,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_global_b32x2(address: Int64, *, loc=None, ip=None):
    ptx = "ld.global.v2.b32 {$0,$1}, [$2];"
    return _asm([Int32] * 2, [address], ptx, "=r,=r,l,~{memory}", True, loc, ip)


@dsl_user_op
def atomic_add_shared(address: Int32, x: Int32, *, loc=None, ip=None):
    """What was there before."""
    ptx = "atom.shared.add.u32 $0, [$1], $2;"
    return _asm([Int32], [address, x], ptx, "=r,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def atomic_add_gpu(address: Int64, x: Int32, *, loc=None, ip=None):
    """What was there before. Orders nothing."""
    ptx = "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;"
    return _asm([Int32], [address, x], ptx, "=r,l,r,~{memory}", True, loc, ip)


@dsl_user_op
def atomic_add_acq_rel_gpu(address: Int64, x: Int32, *, loc=None, ip=None):
    """What was there before."""
    ptx = "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
    return _asm([Int32], [address, x], ptx, "=r,l,r,~{memory}", True, loc, ip)


@dsl_user_op
def fill_if_zero_gpu(address: Int64, x: Int32, lane: Int32, *, loc=None, ip=None):
    """Store x where 0 is; what was there before. In lane 0; others do nothing, and get 0. Orders
    nothing."""
    ptx = (
        "{ .reg .pred p; setp.eq.s32 p, $3, 0; mov.b32 $0, 0;"
        " @p atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2; }"
    )
    return _asm([Int32], [address, x, lane], ptx, "=&r,l,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_b64(address: Int32, *, loc=None, ip=None):
    return _asm([Int64], [address], "ld.shared.b64 $0, [$1];", "=l,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_global_b64(address: Int64, *, loc=None, ip=None):
    return _asm([Int64], [address], "ld.global.b64 $0, [$1];", "=l,l", True, loc, ip)


@dsl_user_op
def ld_global_b32(address: Int64, *, loc=None, ip=None):
    return _asm([Int32], [address], "ld.global.b32 $0, [$1];", "=r,l", True, loc, ip)


@dsl_user_op
def ld_volatile_b32(address: Int64, *, loc=None, ip=None):
    """A load that the assembler does not move to where a branch needs it."""
    return _asm([Int32], [address], "ld.volatile.global.b32 $0, [$1];", "=r,l", True, loc, ip)


@dsl_user_op
def ld_global_f32x4(address: Int64, *, loc=None, ip=None):
    ptx = "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];"
    return _asm([Float32] * 4, [address], ptx, "=f,=f,=f,=f,l", True, loc, ip)


@dsl_user_op
def ld_global_f32(address: Int64, *, loc=None, ip=None):
    return _asm([Float32], [address], "ld.global.f32 $0, [$1];", "=f,l", True, loc, ip)


@dsl_user_op
def ld_global_bf16(address: Int64, *, loc=None, ip=None):
    """One bf16 as float32."""
    ptx = "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [$1]; mov.b32 $0, {z, h}; }"
    return _asm([Float32], [address], ptx, "=f,l", True, loc, ip)


@dsl_user_op
def st_global_f32(address: Int64, x: Float32, *, loc=None, ip=None):
    _asm([], [address, x], "st.global.f32 [$0], $1;", "l,f,~{memory}", True, loc, ip)


@dsl_user_op
def st_global_b8(address: Int64, x: Int32, *, loc=None, ip=None):
    _asm([], [address, x], "st.global.b8 [$0], $1;", "l,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_global_b32x4(address: Int64, x: Int32, y: Int32, z: Int32, w: Int32, *, loc=None, ip=None):
    ptx = "st.global.v4.b32 [$0], {$1,$2,$3,$4};"
    _asm([], [address, x, y, z, w], ptx, "l,r,r,r,r,~{memory}", True, loc, ip)
