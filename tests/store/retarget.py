"""Run a store (or indexer) kernel that was compiled for sm_100a on an SM90 device.

The compiler's PTX for sm_100a is taken as it is but for three changes: each conversion
`cvt.rn.satfinite.e2m1x2.f32`, which sm_90a does not have, becomes a sequence of comparisons with
the boundaries of the format; `.target` names sm_90a; `.version` is lowered to one that older
assemblers know. The driver assembles it. Address arithmetic, scale search, predicates and layout
are so those of the SM100 kernel; the conversion instruction itself, and what the assembler for
sm_100a makes of the rest, are not.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cute_kernels.store.config import THREADS, StoreConfig

CONVERSION = re.compile(r"cvt\.rn\.satfinite\.e2m1x2\.f32\s+(\S+),\s*(\S+),\s*(\S+);")
PTX_VERSION = "8.6"
# PTX's spelling of the boundaries, and whether a tie belongs to the code above.
_BOUNDARIES = (
    ("0f3E800000", "gt"),  # 0.25
    ("0f3F400000", "ge"),  # 0.75
    ("0f3FA00000", "gt"),  # 1.25
    ("0f3FE00000", "ge"),  # 1.75
    ("0f40200000", "gt"),  # 2.5
    ("0f40600000", "ge"),  # 3.5
    ("0f40A00000", "gt"),  # 5
)


def _code(source: str, target: str) -> list[str]:
    lines = [f"abs.f32 mag, {source};", f"mov.b32 {target}, {source};"]
    lines += [f"shr.u32 {target}, {target}, 31;", f"shl.b32 {target}, {target}, 3;"]
    for boundary, comparison in _BOUNDARIES:
        lines.append(f"setp.{comparison}.f32 pr, mag, {boundary};")
        lines.append(f"@pr add.u32 {target}, {target}, 1;")
    lines += [f"setp.nan.f32 pr, {source}, {source};", f"@pr mov.u32 {target}, 7;"]
    return lines


def _software(match: re.Match[str]) -> str:
    byte, high, low = match.groups()
    lines = ["{ .reg .pred pr; .reg .f32 mag; .reg .b32 lo, hi;"]
    lines += [*_code(low, "lo"), *_code(high, "hi")]
    lines += ["shl.b32 hi, hi, 4;", "or.b32 lo, lo, hi;", f"cvt.u8.u32 {byte}, lo;", "}"]
    return "\n".join(lines)


def retargeted(ptx: str) -> tuple[str, int]:
    """The PTX for sm_90a, and how many conversions were replaced."""
    ptx, count = CONVERSION.subn(_software, ptx)
    ptx, targets = re.subn(r"^\.target sm_\w+", ".target sm_90a", ptx, flags=re.M)
    ptx, versions = re.subn(r"^\.version \S+", f".version {PTX_VERSION}", ptx, flags=re.M)
    assert (targets, versions) == (1, 1)
    return ptx, count


def sm100_ptx(config: StoreConfig, folder: Path) -> str:
    """What the compiler makes of a store variant for sm_100a."""
    from cute_kernels.store.build import compile_store

    return compiled_ptx(compile_store, config, folder)


def compiled_ptx(compiler: Callable, config: object, folder: Path) -> str:
    """What a compiling function makes of a variant for sm_100a; the folder is its own."""
    from cute_kernels.compile.plans import compile_options

    compiler(config, f"{compile_options('sm_100a')} --keep-ptx --dump-dir={folder}")
    (path,) = folder.glob("*.ptx")
    return path.read_text(encoding="utf-8").rstrip("\0")


_C_TYPES = {"u64": ctypes.c_int64, "u32": ctypes.c_int32, "f32": ctypes.c_float}
# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and what needs none.
_MAX_SHARED, _SHARED_BYTES = 8, 48 * 1024
_CHECKED = "CUDA driver call failed with error"


class DriverKernel:
    """A kernel of some PTX, launched through the driver on torch's current stream."""

    def __init__(self, ptx: str):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        (name,) = re.findall(r"\.visible \.entry (\w+)\(", ptx)
        parameters = re.search(rf"\.entry {name}\((.*?)\n\)", ptx, re.S).group(1)
        # The first parameter is a tensor: its address, sizes and strides.
        self.kinds = re.findall(r"\.param (?:\.align 8 )?\.(\w+) ", parameters)
        self.log = ctypes.create_string_buffer(1 << 14)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size in bytes
        values = (ctypes.c_void_p * 2)(ctypes.addressof(self.log), len(self.log))
        torch.cuda.current_stream()  # the primary context
        torch.empty(1, device="cuda")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(
            self.cuda.cuModuleLoadDataEx(
                ctypes.byref(self.module), ptx.encode() + b"\0", 2, options, values
            )
        )
        self._check(
            self.cuda.cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode())
        )

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"{_CHECKED} {error}: {self.log.value.decode()}")

    def __call__(
        self,
        grid: Sequence[int],
        tensor: Sequence[int],
        scalars: Sequence[float],
        threads: int = THREADS,
        shared_bytes: int = 0,
    ) -> None:
        """tensor: the 64-bit words of the first parameter."""
        assert self.kinds[0] == "b8" and len(scalars) == len(self.kinds) - 1
        tensor = (ctypes.c_int64 * len(tensor))(*tensor)
        values = [_C_TYPES[k](v) for k, v in zip(self.kinds[1:], scalars, strict=True)]
        pointers = [ctypes.addressof(x) for x in (tensor, *values)]
        parameters = (ctypes.c_void_p * len(pointers))(*pointers)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if shared_bytes > _SHARED_BYTES:
            self._check(self.cuda.cuFuncSetAttribute(self.function, _MAX_SHARED, shared_bytes))
        self._check(
            self.cuda.cuLaunchKernel(
                self.function, *grid, threads, 1, 1, shared_bytes, stream, parameters, None
            )
        )


def flat(values: object) -> list[float]:
    """The numbers of nested tuples, in order."""
    if isinstance(values, tuple):
        return [number for value in values for number in flat(value)]
    return [values]


def launch_function(config: StoreConfig, folder: Path) -> Callable[..., None]:
    """A stand-in for the compiled launch function of the variant's SM100 kernel."""
    ptx, count = retargeted(sm100_ptx(config, folder))
    assert (count > 0) == config.e2m1_instruction
    kernel = DriverKernel(ptx)

    def launch(slots: torch.Tensor, key: tuple, value: tuple, shape: tuple) -> None:
        tokens, (token_groups, *_) = shape[:2]
        grid = (-(-tokens * token_groups // THREADS), 2, 1)
        kernel(grid, (slots.data_ptr(), slots.shape[0]), flat((key, value, shape)))

    return launch
