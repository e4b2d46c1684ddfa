"""Teams: one CTA that does the work of several, in step (``DecodeConfig.teams``).

CTAs that share an SM do not share it evenly: its warp schedulers prefer some warps, and where the
issue of instructions is the limit the CTAs of equal stretches end 15 to 25 of 80 us apart (H200,
nvfp4), the last one alone on its SM. CTAs of one SM cannot wait for each other; teams of a CTA can:
a slot's number is free, in all their rings, when all of them have read it. So who is ahead by the
depth of a ring waits, and the schedulers serve the others. That moves time alone: what a team works
on, and so the bits, is what a CTA of its number would have.

Warps: the teams' consumers, team by team, then a producer warp each.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import dsl
from cute_kernels.attention.common.tile_schedule import Stretch
from cute_kernels.attention.decode_sm90.config import DecodeConfig

_LEAST_TILES = 16


def team_of_thread(config: DecodeConfig) -> Int32 | int:
    """The team of this thread, consumer or producer."""
    if config.teams == 1:
        return 0
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    consumers = config.teams * config.consumer_warps
    return cutlass.select_(warp >= consumers, warp - consumers, warp // config.consumer_warps)


def consumer_in_team(config: DecodeConfig) -> tuple[Int32 | int, Int32]:
    """(team, thread of its consumers) of this consumer thread."""
    tid, _, _ = cute.arch.thread_idx()
    team = team_of_thread(config)
    return team, tid if config.teams == 1 else tid - team * config.consumer_threads


def in_step(stretch: Stretch):
    """Whether teams wait for each other: where all sequences are alike, and stretches not short.

    Else a team that begins an item, which takes it 2 us, would keep the others waiting.
    """
    quotient = dsl.quotient(stretch.total, stretch.ctas)
    whole = quotient * stretch.ctas == stretch.total
    return (stretch.gap == 0) & (quotient >= _LEAST_TILES) & whole
