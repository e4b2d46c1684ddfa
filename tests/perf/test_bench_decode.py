"""The decode benchmark without a GPU: its cases, inputs, checks, table and command line."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from perf import bench_decode, report
from perf.baselines.tuning import tuning
from perf.cases import (
    ALL_CASES,
    BALANCE_CASES,
    BF16_CASES,
    DECODE_CASES,
    NVFP4_CASES,
    VERIFY_CASES,
    DecodeCase,
)
from perf.inputs import CODE_RMS, ROTATED_BYTES, KVPool, make_input_sets, set_count
from perf.providers import PROVIDERS, Provider, select_providers, varlen_arguments
from perf.rows import BY_HAND, NEAREST, OK, TUNED, Measurement, make_row, make_workload
from perf.targets import GPU, verdicts
from perf.timing import Timing, calls_per_graph, rotation
from perf.traffic import traffic
from perf.verify import checked_sequences, verify
from tests.perf.helpers import MACHINE, METHOD, SMALL, make_test_row, requires_module

H200 = replace(MACHINE, gpu=GPU)

TABLE = [
    "B64 S8192 32/4 D512",
    "B8 S8192 32/4 D512",
    "B1 S32768 32/4 D512",
    "B128 S8192 8/1 D512",
    "B32 S8192 8/1 D512",
    "B1 S32768 8/1 D512",
    "B32 S8192 8/1 D512 q4",
    "B32 S8192 64/8 D128",
    "B1 S32768 64/8 D128",
    "B64 S8192 16/1 D128",
    "B64 S8192 32/16 D256 w1024",
    "B32 S8192 64/8 D64",
]


def reference_call(inputs, scale=1.0):
    arguments = varlen_arguments(inputs)
    arguments["softmax_scale"] *= scale
    attention_reference(validate(**arguments, out=inputs.out))


def forgets_a_row(inputs):
    reference_call(inputs)
    inputs.out[2] = float("nan")


def swaps_heads(inputs):
    reference_call(inputs)
    inputs.out.copy_(inputs.out.flip(1))


def raises(inputs):
    raise RuntimeError("no kernel\nfor this")


def provider(function, name="right"):
    return Provider(name, "torch", lambda inputs: partial(function, inputs))


@pytest.fixture(scope="module")
def pool():
    return KVPool([SMALL], "cpu")


def test_cases_are_the_table():
    assert [case.name for case in DECODE_CASES] == TABLE
    assert all(case.page_size == 64 and case.kv_cache_dtype == "fp8_e4m3" for case in DECODE_CASES)
    assert [case.name for case in NVFP4_CASES] == [f"{name} nvfp4" for name in TABLE]
    assert [case.name for case in BF16_CASES] == [f"{name} bf16" for name in TABLE]


def test_command_line_lists_the_table():
    done = CliRunner().invoke(bench_decode.main, ["--list"])
    assert done.exit_code == 0
    assert done.output.splitlines() == [case.name for case in ALL_CASES]


def test_command_line_help():
    done = CliRunner().invoke(bench_decode.main, ["--help"])
    assert done.exit_code == 0
    for option in ("--all", "--cases", "--providers", "--json", "--png", "--quick"):
        assert option in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--cases", "D96"], "no case matches"),
        (["--providers", "nobody"], "unknown provider"),
        (["--all", "--quick"], "exclude each other"),
    ),
)
def test_command_line_refusals(arguments, message):
    done = CliRunner().invoke(bench_decode.main, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_command_line_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(bench_decode.main, [])
    assert done.exit_code == 1
    assert "needs a CUDA device" in done.output


def test_absent_peers_are_listed(monkeypatch):
    monkeypatch.setattr("perf.providers.find_spec", lambda name: None)
    assert {p.name: p.why_not() for p in PROVIDERS} == {p.name: "not installed" for p in PROVIDERS}
    monkeypatch.setattr("perf.providers.find_spec", lambda name: object())
    assert {p.why_not() for p in select_providers(())} == {None}
    assert Provider("known", "some_module", None).why_not() == "not implemented here"
    nvfp4 = {p.name: p.why_not("nvfp4") for p in PROVIDERS}
    assert nvfp4["cute_kernels"] is None
    assert nvfp4["triton_baseline"] == nvfp4["vllm_triton"] == "reads no nvfp4 cache"


def test_pool_has_every_code_but_nan(pool):
    for side in (pool.k, pool.v):
        codes = set(side.unique().tolist())
        assert codes == set(range(256)) - {0x7F, 0xFF}
    values = pool.views(SMALL)["k"].float()
    assert values.square().mean().sqrt().item() == pytest.approx(CODE_RMS, rel=0.02)


def test_ragged_cases_are_the_same_in_every_run():
    for case in BALANCE_CASES:
        lengths = replace(case).kv_lens
        assert lengths == case.kv_lens == tuple(case.workload()["kv_lens"])
        assert len(lengths) == 64
        assert min(lengths) >= 1
    drawn, long = BALANCE_CASES[0], BALANCE_CASES[2]
    assert drawn.name == "B64 S4096 32/4 D512 log-normal"
    assert 3000 < sum(drawn.kv_lens) / 64 < 5500
    assert drawn.longest > 4 * sorted(drawn.kv_lens)[32]
    assert long.kv_lens == (131072,) + (1024,) * 63
    assert "kv_lens" not in DECODE_CASES[0].workload(), "its fingerprint is that of older rows"


def test_ragged_input_sets_share_no_page():
    case = DecodeCase(5, 300, 8, 2, 64, lengths="log-normal", seed=3)
    pool = KVPool([case], "cpu")
    sets = make_input_sets(case, pool, count=2)
    used = []
    for inputs in sets:
        assert inputs.seqused_k.tolist() == list(case.kv_lens)
        assert inputs.block_table.shape == (5, max(case.pages))
        for row, pages in zip(inputs.block_table, case.pages, strict=True):
            used.append(row[:pages])
            assert not row[pages:].any()
    pages = torch.cat(used)
    assert len(pages.unique()) == len(pages) == 2 * sum(case.pages)
    assert verify(provider(reference_call), sets[0]).problem is None


def test_verification_cases_have_up_to_64_packed_rows():
    assert {case.group * case.q_len for case in VERIFY_CASES} == {16, 32, 64}
    assert all(case.group * case.q_len <= 32 for case in VERIFY_CASES if case.head_size == 512)


def test_input_sets_share_no_page(pool):
    sets = make_input_sets(SMALL, pool, count=4)
    pages = torch.cat([inputs.block_table.flatten() for inputs in sets])
    assert len(sets) == 4
    assert len(pages.unique()) == len(pages) == 4 * 3 * 4
    assert not torch.equal(sets[0].q, sets[1].q)
    assert not torch.equal(sets[0].k_descale, sets[1].k_descale)


@pytest.mark.parametrize("case", DECODE_CASES, ids=TABLE)
def test_input_sets_rotate_past_the_cache(case):
    assert set_count(case) * traffic(case).kv >= ROTATED_BYTES
    assert calls_per_graph(set_count(case)) % set_count(case) == 0


def test_calls_per_graph():
    assert [calls_per_graph(n) for n in (1, 2, 3, 4, 5, 12)] == [4, 4, 6, 4, 5, 12]


def test_contenders_read_different_sets_in_a_turn():
    for num_sets in (4, 8):
        for turn in range(num_sets):
            taken = {rotation(turn, i, 3, num_sets) for i in range(3)}
            assert len(taken) == 3
        assert {rotation(turn, 1, 3, num_sets) for turn in range(num_sets)} == set(range(num_sets))


def test_timing_of_samples():
    assert Timing.of([3.0, 1.0, 2.0, 10.0]) == Timing(2.5, 1.0, 10.0)


def test_a_right_provider_is_verified(pool):
    inputs = make_input_sets(SMALL, pool, count=1)[0]
    verdict = verify(provider(reference_call), inputs)
    assert verdict.problem is None
    assert 5e-4 < verdict.relative_error < 3e-3  # bf16 rounding, not nothing


@pytest.mark.parametrize(
    ("function", "problem"),
    (
        (forgets_a_row, "1 of 6 rows not finite or not written"),
        (swaps_heads, "relative error"),
        (partial(reference_call, scale=1.02), "relative error"),
    ),
)
def test_a_wrong_provider_is_caught(pool, function, problem):
    inputs = make_input_sets(SMALL, pool, count=1)[0]
    assert problem in verify(provider(function), inputs).problem


def test_a_pool_of_several_dtypes():
    cases = [replace(SMALL, kv_cache_dtype=name) for name in ("fp8_e4m3", "bf16")]
    pool = KVPool(cases, "cpu")
    for case, dtype in zip(cases, (torch.float8_e4m3fn, torch.bfloat16), strict=True):
        inputs = make_input_sets(case, pool)[0].sequences([0, 2])
        assert inputs.k.dtype is inputs.v.dtype is dtype
        assert inputs.k.shape[1:] == (SMALL.page_size, SMALL.num_kv_heads, SMALL.head_size)
        assert (inputs.k_descale is None) == (inputs.v_descale is None) == (dtype.itemsize == 2)
    assert 0.9 < pool.wide["bf16"][0].float().std() < 1.1
    assert list(pool.wide) == ["bf16"]


def test_large_batches_are_checked_in_part():
    case = DecodeCase(40, 64, 8, 2, 64)
    inputs = make_input_sets(case, KVPool([case], "cpu"), count=1)[0]
    assert checked_sequences(inputs) == list(range(40))
    chosen = checked_sequences(replace(inputs, max_seqlen_k=1 << 20))
    assert chosen == [0, 39]


def test_no_time_without_a_right_answer(pool, monkeypatch):
    timed = []

    def fake_times(contenders, rounds=0):
        timed.append([contender.name for contender in contenders])
        return [Timing(10.0, 9.0, 11.0) for _ in contenders]

    monkeypatch.setattr(bench_decode, "time_rotating", fake_times)
    monkeypatch.setattr(bench_decode, "time_single", fake_times)
    monkeypatch.setattr(bench_decode, "time_host", lambda contenders: [5.0 for _ in contenders])
    monkeypatch.setattr(bench_decode, "kernels_of", lambda call: ["a kernel"])
    monkeypatch.setattr(bench_decode, "make_input_sets", partial(make_input_sets, count=2))
    contenders = [
        provider(reference_call),
        provider(swaps_heads, "wrong"),
        provider(raises, "failing"),
        Provider("absent", "no_such_module_anywhere", None),
    ]
    results, method = bench_decode.measure(SMALL, contenders, pool, rounds=3)
    assert timed == [["right"], ["right"]]
    assert {name: result.status.split(":")[0] for name, result in results.items()} == {
        "right": OK,
        "wrong": "wrong",
        "failing": "failed",
        "absent": "not installed",
    }
    assert results["failing"].status == "failed: RuntimeError: no kernel ... for this"
    assert results["wrong"].rotating is None
    assert results["right"].kernels is None, "the profiler disturbs what is timed after it"
    results = bench_decode.with_kernels(
        results, contenders, make_input_sets(SMALL, pool, count=1)[0]
    )
    assert (results["right"].kernels, results["wrong"].kernels) == (["a kernel"], None)
    assert results["right"].host_us == 5.0
    assert method["input_sets"] == 2


def falls_back(inputs):
    warnings.warn(
        "flash_attn_varlen_func runs the slow torch reference: head size 96", stacklevel=1
    )
    reference_call(inputs)


def test_a_call_that_the_reference_serves_has_no_kernel(pool):
    (result,) = bench_decode.check(SMALL, [provider(falls_back, "ours")], pool).values()
    assert result.status == "no kernel: head size 96" and result.rel_error is None


def test_rows_are_kept_after_each_case_and_get_their_kernels_at_the_end(pool, monkeypatch):
    timing = Timing(2.0, 1.0, 3.0)
    monkeypatch.setattr(bench_decode, "kernels_of", lambda call: ["a kernel"])

    def measure(case, of):
        assert of is pool
        return {"right": Measurement(OK, 1e-3, timing)}, METHOD | {"rounds": 1}

    kept = []
    cases = [SMALL, replace(SMALL, q_len=2)]
    rows = bench_decode.collect(
        cases,
        lambda case: pool,
        measure,
        [provider(reference_call)],
        MACHINE,
        {"read_tb_per_s": 4.0},
        lambda rows: kept.append([(row["case"], row["kernels"]) for row in rows]),
    )
    names = [case.name for case in cases]
    assert kept == [[(names[0], None)], [(name, None) for name in names]]
    assert [(row["case"], row["kernels"]) for row in rows] == [(n, ["a kernel"]) for n in names]


def full_run():
    rows = []
    for case in DECODE_CASES:
        rows.append(make_test_row("cute_kernels", case, 100.0))
        rows.append(make_test_row("triton_baseline", case, 250.0))
        rows.append(make_test_row("vllm_fa4", case, None, "not installed"))
    rows[1] = make_test_row("triton_baseline", DECODE_CASES[0], None, "wrong: relative error 1e-1")
    return rows


def test_report_shows_every_case_and_fits():
    stream = StringIO()
    report.print_report(full_run(), Console(file=stream, width=report.WIDTH))
    text = stream.getvalue()
    assert all(name in text for name in TABLE)
    assert text.count("2.50x") == len(TABLE) - 1
    assert "wrong: relative error 1e-1" in text
    assert text.count("vllm_fa4: not installed") == 1
    assert MACHINE.gpu in text
    assert len(text) < 6000


def test_plot_of_a_run(tmp_path):
    requires_module("matplotlib")
    path = tmp_path / "decode.png"
    report.plot_bandwidth(full_run(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no row has a time"):
        report.plot_bandwidth([make_test_row(median=None, status="not installed")], path)


def test_a_row_has_its_share_of_the_loader():
    timing, loader = Timing(100.0, 90.0, 120.0), Timing(92.0, 91.0, 93.0)
    measurement = Measurement(OK, 1e-3, timing, timing, 5.0, loader=loader)
    case = BALANCE_CASES[0]
    row = make_row("cute_kernels", case, measurement, make_workload(case, H200, METHOD), H200, 4.0)
    assert (row["loader_us"], row["pct_of_loader"]) == (92.0, 92.0)
    (verdict,) = verdicts(row, [row])
    assert verdict.met
    slow = {**row, "pct_of_loader": 89.0}
    assert not verdicts(slow, [slow])[0].met


def test_verdicts_of_verification_rows():
    one = make_test_row(case=DecodeCase(32, 8192, 8, 1, 512), median=100.0, machine=H200)
    for median, met in ((114.0, True), (116.0, False)):
        two = make_test_row(case=VERIFY_CASES[2], median=median, machine=H200)
        assert [verdict.met for verdict in verdicts(two, [one, two])] == [met]
    many = make_test_row(case=VERIFY_CASES[5], median=140.0, machine=H200)
    assert verdicts(many, [many]) == []
    # 69 GFLOP at 689 TFLOP/s are 100 us
    for loader, met in ((120.0, True), (110.0, False)):
        row = {**many, "loader_us": loader}
        assert [verdict.met for verdict in verdicts(row, [row])] == [met]


def test_check_inputs_differ_from_timed_inputs(pool):
    timed = make_input_sets(SMALL, pool, count=1)[0]
    seed = SMALL.seed + bench_decode.CHECK_SEED_OFFSET
    fresh = make_input_sets(SMALL, pool, seed=seed, count=1)[0]
    assert not torch.equal(timed.q, fresh.q)
    assert not torch.equal(timed.block_table, fresh.block_table)
    assert math.isfinite(fresh.k_descale.sum().item())


@pytest.mark.parametrize(
    ("case", "found"),
    (
        (DECODE_CASES[0], TUNED),
        (replace(DECODE_CASES[0], one_scale=True), TUNED),
        (replace(DECODE_CASES[0], batch=3), NEAREST),
        (BALANCE_CASES[0], NEAREST),
        (replace(DECODE_CASES[0], q_len=16), BY_HAND),
    ),
)
def test_the_baseline_says_how_its_configuration_was_found(case, found):
    assert tuning(case) == found
