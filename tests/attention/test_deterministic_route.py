"""``deterministic=True``: kernel and variant of a sequence follow from its own rows alone."""

from __future__ import annotations

import pytest

from cute_kernels.attention.decode_sm90.config import (
    HEAD_SIZES,
    KV_FORMATS,
    make_config,
    row_bucket,
    row_buckets,
)
from cute_kernels.attention.decode_sm90.grid import fixed_splits
from cute_kernels.attention.decode_sm90.op import row_ranges
from cute_kernels.attention.prefill_sm90.config import decode_rows
from cute_kernels.attention.route_sm90 import Bounds, route

SM_COUNT = 132


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_sequence_is_served_by_its_own_rows(head_size, kv_format):
    """Whatever the batch is: its size and the other sequences' queries decide nothing."""
    most = decode_rows(head_size)
    for rows in (1, 8, 16, 17, most, most + 1, 5 * most):
        served = set()
        for batch, others in ((1, 0), (3, 0), (1, 1), (9, most), (2, most + 1), (700, 3 * most)):
            longest = max(rows, others)
            total_q = batch * rows if not others else batch * rows + others
            call = (batch + bool(others), total_q, longest, 1, 4, head_size, True)
            served.add(server_of(rows, Bounds(*call, kv_format, 8192)))
        assert len(served) == 1, (rows, served)


def server_of(rows: int, bounds: Bounds) -> str:
    """Which kernel and variant serve a sequence of so many packed rows in such a call."""
    chosen = route(bounds, SM_COUNT)
    assert chosen.capacity == 0
    found = ["prefill"] if chosen.prefill and rows > chosen.rows else []
    if chosen.decode:
        shape = (bounds.head_size, bounds.group, bounds.batch, bounds.total_q)
        ranges = row_ranges(*shape, bounds.max_seqlen_q, chosen.rows)
        for low, high in ranges:
            if low < rows <= high:
                packed = min(bounds.max_seqlen_q * bounds.group, high)
                found.append(f"decode {row_bucket(bounds.head_size, packed)}")
    (server,) = found
    return server


@pytest.mark.parametrize("kv_heads", (1, 2, 16))
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_partial_results_of_splits_fit_into_bounded_workspace(head_size, kv_heads):
    for rows in row_buckets(head_size):
        config = make_config(head_size, rows, "bf16", 64)
        fixed = fixed_splits(config, kv_heads)
        assert 8 <= fixed.splits <= 64 and 1 <= fixed.least <= fixed.most
        part = 4 * rows * (head_size + 2)
        assert fixed.splits * config.ctas_per_sm * SM_COUNT * part < 300 << 20
