"""Page plans for models whose layers store different numbers of bytes a token.

A framework with one pool of pages for all layers needs pages of equal bytes. Layers that differ in
head size, KV heads or dtype then have pages of different token counts, and where their bytes a
token are no multiples of each other, each page of some layers ends in unused bytes. Everything is
integers and exact fractions; nothing is rounded before it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvcache.blocks import MultipleOf, get_supported_kernel_block_sizes_for_config
from kvcache.checks import check_all, check_type
from kvcache.config import AttentionConfig


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike.

    name: the caller's word for them. config: of one layer. num_layers: that have a cache of their
    own (layers that read another layer's cache are not counted).

    Raises:
        TypeError: a field of another type.
    """

    name: str
    config: AttentionConfig
    num_layers: int

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "a str")
        check_type("config", self.config, AttentionConfig, "an AttentionConfig")
        if isinstance(self.num_layers, bool):
            raise TypeError("num_layers: got a bool; accepted: an int")
        check_type("num_layers", self.num_layers, int, "an int")


@dataclass(frozen=True)
class GroupPlan:
    """block_size: tokens of a page. used_bytes: of a page, K and V. waste_percent: of a page."""

    group: LayerGroup
    block_size: int
    used_bytes: int
    waste_percent: Fraction


@dataclass(frozen=True)
class HybridPlan:
    """page_bytes: of every page of the pool. waste_percent: of the pages of all layers together,
    where all of them hold the same tokens.
    """

    page_bytes: int
    groups: tuple[GroupPlan, ...]
    waste_percent: Fraction


def plan_pages(groups: Sequence[LayerGroup], *, max_block_size: int = 256) -> HybridPlan:
    """Page bytes for all layers, and each group's page size, with the least waste.

    Of plans with equal waste the one with the smallest pages is taken: a sequence's last page is
    half empty on average, which this plan does not see and which grows with the page. For the same
    reason no page has more than `max_block_size` tokens.

    Args:
        groups: at least one; every group with at least one layer.
        max_block_size: tokens; what the groups' kernels advertise is considered up to here.

    Raises:
        ValueError: no groups, a group without layers, or no advertised page size up to
            max_block_size.
        NotImplementedError: no kernel serves one of the groups; the message says why.
        TypeError: groups that are no LayerGroups, a max_block_size that is no int.
    """
    check_type("max_block_size", max_block_size, int, "an int >= 1")
    groups = check_all("groups", groups, LayerGroup, "LayerGroups")
    if not groups:
        raise ValueError("groups: got none; accepted: at least one")
    options = [_block_sizes(group, max_block_size) for group in groups]
    smallest = max(
        group.config.bytes_per_token * sizes[0]
        for group, sizes in zip(groups, options, strict=True)
    )
    # The best page is exactly full for some group: otherwise it could be smaller.
    candidates = {
        group.config.bytes_per_token * size
        for group, sizes in zip(groups, options, strict=True)
        for size in sizes
    }
    plans = [_plan(groups, options, page) for page in candidates if page >= smallest]
    return min(plans, key=lambda plan: (plan.waste_percent, plan.page_bytes))


def _block_sizes(group: LayerGroup, max_block_size: int) -> list[int]:
    if group.num_layers < 1:
        raise ValueError(f"num_layers: group {group.name!r} has {group.num_layers}; at least 1")
    supported = get_supported_kernel_block_sizes_for_config(group.config)
    sizes = [size for size in range(1, max_block_size + 1) if _is_in(size, supported)]
    if not sizes:
        raise ValueError(
            f"max_block_size: got {max_block_size}; the kernel of group {group.name!r} "
            f"advertises {supported}"
        )
    return sizes


def _plan(
    groups: Sequence[LayerGroup], options: Sequence[Sequence[int]], page_bytes: int
) -> HybridPlan:
    planned = []
    for group, sizes in zip(groups, options, strict=True):
        per_token = group.config.bytes_per_token
        block_size = max(size for size in sizes if size * per_token <= page_bytes)
        used = block_size * per_token
        waste = Fraction(100 * (page_bytes - used), page_bytes)
        planned.append(GroupPlan(group, block_size, used, waste))
    used = sum(group.num_layers * group.config.bytes_per_token for group in groups)
    taken = sum(Fraction(plan.group.num_layers * page_bytes, plan.block_size) for plan in planned)
    return HybridPlan(page_bytes, tuple(planned), 100 * (1 - used / taken))


def _is_in(size: int, supported: Sequence[int | MultipleOf]) -> bool:
    return any(size in one if isinstance(one, MultipleOf) else size == one for one in supported)
