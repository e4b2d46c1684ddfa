"""What a compiled variant is made of: its launches, resource usage and instructions."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.metadata import files
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """One launch of the host code, in its order: the kernel, threads of a CTA, dynamic smem."""

    symbol: str
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Usage:
    """`cuobjdump -res-usage` of a kernel: registers a thread, the others in bytes."""

    registers: int
    stack_bytes: int
    local_bytes: int


@dataclass(frozen=True)
class Code:
    """Instructions of a kernel: how often each opcode occurs, and the SHA-256 of their text.

    arrivals: at mbarriers, by threads that bring no bytes; unfenced: those of them that follow a
    wide load from shared memory with no proxy fence between.
    """

    opcodes: dict[str, int]
    sha256: str
    arrivals: int
    unfenced: int

    def count(self, opcode: str) -> int:
        """Occurrences of an opcode, whatever its modifiers (".")."""
        return count(self.opcodes, opcode)


def count(opcodes: dict[str, int], prefix: str) -> int:
    """Occurrences of the opcodes that are `prefix`, or begin with it and a modifier (".")."""
    return sum(n for opcode, n in opcodes.items() if f"{opcode}.".startswith(f"{prefix}."))


@cache
def tool(name: str) -> str:
    """Path of a program that the wheel `nvidia-cuda-<name>` carries."""
    for file in files(f"nvidia-cuda-{name}") or ():
        if file.name == name:
            path = Path(file.locate())
            if not os.access(path, os.X_OK):  # some installers drop the mode of the wheel's file
                path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            return str(path)
    raise FileNotFoundError(f"the package nvidia-cuda-{name} has no program {name}")


def _output(name: str, *arguments: str) -> str:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr or done.stdout}")
    return done.stdout


def usages(cubin: Path) -> dict[str, Usage]:
    """Resource usage of every kernel of a cubin, by symbol."""
    found = re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)",
        _output("cuobjdump", "-res-usage", str(cubin)),
    )
    return {symbol: Usage(*map(int, numbers)) for symbol, *numbers in found}


def code(cubin: Path) -> dict[str, Code]:
    """Instructions of every kernel of a cubin, by symbol."""
    listing = _output("nvdisasm", str(cubin))
    sections = re.split(r"^\s*\.section\s+\.text\.(\S+?),", listing, flags=re.M)
    return {
        symbol: parse(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", text, flags=re.M))
        for symbol, text in zip(sections[1::2], sections[2::2], strict=True)
    }


def parse(instructions: list[str]) -> Code:
    """The code that disassembled instructions, one a string, make up."""
    opcodes: Counter[str] = Counter()
    arrivals = unfenced = 0
    reading = False
    for instruction in instructions:
        text = re.sub(r"^@!?U?P\w+\s+", "", instruction)
        opcode = text.split(maxsplit=1)[0]
        if opcode.startswith("HGMMA"):
            # After the accumulator comes A: a register, or the descriptor of a shared-memory tile.
            operand = "register" if re.match(r"\S+ R\d+, R\d+,", text) else "shared"
            opcode = opcode.replace("HGMMA", f"HGMMA.A_{operand}", 1)
        opcodes[opcode] += 1
        if opcode.startswith(("LDSM", "LDS.128")):
            reading = True
        elif opcode.startswith("FENCE.VIEW.ASYNC"):
            reading = False
        elif opcode.startswith("SYNCS.ARRIVE") and opcode.endswith(("A1T0", "ART0")):
            arrivals += 1
            unfenced += reading
    text = "\n".join(instructions)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Code(dict(sorted(opcodes.items())), digest, arrivals, unfenced)


def ptxas_release(cubin: Path) -> str:
    """The assembler's release, as it wrote it into the cubin."""
    return re.search(rb"release [\d.]+, V[\d.]+", cubin.read_bytes()).group().decode()


# cudaLaunchConfig_t: grid, block, dynamic shared memory, stream, attributes.
_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_EVENTS = re.compile(
    rf"(?P<field>%\d+) = llvm\.getelementptr %\d+\[(?P<index>0, 1, 0|0, 2)\] : .*?, {_CONFIG}\s+"
    r"llvm\.store (?P<value>%\d+), (?P=field) :"
    r"|llvm\.mlir\.addressof @kernels_(?P<symbol>\w+) : "
)


def launches(host_code: str) -> list[Launch]:
    """The launches in the host code (LLVM dialect) that the DSL keeps with a compiled function."""
    functions = re.split(r"^  (?=llvm\.func )", host_code, flags=re.M)
    (body,) = [text for text in functions if re.search(_CONFIG, text)]
    constants = dict(re.findall(r"(%\d+) = llvm\.mlir\.constant\((\d+) : i\d+\)", body))
    found, fields = [], {}
    for event in _EVENTS.finditer(body):
        if event["symbol"] is None:
            fields[event["index"]] = int(constants[event["value"]])
        else:
            found.append(Launch(event["symbol"], fields["0, 1, 0"], fields["0, 2"]))
    return found
