"""The Triton baseline: its launch plan, its numbers in the interpreter, its code for sm_90a."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.cases import ALL_CASES, DECODE_CASES, UNIFORM
from tests.perf.helpers import requires_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan():
    requires_module("triton")
    from perf.baselines import triton_decode

    return triton_decode


@pytest.fixture
def compiler():
    requires_module("triton")
    from perf.baselines import compile_report

    return compile_report


@pytest.fixture(scope="module")
def interpreted():
    """{case id: None or what is wrong} of every interpreted case."""
    requires_module("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.perf.interpret_triton_decode"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreted_numbers(interpreted):
    assert len(interpreted) == 22
    assert {name: wrong for name, wrong in interpreted.items() if wrong} == {}


@pytest.mark.parametrize(
    ("items", "tiles", "ctas_per_sm", "splits"),
    (
        (256, 128, 4, 2),  # 512 CTAs on 132 SMs
        (1024, 128, 4, 1),
        (1, 512, 1, 128),  # 132 wanted; 4 tiles each
        (1, 512, 4, 256),
        (1, 3, 4, 1),
        (1, 5, 4, 2),
        (4, 0, 4, 1),
        (0, 10, 4, 5),
    ),
)
def test_split_counts(plan, items, tiles, ctas_per_sm, splits):
    assert plan.choose_num_splits(items, tiles, 132, ctas_per_sm) == splits


def test_splits_are_never_empty_at_full_length(plan):
    for items in (1, 3, 8, 100):
        for tiles in range(1, 600):
            splits = plan.choose_num_splits(items, tiles, 132, 4)
            assert 1 <= splits <= plan.MAX_SPLITS
            assert (splits - 1) * -(-tiles // splits) < tiles


def test_windows_bound_the_work(plan):
    assert plan.visible_tokens(8192, 1, -1, 64) == 8192
    assert plan.visible_tokens(8192, 4, 1023, 64) == 1023 + 4 + 64
    assert plan.visible_tokens(200, 1, 1023, 64) == 200


def test_packed_rows(plan):
    assert [plan.packed_rows(*x) for x in ((1, 1), (16, 1), (3, 8), (8, 4))] == [16, 16, 32, 32]


def test_nearest_tuned_configuration(plan, monkeypatch):
    known = {7: plan.DecodeConfig(32), 12: plan.DecodeConfig(128)}
    monkeypatch.setattr(plan, "tuned_configs", lambda: {(512, 16): known})
    assert plan.choose_config(512, 16, 3) == known[7]
    assert plan.choose_config(512, 16, 11) == known[12]
    assert plan.choose_config(64, 16, 11) == plan.untuned_config(64, 16)


def test_no_configuration_in_use_is_miscompiled(plan):
    assert plan.miscompiled(64, 64, 4)
    for head_size, rows in itertools.product((64, 128, 256, 512), (16, 32, 64, 128)):
        for bucket in range(16):
            config = plan.choose_config(head_size, rows, bucket)
            assert not plan.miscompiled(head_size, rows, config.num_warps)


def test_tuned_configurations_load(plan):
    for (head_size, rows), of_shape in plan.tuned_configs().items():
        assert head_size in (64, 128, 256, 512)
        assert rows in (16, 32, 64, 128)
        assert all(config.block_n in (32, 64, 128) for config in of_shape.values())


def test_every_configuration_in_use_compiles_and_fits(compiler, plan):
    """Measured ones may spill (the fastest of 32 rows at head size 512 does), guesses may not."""
    shapes = compiler.bench_shapes()
    assert {shape.head_size for shape in shapes} == {case.head_size for case in DECODE_CASES}
    for shape in shapes:
        measured = (shape.head_size, shape.rows) in plan.tuned_configs()
        for config in compiler.configs_in_use(shape):
            resources, _ = compiler.compile_kernel(shape, config)
            fits = resources.shared <= compiler.SMEM_BYTES if measured else resources.fits
            assert fits, f"{shape} {config}: {resources}"


def test_v_goes_through_ldmatrix_trans_and_loads_are_16_bytes(compiler):
    shape = compiler.KernelShape(head_size=128, group=8, q_len=1)
    config = compiler.DecodeConfig(block_n=64, num_warps=4, num_stages=3)
    ptx = compiler.compile_kernel(shape, config)[1]["ptx"]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert "ld.shared.b8" not in ptx
    copies = [line for line in ptx.splitlines() if "shared.global" in line]
    assert copies
    assert all("0x10" in line for line in copies)


def test_pages_smaller_than_a_tile_compile(compiler):
    config = compiler.DecodeConfig(block_n=64, num_warps=4, num_stages=3)
    shape = compiler.KernelShape(head_size=128, group=8, q_len=1, page_size=16)
    assert compiler.compile_kernel(shape, config)[0].fits


def test_kernel_without_splits_compiles(compiler):
    config = compiler.DecodeConfig(block_n=64, num_warps=4, num_stages=3)
    shape = compiler.KernelShape(head_size=256, group=2, q_len=1, window=1023)
    assert compiler.compile_kernel(shape, config, split=False)[0].fits


def test_shapes_that_are_not_built_are_refused(plan):
    import torch

    q = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
    kv = torch.zeros(1, 64, 1, 128).to(torch.float8_e4m3fn)
    table = torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.ones(1, dtype=torch.int32)
    starts = torch.zeros(2, dtype=torch.int32)
    batch = plan.DecodeBatch(q, kv, kv, table, lengths, starts, 1, 1.0)
    out, lse = torch.empty_like(q), torch.empty(16, 1)
    for change, message in (
        ({"k": kv.to(torch.bfloat16)}, "only float8_e4m3fn"),
        ({"max_seqlen_q": 9}, "more than 128 packed rows"),
        ({"q": q[..., :96]}, "head size 96"),
        ({"k": kv[:, :24], "v": kv[:, :24]}, "pages of 24 tokens"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            plan.decode_attention(batch._replace(**change), out, lse)
    with pytest.raises(ValueError, match="no multiple"):
        plan.decode_attention(batch._replace(q=q[:, :15], k=kv.expand(1, 64, 2, 128)), out, lse)


def test_tuning_keeps_one_configuration_a_key(plan):
    from perf.baselines import tune

    fast, slow, other = DECODE_CASES[1], DECODE_CASES[4], DECODE_CASES[5]
    config = plan.DecodeConfig(block_n=32)
    entries = [
        tune.table_entry(fast, 132, (70.0, config)),
        tune.table_entry(slow, 132, (75.0, plan.DecodeConfig(block_n=64))),
        tune.table_entry(other, 132, (20.0, config)),
    ]
    assert [entry["work_bucket"] for entry in entries] == [10, 10, 7]
    merged = tune.merge(entries)
    assert [entry["case"] for entry in merged] == [other.name, slow.name]
    assert plan.DecodeConfig(**merged[0]["config"]) == config


def test_tuning_some_shapes_again_keeps_the_others(plan):
    from perf.baselines import tune

    def run(date, *buckets):
        keys = [{"head_size": 64, "rows": 16, "work_bucket": bucket} for bucket in buckets]
        return {"machine": {"date": date}, "configs": keys}

    first = tune.with_run([], run("first", 10, 11))
    second = tune.with_run(first, run("second", 11, 12))
    assert second == [run("first", 10), run("second", 11, 12)]
    assert tune.with_run(second, run("third", 10)) == [run("second", 11, 12), run("third", 10)]


def test_all_uniform_fp8_cases_can_be_tuned(plan):
    from perf.baselines import tune

    assert {case.name for case in tune.TUNED_CASES} == {
        case.name
        for case in ALL_CASES
        if case.kv_cache_dtype == "fp8_e4m3" and case.lengths == UNIFORM
    }
