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
from cute_kernels.attention.decode_sm90 import config, op
from cute_kernels.registry import (
    FEATURES,
    KernelContract,
    PageSizes,
    contracts,
    support_table_markdown,
)
from tests.cases import AttentionCase, make_inputs

(DECODE_SM90,) = contracts()


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


def test_every_variant_is_in_the_contract_and_the_reverse():
    table = config.support_table()
    heads = {variant.head_size for variant in table}
    assert heads == set(DECODE_SM90.head_sizes)
    assert {variant.q_dtype for variant in table} == set(DECODE_SM90.q_dtypes)
    for head_size in heads:
        rows = max(variant.rows for variant in table if variant.head_size == head_size)
        assert DECODE_SM90.max_packed_rows(head_size) == rows
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


@pytest.mark.parametrize("head_size", (16, 64, 80, 96, 128, 192, 256, 512, 576))
@pytest.mark.parametrize("page_size", (None, 1, 8, 16, 24, 32, 48, 64, 80, 128, 1600))
def test_the_op_takes_the_shapes_of_the_contract_and_no_others(monkeypatch, head_size, page_size):
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 132))
    promised = head_size in DECODE_SM90.head_sizes
    promised &= page_size is None or page_size in DECODE_SM90.page_sizes
    problem = problem_on_a_gpu(case_of(head_size, page_size))
    assert (op.can_run(problem) is None) == promised


@pytest.mark.parametrize("capability", sorted(TARGETS))
def test_the_op_takes_the_architectures_of_the_contract_and_no_others(monkeypatch, capability):
    target = TARGETS[capability]
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch(capability, target, 132))
    runs = op.can_run(problem_on_a_gpu(case_of(128, 64))) is None
    assert runs == (target in DECODE_SM90.architectures)


@pytest.mark.parametrize(
    ("fields", "runs"),
    (
        ({"layout": "NHD"}, True),
        ({"layout": "HND"}, True),
        ({"layout": "interleaved"}, True),
        ({"window": (127, 0), "softcap": 20.0, "sinks": True}, True),
        ({"causal": False, "q_dtype": torch.float16}, True),
        ({"kv_dtype": torch.bfloat16, "scale_kind": "none"}, False),
    ),
)
def test_the_op_takes_the_features_of_the_contract(monkeypatch, fields, runs):
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 132))
    assert (op.can_run(problem_on_a_gpu(case_of(256, 64, **fields))) is None) == runs


def test_support_table():
    lines = support_table_markdown().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if not line.startswith("|---")]
    assert {len(line) for line in cells} == {1 + len(contracts())}
    table = dict(cells)
    assert table["kernel"] == "`decode_sm90`"
    assert table["head size"] == "64, 128, 256, 512"
    assert table["KV cache"] == "`fp8_e4m3`"
    assert table["page size, tokens"].startswith("multiples of 16; 64 preferred")
