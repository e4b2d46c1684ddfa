"""The contracts are plain, light, and agree with what the kernels do."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.arch import TARGETS, DeviceArch
from cute_kernels.attention.arguments import validate
from cute_kernels.attention.decode_sm90 import config
from cute_kernels.attention.decode_sm90 import op as decode_op
from cute_kernels.attention.prefill_sm90 import config as prefill_config
from cute_kernels.attention.prefill_sm90 import op as prefill_op
from cute_kernels.attention.widen_sm90 import config as widen_config
from cute_kernels.formats import STORAGE_FORMATS
from cute_kernels.registry import (
    FEATURES,
    KernelContract,
    PageSizes,
    contracts,
    support_table_markdown,
)
from tests.cases import AttentionCase, make_inputs

DECODE_SM90, DECODE_16_BITS, PREFILL_SM90, PREFILL_16_BITS, PREFILL_NVFP4 = contracts()
OPS = {
    "decode_sm90": decode_op,
    "decode_sm90_16_bits": decode_op,
    "prefill_sm90": prefill_op,
    "prefill_sm90_16_bits": prefill_op,
}
Q_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_importing_the_registry_loads_neither_torch_nor_the_dsl():
    code = (
        "import sys, cute_kernels.registry as registry\n"
        "registry.support_table_markdown()\n"
        "print({'torch', 'cutlass', 'tvm_ffi', 'cuda'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_contracts_are_plain_data():
    for contract in contracts():
        as_lists = json.loads(json.dumps(dataclasses.asdict(contract)))
        assert set(as_lists) == {field.name for field in dataclasses.fields(KernelContract)}
        hash(contract)
        with pytest.raises(dataclasses.FrozenInstanceError):
            contract.preferred_page_size = 16


def test_names_are_unique_and_known():
    names = [contract.name for contract in contracts()]
    assert len(set(names)) == len(names)
    for contract in contracts():
        assert set(contract.architectures) <= set(TARGETS.values())
        assert set(contract.features) <= set(FEATURES)


def test_page_sizes():
    pages = PageSizes((24, 64), 32)
    assert [size for size in range(-64, 100) if size in pages] == [24, 32, 64, 96]
    assert 0 not in pages
    accepted = PageSizes((), 16)
    assert [size for size in range(-16, 50) if size in accepted] == [16, 32, 48]


def test_page_sizes_of_the_decode_kernel():
    contract = DECODE_SM90
    accepted = [size for size in range(4097) if size in contract.page_sizes]
    assert accepted == [n for n in range(4097) if config.box_tokens_for_page(n) is not None]
    advertised = [size for size in range(4097) if size in contract.advertised_page_sizes]
    assert advertised == [n for n in range(4097) if config.box_tokens_for_page(n) == 64]
    assert contract.preferred_page_size == min(advertised) == 64
    assert contract.advertised_page_sizes.sizes == (64,)


def test_kernels_that_share_a_cache_take_the_same_pages():
    """Planners ask for the pages of one of them."""
    for field in ("page_sizes", "advertised_page_sizes", "preferred_page_size", "kv_layouts"):
        assert len({getattr(contract, field) for contract in contracts()}) == 1


def test_every_variant_of_the_prefill_kernel_is_in_one_contract_and_the_reverse():
    table = {
        (variant.kv_format, variant.q_dtype, variant.head_size, variant.rows)
        for variant in prefill_config.support_table()
        if not variant.reads_copies
    }
    promised = {
        (storage, q_dtype, head_size, contract.max_packed_rows(head_size))
        for contract in (PREFILL_SM90, PREFILL_16_BITS)
        for storage in contract.kv_cache_formats
        for q_dtype in contract.q_dtypes
        for head_size in contract.head_sizes
        if storage == q_dtype or not contract.cache_in_q_dtype
    }
    assert promised == table and len(table) == 2 * 4 + 2 * 4
    assert PREFILL_16_BITS.head_sizes == (64, 128, 256, 512)
    assert [each.cache_in_q_dtype for each in contracts()] == [False, True] * 2 + [False]
    assert {contract.kv_cache_formats for contract in contracts()} == {
        ("fp8_e4m3", "nvfp4"),
        ("fp8_e4m3",),
        ("bf16", "fp16"),
        ("nvfp4",),
    }
    with pytest.raises(ValueError, match="^head_size: got 96; prefill_sm90_16_bits has "):
        PREFILL_16_BITS.max_packed_rows(96)


def test_every_variant_is_in_the_contract_and_the_reverse():
    most: dict[tuple[str, str, int], int] = {}
    for variant in config.support_table():
        key = (variant.kv_format, variant.q_dtype, variant.head_size)
        most[key] = max(variant.rows, most.get(key, 0))
    promised = {
        (storage, q_dtype, head_size): contract.max_packed_rows(head_size)
        for contract in (DECODE_SM90, DECODE_16_BITS)
        for storage in contract.kv_cache_formats
        for q_dtype in contract.q_dtypes
        for head_size in contract.head_sizes
        if storage == q_dtype or not contract.cache_in_q_dtype
    }
    assert promised == most and len(most) == 2 * 2 * 4 + 2 * 4
    with pytest.raises(ValueError, match="^head_size: got 96; decode_sm90 has "):
        DECODE_SM90.max_packed_rows(96)


def problem_on_a_gpu(case: AttentionCase) -> object:
    """The validated problem of a case, its tensors claiming to be on cuda:0."""
    problem = validate(**make_inputs(case))
    q = SimpleNamespace(device=torch.device("cuda:0"), dtype=problem.q.dtype, shape=problem.q.shape)
    return problem._replace(q=q)


def case_of(head_size: int, page_size: int | None, **fields) -> AttentionCase:
    shape = {"kv_lens": (70, 3), "q_lens": (1, 2)}
    return AttentionCase(id="contract", head_size=head_size, page_size=page_size, **shape, **fields)


def takes(monkeypatch, contract, problem, capability=(9, 0)) -> bool:
    """Whether the contract's kernel says that it runs this problem, on such a device."""
    arch = DeviceArch(capability, TARGETS[capability], 132)
    op = OPS[contract.name]
    monkeypatch.setattr(op, "device_arch", lambda index: arch)
    return op.can_run(problem) is None


