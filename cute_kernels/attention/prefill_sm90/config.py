"""What varies between the compiled variants of the SM90 prefill kernel, and what it accepts.

Import-light: no DSL here, because planners, tests and the registry read these facts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.attention.decode_sm90.config import (
    BOX_TOKENS,
    Q_DTYPES,
    WARPGROUP_THREADS,
    row_buckets,
)
from cute_kernels.attention.widen_sm90 import config as widen_sm90

# A tile's halves: each consumer warpgroup scores one of them.
HALF_TOKENS = 64
TILE_TOKENS = 2 * HALF_TOKENS
CONSUMER_WARPS = 8
CONSUMER_THREADS = 2 * WARPGROUP_THREADS
THREADS = 3 * WARPGROUP_THREADS
# 65536 registers over 384 threads, in steps of 8: what a thread has before setmaxnreg.
LAUNCH_REGISTERS = 168
PRODUCER_WARPS = THREADS // 32 - CONSUMER_WARPS


@dataclass(frozen=True)
class PrefillConfig:
    """Compile-time parameters of one variant.

    kv_format: "fp8_e4m3", or "bf16" or "fp16": the 16-bit kernel, whose MMAs have this type.
    head_size: elements of one head.
    rows: packed query rows (GQA group x query tokens) of one CTA. Of FP8 a multiple of 32, the
        MMA's N; of 16 bits 128, the MMA's M in two warpgroups, or 64, which they share.
    q_dtype: "bf16" or "fp16"; the output has it too.
    box_tokens: tokens of one TMA box, 64, 32 or 16.
    k_slots, v_slots: slots of K and of V in flight, see ``slots_per_tile``.
    score_steps, value_steps: of FP8, MMA k-steps whose operands are converted before they are
        issued (of K, at most 4; of V, 2 or 4).
    overlap: of FP8, leave a tile's last scores in flight while the values before it are started.
    consumer_registers: registers of a consumer thread (setmaxnreg).
    tile_tokens: keys of a tile.
    copies_from: of fp16, the format of the cache of which K and V are copies that the kernel makes
        (widen_sm90); "" where they are the cache's own.
    """

    kv_format: str
    head_size: int
    rows: int
    q_dtype: str
    box_tokens: int
    k_slots: int
    v_slots: int
    score_steps: int
    value_steps: int
    overlap: bool
    consumer_registers: int
    tile_tokens: int = TILE_TOKENS
    copies_from: str = ""

    @property
    def name(self) -> str:
        suffix = f"_from_{self.copies_from}" if self.copies_from else ""
        return (
            f"prefill_sm90_{self.kv_format}_d{self.head_size}_r{self.rows}_{self.q_dtype}"
            f"_box{self.box_tokens}{suffix}"
        )

    @property
    def producer_registers(self) -> int:
        """What the producer warpgroup keeps when it gives its registers to the consumers."""
        return 3 * LAUNCH_REGISTERS - 2 * self.consumer_registers

    @property
    def reads_copies(self) -> bool:
        """Whether K and V are fp16 copies of an FP8 or nvfp4 cache."""
        return self.copies_from != ""

    @property
    def copy_loads(self) -> int:
        """Loads (two registers each) that a lane of the copying warps has in flight."""
        return 16 if self.producer_registers >= 56 else 8

    @property
    def converts(self) -> bool:
        """Whether K and V are converted (to fp16) on their way to the MMA."""
        return self.kv_format == "fp8_e4m3"

    @property
    def mma_dtype(self) -> str:
        return "fp16" if self.converts else self.kv_format

    @property
    def head_bytes(self) -> int:
        return self.head_size if self.converts else 2 * self.head_size

    @property
    def slots_per_tile(self) -> int:
        """Ring slots of a tile of K or V. Of FP8 one a warpgroup, which scores its half of the
        tokens; of 16 bits two where the warpgroups share rows, each with half of the columns."""
        return 2 if self.converts or self.shares_rows else 1

    @property
    def slot_tokens(self) -> int:
        return self.tile_tokens // 2 if self.converts else self.tile_tokens

    @property
    def slot_bytes(self) -> int:
        return self.tile_tokens * self.head_bytes // self.slots_per_tile

    @property
    def splits_rows(self) -> bool:
        """O^T of a tile has head_size / 64 blocks of 64 rows. Head size 64 has one, so there the
        warpgroups share out its columns (query rows) instead."""
        return self.head_size == 64

    @property
    def shares_rows(self) -> bool:
        """Of 16 bits: both warpgroups have all rows, each half of the columns of O. At head size
        512 all of O does not fit into one's registers; both then compute all scores."""
        return not self.converts and self.rows == 64

    @property
    def value_columns(self) -> int:
        """Of 16 bits: columns of O that a warpgroup accumulates."""
        return self.head_size // 2 if self.shares_rows else self.head_size

    @property
    def value_blocks(self) -> int:
        """64-row blocks of O^T that a warpgroup accumulates."""
        return 1 if self.splits_rows else self.head_size // 128

    @property
    def value_rows(self) -> int:
        """Query rows (columns of O^T) that a warpgroup accumulates."""
        return self.rows // 2 if self.splits_rows else self.rows


