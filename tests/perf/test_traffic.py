"""Traffic and arithmetic of benchmark cases against numbers counted by hand."""

from __future__ import annotations

import pytest
import torch

from perf.cases import DecodeCase
from perf.traffic import (
    ReductionProbe,
    Traffic,
    device_ceilings,
    flops,
    read_ceilings,
    traffic,
    visible_keys,
    visible_pairs,
)


def test_traffic_of_a_large_case():
    counted = traffic(DecodeCase(64, 8192, 32, 4, 512))
    # K and V: 2 * 64 * 8192 * 4 * 512 bytes; q and out: 64 * 32 * 512 * 2; 128 pages a sequence.
    assert counted == Traffic(2_147_483_648, 2_097_152, 2_097_152, 32_768)
    assert counted.total == 2_151_710_720


def test_traffic_counts_only_what_the_window_shows():
    counted = traffic(DecodeCase(64, 8192, 32, 16, 256, window=1024))
    # 2 * 64 * 1024 * 16 * 256; positions 7168..8191 are pages 112..127.
    assert counted.kv == 536_870_912
    assert counted.block_table == 64 * 16 * 4


def test_a_window_that_starts_inside_a_page_reads_that_page():
    counted = traffic(DecodeCase(1, 130, 1, 1, 64, window=3))
    assert counted.kv == 2 * 3 * 64
    assert counted.block_table == 4 * 2  # positions 127..129: pages 1 and 2


@pytest.mark.parametrize(
    ("dtype", "kv"), (("fp8_e4m3", 12_800), ("bfloat16", 25_600), ("nvfp4", 7_200))
)
def test_bytes_per_element(dtype, kv):
    assert traffic(DecodeCase(1, 100, 1, 1, 64, kv_cache_dtype=dtype)).kv == kv


@pytest.mark.parametrize(
    ("kv_len", "q_len", "window", "keys", "pairs"),
    (
        (8192, 1, 0, 8192, 8192),
        (8192, 4, 0, 8192, 8189 + 8190 + 8191 + 8192),
        (100, 3, 10, 12, 30),
        (5, 8, 0, 5, 1 + 2 + 3 + 4 + 5),  # the first three queries see nothing
        (8, 2, 8, 8, 7 + 8),
        (8, 3, 7, 8, 6 + 7 + 7),
    ),
)
def test_visible_keys_and_pairs(kv_len, q_len, window, keys, pairs):
    case = DecodeCase(1, kv_len, 1, 1, 64, q_len=q_len, window=window)
    assert visible_keys(case, kv_len) == keys
    assert visible_pairs(case, kv_len) == pairs


def test_flops_count_a_multiplication_and_an_addition_of_both_products():
    assert flops(DecodeCase(64, 8192, 32, 4, 512)) == 34_359_738_368
    assert flops(DecodeCase(32, 8192, 8, 1, 512, q_len=4)) == 4 * 32 * 32_762 * 8 * 512


def test_ceilings_of_a_device_count_what_is_moved_and_multiplied():
    found = device_ceilings(
        torch.zeros(4_000_000, dtype=torch.uint8), lambda call: [call(), 2.0][1], size=100
    )
    # 4 MB read, as many read and written; 100^3 multiplications and additions: in 2 us each.
    rates = {"read_tb_per_s": 2.0, "copy_tb_per_s": 4.0, "matmul_tflops": 1.0}
    size = 4_000_000 / 2**30
    assert found == pytest.approx({**rates, "read_gib": size, "copy_gib": size})


def test_ceiling_is_bytes_over_the_measured_time():
    probe = ReductionProbe(torch.zeros(4_000_000, dtype=torch.uint8))
    ran = []

    def two_microseconds(call):
        ran.append(call)
        call()
        return 2.0

    # 4 MB in 2 us are 2 TB/s.
    assert read_ceilings([probe], two_microseconds) == {"reduction": pytest.approx(2.0)}
    assert ran == [probe.run]
