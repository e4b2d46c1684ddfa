"""What varies between the compiled variants of the indexer's kernels, and what they accept.

Import-light: no DSL here, because planners, tests and the registry read these facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cute_kernels.indexer.formats import HEAD_MULTIPLE, INDEXER_FORMATS
from cute_kernels.store import config as store

TARGETS, E2M1_TARGETS = store.TARGETS, store.E2M1_TARGETS
# Elements that a lane quantizes at a time: 16 bytes of bf16.
CHUNK = 8
MAX_HEAD_SIZE = 512
MAX_HEADS = 65535  # a head is a coordinate of the grid
HEAD_SIZES = tuple(range(HEAD_MULTIPLE, MAX_HEAD_SIZE + 1, HEAD_MULTIPLE))
Q_DTYPES = ("bf16",)
Q_THREADS = 128
# DeepSeek-V4's sizes, constants in variants of their own: addresses then cost next to nothing.
FIXED_HEAD_SIZE, FIXED_PAIRS = 128, 32
# Calls of at least this many (token, head) rows an SM share rotations between heads of a thread.
Q_SHARED_ROWS = 64
# Rows of a window that a lane has in flight: the whole window of DeepSeek-V4's ratio 4.
WINDOW_ROWS = 8
# Channels that a warp's lanes hold together, 16 bytes of float32 each.
LANE_CHANNELS = 4
WARP_CHANNELS = 32 * LANE_CHANNELS
# Warps that share a window leave a row of shared memory each; 8 floats between rows, so that the
# threads that then join four parts of a channel each meet no bank conflicts.
JOIN_ROW_BYTES = 4 * (WARP_CHANNELS + 8)
JOINED_WARPS = 4
# In shared memory, of each of a CTA's tokens: an entry of the list of those that complete a row.
ENTRY_BYTES = 16
# CTAs that a launch may have (`claims.py`).
TURNS = 512
# Calls of up to this many tokens have one CTA an SM (measured between 1,024 and 4,096).
SHORT_TOKENS = 2048
# Shared memory of an SM; each CTA takes 1 KiB more than it asks for.
_SM_SHARED_BYTES, _CTA_SHARED_BYTES = 228 * 1024, 1024


class Table(IntEnum):
    """How numbers of a table that follow each other are read: one by one, or at once."""

    FLOAT32 = 0
    BF16 = 1
    FLOAT32_AT_ONCE = 2
    BF16_AT_ONCE = 3


@dataclass(frozen=True)
class IndexerQConfig:
    """Compile-time parameters of a Q variant; sizes, strides and the other dtypes are run-time.

    cache_format: "mxfp4" or "fp8_e4m3", of the codes.
    heads_per_thread: heads of a token that a thread takes, with one load of cos and sin.
    fixed_sizes: heads of `FIXED_HEAD_SIZE` with `FIXED_PAIRS` rotated pairs; else any.
    e2m1_instruction: convert to E2M1 by the instruction that only some targets have.
    """

    cache_format: str
    heads_per_thread: int
    fixed_sizes: bool
    e2m1_instruction: bool

    @property
    def name(self) -> str:
        size = f"_d{FIXED_HEAD_SIZE}" if self.fixed_sizes else ""
        by = "_cvt" if self.e2m1_instruction else ""
        return f"indexer_q_{self.cache_format}{size}_h{self.heads_per_thread}{by}"

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs that registers are budgeted for."""
        return 5 if self.heads_per_thread > 1 else 8