def cache_for(contract, q_dtype: str = "bf16") -> dict[str, object]:
    """Fields of a case whose cache the contract reads."""
    if not contract.cache_in_q_dtype:
        return {"q_dtype": Q_DTYPES[q_dtype]}
    return {"q_dtype": Q_DTYPES[q_dtype], "kv_dtype": Q_DTYPES[q_dtype], "scale_kind": "none"}


# That of copies takes no call by itself: it takes long sequences off the decode kernel's.
OF_CALLS = (DECODE_SM90, PREFILL_SM90, PREFILL_16_BITS)
each_contract = pytest.mark.parametrize("contract", OF_CALLS, ids=lambda each: each.name)


@each_contract
@pytest.mark.parametrize("head_size", (16, 64, 80, 96, 128, 192, 256, 512, 576))
@pytest.mark.parametrize("page_size", (None, 1, 8, 16, 24, 32, 48, 64, 80, 128, 1600))
def test_the_op_takes_the_shapes_of_the_contract_and_no_others(
    monkeypatch, contract, head_size, page_size
):
    promised = head_size in contract.head_sizes
    promised &= page_size is None or page_size in contract.page_sizes
    problem = problem_on_a_gpu(case_of(head_size, page_size, **cache_for(contract)))
    assert takes(monkeypatch, contract, problem) == promised


@each_contract
@pytest.mark.parametrize("capability", sorted(TARGETS))
def test_the_op_takes_the_architectures_of_the_contract_and_no_others(
    monkeypatch, contract, capability
):
    problem = problem_on_a_gpu(case_of(128, 64, **cache_for(contract)))
    promised = TARGETS[capability] in contract.architectures
    assert takes(monkeypatch, contract, problem, capability) == promised


@each_contract
@pytest.mark.parametrize(
    "fields",
    (
        {"layout": "NHD"},
        {"layout": "HND"},
        {"layout": "interleaved"},
        {"window": (127, 0), "softcap": 20.0, "sinks": True},
        {"causal": False},
    ),
)
@pytest.mark.parametrize("q_dtype", ("bf16", "fp16"))
def test_the_op_takes_the_features_of_the_contract(monkeypatch, contract, fields, q_dtype):
    case = case_of(256, 64, **fields, **cache_for(contract, q_dtype))
    assert takes(monkeypatch, contract, problem_on_a_gpu(case))