def smem_bytes(config: PrefillConfig) -> int:
    """Shared memory of one CTA: what the allocator will ask for."""
    rows = config.rows
    slots = config.k_slots + config.v_slots
    ring = slots * (config.slot_bytes + 2 * 8)
    queries = rows * config.head_size * 2
    mailbox = 11 * 4 + 4 + 2 * 8  # padding included
    if not config.converts:
        return ring + queries + rows * 8 + mailbox  # scale and reference of each row
    probabilities = 2 * rows * TILE_TOKENS * 2
    # maxima of 8 warps; scale and reference of each row; its position; flags
    tables = rows * (CONSUMER_WARPS * 4 + 8 + 4) + 2 * CONSUMER_WARPS * 4
    return ring + queries + probabilities + tables + 2 * 8 + mailbox


# head size -> (rows, K slots, V slots, score steps, value steps, overlap, consumer registers).
# The best of what was tried on an H200; smaller rings and fewer rows are slower.
_TUNED = {
    512: (64, 2, 2, 2, 2, True, 232),
    256: (96, 4, 2, 4, 2, True, 240),
    128: (128, 4, 4, 2, 2, False, 240),
    64: (128, 4, 4, 2, 2, False, 240),
}
# The same for K and V of 16 bits: head size -> (rows, keys of a tile, K slots, V slots).
_TUNED_16_BITS = {
    512: (64, 64, 3, 2),
    256: (128, 64, 2, 2),
    128: (128, 128, 2, 2),
    64: (128, 128, 2, 2),
}


def head_sizes(kv_format: str) -> tuple[int, ...]:
    """Head sizes that the kernel has for a cache format, ascending."""
    return tuple(sorted(_TUNED if kv_format == "fp8_e4m3" else _TUNED_16_BITS))


def rows_of(head_size: int, kv_format: str = "fp8_e4m3") -> int:
    """Packed query rows of one CTA."""
    tuned = _TUNED if kv_format == "fp8_e4m3" else _TUNED_16_BITS
    return tuned[head_size][0]


def decode_rows(head_size: int) -> int:
    """Sequences with at most so many packed rows are the decode kernel's."""
    return row_buckets(head_size)[-1]


def make_config(
    head_size: int, q_dtype: str, box_tokens: int, kv_format: str = "fp8_e4m3"
) -> PrefillConfig:
    """The tuned variant for a head size, query dtype, TMA box and cache format."""
    if kv_format == "fp8_e4m3":
        rows, k_slots, v_slots, score_steps, value_steps, overlap, registers = _TUNED[head_size]
        return PrefillConfig(
            kv_format, head_size, rows, q_dtype, box_tokens, k_slots, v_slots, score_steps,
            value_steps, overlap, registers,
        )  # fmt: skip
    rows, tile, k_slots, v_slots = _TUNED_16_BITS[head_size]
    return PrefillConfig(
        kv_format, head_size, rows, q_dtype, box_tokens, k_slots, v_slots, 0, 0, False, 240, tile,
    )  # fmt: skip


def widened_config(head_size: int, q_dtype: str, kv_format: str) -> PrefillConfig:
    """The variant that makes and reads fp16 copies of an FP8 or nvfp4 cache. The warps that make
    them need more registers than a producer."""
    config = make_config(head_size, q_dtype, widen_sm90.BLOCK_TOKENS, "fp16")
    registers = 224 if head_size == 128 else 232
    return replace(config, copies_from=kv_format, consumer_registers=registers)


def support_table() -> list[PrefillConfig]:
    """Every variant that the public function can ask for."""
    direct = [
        make_config(head_size, q_dtype, box, kv_format)
        for q_dtype in Q_DTYPES
        for kv_format in ("fp8_e4m3", q_dtype)
        for head_size in head_sizes(kv_format)
        for box in BOX_TOKENS
    ]
    widened = [
        widened_config(head_size, q_dtype, kv_format)
        for head_size, kv_format in widen_sm90.variants()
        for q_dtype in Q_DTYPES
    ]
    return direct + widened
