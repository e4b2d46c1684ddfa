"""Every indexer kernel compiles for every architecture it is for, and into what it should be."""

from __future__ import annotations

import json

from cute_kernels.indexer.config import TARGETS, IndexerKConfig, IndexerQConfig
from tests.compile.cubin import count
from tests.compile.indexer_variants import RECORD, indexer_units, record_of
from tests.compile.store_variants import CONVERSION, REGISTERS_PER_SM, compiled, over, unit_id
from tests.requires import requires

UNITS = indexer_units()
QS = [unit for unit in UNITS if isinstance(unit.config, IndexerQConfig)]
KS = [unit for unit in UNITS if isinstance(unit.config, IndexerKConfig)]


def test_the_units_are_all_there():
    """Two formats; Q: sizes, and heads of a thread; K: head sizes and windows."""
    names = {unit_id(unit) for unit in UNITS}
    assert len(UNITS) == len(names) == len(TARGETS) * 2 * (4 + 5)


@over(UNITS)
def test_compiles_without_spills(indexer_report, unit):
    variant = compiled(indexer_report, unit)
    assert (variant["stack_bytes"], variant["local_bytes"]) == (0, 0)
    assert count(variant["opcodes"], "LDL") + count(variant["opcodes"], "STL") == 0
    assert variant["registers"] * getattr(unit.config, "threads", 128) <= REGISTERS_PER_SM


@over(QS + KS)
def test_the_conversion_is_where_the_architecture_has_it(indexer_report, unit):
    """Four a chunk of 8 elements: of Q two chunks a head, of K one a vector."""
    found = count(compiled(indexer_report, unit)["opcodes"], CONVERSION)
    mxfp4_by_instruction = unit.config.cache_format == "mxfp4" and unit.target != "sm_90a"
    chunks = 2 * unit.config.heads_per_thread if unit in QS else unit.config.vectors
    assert found == (4 * chunks if mxfp4_by_instruction else 0)
    assert unit.config.e2m1_instruction == mxfp4_by_instruction


@over(QS)
def test_elements_of_q_are_loaded_16_bytes_at_a_time(indexer_report, unit):
    """Those of all heads of a thread; two more at least are of cos and sin."""
    opcodes = compiled(indexer_report, unit)["opcodes"]
    assert count(opcodes, "LDG.E.128") >= 2 * unit.config.heads_per_thread + 2


@over(QS)
def test_products_of_the_rotation_are_not_contracted(indexer_report, unit):
    """Four products and two sums a pair, of both chunks where the first may be rotated too."""
    opcodes = compiled(indexer_report, unit)["opcodes"]
    pairs = (1 if unit.config.fixed_sizes else 2) * 4 * unit.config.heads_per_thread
    assert count(opcodes, "FFMA") == 0
    assert count(opcodes, "FMUL") >= 4 * pairs
    assert count(opcodes, "FADD") >= 2 * pairs


@over(KS)
def test_state_rows_are_loaded_16_bytes_at_a_time(indexer_report, unit):
    """Entries and scores of 8 rows a vector, which L1 does not keep, and norm weights. For sm_120a
    the assembler does not always say .NA, and writes the loads of seven rows out twice."""
    opcodes = compiled(indexer_report, unit)["opcodes"]
    found = [count(opcodes, name) for name in ("LDG.E.NA.128", "LDG.E.128")]
    vectors = unit.config.vectors
    if unit.target == "sm_120a":
        assert sum(found) in ((2 * 8 + 1) * vectors, (2 * (8 + 7) + 1) * vectors)
    else:
        assert found == [2 * 8 * vectors, vectors]


def test_the_record_is_of_these_units():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(record["units"]) == {unit_id(unit) for unit in UNITS}


def test_registers_are_as_recorded(indexer_report):
    """python -m tests.compile.indexer_variants records them anew."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    requires(dsl=record["dsl"])
    assert record_of(indexer_report) == record
