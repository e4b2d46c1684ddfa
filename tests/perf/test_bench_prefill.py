"""The prefill benchmark without a GPU: its cases, workloads and refusals."""

from __future__ import annotations

from dataclasses import replace

import torch
from click.testing import CliRunner

from perf import bench_decode, bench_prefill
from perf.bench_prefill import ALL_CASES, CASES, CONTENDERS, PrefillCase, main, print_table
from perf.cases import DecodeCase
from perf.inputs import KVPool
from perf.providers import Provider
from perf.rows import BY_HAND, OK, Machine, Measurement, fingerprint, make_row, make_workload
from perf.timing import Timing
from perf.traffic import flops
from tests.perf.helpers import METHOD

MACHINE = Machine("card", "driver", {"torch": "2"}, "commit", "command", "2026-11-30")


def test_the_cases_are_those_of_the_targets():
    names = [case.name for case in ALL_CASES]
    assert len(set(names)) == len(names)
    for name in ("B1 S8192 32/4 D512 q8192", "B1 S32768 64/8 D128 q512 bf16"):
        assert name in names


def test_work_is_counted_inside_the_causal_mask():
    case = PrefillCase(2, 5, 4, 2, 64, q_len=3)
    assert flops(case) == 4 * 2 * 4 * 64 * (3 + 4 + 5)


def test_a_prefill_is_not_compared_with_a_decode():
    shape = (1, 8192, 32, 4, 512)
    prefill = make_workload(PrefillCase(*shape, q_len=4), MACHINE, {})
    decode = make_workload(DecodeCase(*shape, q_len=4), MACHINE, {})
    assert (prefill["op"], decode["op"]) == ("prefill", "decode")
    assert fingerprint(prefill) != fingerprint(decode)


def test_the_table_has_rates_and_reasons(capsys):
    case = CASES[0]
    workload = make_workload(case, MACHINE, METHOD)
    timing = Timing(1000.0, 900.0, 1100.0)
    rows = [
        make_row("cute_kernels", case, Measurement(OK, 1e-3, timing), workload, MACHINE, 4.0),
        make_row("triton_baseline", case, Measurement("not installed"), workload, MACHINE, 4.0),
    ]
    print_table(rows)
    printed = capsys.readouterr().out
    assert f"{flops(case) / 1e9:.0f}" in printed and "not installed" in printed


def test_contenders(monkeypatch):
    assert [(provider.name, provider.on_request) for provider in CONTENDERS] == [
        ("cute_kernels", False),
        ("triton_baseline", False),
        ("torch_flex_attention", True),
    ]
    taken = []

    def run(cases, contenders, *others):
        taken.append([each.name for each in contenders])
        return []

    monkeypatch.setattr(bench_prefill, "run", run)
    monkeypatch.setattr(bench_prefill, "begin", lambda *arguments: MACHINE)
    flex = ["--cases", "bf16", "--providers", "torch_flex_attention"]
    for arguments in ([], flex):
        assert CliRunner().invoke(main, arguments).exit_code == 0
    assert taken == [["cute_kernels", "triton_baseline"], ["torch_flex_attention"]]


def test_the_cases_are_listed():
    done = CliRunner().invoke(main, ["--list"])
    assert done.exit_code == 0 and done.output.splitlines() == [case.name for case in ALL_CASES]


def test_refusals(monkeypatch):
    done = CliRunner().invoke(main, ["--cases", "D96"])
    assert done.exit_code == 2 and "no case matches 'D96'; known: B1 S8192" in done.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, ["--cases", "D512"])
    assert done.exit_code == 1 and "needs a CUDA device" in done.output


def test_all_dtypes_of_a_shape_are_timed_in_turn(monkeypatch):
    turns = []

    def time_rotating(contenders, rounds):
        turns.append([contender.name for contender in contenders])
        return [Timing(float(i), float(i), float(i)) for i in range(1, len(contenders) + 1)]

    def check(case, providers, pool):
        fp8 = case.kv_cache_dtype == "fp8_e4m3"
        found = {"ours": Measurement(OK, 1e-3), "theirs": Measurement("reads none")}
        found |= {"theirs": found["ours"]} if fp8 else {}
        return {name: found[name] for name in ("ours", "theirs")}

    small = replace(CASES[0], kv_len=64, q_len=64)
    cases = [small, replace(small, head_size=64), replace(small, kv_cache_dtype="bf16")]
    monkeypatch.setattr(bench_prefill, "time_rotating", time_rotating)
    monkeypatch.setattr(bench_prefill, "check", check)
    monkeypatch.setattr(bench_prefill, "ceiling_buffer", lambda: None)
    monkeypatch.setattr(bench_prefill, "device_ceilings", lambda *_: {"read_tb_per_s": 4.0})
    monkeypatch.setattr(bench_prefill, "KVPool", lambda cases, _: KVPool(cases, "cpu"))
    monkeypatch.setattr(bench_decode, "kernels_of", lambda call: None)
    providers = [
        Provider(name, "torch", lambda inputs: lambda: None, tuning=tuning)
        for name, tuning in (("ours", None), ("theirs", bench_prefill.TRITON.tuning))
    ]
    rows = bench_prefill.run(cases, providers, MACHINE, 3, lambda rows: None)
    together = ["ours, fp8_e4m3", "theirs, fp8_e4m3", "ours, bf16"]
    assert turns == [together, together[:2]]
    assert [row["median_us"] for row in rows] == [1.0, 2.0, 3.0, None, 1.0, 2.0]
    assert rows[0]["workload"]["in_turn"] == rows[2]["workload"]["in_turn"] == together
    assert [row.get("tuning") for row in rows] == [None, BY_HAND, None, None, None, BY_HAND]
