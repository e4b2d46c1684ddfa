"""The only home of inline PTX, MLIR builders and workarounds for the CuTe DSL.

Everything that a kernel needs and the DSL does not offer stands here as a function with a name,
so that kernels stay free of instruction strings. Addresses of shared memory are 32-bit byte
addresses (``Int32``), addresses of global memory 64-bit (``Int64``).

Facts about DSL 4.8.0 and 4.8.1 that shaped the callers:

- ``cute.copy`` with a TMA atom contains ``elect.sync``: the whole warp must reach it. Only
  ``mbarrier_arrive_and_expect_tx`` goes under ``elect_one()``.
- Volatile inline assembly keeps its source order, so independent loads are issued as a batch
  before their first use. Pure conversions are not volatile and may move.
- ``min_blocks_per_mp > 1`` makes ``launch`` ask the driver for the shared-memory carveout at
  compile time, which fails on a machine without a GPU unless ``preferred_smem_carveout`` is given.
- A variable assigned under a dynamic ``if`` must have one type on both paths.
- float8 tensors do not cross TVM-FFI; kernels take addresses and see bytes.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
NEG_INF = -float("inf")


def _asm(results, operands, ptx, constraints, volatile, loc, ip):
    """Emit one inline-assembly block; returns None, one value or a tuple by ``len(results)``."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    types = [result.mlir_type for result in results]
    if not types:
        returned = None
    elif len(types) == 1:
        returned = types[0]
    else:
        returned = llvm.StructType.get_literal(types)
    block = llvm.inline_asm(
        returned,
        values,
        ptx,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](block)
    return tuple(
        result(llvm.extractvalue(kind, block, [index], loc=loc, ip=ip))
        for index, (result, kind) in enumerate(zip(results, types, strict=True))
    )


# ---- shared memory -------------------------------------------------------------------------


