"""Calls of the indexer functions, made by one rule each, and their results by the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from cute_kernels import compress_norm_rope_insert, fused_indexer_q_rope_quant
from tests.indexer import oracle

BF16 = torch.bfloat16
SENTINEL = 0xA5
GARBAGE = (-1, 2**31 - 1, -(2**31))


def wide(x: torch.Tensor) -> np.ndarray:
    """The values in float64."""
    return x.double().numpy()


def bytes_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values within NaN (integers: -1), at an odd offset, with gaps in every dim."""
    shape = [2 * n + 1 for n in x.shape[:-1]] + [2 * x.shape[-1] + 3]
    room = torch.full(shape, float("nan") if x.is_floating_point() else -1, dtype=x.dtype)
    view = room[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
    view.copy_(x)
    return view


def assert_q_is_the_definition(arguments: dict) -> None:
    """Run Q in both formats and compare every bit with the oracle; NaN weights as NaN."""
    for use_fp4 in (True, False):
        got = fused_indexer_q_rope_quant(**arguments, use_fp4=use_fp4)
        codes, scales, weights = oracle.indexer_q(
            arguments["positions"].tolist(),
            *(wide(arguments[name]) for name in ("index_q", "cos_sin_cache", "index_weights")),
            arguments["softmax_scale"],
            arguments["head_scale"],
            use_fp4,
        )
        assert got[0].dtype is (torch.uint8 if use_fp4 else torch.float8_e4m3fn)
        np.testing.assert_array_equal(bytes_of(got[0]), codes)
        if use_fp4:
            assert got[1].dtype is torch.uint8
            np.testing.assert_array_equal(got[1].numpy(), scales)
        else:
            assert got[1] is None
        assert got[2].dtype is torch.float32
        np.testing.assert_array_equal(wide(got[2]), weights)


def q_arguments(index_q: torch.Tensor, rope_dim: int = 64, identity: bool = False) -> dict:
    """Arguments for these queries; with `identity` the rotation is by 0."""
    tokens, heads, _ = index_q.shape
    generator = torch.Generator().manual_seed(tokens)
    angles = torch.rand(2 * tokens + 1, rope_dim // 2, generator=generator) * 6.0
    if identity:
        angles.zero_()
    return {
        "positions": torch.randperm(2 * tokens + 1, generator=generator)[:tokens],
        "index_q": index_q,
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1),
        "index_weights": torch.randn(tokens, heads, generator=generator),
        "softmax_scale": 128**-0.5,
        "head_scale": 64**-0.5,
    }


@dataclass(frozen=True)
class KCase:
    """One kind of K call. lengths: tokens of each sequence, all of them new."""

    id: str
    cache_format: str
    ratio: int
    overlap: int
    head_size: int = 128
    rope_dim: int = 64
    lengths: tuple[int, ...] = (70, 9)
    state_block_size: int = 16
    block_size: int = 8
    table_dtype: torch.dtype = torch.float32

    @property
    def row_bytes(self) -> tuple[int, int]:
        d = self.head_size
        return (d // 2, d // 32) if self.cache_format == "mxfp4" else (d, 4)


_KINDS = (
    KCase("ratio4", "mxfp4", 4, 1),
    KCase("ratio128", "mxfp4", 128, 0, lengths=(300, 127, 128)),
    KCase("bf16", "mxfp4", 4, 1, table_dtype=BF16, state_block_size=4, block_size=64),
    KCase("small", "mxfp4", 3, 1, head_size=32, rope_dim=2, state_block_size=5, block_size=1),
    KCase("all-rope", "mxfp4", 1, 0, head_size=96, rope_dim=96, lengths=(11, 0, 3)),
)
K_CASES = tuple(
    replace(case, id=f"{case.id}-{name}", cache_format=name)
    for case in _KINDS
    for name in ("mxfp4", "fp8_e4m3")
)


DEGENERATE = ("zero", "nan", "infinite", "no score", "tiny", "huge scores")


class KCall:
    """Arguments of a K call whose unread memory is poison, and what the call has to write.

    State rows that no window has are NaN, block-table entries past a sequence are garbage, the
    cache and the gaps between its blocks hold a sentinel. Every completed row gets a slot, in
    shuffled order; a padding token with garbage everywhere comes last.
    """

    def __init__(self, case: KCase, seed: int = 0):
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-n // case.state_block_size) for n in case.lengths]
        order = (torch.randperm(sum(pages), generator=generator) + 1).int().split(pages)
        table = torch.tensor(GARBAGE).int().repeat(len(pages), max(pages)).contiguous()
        width = (1 + case.overlap) * case.head_size
        state = torch.full((sum(pages) + 1, case.state_block_size, 2 * width), float("nan"))
        for i, (length, own) in enumerate(zip(case.lengths, order, strict=True)):
            table[i, : len(own)] = own
            at = torch.arange(length)
            rows = torch.randn(length, 2 * width, generator=generator) * 3.0
            rows *= torch.logspace(-3, 3, max(length, 1)).unsqueeze(1)[:length].roll(length // 3)
            rows[:, width:] = torch.randn(length, width, generator=generator) * 2.0
            state[own.long()[at // case.state_block_size], at % case.state_block_size] = rows
        positions = torch.cat([torch.arange(n) for n in case.lengths])
        sequences = torch.cat([torch.full((n,), i) for i, n in enumerate(case.lengths)])
        complete = (positions + 1) % case.ratio == 0
        count = int(complete.sum())
        blocks = count // case.block_size + 2
        slots = torch.arange(len(positions)) % 7  # of tokens that complete nothing: ignored
        slots[complete] = torch.randperm(blocks * case.block_size, generator=generator)[:count]
        self.rows = [
            tuple(x.tolist()) for x in torch.stack((slots, sequences, positions), 1)[complete]
        ]
        row = sum(case.row_bytes)
        self.block_stride = row * case.block_size + 5
        self.offset = 3
        self.memory = torch.full((self.offset + blocks * self.block_stride,), SENTINEL).byte()
        k_cache = self.memory.as_strided(
            (blocks, case.block_size, row), (self.block_stride, row, 1), self.offset
        )
        angles = torch.rand(max(case.lengths) + 1, case.rope_dim // 2, generator=generator) * 6.0
        padding = torch.tensor([2**40])
        self.arguments = {
            "state_cache": state,
            "token_to_seq": torch.cat((sequences, padding * 0 - 5)).int(),
            "positions": torch.cat((positions, padding - 1)),
            "slot_mapping": torch.cat((slots, padding * 0 - 1)),
            "state_block_table": table,
            "norm_weight": torch.randn(case.head_size, generator=generator).to(case.table_dtype),
            "norm_eps": 1e-6,
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1).to(case.table_dtype),
            "k_cache": k_cache,
            "compress_ratio": case.ratio,
            "cache_format": case.cache_format,
        }

    def run(self, **changes) -> np.ndarray:
        """Call the function; the whole memory of the cache."""
        assert compress_norm_rope_insert(**{**self.arguments, **changes}) is None
        return self.memory.numpy()

    def ranges(self, slot: int) -> tuple[slice, slice]:
        """The bytes of a slot's values and of its scales within the memory: the byte map."""
        block, token = divmod(slot, self.case.block_size)
        values, scales = self.case.row_bytes
        start = self.offset + block * self.block_stride
        first = start + token * values
        second = start + self.case.block_size * values + token * scales
        return slice(first, first + values), slice(second, second + scales)

    def expected(self, rows=None) -> np.ndarray:
        """The memory by the oracle; `rows`: its rows, where they are given, by slot."""
        memory = np.full(len(self.memory), SENTINEL, np.uint8)
        for slot, sequence, position in self.rows:
            row = self.oracle_row(sequence, position) if rows is None else rows[slot]
            for at, part in zip(
                self.ranges(slot), oracle.cache_row(row, self.case.cache_format), strict=True
            ):
                memory[at] = np.frombuffer(part, np.uint8)
        return memory

    def oracle_row(self, sequence: int, position: int) -> np.ndarray:
        a = self.arguments
        return oracle.k_row(
            wide(a["state_cache"]),
            a["state_block_table"][sequence].tolist(),
            position,
            self.case.ratio,
            wide(a["norm_weight"]),
            a["norm_eps"],
            wide(a["cos_sin_cache"]),
        )


def degenerate_k_call(case: KCase, what: str) -> KCall:
    """A single window of special entries or scores. what: one of `DEGENERATE`."""
    call = KCall(replace(case, lengths=(case.ratio,), state_block_size=case.ratio))
    entries, scores = call.arguments["state_cache"][1].chunk(2, -1)
    if what == "zero":
        entries.zero_()
    elif what == "tiny":
        entries.fill_(2.0**-149)
        call.arguments["norm_weight"].fill_(2.0**-20)
    elif what == "no score":
        scores.fill_(-math.inf)
    elif what == "huge scores":
        scores.fill_(1e38)
        entries.fill_(1.5)
    else:
        # A channel that the first window reads, whether its rows have one half or two.
        entries[1, -56] = math.nan if what == "nan" else math.inf
    return call
