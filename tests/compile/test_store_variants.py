"""Every store kernel compiles for every architecture it is for, and into what it should be."""

from __future__ import annotations

from cute_kernels.formats import ScaleSearch
from cute_kernels.store.config import TARGETS, THREADS, StoreConfig
from tests.compile.cubin import count
from tests.compile.store_variants import (
    CONVERSION,
    REGISTERS_PER_SM,
    compiled,
    over,
    store_units,
    unit_id,
)

UNITS = store_units()
STORES = [unit for unit in UNITS if isinstance(unit.config, StoreConfig)]


def test_the_units_are_all_there():
    assert len(UNITS) == len({unit_id(unit) for unit in UNITS}) == len(TARGETS) * (5 * 2 + 1)


@over(UNITS)
def test_compiles_without_spills(store_report, unit):
    variant = compiled(store_report, unit)
    assert (variant["stack_bytes"], variant["local_bytes"]) == (0, 0)
    assert count(variant["opcodes"], "LDL") + count(variant["opcodes"], "STL") == 0
    ctas = getattr(unit.config, "ctas_per_sm", 1)
    assert variant["registers"] * ctas * THREADS <= REGISTERS_PER_SM


@over(STORES)
def test_the_conversion_is_where_the_architecture_has_it(store_report, unit):
    """Four floats a byte pair: 8 conversions a group, K and V."""
    found = count(compiled(store_report, unit)["opcodes"], CONVERSION)
    nvfp4_by_instruction = unit.config.storage == "nvfp4" and unit.target != "sm_90a"
    assert found == (16 if nvfp4_by_instruction else 0)
    assert unit.config.e2m1_instruction == nvfp4_by_instruction


@over(STORES)
def test_memory_instructions_are_wide(store_report, unit):
    """16 bytes a load of elements, one store a group where rows are aligned."""
    opcodes = compiled(store_report, unit)["opcodes"]
    assert count(opcodes, "LDG.E.128") == 4
    assert count(opcodes, "STG.E.64" if unit.config.storage == "nvfp4" else "STG.E.128") == 2


@over([unit for unit in STORES if unit.config.storage == "nvfp4"])
def test_products_and_sums_are_not_contracted(store_report, unit):
    """FFMA may be where it is written: one an element in each rounding to E2M1, of which a search
    has two copies and packing without the instruction one; and a few in each reciprocal."""
    ffma = count(compiled(store_report, unit)["opcodes"], "FFMA")
    packs = 0 if unit.config.e2m1_instruction else 2
    searching = sum(search is not ScaleSearch.DEFAULT for search in unit.config.searches)
    written = 16 * (packs + 2 * searching)
    assert written <= ffma <= written + 16 + 4 * searching
