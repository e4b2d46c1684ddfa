"""The variants of the decode kernel: which one serves a call, and what each may use of an SM."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cute_kernels.attention.decode_sm90 import config as module
from cute_kernels.attention.decode_sm90.config import (
    BOX_TOKENS,
    HEAD_SIZES,
    KV_FORMATS,
    PRODUCER_REGISTERS,
    Q_DTYPES,
    QUANTIZED_FORMATS,
    SMEM_BYTES_PER_CTA,
    SMEM_BYTES_PER_SM,
    TILE_TOKENS,
    box_tokens_for_page,
    make_config,
    row_bucket,
    row_buckets,
    smem_bytes,
    support_table,
)
from cute_kernels.attention.decode_sm90.op import heads_abreast

TABLE = support_table()
each_variant = pytest.mark.parametrize("config", TABLE, ids=[config.name for config in TABLE])


@pytest.mark.parametrize(
    ("page_size", "box"),
    (
        (16, 16), (32, 32), (48, 16), (64, 64), (80, 16), (96, 32), (112, 16), (128, 64),
        (192, 64), (256, 64), (1600, 64), (1568, 32), (1584, 16),
        (8, None), (1, None), (24, None), (63, None), (100, None), (0, None), (-64, None),
    ),
)  # fmt: skip
def test_box_for_a_page_size(page_size, box):
    assert box_tokens_for_page(page_size) == box


def test_boxes_tile_pages_and_tiles():
    for page_size in range(16, 4097, 16):
        box = box_tokens_for_page(page_size)
        assert page_size % box == 0 and TILE_TOKENS % box == 0
        assert all(page_size % larger for larger in BOX_TOKENS if larger > box)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_row_bucket_is_the_smallest_that_holds_the_rows(head_size):
    buckets = row_buckets(head_size)
    assert buckets == tuple(sorted(set(buckets)))
    for packed_rows in range(1, 200):
        rows = row_bucket(head_size, packed_rows)
        assert rows in buckets
        if packed_rows > buckets[-1]:
            assert rows == buckets[-1]
        else:
            assert rows >= packed_rows
            assert all(smaller < packed_rows for smaller in buckets if smaller < rows)


def test_row_buckets():
    # Multi-token prediction verifies up to 64 packed rows: a second pass is the exception.
    assert {size: row_buckets(size)[-1] for size in HEAD_SIZES} == {
        64: 64,
        128: 64,
        256: 64,
        512: 32,
    }
    assert all(row_buckets(size)[0] == 8 for size in HEAD_SIZES)


def test_the_table_is_the_whole_grid():
    wanted = [
        (head_size, rows, q_dtype, box, False, kv_format)
        for kv_format in KV_FORMATS
        for head_size in HEAD_SIZES
        for rows, q_dtype, box in itertools.product(row_buckets(head_size), Q_DTYPES, BOX_TOKENS)
        if kv_format in (*QUANTIZED_FORMATS, q_dtype)
    ]
    got = [(c.head_size, c.rows, c.q_dtype, c.box_tokens, False, c.kv_format) for c in TABLE]
    assert sorted(got) == sorted(wanted)
    assert len({config.name for config in TABLE}) == len(TABLE) == len(set(TABLE))
    assert all(config == make_config(*key) for config, key in zip(TABLE, got, strict=True))
    assert not any(config.loader_only for config in TABLE)


def test_the_loader_is_the_same_variant_under_another_name():
    for config in TABLE:
        key = config.head_size, config.rows, config.q_dtype, config.box_tokens
        loader = make_config(*key, loader_only=True, kv_format=config.kv_format)
        assert dataclasses.replace(loader, loader_only=False) == config
        assert loader.name != config.name


@each_variant
def test_shared_memory_holds_the_resident_ctas(config):
    assert smem_bytes(config) <= SMEM_BYTES_PER_CTA
    assert config.ctas_per_sm * (smem_bytes(config) + 1024) <= SMEM_BYTES_PER_SM


@each_variant
def test_the_ring_keeps_the_memory_busy(config):
    """A step holds the K and V of its tiles; an SM has four tiles (of 64 KiB, what 16 bits at head
    size 512 make, two) and 128 KiB in flight; 96 to 112 of a quantized cache and small slots."""
    slots = config.step_tiles * (1 if config.paired else 2)
    assert config.stages >= slots
    assert config.ctas_per_sm * config.stages >= min(4, 131072 // config.stage_bytes)
    in_flight = config.ctas_per_sm * config.stages * config.stage_bytes
    least, most = 128, 192
    if config.converts and config.stage_bytes < 32768:
        least, most = 96, 112
    if config.kv_format == "fp8_e4m3" and config.rows >= 16:
        assert config.stages >= 4
        most = 128
    assert least * 1024 <= in_flight <= most * 1024


def test_warps_that_keep_apart_exchange_whole_outputs():
    """Each of the four has accumulated the whole output in float32."""
    apart = [config for config in TABLE if config.warps_apart]
    assert {(c.kv_format, c.head_size, c.rows) for c in apart} == set(
        itertools.product(QUANTIZED_FORMATS, (64, 128), (8,))
    )
    for config in apart:
        assert config.exchange_bytes == 4 * config.rows * config.head_size * 4
        assert config.stage_bytes == 2 * config.tile_bytes


@each_variant
def test_the_ring_is_as_deep_as_it_can_be(config):
    deeper = dataclasses.replace(config, stages=config.stages + 1)
    fits = config.ctas_per_sm * (smem_bytes(deeper) + 1024) <= SMEM_BYTES_PER_SM
    in_flight = config.ctas_per_sm * deeper.stages * config.stage_bytes
    assert not fits or in_flight > module.ring_bytes_per_sm(config)


@each_variant
def test_registers(config):
    """A thread's share of its partition's 16384 registers, in pieces of 8, at most 255."""
    warps = -(-config.threads // 32 * config.ctas_per_sm // 4)
    share = min(255, 16384 // warps // 32 // 8 * 8)
    # An estimate of what is alive at once: the output accumulators and the scores of a step.
    accumulators = (
        config.rows * config.head_size // (32 if config.warps_apart else config.consumer_threads)
    )
    scores = config.step_tiles // config.warpgroups * config.rows // 2
    if config.consumer_registers:
        assert config.threads == config.consumer_threads + 128
        held = PRODUCER_REGISTERS + config.warpgroups * config.consumer_registers
        assert held <= (1 + config.warpgroups) * share
        assert PRODUCER_REGISTERS % 8 == config.consumer_registers % 8 == 0
        share = config.consumer_registers
    else:
        assert config.threads == config.consumer_threads + 32
    assert accumulators + scores < share


@pytest.mark.parametrize(
    ("kv_format", "head_size", "kv_heads", "abreast"),
    (
        ("fp8_e4m3", 64, 8, 2),
        ("fp8_e4m3", 64, 6, 2),
        ("fp8_e4m3", 64, 3, 1),
        ("fp8_e4m3", 128, 8, 1),
        ("nvfp4", 64, 8, 1),
        ("bf16", 64, 8, 1),
    ),
)
def test_heads_that_share_lines_are_read_abreast(kv_format, head_size, kv_heads, abreast):
    config = make_config(head_size, 8, "bf16", 64, kv_format=kv_format)
    assert heads_abreast(config, kv_heads) == abreast
