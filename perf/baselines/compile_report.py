"""Compile the Triton baseline for sm_90a without a GPU: registers, spills, shared memory.

    python -m perf.baselines.compile_report            the configurations in use
    python -m perf.baselines.compile_report --search   every configuration that the tuner tries

Triton's own ptxas and cuobjdump do the work.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from perf.baselines import triton_decode_kernels as kernels
from perf.baselines.triton_decode import (
    DecodeConfig,
    tuned_configs,
    untuned_config,
)
from perf.baselines.tuning import packed_rows

HOPPER = GPUTarget("cuda", 90, 32)
SMEM_BYTES = 232448  # SM90: 227 KiB a CTA
# Triton releases differ by a spilled register or two; a spilled accumulator is hundreds of bytes.
MAX_STACK_BYTES = 32
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class KernelShape:
    """What the split kernel is specialised for, besides the configuration."""

    head_size: int
    group: int
    q_len: int
    page_size: int = 64
    window: int = -1

    @property
    def rows(self) -> int:
        return packed_rows(self.group, self.q_len)


@dataclass(frozen=True)
class Resources:
    """Registers a thread; bytes of stack a thread (spills live there); shared bytes a CTA."""

    registers: int
    stack: int
    shared: int

    @property
    def fits(self) -> bool:
        return self.stack <= MAX_STACK_BYTES and self.shared <= SMEM_BYTES


def search_space() -> list[DecodeConfig]:
    """What is tried for every shape; the split target costs no compile."""
    return [
        DecodeConfig(block_n, warps, stages)
        for block_n, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4))
    ]


def bench_shapes() -> list[KernelShape]:
    """The distinct kernels of the decode cases."""
    from perf.cases import DECODE_CASES, VERIFY_CASES

    shapes = {
        KernelShape(c.head_size, c.group, c.q_len, c.page_size, c.window_left)
        for c in (*DECODE_CASES, *VERIFY_CASES)
    }
    return sorted(shapes, key=lambda s: (s.head_size, s.rows, s.window))


def configs_in_use(shape: KernelShape) -> list[DecodeConfig]:
    """What `choose_config` can answer for a shape, configurations of one kernel listed once."""
    tuned = tuned_configs().get((shape.head_size, shape.rows), {})
    known = list(tuned.values()) or [untuned_config(shape.head_size, shape.rows)]
    kernels_of = {(c.block_n, c.num_warps, c.num_stages): c for c in known}
    return [kernels_of[key] for key in sorted(kernels_of)]


def _source(shape: KernelShape, block_n: int, split: bool) -> ASTSource:
    """The split kernel as the launcher specialises it for aligned tensors, 16-divisible strides."""
    operands = {
        "queries": kernels.Queries("*bf16", "*i32", "i32", "i32"),
        "kv": kernels.PagedKV("*fp8e4nv", "*i16", "*i32", "*i32", "*fp32", "*fp32"),
        "strides": kernels.KVStrides(*["i32"] * 11),
        "outputs": kernels.Outputs("*bf16", "*fp32", "constexpr", "i32", "i32", "i32"),
        "partials": kernels.Partials("*fp32", "*fp32", "i32"),
        "qk_scale": "fp32",
    }
    constants = {
        "GROUP": shape.group,
        "ROWS": shape.rows,
        "D": shape.head_size,
        "PAGE": shape.page_size,
        "BLOCK_N": block_n,
        "FLAGS": (True, shape.window, split, True),
    }
    names = kernels.decode_split_kernel.arg_names
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    constexprs[(names.index("outputs"), 2)] = None
    divisible = {(names.index("strides"), i) for i in range(6)}
    divisible |= {(names.index("queries"), i) for i in (2, 3)}
    divisible |= {(names.index("outputs"), i) for i in (3, 4)}
    for name, operand in operands.items():
        parts = operand if isinstance(operand, tuple) else ()
        divisible |= {(names.index(name), i) for i, part in enumerate(parts) if part[0] == "*"}
    attrs = {path: [["tt.divisibility", 16]] for path in divisible}
    signature = {**operands, **dict.fromkeys(constants, "constexpr")}
    return ASTSource(kernels.decode_split_kernel, signature, constexprs, attrs)


def compile_kernel(
    shape: KernelShape, config: DecodeConfig, split: bool = True
) -> tuple[Resources, dict[str, str | bytes]]:
    """Compile for sm_90a; returns the resource usage and the stages' texts (ttgir, ptx, cubin)."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    source = _source(shape, config.block_n, split)
    compiled = triton.compile(source, target=HOPPER, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    resources = Resources(int(found[1]), int(found[2]), compiled.metadata.shared)
    return resources, compiled.asm


@click.command(help="Registers, spills and shared memory of the Triton baseline on sm_90a.")
@click.option("--search", is_flag=True, help="the tuner's whole search space")
def main(search: bool) -> None:
    for shape in bench_shapes():
        for config in search_space() if search else configs_in_use(shape):
            resources, _ = compile_kernel(shape, config)
            click.echo(
                f"D {shape.head_size:3d} rows {shape.rows:3d} window {shape.window:5d} | "
                f"block_n {config.block_n:3d} warps {config.num_warps} stages {config.num_stages}"
                f" | registers {resources.registers:3d} stack {resources.stack:4d} "
                f"shared {resources.shared:6d}{'' if resources.fits else '  spills or too large'}"
            )


if __name__ == "__main__":
    main()
