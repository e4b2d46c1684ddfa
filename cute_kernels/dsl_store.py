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


# Adding and subtracting M = 2^22 (1 + 3/4 e), e being the power of two below |q| (0 for a
# subnormal), rounds |q| to the nearest even multiple of an ulp of M, which is the distance of
# E2M1's neighbours there: 0.5 below 2 (M in [2^22, 2^23)), 1 below 4 (M = 2.5 * 2^22), 2 from 4 on
# (M = 4 * 2^22). M is an even multiple of that distance, so ties keep their parity. Beyond 8 the
# result is at least 8, or NaN where M overflows, and `min`, which drops NaN, makes 6 of it.
_E2M1_ROUND = (
    " mov.b32 e, {q}; and.b32 e, e, 0x7f800000; mov.b32 m, e; abs.f32 a, {q};"
    " fma.rn.f32 m, m, 0f4A400000, 0f4A800000; add.rn.f32 a, a, m; sub.rn.f32 a, a, m;"
    " min.f32 {v}, a, 0f40C00000;"
)


@dsl_user_op
def round_abs_to_e2m1(q: Float32, *, loc=None, ip=None):
    """|q| rounded to E2M1's magnitudes, as a float32: to nearest even, saturating, NaN to 6."""
    body = _E2M1_ROUND.format(q="$1", v="$0")
    ptx = f"{{ .reg .b32 e; .reg .f32 m, a;{body} }}"
    return _asm([Float32], [q], ptx, "=f,f", False, loc, ip)


def _pack_e2m1x8_ptx() -> str:
    """Eight floats $1..$8 to E2M1 codes in $0, the first one lowest.

    A magnitude times 2^-6 is an e4m3 number whose byte is the E2M1 code times 4: the hardware
    packs them. The conversion of q itself gives the sign, of -0.0 and of numbers that round to 0
    too, and + for NaN. Bytes of ``ea`` and ``sa`` belong to the even elements, ``eb`` and ``sb``
    to the odd ones.
    """
    lines = [".reg .b32 e, ea, eb, sa, sb; .reg .f32 m, a, v<8>; .reg .b16 l, h;"]
    for i in range(8):
        lines.append(_E2M1_ROUND.format(q=f"${i + 1}", v=f"v{i}").strip())
        lines.append(f"mul.rn.f32 v{i}, v{i}, 0f3C800000;")
    for word, names in (
        ("ea", [f"v{i}" for i in (0, 2, 4, 6)]),
        ("eb", [f"v{i}" for i in (1, 3, 5, 7)]),
        ("sa", [f"${i}" for i in (1, 3, 5, 7)]),
        ("sb", [f"${i}" for i in (2, 4, 6, 8)]),
    ):
        lines.append(f"cvt.rn.satfinite.e4m3x2.f32 l, {names[1]}, {names[0]};")
        lines.append(f"cvt.rn.satfinite.e4m3x2.f32 h, {names[3]}, {names[2]};")
        lines.append(f"mov.b32 {word}, {{l, h}};")
    lines.append("shr.u32 ea, ea, 2; shl.b32 eb, eb, 2; or.b32 ea, ea, eb;")
    lines.append("shr.u32 sa, sa, 4; and.b32 sa, sa, 0x08080808; and.b32 sb, sb, 0x80808080;")
    lines.append("or.b32 ea, ea, sa; or.b32 $0, ea, sb;")
    return f"{{ {' '.join(lines)} }}"


@dsl_user_op
def pack_e2m1x8(
    q0: Float32, q1: Float32, q2: Float32, q3: Float32,
    q4: Float32, q5: Float32, q6: Float32, q7: Float32, *, loc=None, ip=None,
):  # fmt: skip
    """Eight floats to E2M1 codes, q0 in the lowest nibble, without the instruction for it."""
    constraints = "=r" + ",f" * 8
    q = [q0, q1, q2, q3, q4, q5, q6, q7]
    return _asm([Int32], q, _pack_e2m1x8_ptx(), constraints, False, loc, ip)


@dsl_user_op
def pack_e2m1x8_sm100(
    q0: Float32, q1: Float32, q2: Float32, q3: Float32,
    q4: Float32, q5: Float32, q6: Float32, q7: Float32, *, loc=None, ip=None,
):  # fmt: skip
    """As ``pack_e2m1x8`` by cvt.e2m1x2, which sm_100a, sm_103a and sm_120a have and sm_90a does
    not. Its first operand becomes the high nibble. One instruction a line: a test replaces it."""
    lines = [f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4)]
    body = "\n".join([".reg .b8 b<4>;", *lines, "mov.b32 $0, {b0, b1, b2, b3};"])
    q = [q0, q1, q2, q3, q4, q5, q6, q7]
    return _asm([Int32], q, f"{{\n{body}\n}}", "=r" + ",f" * 8, False, loc, ip)


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


