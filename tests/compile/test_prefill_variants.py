"""Every variant of the prefill kernel compiles for sm_90a, and into what it was designed to be."""

from __future__ import annotations

import pytest

from cute_kernels.attention.decode_sm90.config import SMEM_BYTES_PER_CTA
from cute_kernels.attention.prefill_sm90.config import (
    HALF_TOKENS,
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
MAX_STACK_BYTES = {64: 16, 128: 128, 256: 128, 512: 32}


def compiled(report: Report, config: PrefillConfig) -> Report:
    variant = report[config.name]
    assert not variant["error"], variant["error"]
    return variant


over_all = pytest.mark.parametrize("config", TABLE, ids=[config.name for config in TABLE])


@over_all
def test_resources(prefill_report, config):
    variant = compiled(prefill_report, config)
    assert variant["threads"] == THREADS
    assert variant["registers"] == LAUNCH_REGISTERS
    assert variant["local_bytes"] == 0
    assert variant["stack_bytes"] <= MAX_STACK_BYTES[config.head_size]
    assert variant["shared_bytes"] <= smem_bytes(config) + 1024
    assert variant["shared_bytes"] <= SMEM_BYTES_PER_CTA


@over_all
def test_instructions(prefill_report, config):
    opcodes = compiled(prefill_report, config)["opcodes"]
    boxes = HALF_TOKENS // config.box_tokens
    if not config.converts:
        boxes *= config.head_bytes // 128
    assert count(opcodes, "UTMALDG") == 4 * boxes, "one load a box"
    # A tile's scores, at the start and in the loop; its values, in the loop and at the end.
    k_steps = config.head_size // 16 + 2 * (HALF_TOKENS // 16) * config.value_blocks
    source, other = ("register", "shared") if config.converts else ("shared", "register")
    assert count(opcodes, f"HGMMA.A_{source}") == 2 * k_steps
    assert count(opcodes, f"HGMMA.A_{other}") == 0, "converted tiles stay out of shared memory"
    assert (count(opcodes, "F2FP.F16.E4M3.UNPACK_B") > 0) == config.converts
    assert count(opcodes, "STSM") == 2 * config.rows // 16


@over_all
def test_setmaxnreg_and_wgmma_are_as_written(prefill_report, config):
    """C7508: setmaxnreg ignored. C7512: each wgmma waits for the one before."""
    variant = compiled(prefill_report, config)
    assert count(variant["opcodes"], "USETMAXREG.DEALLOC") == 1
    assert count(variant["opcodes"], "USETMAXREG.TRY_ALLOC") == 1
    assert "Used " in variant["remarks"], "ptxas did not report"
    for complaint in ("Potential Performance Loss", "C7508", "C7512"):
        assert complaint not in variant["remarks"]
