"""Launch shape of the combine kernel. Import-light: no DSL here."""

from __future__ import annotations

from dataclasses import dataclass

# A row's parts: at most one per CTA of the decode grid (4 CTAs on each of 264 SMs).
MAX_PARTS = 1056


@dataclass(frozen=True)
class CombineConfig:
    """One CTA finishes ``head_size / slices`` elements of one row of one item.

    threads: slice_threads (4 elements each) times the groups that share the row's parts.
    """

    head_size: int
    rows: int
    slices: int
    threads: int

    @property
    def slice_elements(self) -> int:
        return self.head_size // self.slices

    @property
    def slice_threads(self) -> int:
        return self.slice_elements // 4

    @property
    def groups(self) -> int:
        return self.threads // self.slice_threads


def combine_config(head_size: int, rows: int, wide: bool) -> CombineConfig:
    """``wide``: few rows with many parts each, which want many threads a row."""
    if wide:
        slices = max(1, head_size // 128)
        return CombineConfig(head_size, rows, slices, 512)
    return CombineConfig(head_size, rows, 1, max(32, head_size // 4))