@each_contract
def test_the_op_is_batch_invariant_where_the_contract_says_so(monkeypatch, contract):
    problem = problem_on_a_gpu(case_of(128, 64, **cache_for(contract)))
    same_bits = problem._replace(deterministic=True)
    assert takes(monkeypatch, contract, same_bits) == ("batch_invariant" in contract.features)


def test_caches_are_read_by_the_kernels_of_their_format(monkeypatch):
    wide = problem_on_a_gpu(case_of(128, 64, **cache_for(PREFILL_16_BITS)))
    assert takes(monkeypatch, DECODE_16_BITS, wide)
    assert takes(monkeypatch, PREFILL_16_BITS, wide)
    # In another dtype than the queries' no call gets that far.
    for name, torch_dtype in Q_DTYPES.items():
        (other,) = set(PREFILL_16_BITS.kv_cache_formats) - {name}
        stored = STORAGE_FORMATS[other].torch_dtype
        mixed = {"q_dtype": torch_dtype, "kv_dtype": stored, "scale_kind": "none"}
        with pytest.raises(ValueError, match="float8_e4m3fn"):
            validate(**make_inputs(case_of(128, 64, **mixed)))


def test_the_kernel_that_reads_copies_of_nvfp4():
    contract = PREFILL_NVFP4
    sizes = set(widen_config.head_sizes("nvfp4"))
    assert set(contract.head_sizes) == sizes <= set(DECODE_SM90.head_sizes)
    assert contract.kv_cache_formats == ("nvfp4",) and contract.q_dtypes == DECODE_SM90.q_dtypes
    table = prefill_config.support_table()
    assert {each.head_size for each in table if each.copies_from == "nvfp4"} == sizes
    for head_size, rows in contract.least_rows:
        assert rows == widen_config.min_rows("nvfp4", head_size)
        assert rows > DECODE_SM90.max_packed_rows(head_size)
    assert not {"batch_invariant", "split_keys"} & set(contract.features)


def test_copies_of_fp8_keys_are_told_as_the_route_makes_them():
    """And as the table has the kernel that makes them."""
    assert PREFILL_SM90.max_copy_bytes == PREFILL_NVFP4.max_copy_bytes == widen_config.MAX_BYTES
    for head_size in PREFILL_SM90.head_sizes:
        rows = dict(PREFILL_SM90.copied_from_rows).get(head_size)
        assert rows == widen_config.min_rows("fp8_e4m3", head_size)
    table = prefill_config.support_table()
    sizes = {each.head_size for each in table if each.copies_from == "fp8_e4m3"}
    assert {size for size, _ in PREFILL_SM90.copied_from_rows} == sizes
    lines = [line for line in support_table_markdown().splitlines() if "fp16 copies" in line]
    fp8, nvfp4 = (lines[0].split(" | ")[index] for index in (3, 5))
    assert fp8.startswith(
        "of at most 512 MiB, in calls whose longest sequence may have so many rows: 1024 at head"
    )
    assert nvfp4 == "of at most 512 MiB, always |"


def test_support_table():
    lines = support_table_markdown().splitlines()
    cells = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
    assert {len(line) for line in cells} == {1 + len(contracts())}
    table = {title: columns for title, *columns in cells}
    assert table["kernel"] == [f"`{contract.name}`" for contract in contracts()]
    assert table["head size"] == ["64, 128, 256, 512"] * 5
    as_queries = "`bf16`, `fp16`, as the queries"
    formats = ["`fp8_e4m3`, `nvfp4`", as_queries, "`fp8_e4m3`", as_queries, "`nvfp4`"]
    assert table["KV cache"] == formats
    (*none, least) = table["fewest rows of its sequences"]
    assert not any(none)
    assert all(f"{rows} at head size" in least for _, rows in PREFILL_NVFP4.least_rows)
    for cell in table["page size, tokens"]:
        assert cell.startswith("multiples of 16; 64 preferred")
    ends = [cell.rpartition(", ")[2] for cell in table["features"]]
    assert ends[:-1] == ["bits independent of the batch"] * 4
    split = ["keys split over CTAs" in cell for cell in table["features"]]
    assert split == [True, True, False, False, False]
