"""What the compile tests conclude from disassembly and host code, on small pieces of both."""

from __future__ import annotations

import subprocess

import pytest

from tests.compile import cubin

SASS = (
    "HGMMA.64x32x16.F32 R24, R120, gdesc[UR8], RZ, !UPT",
    "HGMMA.64x32x16.F32 R24, gdesc[UR4], R24",
    "@!P0 STL.64 [R1+0x8], R2",
    "@UP1 LDL.LU R3, [R1]",
    "LDL R3, [R1]",
    "@!UPT UTMALDG.4D [UR8], [UR6], desc[UR22]",
    "LDLX R1",
    "EXIT",
)


def test_opcodes_are_counted_by_name():
    code = cubin.parse(list(SASS))
    assert code.opcodes == {
        "EXIT": 1,
        "HGMMA.A_register.64x32x16.F32": 1,
        "HGMMA.A_shared.64x32x16.F32": 1,
        "LDL": 1,
        "LDL.LU": 1,
        "LDLX": 1,
        "STL.64": 1,
        "UTMALDG.4D": 1,
    }
    counts = {"LDL": 2, "STL": 1, "HGMMA": 2, "HGMMA.A_shared": 1, "UTMALDG": 1, "HMMA": 0}
    assert {opcode: code.count(opcode) for opcode in counts} == counts


def test_equal_code_has_an_equal_hash():
    hashes = {cubin.parse(list(text)).sha256 for text in (SASS, SASS[::-1], SASS[:-1])}
    assert len(hashes) == 3
    assert cubin.parse(list(SASS)).sha256 in hashes


CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def host_code(threads: str) -> str:
    return f"""module {{
  llvm.func @cuda_init(%arg0: !llvm.ptr) -> i32 {{
    %1 = llvm.mlir.addressof @kernels_other : !llvm.ptr
  }}
  llvm.func @launch(%arg0: i32) {{
    %7 = llvm.mlir.constant(160 : i32) : i32
    %8 = llvm.mlir.constant(52032 : i64) : i64
    %9 = llvm.alloca %3 x {CONFIG} : (i32) -> !llvm.ptr
    %10 = llvm.getelementptr %9[0, 1, 0] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}
    llvm.store {threads}, %10 : i32, !llvm.ptr
    %11 = llvm.getelementptr %9[0, 1, 1] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}
    llvm.store %3, %11 : i32, !llvm.ptr
    %12 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}
    llvm.store %8, %12 : i64, !llvm.ptr
    %13 = llvm.mlir.addressof @kernels_decode : !llvm.ptr
  }}
}}
"""


def test_launches():
    assert cubin.launches(host_code("%7")) == [cubin.Launch("decode", 160, 52032)]


def test_a_launch_that_is_not_fixed_at_compile_time_is_an_error():
    with pytest.raises(KeyError):
        cubin.launches(host_code("%5"))


@pytest.mark.parametrize("name", ("cuobjdump", "nvdisasm"))
def test_the_tools_run(name):
    done = subprocess.run([cubin.tool(name), "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and "release" in done.stdout


def test_a_missing_tool_is_an_error():
    with pytest.raises(ModuleNotFoundError):
        cubin.tool("no-such-tool")


def test_an_arrival_behind_an_unfenced_load_is_counted():
    load, fence = "LDSM.16.MT88.4 R4, [R2]", "FENCE.VIEW.ASYNC.S"
    arrive = "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R3+URZ+0x80], RZ"
    with_bytes = "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR22+0x80], R8"
    for text, wanted in (
        ([load, arrive], (1, 1)),
        ([load, fence, arrive], (1, 0)),
        ([load, fence, "LDS.128 R8, [R2]", arrive, fence, arrive], (2, 1)),
        ([load, with_bytes], (0, 0)),
    ):
        code = cubin.parse(text)
        assert (code.arrivals, code.unfenced) == wanted
