"""Every variant of the prefill kernel compiles for sm_90a, and into what it was designed to be."""

from __future__ import annotations

import pytest

from cute_kernels.attention.decode_sm90.config import SMEM_BYTES_PER_CTA
from cute_kernels.attention.prefill_sm90.config import (
    LAUNCH_REGISTERS,
    THREADS,
    PrefillConfig,
    smem_bytes,
    support_table,
)
from tests.compile.cubin import count
from tests.compile.prefill_variants import Report

TABLE = support_table()
# Bytes of stack a thread. What is spilled is spilled around code that rarely runs (softcap, masks,
# moving references); at head size 128 also some of the row sums, once a tile, and at 256 addresses
# in the producer, which issues 64 loads a tile of pages of 16 tokens.
MAX_STACK_BYTES = {64: 16, 128: 128, 256: 128, 512: 48}
# Of the 16-bit kernel only that producer spills, and at head size 512 addresses of the output.
MAX_STACK_BYTES_16_BITS = 32
MAX_STACK_BYTES_16_BITS_D512 = 160
# Where warps copy, consumers have 16 registers fewer: what an item's last rows need is kept in
# memory while it is walked.
MAX_STACK_BYTES_WIDENED = 48


def compiled(report: Report, config: PrefillConfig) -> Report:
    variant = report[config.name]
    assert not variant["error"], variant["error"]
    return variant


def _most_stack(config: PrefillConfig) -> int:
    if config.converts:
        return MAX_STACK_BYTES[config.head_size]
    if config.head_size == 512:
        return MAX_STACK_BYTES_16_BITS_D512
    if config.reads_copies:
        return MAX_STACK_BYTES_WIDENED
    return MAX_STACK_BYTES_16_BITS if config.box_tokens == 16 else 0


over_all = pytest.mark.parametrize("config", TABLE, ids=[config.name for config in TABLE])


@over_all
def test_resources(prefill_report, config):
    variant = compiled(prefill_report, config)
    assert variant["threads"] == THREADS
    assert variant["registers"] == LAUNCH_REGISTERS
    assert variant["local_bytes"] == 0
    assert variant["stack_bytes"] <= _most_stack(config)
    assert variant["shared_bytes"] <= smem_bytes(config) + 1024
    assert variant["shared_bytes"] <= SMEM_BYTES_PER_CTA


@over_all
def test_instructions(prefill_report, config):
    opcodes = compiled(prefill_report, config)["opcodes"]
    boxes = config.tile_tokens // config.box_tokens
    # A tile's scores, at the start and in the loop; its values, in the loop and at the end.
    scores, values = 2 * config.head_size // 16, 2 * config.tile_tokens // 16
    shared, registers = count(opcodes, "HGMMA.A_shared"), count(opcodes, "HGMMA.A_register")
    if config.converts:
        assert count(opcodes, "UTMALDG") == 2 * boxes, "one load a box"
        assert registers == scores + values * config.value_blocks
        assert shared == 0, "converted tiles stay out of shared memory"
        assert count(opcodes, "STSM") == 2 * config.rows // 16
    else:
        assert count(opcodes, "UTMALDG") == 2 * boxes * (config.head_bytes // 128)
        assert (shared, registers) == (scores, values), "P stays in registers"
    converts = config.converts or config.reads_copies
    assert (count(opcodes, "F2FP.F16.E4M3.UNPACK_B") > 0) == converts


@over_all
def test_setmaxnreg_and_wgmma_are_as_written(prefill_report, config):
    """C7508: setmaxnreg ignored. C7512: each wgmma waits for the one before."""
    variant = compiled(prefill_report, config)
    assert count(variant["opcodes"], "USETMAXREG.DEALLOC") == 1
    assert count(variant["opcodes"], "USETMAXREG.TRY_ALLOC") == 1
    assert "Used " in variant["remarks"], "ptxas did not report"
    for complaint in ("Potential Performance Loss", "C7508", "C7512"):
        assert complaint not in variant["remarks"]


WIDENED = [config for config in TABLE if config.reads_copies]


@pytest.mark.parametrize("config", WIDENED, ids=lambda config: config.name)
def test_copies(prefill_report, config):
    """Vectors of 8 elements, converted to 16 bytes each; as many as there are loads in flight."""
    opcodes = compiled(prefill_report, config)["opcodes"]
    vectors = min(config.copy_loads, config.head_size // 8)
    assert count(opcodes, "STG.E.128") == vectors
    # Of the counters: the first unit, the next one; leaving of the producer, of its neighbours.
    assert count(opcodes, "ATOMG") == 4
    # Of a unit, and of what the producer found.
    assert count(opcodes, "FENCE.VIEW.ASYNC.G") == 2
    if config.copies_from == "nvfp4":
        # a word of codes and a block scale
        assert count(opcodes, "LDG.E.U8") == vectors
        assert count(opcodes, "F2FP.F16.E4M3.UNPACK_B") == 5 * vectors
    else:
        assert count(opcodes, "LDG.E.64") == vectors
        assert count(opcodes, "F2FP.F16.E4M3.UNPACK_B") == 4 * vectors
