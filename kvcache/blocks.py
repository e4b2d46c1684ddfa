"""Page sizes: which ones a kernel takes, and how a manager's blocks become a kernel's pages.

Block and page are one word each for the same thing at two levels: the *manager block* is what a
framework allocates, the *kernel block* is the page that the kernel is handed. A manager block holds
a whole number of kernel blocks. Handing the kernel a table of manager blocks where it expects
kernel blocks reads other sequences' keys without any error, hence `split_block_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

from cute_kernels.registry import KernelContract, PageSizes
from kvcache.checks import check_all, check_positive, check_type
from kvcache.config import AttentionConfig
from kvcache.selection import select_kernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MultipleOf:
    """Every positive multiple of `base` tokens."""

    base: int

    def __post_init__(self) -> None:
        check_positive("MultipleOf", self.base)

    def __contains__(self, size: int) -> bool:
        return size > 0 and size % self.base == 0


def get_supported_kernel_block_sizes_for_config(
    config: AttentionConfig,
) -> list[int | MultipleOf]:
    """The page sizes to offer to a planner, in tokens, smallest first.

    Only those that the kernel reads at one load a tile. A planner that is offered more takes the
    smallest; the kernel accepts smaller pages from a caller who already has them, see
    `select_common_block_size`. Sizes are also named one by one because some planners split manager
    blocks to such sizes only. `config.page_size` plays no part.

    Raises:
        NotImplementedError: no kernel serves the configuration; the message says why.
    """
    pages = _contract(config).advertised_page_sizes
    return [*sorted(pages.sizes), MultipleOf(pages.multiple_of)]


def get_preferred_block_size_for_config(default: int, config: AttentionConfig) -> int:
    """`default` where the kernel advertises it, else the page size that the kernel prefers.

    Raises:
        ValueError: default < 1. NotImplementedError: no kernel serves the configuration.
    """
    check_positive("default", default)
    contract = _contract(config)
    if default in contract.advertised_page_sizes:
        return default
    return contract.preferred_page_size


def largest_kernel_block_within(
    config: AttentionConfig, per_token_bytes: int, page_budget: int, fallback: int
) -> int:
    """The largest advertised page size whose page fits a budget, else `fallback`.

    Args:
        per_token_bytes: bytes of one token in a page, for all that shares the page.
        page_budget: bytes that a page may take.
        fallback: tokens; returned as it is where not even the smallest page fits.

    Raises:
        ValueError: an argument < 1. NotImplementedError: no kernel serves the configuration.
    """
    check_positive("per_token_bytes", per_token_bytes)
    check_positive("page_budget", page_budget)
    check_positive("fallback", fallback)
    most = page_budget // per_token_bytes
    return max(_sizes_up_to(_contract(config).advertised_page_sizes, most), default=fallback)


def select_common_block_size(
    configs: Iterable[AttentionConfig],
    manager_block: int | None = None,
    *,
    accept_small: bool = False,
) -> int:
    """One kernel block size that the kernels of all these layers take.

    Args:
        configs: of the layers; they may differ in everything.
        manager_block: tokens of a manager block. The result divides it, and is the largest that
            does. None: the smallest size that is good for all layers.
        accept_small: also sizes that the kernels read at several loads a tile and do not advertise,
            for a manager block that nothing advertised divides.

    Raises:
        ValueError: no layers, or no size of all layers divides the manager block.
        NotImplementedError: no kernel serves one of the layers.
    """
    configs = check_all("configs", configs, AttentionConfig, "AttentionConfigs")
    contracts = [_contract(config) for config in configs]
    if not contracts:
        raise ValueError("configs: got none; accepted: at least one layer")
    offered = [
        contract.page_sizes if accept_small else contract.advertised_page_sizes
        for contract in contracts
    ]
    if manager_block is None:
        preferred = max(contract.preferred_page_size for contract in contracts)
        return preferred if all(preferred in pages for pages in offered) else _smallest(offered)
    check_positive("manager_block", manager_block)
    dividing = [size for size in _common_sizes(offered, manager_block) if not manager_block % size]
    if not dividing:
        raise ValueError(
            f"manager_block: got {manager_block}; no kernel block of all layers divides it; "
            f"accepted: multiples of {_smallest(offered)}"
        )
    return max(dividing)


def split_block_table(
    block_table: torch.Tensor, manager_block: int, kernel_block: int
) -> torch.Tensor:
    """A table of manager blocks as the table of their kernel blocks.

    Manager block `i` is the kernel blocks `i * r` to `i * r + r - 1`, with r = manager_block /
    kernel_block: the pool is contiguous and only seen in smaller pages.

    Args:
        block_table: (B, max_blocks) int32 or int64, on any device, never read on the host.
        manager_block, kernel_block: tokens; the first a multiple of the second.

    Returns:
        (B, max_blocks * r), contiguous, same dtype and device. Entries past a sequence's last block
        may hold anything: negative ones, and those that the dtype cannot hold multiplied, become
        -1. With r = 1 it is `block_table` itself.

    Raises:
        ValueError: sizes that are not positive or do not divide, another rank or dtype.
        TypeError: a table that is no tensor.
    """
    import torch

    check_type("block_table", block_table, torch.Tensor, "a tensor, int32 or int64")
    ratio = check_split(manager_block, kernel_block)
    if block_table.dim() != 2 or block_table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"block_table: got {block_table.dtype} {tuple(block_table.shape)}; "
            "accepted: int32 or int64 (B, max_blocks)"
        )
    if ratio == 1:
        return block_table
    limit = (torch.iinfo(block_table.dtype).max + 1) // ratio
    valid = (block_table >= 0) & (block_table < limit)
    first = torch.where(valid, block_table, 0) * ratio
    inside = torch.arange(ratio, dtype=block_table.dtype, device=block_table.device)
    split = torch.where(valid[..., None], first[..., None] + inside, -1)
    return split.flatten(1)


def check_split(manager_block: int, kernel_block: int) -> int:
    """Kernel blocks of a manager block.

    Raises:
        ValueError: sizes that are not positive or do not divide.
    """
    check_positive("manager_block", manager_block)
    check_positive("kernel_block", kernel_block)
    ratio, rest = divmod(manager_block, kernel_block)
    if rest or not ratio:
        raise ValueError(
            f"manager_block: got {manager_block}; accepted: multiples of kernel_block, "
            f"{kernel_block}"
        )
    return ratio


def _contract(config: AttentionConfig) -> KernelContract:
    check_type("config", config, AttentionConfig, "an AttentionConfig")
    return select_kernel(replace(config, page_size=None))


def _sizes_up_to(pages: PageSizes, most: int) -> Iterator[int]:
    yield from (size for size in pages.sizes if size <= most)
    yield from range(pages.multiple_of, most + 1, pages.multiple_of)


def _common_sizes(offered: Sequence[PageSizes], most: int) -> list[int]:
    """Sizes up to `most` tokens that are in every set."""
    first, *others = offered
    return sorted(
        {size for size in _sizes_up_to(first, most) if all(size in pages for pages in others)}
    )


def _smallest(offered: Sequence[PageSizes]) -> int:
    # The least common multiple is in every set, so the smallest common size is at most that.
    return min(_common_sizes(offered, lcm(*(pages.multiple_of for pages in offered))))
