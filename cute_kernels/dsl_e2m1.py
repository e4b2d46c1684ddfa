"""Inline PTX of roundings to E2M1: of float32, and of bf16 pairs, with its instruction and without.

A continuation of ``dsl_store.py``; ``numerics/e2m1_device.py`` chooses.
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.dsl import _asm

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
