"""Cache allocations and their byte maps, written out as the formats document them.

A `Pool` is one flat allocation, filled with 0x7F, of which the caches are views. `offset` says
where a byte of a row is, by arithmetic of its own; nothing from `cute_kernels` is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GUARD = 48  # bytes before and behind the pages, so that a storage offset that gets lost is seen


@dataclass(frozen=True)
class Pool:
    """How the pages of one layer's K and V lie in memory.

    `order` is "NHD" or "HND" within each region of a page, or, for fp8 only, "interleaved": K and
    V of a head side by side. `together` puts both sides of a page into one page.
    """

    storage: str
    order: str
    together: bool
    blocks: int = 5
    tokens: int = 8
    heads: int = 3
    head_size: int = 64
    layers: int = 1  # pages of other layers lie between ours: a cross-layer allocation

    @property
    def id(self) -> str:
        together = "one allocation" if self.together else "two"
        return f"{self.storage} {self.order} {together} {self.layers} layers D{self.head_size}"

    @property
    def regions(self) -> tuple[int, ...]:
        """Bytes of a row in each region of a side: data, and the scales where there are any."""
        d = self.head_size
        return (d,) if self.storage == "fp8" else (d // 2, d // 16)

    @property
    def row(self) -> int:
        return sum(self.regions)

    @property
    def side_bytes(self) -> int:
        return self.tokens * self.heads * self.row

    @property
    def page_stride(self) -> int:
        return self.side_bytes * (2 if self.together else 1) * self.layers

    def _start(self, side: int) -> int:
        if not self.together:
            return GUARD + side * self.blocks * self.page_stride
        if self.order == "interleaved":
            return GUARD + side * self.row
        return GUARD + side * self.side_bytes

    def allocate(self) -> torch.Tensor:
        sides = 1 if self.together else 2
        return torch.full((2 * GUARD + sides * self.blocks * self.page_stride,), 0x7F).byte()

    def side(self, memory: torch.Tensor, side: int) -> torch.Tensor:
        """The K (0) or V (1) cache: (blocks, tokens, heads, row) uint8."""
        token, head = {
            "NHD": (self.heads * self.row, self.row),
            "HND": (self.row, self.tokens * self.row),
            "interleaved": (self.heads * 2 * self.row, 2 * self.row),
        }[self.order]
        shape = (self.blocks, self.tokens, self.heads, self.row)
        return memory.as_strided(shape, (self.page_stride, token, head, 1), self._start(side))

    def offset(self, side: int, slot: int, head: int, region: int, byte: int) -> int:
        """Where a byte of a row of region 0 (data) or 1 (scales) is in the allocation."""
        page, token = divmod(slot, self.tokens)
        at = self._start(side) + page * self.page_stride
        width = self.regions[region]
        if self.order == "interleaved":
            return at + (token * self.heads + head) * 2 * self.row + byte
        if region == 1:
            at += self.tokens * self.heads * self.regions[0]
        row = token * self.heads + head if self.order == "NHD" else head * self.tokens + token
        return at + row * width + byte


def swizzled(token: int, group: int, groups: int) -> tuple[int, int]:
    """Where the SM100 reader looks for the V scale of (token in its block, group)."""
    quarter = groups // 4
    return token // 4 * 4 + group // quarter, group % quarter * 4 + token % 4


FP8_POOLS = [
    Pool("fp8", "NHD", together=False),
    Pool("fp8", "NHD", together=True, layers=3),
    Pool("fp8", "HND", together=True),
    Pool("fp8", "HND", together=False, head_size=80),
    Pool("fp8", "interleaved", together=True),
]
NVFP4_POOLS = [
    Pool("nvfp4", "NHD", together=True),
    Pool("nvfp4", "NHD", together=False, head_size=128),
    Pool("nvfp4", "NHD", together=True, heads=1, layers=2),
    Pool("nvfp4", "HND", together=True, head_size=256),
    Pool("nvfp4", "HND", together=False, layers=2),
    Pool("nvfp4", "HND", together=True, heads=1, tokens=4),
]