def _pack_e2m1x8_of_bf16_ptx() -> str:
    """bf16 pairs (0, 1) .. (6, 7) in $1..$4, times the pair $5, to E2M1 codes in $0.

    The rounding of ``_E2M1_ROUND`` on pairs, with M = 2^6 (1 + 3/4 e), which bf16's 8 significant
    bits hold. A magnitude times 2^-126 has its code in bits 6 to 8 of bf16 (0.5 is subnormal
    there, as in E2M1). With pairs (k, k + 4) in a word, codes and signs need only be shifted into
    their nibbles. Signs are those of the products, in which NaN has none.
    """
    lines = [".reg .b32 n<4>, q<4>, c<4>, e, m, a, s, t, f48, f64, f6, tiny;"]
    for name, bits in (("f48", 0x4240), ("f64", 0x4280), ("f6", 0x40C0), ("tiny", 0x0080)):
        lines.append(f"mov.b32 {name}, {bits << 16 | bits:#x};")
    for i, (low, high, order) in enumerate(
        ((1, 3, "0x5410"), (1, 3, "0x7632"), (2, 4, "0x5410"), (2, 4, "0x7632"))
    ):
        lines.append(f"prmt.b32 n{i}, ${low}, ${high}, {order};")
        lines.append(f"mul.rn.bf16x2 q{i}, n{i}, $5; and.b32 e, q{i}, 0x7f807f80;")
        lines.append(f"fma.rn.bf16x2 m, e, f48, f64; abs.bf16x2 a, q{i};")
        lines.append("add.rn.bf16x2 a, a, m; sub.rn.bf16x2 a, a, m; min.bf16x2 a, a, f6;")
        lines.append(f"mul.rn.bf16x2 c{i}, a, tiny;")
    # lop3 0xE4: the first operand where the third has ones, else the second.
    lines.append("mov.b32 s, 0x80008000; shr.u32 t, q0, 4;")
    lines += ["lop3.b32 t, q1, t, s, 0xE4; shr.u32 t, t, 4;"]
    lines += ["lop3.b32 t, q2, t, s, 0xE4; shr.u32 t, t, 4; lop3.b32 t, q3, t, s, 0xE4;"]
    lines.append("shl.b32 a, c1, 4; or.b32 a, a, c0; shr.u32 a, a, 6;")
    lines.append("shl.b32 m, c3, 4; or.b32 m, m, c2; shl.b32 m, m, 2; or.b32 a, a, m;")
    lines.append("lop3.b32 $0, a, t, 0x77777777, 0xE4;")
    return f"{{ {' '.join(lines)} }}"


@dsl_user_op
def pack_e2m1x8_of_bf16(
    w0: Int32, w1: Int32, w2: Int32, w3: Int32, scale: Int32, *, loc=None, ip=None
):
    """Eight bf16 (pairs in w0..w3) times a pair of equal bf16, a power of two, to E2M1 codes."""
    operands, ptx = [w0, w1, w2, w3, scale], _pack_e2m1x8_of_bf16_ptx()
    return _asm([Int32], operands, ptx, "=r,r,r,r,r,r", False, loc, ip)


def _pack_e2m1x8_in_range_ptx() -> str:
    """As ``_pack_e2m1x8_of_bf16_ptx`` where no product exceeds 6: pairs in $1..$4, their magnitudes
    in $5..$8, the scale in $9, 67 times the scale in $10.

    M is such that the code is what |q| + M has in its last bits: ulps of 0.5, 1 and 2 below 2,
    below 4 and from 4 on, and M = 64, 128 + 2, 256 + 8 for codes from 0, 4 and 6 on. With e, the
    power of two of |q|, that is max(64, 67 e - 4). Bits 3 to 6 are then 0, and bit 7 is dropped.
    """
    lines = [".reg .b32 a<4>, e, m, p, s, x<2>, f4, f64;"]
    lines.append("mov.b32 f4, 0xc080c080; mov.b32 f64, 0x42804280;")
    for i in range(4):
        lines.append(f"and.b32 e, ${5 + i}, 0x7f807f80; fma.rn.bf16x2 m, e, $10, f4;")
        lines.append(f"max.bf16x2 m, m, f64; fma.rn.bf16x2 a{i}, ${5 + i}, $9, m;")
    for i in range(2):
        # Bytes with codes, bytes with eight times the sign, and two nibbles to a byte.
        lines.append(f"prmt.b32 p, a{2 * i}, a{2 * i + 1}, 0x6420;")
        lines.append(f"prmt.b32 s, ${2 * i + 1}, ${2 * i + 2}, 0xfdb9;")
        lines.append("lop3.b32 p, s, p, 0x08080808, 0xE4; shr.u32 s, p, 4;")
        lines.append(f"lop3.b32 x{i}, s, p, 0xf0f0f0f0, 0xE4;")
    lines.append("prmt.b32 $0, x0, x1, 0x6420;")
    return f"{{ {' '.join(lines)} }}"


@dsl_user_op
def pack_e2m1x8_in_range(
    w0: Int32, w1: Int32, w2: Int32, w3: Int32, a0: Int32, a1: Int32, a2: Int32, a3: Int32,
    scale: Int32, scale67: Int32, *, loc=None, ip=None,
):  # fmt: skip
    """Eight bf16 (pairs in w0..w3, their magnitudes in a0..a3) times a pair of equal bf16, a power
    of two, to E2M1 codes; no product may exceed 6, and 67 times the power must not overflow."""
    operands = [w0, w1, w2, w3, a0, a1, a2, a3, scale, scale67]
    ptx = _pack_e2m1x8_in_range_ptx()
    return _asm([Int32], operands, ptx, "=r" + ",r" * 10, False, loc, ip)


# ---- global memory, of kernels that are launched before their predecessor has ended ---------
# Volatile, in contrast to `ld_global_nc_b32x4`: they must not move above griddepcontrol.wait.


@dsl_user_op
def ld_global_b32x4(address: Int64, *, loc=None, ip=None):
    ptx = "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Int32] * 4, [address], ptx, "=r,=r,=r,=r,l", True, loc, ip)


@dsl_user_op
def ld_global_b32x2(address: Int64, *, loc=None, ip=None):
    ptx = "ld.global.v2.b32 {$0,$1}, [$2];"
    return _asm([Int32] * 2, [address], ptx, "=r,=r,l,~{memory}", True, loc, ip)


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