@dsl_user_op
def ld_shared_b32x4(address: Int32, *, loc=None, ip=None):
    ptx = "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Int32] * 4, [address], ptx, "=r,=r,=r,=r,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_b32x2(address: Int32, *, loc=None, ip=None):
    ptx = "ld.shared.v2.b32 {$0,$1}, [$2];"
    return _asm([Int32] * 2, [address], ptx, "=r,=r,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_b32(address: Int32, *, loc=None, ip=None):
    ptx = "ld.shared.b32 $0, [$1];"
    return _asm([Int32], [address], ptx, "=r,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_f32(address: Int32, *, loc=None, ip=None):
    return _asm([Float32], [address], "ld.shared.f32 $0, [$1];", "=f,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_f32x2(address: Int32, *, loc=None, ip=None):
    ptx = "ld.shared.v2.f32 {$0,$1}, [$2];"
    return _asm([Float32] * 2, [address], ptx, "=f,=f,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_f32x4(address: Int32, *, loc=None, ip=None):
    ptx = "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];"
    return _asm([Float32] * 4, [address], ptx, "=f,=f,=f,=f,r,~{memory}", True, loc, ip)


@dsl_user_op
def ld_shared_b64x2(address: Int32, *, loc=None, ip=None):
    ptx = "ld.shared.v2.b64 {$0,$1}, [$2];"
    return _asm([Int64] * 2, [address], ptx, "=l,=l,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_b64(address: Int32, x: Int64, *, loc=None, ip=None):
    _asm([], [address, x], "st.shared.b64 [$0], $1;", "r,l,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_b32(address: Int32, x: Int32, *, loc=None, ip=None):
    _asm([], [address, x], "st.shared.b32 [$0], $1;", "r,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_b32x2(address: Int32, x: Int32, y: Int32, *, loc=None, ip=None):
    ptx = "st.shared.v2.b32 [$0], {$1,$2};"
    _asm([], [address, x, y], ptx, "r,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_b32x4(address: Int32, x: Int32, y: Int32, z: Int32, w: Int32, *, loc=None, ip=None):
    ptx = "st.shared.v4.b32 [$0], {$1,$2,$3,$4};"
    _asm([], [address, x, y, z, w], ptx, "r,r,r,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_f32(address: Int32, x: Float32, *, loc=None, ip=None):
    _asm([], [address, x], "st.shared.f32 [$0], $1;", "r,f,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_f32x2(address: Int32, x: Float32, y: Float32, *, loc=None, ip=None):
    ptx = "st.shared.v2.f32 [$0], {$1,$2};"
    _asm([], [address, x, y], ptx, "r,f,f,~{memory}", True, loc, ip)


@dsl_user_op
def st_shared_f32x4(
    address: Int32, x: Float32, y: Float32, z: Float32, w: Float32, *, loc=None, ip=None
):
    ptx = "st.shared.v4.f32 [$0], {$1,$2,$3,$4};"
    _asm([], [address, x, y, z, w], ptx, "r,f,f,f,f,~{memory}", True, loc, ip)


@dsl_user_op
def ldmatrix_x4_trans(address: Int32, *, loc=None, ip=None):
    """Four 8x8 matrices of b16, transposed; on FP8 bytes one b16 is two neighbours of a row."""
    ptx = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
    return _asm([Int32] * 4, [address], ptx, "=r,=r,=r,=r,r,~{memory}", True, loc, ip)


@dsl_user_op
def stmatrix_x4_trans(address: Int32, x: Int32, y: Int32, z: Int32, w: Int32, *, loc=None, ip=None):
    """Four 8x8 matrices of b16, transposed on their way to shared memory."""
    ptx = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1,$2,$3,$4};"
    _asm([], [address, x, y, z, w], ptx, "r,r,r,r,r,~{memory}", True, loc, ip)


# ---- global memory -------------------------------------------------------------------------


@dsl_user_op
def ld_global_nc_b32x4(address: Int64, *, loc=None, ip=None):
    """16 bytes that nothing writes while the kernel runs (read-only path), in program order."""
    ptx = "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];"
    return _asm([Int32] * 4, [address], ptx, "=r,=r,=r,=r,l", True, loc, ip)


@dsl_user_op
def st_global_b32(address: Int64, x: Int32, *, loc=None, ip=None):
    _asm([], [address, x], "st.global.b32 [$0], $1;", "l,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_global_b32x2(address: Int64, x: Int32, y: Int32, *, loc=None, ip=None):
    ptx = "st.global.v2.b32 [$0], {$1,$2};"
    _asm([], [address, x, y], ptx, "l,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def st_global_f32x2(address: Int64, x: Float32, y: Float32, *, loc=None, ip=None):
    ptx = "st.global.v2.f32 [$0], {$1,$2};"
    _asm([], [address, x, y], ptx, "l,f,f,~{memory}", True, loc, ip)


@dsl_user_op
def bits_of(x: Int32, *, loc=None, ip=None):
    """How many bits a number that is not negative has; 0 for 0."""
    return _asm(
        [Int32], [x], "{ .reg .b32 z; clz.b32 z, $1; sub.s32 $0, 32, z; }", "=r,r", False, loc, ip
    )


# ---- conversions ---------------------------------------------------------------------------


@dsl_user_op
def e4m3x4_to_f16x4(word: Int32, *, loc=None, ip=None):
    """Four e4m3 bytes -> (bytes 0,1 as f16x2, bytes 2,3 as f16x2). Exact; NaN stays NaN."""
    ptx = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    )
    return _asm([Int32] * 2, [word], ptx, "=r,=r,r", False, loc, ip)


@dsl_user_op
def swap_middle_bytes(word: Int32, *, loc=None, ip=None):
    """Bytes (0, 1, 2, 3) -> (0, 2, 1, 3)."""
    return _asm([Int32], [word], "prmt.b32 $0, $1, $1, 0x3120;", "=r,r", False, loc, ip)


@dsl_user_op
def pack_f16x2(low: Float32, high: Float32, *, loc=None, ip=None):
    return _asm([Int32], [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip)


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None):
    return _asm([Int32], [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip)


@dsl_user_op
def bf16x2_to_f16x2_scaled(word: Int32, scale: Float32, *, loc=None, ip=None):
    """Two bf16 times ``scale`` (a power of two) as f16x2: exact while the products fit fp16."""
    ptx = (
        "{ .reg .b32 l, h; .reg .f32 x, y; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000;"
        " mul.rn.f32 x, l, $2; mul.rn.f32 y, h, $2; cvt.rn.f16x2.f32 $0, y, x; }"
    )
    return _asm([Int32], [word, scale], ptx, "=r,r,f", False, loc, ip)


@dsl_user_op
def max_abs_bf16x2(running: Int32, word: Int32, *, loc=None, ip=None):
    """Lane-wise max(running, |word|) on bf16x2; infinities and NaN count as 0.

    A row's power-of-two scale must come from its finite elements, or one infinity would flush
    the rest of the row to zero: a * 0 + a is a for a finite a and NaN otherwise, and ``max``
    drops NaN.
    """
    ptx = (
        "{ .reg .b32 a, z; and.b32 a, $2, 0x7fff7fff; mov.b32 z, 0;"
        " fma.rn.bf16x2 a, a, z, a; max.bf16x2 $0, $1, a; }"
    )
    return _asm([Int32], [running, word], ptx, "=r,r,r", False, loc, ip)


@dsl_user_op
def bits_to_f32(bits: Int32, *, loc=None, ip=None):
    return _asm([Float32], [bits], "mov.b32 $0, $1;", "=f,r", False, loc, ip)


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x], "lg2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip)


@dsl_user_op
def fma(x: Float32, y: Float32, z: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x, y, z], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", False, loc, ip)


@dsl_user_op
def mul_pair(word: Int32, factor: Float32, kind: str, *, loc=None, ip=None):
    """Two f16 or bf16 (``kind``) times ``factor``, which is rounded to that type first."""
    ptx = f"{{ .reg .b32 f; cvt.rn.{kind}x2.f32 f, $2, $2; mul.rn.{kind}x2 $0, $1, f; }}"
    return _asm([Int32], [word, factor], ptx, "=r,r,f", False, loc, ip)


@dsl_user_op
def fmax(x: Float32, y: Float32, *, loc=None, ip=None):
    return _asm([Float32], [x, y], "max.f32 $0, $1, $2;", "=f,f,f", False, loc, ip)


# ---- warp ----------------------------------------------------------------------------------


@dsl_user_op
def barrier_reduce_or(barrier: Int32, threads: Int32, condition: Int32, *, loc=None, ip=None):
    """Named barrier; 1 for all ``threads`` where any of them came with a nonzero condition."""
    ptx = (
        "{ .reg .pred p, q; setp.ne.b32 p, $3, 0;"
        " barrier.cta.red.or.pred q, $1, $2, p; selp.b32 $0, 1, 0, q; }"
    )
    constraints = "=r,r,r,r,~{memory}"
    return _asm([Int32], [barrier, threads, condition], ptx, constraints, True, loc, ip)


@dsl_user_op
def shuffle_xor_f32(x: Float32, mask: Int32, *, loc=None, ip=None):
    ptx = "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return _asm([Float32], [x, mask], ptx, "=f,f,r", True, loc, ip)


@dsl_user_op
def shuffle_xor_b32(x: Int32, mask: Int32, *, loc=None, ip=None):
    ptx = "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return _asm([Int32], [x, mask], ptx, "=r,r,r", True, loc, ip)


@dsl_user_op
def shuffle_from_lane(x: Int32, lane: Int32, *, loc=None, ip=None):
    ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return _asm([Int32], [x, lane], ptx, "=r,r,r", True, loc, ip)


@dsl_user_op
def shuffle_from_lane_f32(x: Float32, lane: Int32, *, loc=None, ip=None):
    ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return _asm([Float32], [x, lane], ptx, "=f,f,r", True, loc, ip)


@dsl_user_op
def shuffle_up_or_zero(x: Int32, distance: Int32, *, loc=None, ip=None):
    """The value ``distance`` lanes below, 0 where there is none (a step of a prefix sum)."""
    ptx = "{ .reg .pred p; shfl.sync.up.b32 $0|p, $1, $2, 0x0, 0xffffffff; @!p mov.b32 $0, 0; }"
    return _asm([Int32], [x, distance], ptx, "=&r,r,r", True, loc, ip)


@dsl_user_op
def quotient(x: Int32, y: Int32, *, loc=None, ip=None):
    """x // y for x >= 0, y > 0: half the instructions of a division that rounds negatives down."""
    return _asm([Int32], [x, y], "div.u32 $0, $1, $2;", "=r,r,r", False, loc, ip)


@dsl_user_op
def warp_sum_b32(x: Int32, *, loc=None, ip=None):
    ptx = "redux.sync.add.s32 $0, $1, 0xffffffff;"
    return _asm([Int32], [x], ptx, "=r,r", True, loc, ip)


@dsl_user_op
def warp_max_b32(x: Int32, *, loc=None, ip=None):
    ptx = "redux.sync.max.s32 $0, $1, 0xffffffff;"
    return _asm([Int32], [x], ptx, "=r,r", True, loc, ip)


@dsl_user_op
def warp_min_b32(x: Int32, *, loc=None, ip=None):
    ptx = "redux.sync.min.s32 $0, $1, 0xffffffff;"
    return _asm([Int32], [x], ptx, "=r,r", True, loc, ip)


@dsl_user_op
def count_le(x: Int32, y: Int32, *, loc=None, ip=None):
    """Number of lanes of the warp in which x <= y."""
    ptx = (
        "{ .reg .pred p; .reg .b32 t; setp.le.s32 p, $1, $2;"
        " vote.sync.ballot.b32 t, p, 0xffffffff; popc.b32 $0, t; }"
    )
    return _asm([Int32], [x, y], ptx, "=r,r,r", True, loc, ip)


@dsl_user_op
def transpose_8x8_b16(word: Int32, *, loc=None, ip=None):
    ptx = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return _asm([Int32], [word], ptx, "=r,r", True, loc, ip)


@dsl_user_op
def mma_m16n8k16(a, b, c, kind: str, *, loc=None, ip=None):
    """D = A B + C on one warp; A (4 words) and B (2) hold pairs of ``kind`` (f16 or bf16), C and D
    4 float32."""
    ptx = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return _asm([Float32] * 4, [*a, *b, *c], ptx, constraints, False, loc, ip)
