"""Every variant of the support table compiles for sm_90a, and into what it was designed to be."""

from __future__ import annotations

import json
import math

import pytest

from cute_kernels.attention.decode_sm90.config import (
    PRODUCER_REGISTERS,
    SMEM_BYTES_PER_CTA,
    SMEM_BYTES_PER_SM,
    TILE_TOKENS,
    WARPGROUP_THREADS,
    DecodeConfig,
    make_config,
    smem_bytes,
    support_table,
)
from tests.compile.cubin import count
from tests.compile.variants import (
    RECORD,
    Report,
    compile_one,
    record_of,
    wants_remarks,
    worker_pool,
)
from tests.requires import requires

TABLE = support_table()
# Of one SM: four partitions with a register file each, allocated to warps in pieces of 256.
PARTITIONS = 4
PARTITION_REGISTERS = 16384
REGISTER_PIECE = 256
# What the hardware keeps of each CTA's shared memory.
RESERVED_SMEM = 1024


def over(configs: list[DecodeConfig]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("config", configs, ids=[config.name for config in configs])


def compiled(report: Report, config: DecodeConfig) -> Report:
    variant = report["variants"][config.name]
    assert not variant["error"], variant["error"]
    return variant


@over(TABLE)
def test_compiles(report, config):
    variant = compiled(report, config)
    assert variant["threads"] == config.threads


@over([c for c in TABLE if c.head_size <= 256 or c.rows < 32 or not c.block_scaled])
def test_nothing_spills(report, config):
    variant = compiled(report, config)
    spills = {name: variant[name] for name in ("stack_bytes", "local_bytes")}
    spills["instructions"] = variant["local_memory_instructions"]
    assert spills == {"stack_bytes": 0, "local_bytes": 0, "instructions": 0}


@over(TABLE)
def test_registers_leave_room_for_the_resident_ctas(report, config):
    """The kernel waits for other CTAs of its grid, so all that it launches must be resident."""
    registers = compiled(report, config)["registers"]
    warps = math.ceil(config.threads // 32 * config.ctas_per_sm / PARTITIONS)
    per_warp = math.ceil(32 * registers / REGISTER_PIECE) * REGISTER_PIECE
    assert warps * per_warp <= PARTITION_REGISTERS


@over(TABLE)
def test_shared_memory_leaves_room_for_the_resident_ctas(report, config):
    needed = compiled(report, config)["shared_bytes"]
    bound = smem_bytes(config)
    assert needed <= bound <= SMEM_BYTES_PER_CTA
    assert bound - needed <= 3 * 1024, "the bound is wasteful: it would cost a ring slot"
    assert config.ctas_per_sm * (needed + RESERVED_SMEM) <= SMEM_BYTES_PER_SM


@over(TABLE)
def test_instructions(report, config):
    opcodes = compiled(report, config)["opcodes"]
    assert count(opcodes, "UTMALDG") >= 2 * TILE_TOKENS // config.box_tokens, "one load a box"
    converted = count(opcodes, "F2FP.F16.E4M3.UNPACK_B") > 0
    assert converted == config.converts, "e4m3 is converted in registers"
    assert count(opcodes, "HGMMA.A_shared") == 0, "no dequantized tile goes through shared memory"
    if config.uses_wgmma:
        assert count(opcodes, "HGMMA.A_register") > 0
        assert count(opcodes, "HMMA") == 0
    else:
        assert count(opcodes, "HMMA") > 0 and count(opcodes, "MOVM") > 0
        assert count(opcodes, "HGMMA") == 0


@over(TABLE)
def test_a_slot_is_handed_back_behind_a_fence(report, config):
    """Without it the arrival is issued right behind the loads, and TMA may overtake them."""
    variant = compiled(report, config)
    keys = 0 if config.paired else config.step_tiles // config.warpgroups
    # Once an item that of the staged queries.
    assert variant["arrivals"] == config.step_tiles + keys + config.stages_queries
    assert variant["unfenced"] == 0


@over([config for config in TABLE if wants_remarks(config)])
def test_the_assembler_has_no_complaint(report, config):
    """C7508: setmaxnreg ignored. C7512: each wgmma waits for the one before."""
    remarks = compiled(report, config)["remarks"]
    assert "Used " in remarks, "ptxas did not report"
    assert "Potential Performance Loss" not in remarks
    assert "C7508" not in remarks and "C7512" not in remarks


@over([config for config in TABLE if config.consumer_registers])
def test_setmaxnreg_moves_registers_that_the_cta_has(report, config):
    variant = compiled(report, config)
    assert count(variant["opcodes"], "USETMAXREG.DEALLOC") == 1
    assert count(variant["opcodes"], "USETMAXREG.TRY_ALLOC") == 1
    # More than the launch gave the CTA would never be granted: the consumers would wait for ever.
    groups = config.warpgroups
    assert config.threads == (1 + groups) * WARPGROUP_THREADS
    held = PRODUCER_REGISTERS + groups * config.consumer_registers
    assert held <= (1 + groups) * variant["registers"]
    assert PRODUCER_REGISTERS % 8 == config.consumer_registers % 8 == 0


@over([config for config in TABLE if not config.consumer_registers])
def test_no_setmaxnreg_elsewhere(report, config):
    assert count(compiled(report, config)["opcodes"], "USETMAXREG") == 0


def test_an_ignored_setmaxnreg_would_be_seen(report):
    """Shows that the two tests above can fail: this variant provokes the remark."""
    ignored = report["ignored"]
    assert not ignored["error"], ignored["error"]
    assert "C7508" in ignored["remarks"] and "Potential Performance Loss" in ignored["remarks"]
    assert count(ignored["opcodes"], "USETMAXREG") == 0


def test_the_committed_resource_usage_is_current(report):
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    requires(dsl=record["dsl"])
    found = record_of(report)
    changed = {
        name: (record["variants"].get(name), row)
        for name, row in found["variants"].items()
        if record["variants"].get(name) != row
    }
    assert not changed, "committed and found; to record: python -m tests.compile.variants"
    assert found == record


def test_another_process_makes_the_same_code(report, tmp_path):
    """Without ptxas's report, in another order and a process of its own."""
    configs = [make_config(128, 64, "bf16", 64), make_config(256, 8, "fp16", 16)]
    with worker_pool(1) as pool:
        for i, config in enumerate(configs):
            again = pool.submit(compile_one, config, False, tmp_path / str(i)).result()
            assert not again["error"], again["error"]
            assert again["sha256"] == compiled(report, config)["sha256"]
