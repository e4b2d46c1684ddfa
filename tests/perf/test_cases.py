"""How cases are chosen: by one rule in all benchmarks."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from perf import bench_decode, bench_indexer, bench_prefill, bench_store
from perf.cases import ALL_CASES, BALANCE_CASES, DECODE_CASES, GROUPS, NVFP4_CASES, select

TABLE = [case.name for case in DECODE_CASES]


def test_case_selection():
    assert select(ALL_CASES, ()) == list(ALL_CASES)
    names = [case.name for case in select(ALL_CASES, ("512 q4 nv", "d256"))]
    assert names == [TABLE[10], f"{TABLE[6]} nvfp4", f"{TABLE[10]} nvfp4", f"{TABLE[10]} bf16"]
    assert select(ALL_CASES, ("log-normal", "one 128k")) == list(BALANCE_CASES)
    assert select(ALL_CASES, ("nvfp4",)) == [*NVFP4_CASES, *BALANCE_CASES[-2:]]
    # A name is that case, not what also begins so.
    assert select(ALL_CASES, (TABLE[6], TABLE[0])) == [DECODE_CASES[0], DECODE_CASES[6]]
    with pytest.raises(ValueError, match="no case matches 'D96'; known: B64 "):
        select(ALL_CASES, ("D512", "D96"))


@pytest.mark.parametrize("module", (bench_decode, bench_prefill, bench_store, bench_indexer))
def test_all_benchmarks_choose_cases_alike(module):
    """By name, else by a part of it in any case; a pattern that none has is an error."""

    def listed(*patterns):
        arguments = [word for pattern in patterns for word in ("--cases", pattern)]
        done = CliRunner().invoke(module.main, [*arguments, "--list"])
        return done.output.splitlines() if not done.exit_code else done

    names = listed()
    assert len(names) == len(set(names)) > 10
    for name in names:
        assert listed(name) == [name]
    part = names[-1][1:].lower()
    assert listed(part, names[0]) == [n for n in names if part in n.lower() or n == names[0]]
    refused = listed(names[0], "no such case")
    assert refused.exit_code == 2 and "no case matches 'no such case'" in refused.output


def test_groups_are_parts_of_the_cases():
    def listed(*arguments):
        return CliRunner().invoke(bench_decode.main, [*arguments, "--list"]).output.splitlines()

    assert listed("--group", "fp8") == TABLE
    assert listed("--group", "bf16", "--cases", "d64") == [f"{TABLE[11]} bf16"]
    assert [name for group in GROUPS for name in listed("--group", group)] == listed()
