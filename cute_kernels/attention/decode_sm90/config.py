"""What varies between the compiled variants of the SM90 decode kernel, and what it accepts.

Import-light: no DSL here, because planners, tests and the registry read these facts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.attention.decode_sm90.residency import RESIDENCY
from cute_kernels.formats import NVFP4_GROUP

TILE_TOKENS = 64
WARPGROUP_THREADS = 128
# What a producer warpgroup keeps when it gives its registers to the consumers.
PRODUCER_REGISTERS = 40

HEAD_SIZES = (64, 128, 256, 512)
Q_DTYPES = ("bf16", "fp16")
QUANTIZED_FORMATS = ("fp8_e4m3", "nvfp4")
# A cache of 16 bits has the queries' dtype.
KV_FORMATS = (*QUANTIZED_FORMATS, *Q_DTYPES)
_ELEMENT_BITS = {"nvfp4": 4, "fp8_e4m3": 8, "bf16": 16, "fp16": 16}
# Packed query rows (GQA group x query tokens) that one pass over K and V serves.
ROW_BUCKETS = (8, 16, 32, 64)
# Tokens that one TMA box carries: a page smaller than a tile is loaded by several boxes.
BOX_TOKENS = (64, 32, 16)

LINE_BYTES = 128

SMEM_BYTES_PER_SM = 233472  # SM90: 228 KiB, of which each resident CTA reserves 1 KiB
SMEM_BYTES_PER_CTA = 232448  # SM90: 227 KiB


# More rows than this would not leave registers for a tile's operands beside the accumulators
# (rows * head_size / 128 registers a thread, half of that with two consumer warpgroups), or shared
# memory for the tiles beside the queries: such calls run as several chunks of rows.
_MAX_ROWS = {64: 64, 128: 64, 256: 64, 512: 32}


def row_buckets(head_size: int) -> tuple[int, ...]:
    """The row buckets compiled for a head size, ascending."""
    return tuple(rows for rows in ROW_BUCKETS if rows <= _MAX_ROWS[head_size])


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time parameters of one variant.

    head_size: elements of one head, one of ``HEAD_SIZES``.
    rows: packed query rows of one work item (a multiple of 8; the MMA's N).
    q_dtype: "bf16" or "fp16"; the output has it too.
    box_tokens: tokens of one TMA box, 64, 32 or 16.
    stages: ring slots, each holding one K or V tile of 64 tokens, or both (``paired``).
    ctas_per_sm: resident CTAs that registers and shared memory are budgeted for.
    consumer_registers: registers of a consumer thread when the producer warp is padded to a
        warpgroup that gives its own away (setmaxnreg); 0 for a single producer warp.
    loader_only: consumers only hand slots back. The read ceiling of perf/, not an attention.
    kv_format: one of ``KV_FORMATS``; what depends on it is a policy, see fragments.py.
    warpgroups: of consumers. Two take two tiles a step: each scores one of them, and multiplies
        both tiles' probabilities with its half of the head.
    """

    head_size: int
    rows: int
    q_dtype: str
    box_tokens: int
    stages: int
    ctas_per_sm: int
    consumer_registers: int = 0
    loader_only: bool = False
    kv_format: str = "fp8_e4m3"
    warpgroups: int = 1

    @property
    def name(self) -> str:
        loader = "_loader" if self.loader_only else ""
        return (
            f"decode_sm90_{self.kv_format}_d{self.head_size}_r{self.rows}_{self.q_dtype}"
            f"_box{self.box_tokens}{loader}"
        )

    @property
    def converts(self) -> bool:
        """Whether K and V are converted (to fp16) on their way to the MMA."""
        return self.kv_format in QUANTIZED_FORMATS

    @property
    def mma_dtype(self) -> str:
        """Of both products' operands: Q and P have it, too."""
        return "fp16" if self.converts else self.kv_format

    @property
    def scales_queries(self) -> bool:
        """Whether bf16 queries become fp16, which has not their range: queries.py."""
        return self.q_dtype != self.mma_dtype

    @property
    def uses_wgmma(self) -> bool:
        """16 and more rows feed register-A wgmma; 8 rows are served by mma.sync alone."""
        return self.rows >= 16

    @property
    def block_scaled(self) -> bool:
        """Whether the cache has a scale for each group of elements (nvfp4)."""
        return self.kv_format == "nvfp4"

    @property
    def queries_in_smem(self) -> bool:
        """Where Q^T is: wgmma needs it in shared memory; else registers, if there are enough."""
        return self.uses_wgmma or (self.block_scaled and self.head_size >= 256)

    @property
    def stages_queries(self) -> bool:
        """Whether the producer brings an item's queries (staging.py), where that costs no slot."""
        if self.loader_only or self.head_size == 256:
            return False
        return self.kv_format == "fp8_e4m3" and self.rows == 8

    @property
    def asks_first(self) -> bool:
        """Whether the producer waits until consumers, who then load them themselves, have asked for
        the first queries: where registers allow to remember it."""
        return not (self.loader_only or self.stages_queries or self.narrow)

    @property
    def narrow(self) -> bool:
        """Whether consumers' registers are so short that the producer looks after shared items."""
        return self.ctas_per_sm >= 4 and self.box_tokens == 16 and not self.loader_only

    @property
    def staged_row_bytes(self) -> int:
        """A row, and what puts the next one into other banks for the same element."""
        return 2 * self.head_size + 16

    @property
    def paired(self) -> bool:
        """Whether a tile's K and V share a slot, which halves waits, arrivals and fences."""
        return self.warps_apart or (self.block_scaled and self.head_size <= 128)

    @property
    def warps_apart(self) -> bool:
        """Whether a warp multiplies its own tokens' probabilities with their values, for all of the
        head: no exchange between warps but at the end of an item's part. It takes four times as
        many accumulators (H200, B32 S8192 64/8: FP8 D64 72.0 -> 67.8 us, from L2 70.9 -> 40.4)."""
        return self.converts and self.rows == 8 and self.head_size <= 128

    @property
    def release_arrivals(self) -> int:
        """Arrivals at a slot's ``empty`` barrier: of one lane a warp, or of all. racecheck does not
        see that a warp's barrier orders the other lanes' reads before the one arrival, and reports
        them against the copies of block scales, which are the only writes to a slot that it
        follows. All lanes' arrivals cost nothing (H200: D128 91.5, D512 47.7 us either way)."""
        return self.consumer_threads if self.block_scaled else self.consumer_warps

    @property
    def step_tiles(self) -> int:
        """Tiles that share one softmax exchange: small tiles are bound by its latency."""
        if self.warpgroups > 1:
            return self.warpgroups
        if self.warps_apart:
            return 1
        if self.block_scaled and self.head_size == 256 and self.rows == 8:
            return 2
        row = self.head_size if self.block_scaled else self.head_bytes
        return 2 if row <= 128 and self.rows <= 16 else 1

    @property
    def chains(self) -> int:
        """Independent accumulators of a tile's scores: at 8 rows four a step hide the latency of
        mma.sync. Where warps are apart, other warps do."""
        if self.uses_wgmma or self.warps_apart:
            return 1
        return 2 if self.block_scaled and self.head_size == 512 else 4 // self.step_tiles

    @property
    def value_loads_in_flight(self) -> int:
        """Loads of V whose products may be in flight while the next one is converted: their
        operands take registers, and where those run out ptxas serializes every wgmma."""
        return 0 if self.block_scaled and self.head_size == 512 and self.rows == 32 else 1

    @property
    def loads_first(self) -> bool:
        """Whether a warp reads all that it needs of a tile before the first product: the slot is
        handed back, and loaded anew, while products are made."""
        return self.uses_wgmma and self.kv_format == "fp8_e4m3"

    @property
    def values_overlap(self) -> bool:
        """Whether a step's last products with V may be in flight until the next step's first ones
        with K. ptxas serializes all of them where a warpgroup may have no tile to score, and where
        a step has two tiles of a single load."""
        if self.warpgroups > 1 or (self.head_size == 64 and self.step_tiles > 1):
            return False
        return self.loads_first

    @property
    def parts_in_flight(self) -> int:
        """Parts of an item whose loads a thread has in flight: as its registers allow."""
        if self.warpgroups > 1:
            return 16
        if self.ctas_per_sm >= 4:
            return 1 if self.narrow else 4
        return 8

    @property
    def consumer_threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def fold_bytes(self) -> int:
        """For what a CTA folded of an item's earlier splits, where that costs no ring slot."""
        apart = self.rows == 8 and not self.block_scaled
        return 4 * (self.rows * self.head_size + 4 * WARPGROUP_THREADS) if apart else 0

    @property
    def threads(self) -> int:
        return self.consumer_threads + (WARPGROUP_THREADS if self.consumer_registers else 32)

    @property
    def head_bytes(self) -> int:
        """Bytes of one token's head of K or V, block scales not counted."""
        return self.head_size * _ELEMENT_BITS[self.kv_format] // 8

    @property
    def value_units(self) -> int:
        """16-byte units of a token's V that one of the consumer warps reads."""
        return self.head_bytes // (16 * self.consumer_warps)

    @property
    def heads_in_line(self) -> int:
        """KV heads whose rows of a token fill a line of L2 if they lie side by side: what a head's
        row brings with it is lost where the others are read at another time. NVFP4 gains nothing
        from being read so: instructions are its limit (H200, 2026-11-30)."""
        return 1 if self.block_scaled else max(1, LINE_BYTES // self.head_bytes)

    @property
    def data_bytes(self) -> int:
        return TILE_TOKENS * self.head_bytes

    @property
    def scale_bytes(self) -> int:
        """Of a tile: bytes of its block scales, which follow the data in a slot."""
        return TILE_TOKENS * self.head_size // NVFP4_GROUP if self.block_scaled else 0

    @property
    def tile_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_bytes * (2 if self.paired else 1)

    @property
    def scale_piece(self) -> tuple[int, int]:
        """(bytes, lanes): the pieces in which a lane of the producer copies a token's scales, and
        how many lanes share a token."""
        row = self.head_size // NVFP4_GROUP
        return min(row, 16), max(1, row // 16)

    @property
    def value_groups(self) -> int:
        """Groups of 16 output elements that a warp has a part in; 0 without block scales."""
        return max(2, self.head_size // (16 * self.consumer_warps)) if self.block_scaled else 0

    @property
    def scale_table_bytes(self) -> int:
        """V scales of a step as the consumer warps arrange them: fragments_nvfp4.py."""
        return self.consumer_threads * self.step_tiles * self.value_groups * 4

    @property
    def exchange_bytes(self) -> int:
        """What warps pass on: probabilities of two steps, or their outputs."""
        if self.warps_apart:
            return 16 * self.rows * self.head_size
        return 2 * self.step_tiles * self.rows * TILE_TOKENS * 2


def smem_bytes(config: DecodeConfig) -> int:
    """Shared memory of one CTA, alignment padding included (what the allocator will ask for)."""
    rows, head_size = config.rows, config.head_size
    ring = config.stages * config.stage_bytes
    queries = rows * head_size * 2 if config.queries_in_smem else 0
    # cross-warp maxima and sums, row scales, visible ranges, row maxima of |q|; shared items, plan
    tables = rows * (3 * 4 * config.consumer_warps + 4 + 8) + 96 + 32
    exchange = config.exchange_bytes + config.fold_bytes
    if config.stages_queries:
        exchange += rows * config.staged_row_bytes + 16
    parts = (exchange, queries, config.scale_table_bytes, tables, 2 * 8 * config.stages)
    return ring + sum(parts) + 3 * 1024


def _stages_within(config: DecodeConfig) -> int:
    """The largest stage count that leaves room for ``ctas_per_sm`` CTAs."""
    budget = min(SMEM_BYTES_PER_SM // config.ctas_per_sm - 1024, SMEM_BYTES_PER_CTA)
    fixed = smem_bytes(config) - config.stages * (config.stage_bytes + 16)
    return (budget - fixed) // (config.stage_bytes + 16)


# More in flight than this buys no bandwidth (H200: 128 KiB an SM saturate DRAM).
_MAX_RING_BYTES_PER_SM = 196608
# From a quantized cache more than this costs time (H200, 112 KiB against up to 192: from 0.5 %
# slower to 4 % faster where lengths are equal, up to 6 % in log-normal batches and single
# sequences), but where 8 rows have slots of 32 KiB, for which it is the same.
_MAX_RING_BYTES_QUANTIZED = 114688
# Two warpgroups take so many a step. Of 32 rows at head size 256 three instead of four are 2 %
# faster in log-normal batches and 1 % slower elsewhere; five 2 % slower and 1 % faster.
_LEAST_SLOTS = 4


def ring_bytes_per_sm(config: DecodeConfig) -> int:
    """The most bytes that the rings of an SM's CTAs have."""
    if not config.converts or (config.rows == 8 and config.head_bytes == 512):
        return _MAX_RING_BYTES_PER_SM
    least = _LEAST_SLOTS * config.ctas_per_sm * config.stage_bytes if config.loads_first else 0
    return max(_MAX_RING_BYTES_QUANTIZED, least)


def make_config(
    head_size: int,
    rows: int,
    q_dtype: str,
    box_tokens: int,
    loader_only: bool = False,
    kv_format: str = "fp8_e4m3",
) -> DecodeConfig:
    """The tuned variant for a head size, row bucket, query dtype, TMA box and cache format."""
    ctas, registers, *two = RESIDENCY[kv_format][head_size, rows]
    draft = DecodeConfig(
        head_size, rows, q_dtype, box_tokens, 1, ctas, registers, loader_only, kv_format, *two
    )
    stages = min(_stages_within(draft), ring_bytes_per_sm(draft) // ctas // draft.stage_bytes)
    return replace(draft, stages=stages)


def row_bucket(head_size: int, packed_rows: int) -> int:
    """The smallest bucket that holds ``packed_rows`` rows, else the largest (in chunks)."""
    buckets = row_buckets(head_size)
    return next((rows for rows in buckets if rows >= packed_rows), buckets[-1])


def formats_for(q_dtype: str) -> tuple[str, ...]:
    """The cache formats that go with such queries."""
    return (*QUANTIZED_FORMATS, q_dtype)


def box_tokens_for_page(page_size: int) -> int | None:
    """Tokens of one TMA box for a page size, or None where the kernel cannot read such pages."""
    return (
        next((box for box in BOX_TOKENS if page_size % box == 0), None) if page_size > 0 else None
    )


def support_table() -> list[DecodeConfig]:
    """Every variant that the public function can ask for."""
    return [
        make_config(head_size, rows, q_dtype, box, kv_format=kv_format)
        for kv_format in KV_FORMATS
        for head_size in HEAD_SIZES
        for rows in row_buckets(head_size)
        for q_dtype in Q_DTYPES
        if kv_format in formats_for(q_dtype)
        for box in BOX_TOKENS
    ]