@dataclass(frozen=True)
class IndexerKConfig:
    """Compile-time parameters of a K variant; sizes, strides and the other dtypes are run-time.

    cache_format: "mxfp4" or "fp8_e4m3".
    vectors: how often `WARP_CHANNELS` go into the head size, rounded up; some may be unused.
    warps: that share a window. With one, `independent_warps` of a CTA have windows of their own.
    loop: for windows of more rows than the warps hold at once, `WINDOW_ROWS` each, and for states
        that do not allow 16-byte loads. Else neither occurs.
    e2m1_instruction: as in `IndexerQConfig`.
    """

    cache_format: str
    vectors: int
    warps: int
    loop: bool
    e2m1_instruction: bool

    @property
    def name(self) -> str:
        loop = "_loop" if self.loop else ""
        by = "_cvt" if self.e2m1_instruction else ""
        return f"indexer_k_{self.cache_format}_v{self.vectors}_w{self.warps}{loop}{by}"

    @property
    def independent_warps(self) -> int:
        if self.warps > 1:
            return 1
        return 8 if self.vectors == 1 else 4

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.independent_warps

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs that registers are budgeted for, each with a span of tokens."""
        return 1 if self.warps > 1 else 2

    def ctas_of_call(self, tokens: int) -> int:
        """CTAs that an SM gets of a call: in short ones half of what fits is enough, and the next
        kernel's are there already when it ends."""
        short = self.vectors == 1 and tokens <= SHORT_TOKENS
        return 1 if short else self.ctas_per_sm

    def buckets(self, tokens: int) -> int:
        """Of a table of claims: a power of two. Up to 4,096 tokens at least 4 for each, so that few
        rows meet others, and then 2; none for calls that each CTA looks at as a whole."""
        if tokens <= self.threads:
            return 0
        two = 1 << (2 * tokens - 1).bit_length()
        return max(two, min(2 * two, 16384))

    @property
    def smem_carveout(self) -> int:
        """Percent of an SM's memory that is shared; the rest is L1 cache."""
        needed = self.ctas_per_sm * (self.shared_bytes + _CTA_SHARED_BYTES)
        return -(-100 * needed // _SM_SHARED_BYTES)

    @property
    def join_floats(self) -> int:
        """Maxima, sums and weighted sums of all channels and warps, and the compressed channels;
        none where one warp has all."""
        if self.warps == 1:
            return 0
        rows = 3 * self.warps * self.vectors
        return rows * JOIN_ROW_BYTES // 4 + self.vectors * WARP_CHANNELS

    @property
    def list_bytes(self) -> int:
        """The list of rows (`rows.Memory`)."""
        return (ENTRY_BYTES + 4) * self.threads + 16

    @property
    def shared_bytes(self) -> int:
        return 4 * self.join_floats + self.list_bytes


def kernel_name(part: str, target: str) -> str:
    """The entry in ``compile.plans.KERNELS`` of part "q" or "k" for an architecture."""
    return f"indexer_{part}_{'sm100' if target in E2M1_TARGETS else 'sm90'}"


def _by_instruction(cache_format: str, target: str) -> bool:
    return cache_format == "mxfp4" and target in E2M1_TARGETS


def q_config(
    cache_format: str, head_size: int, pairs: int, rows_per_sm: float, target: str
) -> IndexerQConfig:
    """The variant for a call with so many rotated pairs, and (token, head) rows for each SM."""
    heads = 4 if rows_per_sm >= Q_SHARED_ROWS else 1
    fixed = (head_size, pairs) == (FIXED_HEAD_SIZE, FIXED_PAIRS)
    return IndexerQConfig(cache_format, heads, fixed, _by_instruction(cache_format, target))


def k_config(
    cache_format: str, head_size: int, window: int, target: str, wide: bool = True
) -> IndexerKConfig:
    """The variant for windows of this many rows. wide: of which lanes may load 16 bytes at once."""
    vectors = 1 if head_size <= WARP_CHANNELS else 4
    # A longer window has a CTA: 16 warps of 8 rows take DeepSeek-V4's 128 at once. In a loop they
    # would lack registers, with 4 vectors the 48 KiB of shared memory that need no opting in.
    short = window <= WINDOW_ROWS
    if vectors == 1:
        loop = not wide or window > 16 * WINDOW_ROWS
        warps = 8 if loop else 1 if short else 16
    else:
        warps, loop = 1 if short else 4, True
    return IndexerKConfig(cache_format, vectors, warps, loop, _by_instruction(cache_format, target))


def q_support_table(
    target: str, head_sizes: tuple[int, ...] = (FIXED_HEAD_SIZE,)
) -> list[IndexerQConfig]:
    """Every Q variant that calls with these head sizes can ask for on an architecture."""
    sizes = ((size, pairs) for size in head_sizes for pairs in (1, FIXED_PAIRS))
    return list(
        dict.fromkeys(
            q_config(name, *size, rows, target)
            for size in sizes
            for name in INDEXER_FORMATS
            for rows in (0, Q_SHARED_ROWS)
        )
    )


def k_support_table(
    target: str, head_sizes: tuple[int, ...] = (WARP_CHANNELS, MAX_HEAD_SIZE)
) -> list[IndexerKConfig]:
    """Every K variant that calls with these head sizes can ask for on an architecture."""
    return list(
        dict.fromkeys(
            k_config(name, head_size, window, target)
            for name in INDEXER_FORMATS
            for head_size in head_sizes
            for window in (WINDOW_ROWS, 16 * WINDOW_ROWS, 16 * WINDOW_ROWS + 1)
        )
    )
