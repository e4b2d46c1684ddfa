"""Queries on their way to the consumers: copied to shared memory by the producer.

They are asked for before the item's first tile. A load that a consumer issues then would wait in
the SM's queue behind all the tiles that the ring has room for (H200, B1 S32768 8/1 D512: asked for
500 cycles before the first tile, there 9,000 cycles after it).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl_nvfp4
from cute_kernels.attention.common.tile_schedule import Chunk, Sequence, Shape, query_token
from cute_kernels.attention.decode_sm90.config import DecodeConfig


class Staging(NamedTuple):
    """Rows of queries, ``DecodeConfig.staged_row_bytes`` apart, and their barriers: ``full`` (bytes
    of bulk copies), ``empty`` (consumer warps)."""

    base: Int32
    full: cute.Pointer
    empty: cute.Pointer


def row_address(
    mQ: cute.Tensor, shape: Shape, seq: Sequence, chunk: Chunk, head: Int32, row: Int32, element
) -> Int64:
    """Of an element of a row of an item; rows past the chunk alias its last row.

    Their scores are computed and dropped: nothing is written for them.
    """
    row = cutlass.min(chunk.first_row + row, chunk.rows_end - 1)
    token = query_token(shape, row)
    query_head = head * shape.group + row - token * shape.group
    index = cute.crd2idx((seq.q_start + token, query_head, element), mQ.layout)
    return mQ.iterator.toint() + Int64(index) * 2


@cute.jit
def copy_queries(
    config: DecodeConfig, staging: Staging, mQ: cute.Tensor, shape: Shape, segment, phase: Int32
):
    """By the producer's warp, a lane a row. phase: of ``empty``."""
    lane = cute.arch.lane_idx()
    row_bytes = 2 * config.head_size
    address = row_address(
        mQ, shape, segment.seq, segment.chunk, segment.head, lane % config.rows, Int32(0)
    )
    cute.arch.mbarrier_wait(staging.empty, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(staging.full, config.rows * row_bytes)
    cute.arch.sync_warp()
    if lane < config.rows:
        to = staging.base + lane * config.staged_row_bytes
        dsl_nvfp4.copy_bulk(to, address, row_bytes, staging.full.toint())
    cute.arch.sync_warp()


@cute.jit
def release_queries(staging: Staging, lane: Int32):
    """Each consumer warp has read them: the next item's may come. The fence as in
    ``ConsumerLane.release``."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(staging.empty)
