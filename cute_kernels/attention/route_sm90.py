"""Which SM90 kernel serves which sequences of a call: host arithmetic on the call's bounds.

Few packed rows (query tokens x GQA group) are the decode kernel's work: it deals the keys of one
sequence to many CTAs. Many rows are the prefill kernel's: one CTA walks all keys of a chunk of rows
at the tensor cores' speed. The lengths are on the device, so where a batch may hold both kinds both
kernels are launched, and each skips the other's sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.arch import device_arch
from cute_kernels.attention.arguments import AttentionProblem
from cute_kernels.attention.common.launches import Launch, together
from cute_kernels.attention.common.operands import UNLIMITED
from cute_kernels.attention.decode_sm90 import op as decode_sm90
from cute_kernels.attention.prefill_sm90 import op as prefill_sm90
from cute_kernels.attention.prefill_sm90.config import decode_rows, rows_of
from cute_kernels.attention.widen_sm90 import config as widen_sm90

# With fewer items than this part of the SMs the prefill kernel, one item an SM, is slower than the
# decode kernel, which uses all SMs at a third of the speed per SM.
_MIN_ITEMS_PER_SM = 1 / 3


class Bounds(NamedTuple):
    """What the host knows of a call: upper bounds, but for the shapes."""

    batch: int
    total_q: int
    max_seqlen_q: int
    group: int
    kv_heads: int
    head_size: int
    deterministic: bool
    kv_format: str
    keys: int  # of a sequence


class Route(NamedTuple):
    """Sequences of at most ``rows`` packed rows go to the decode kernel, the others to prefill.

    decode, prefill: the kernel may have work, so it is launched. capacity: not 0 where prefill
    reads a 16-bit copy of the keys: the tokens that the copy has room for, of each copied sequence.
    """

    decode: bool
    prefill: bool
    rows: int
    capacity: int = 0


def route(bounds: Bounds, sm_count: int) -> Route:
    """Choose from bounds alone: a captured graph serves any lengths within them."""
    if bounds.kv_format == "nvfp4":
        return _route_nvfp4(bounds, sm_count)
    most = decode_rows(bounds.head_size)
    long = bounds.max_seqlen_q * bounds.group > most
    if bounds.deterministic:
        # Bits would depend on the batch if it decided which kernel serves a sequence.
        return _shared(bounds, most) if long else Route(True, False, most)
    if not long or _few_items(bounds, sm_count):
        return Route(True, False, UNLIMITED)
    return _shared(bounds, most)


def _route_nvfp4(bounds: Bounds, sm_count: int) -> Route:
    """Prefill reads copies only: what is too short or too large for them is decode's, in chunks of
    rows."""
    least = widen_sm90.min_rows(bounds.kv_format, bounds.head_size)
    if least is not None and not _few_items(bounds, sm_count):
        chosen = _shared(bounds, least - 1)
        if chosen.capacity:
            return chosen
    return Route(True, False, UNLIMITED)


def _few_items(bounds: Bounds, sm_count: int) -> bool:
    """Whether the call has too few items for the prefill kernel, see ``_MIN_ITEMS_PER_SM``."""
    read = "fp16" if bounds.kv_format == "nvfp4" else bounds.kv_format
    rows = rows_of(bounds.head_size, read)
    items = -(-bounds.total_q * bounds.group // rows) * bounds.kv_heads
    return items < sm_count * _MIN_ITEMS_PER_SM


def _shared(bounds: Bounds, most: int) -> Route:
    """Sequences of at most ``most`` packed rows for decode, the others for prefill; all for prefill
    where all are of the largest length."""
    all_long = bounds.batch * bounds.max_seqlen_q <= bounds.total_q
    rows = 0 if all_long else most
    return Route(not all_long, True, rows, _capacity(bounds, rows))


def _capacity(bounds: Bounds, skip_rows: int) -> int:
    """See ``Route``. Bits would depend on the batch, so deterministic calls have none."""
    if bounds.deterministic:
        return 0
    tokens = -(-bounds.keys // widen_sm90.BLOCK_TOKENS) * widen_sm90.BLOCK_TOKENS
    copies = widen_sm90.most_copies(bounds.batch, bounds.total_q * bounds.group, skip_rows)
    size = 4 * copies * tokens * bounds.kv_heads * bounds.head_size
    rows = bounds.max_seqlen_q * bounds.group
    least = widen_sm90.min_rows(bounds.kv_format, bounds.head_size)
    wanted = least is not None and rows >= least
    return tokens if wanted and size <= widen_sm90.MAX_BYTES else 0


def can_run(problem: AttentionProblem) -> str | None:
    """Why no SM90 kernel can serve this problem, or None; reads shapes and strides only."""
    if problem.kv_format == "nvfp4":
        return decode_sm90.can_run(problem) or prefill_sm90.cannot_count(problem)
    return decode_sm90.can_run(problem) or prefill_sm90.can_run(problem)


def run(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None) -> Launch | None:
    """Launch what the problem needs; see the kernels' ``run``."""
    chosen, launches = _route_of(problem), []
    if chosen.prefill:
        launches.append(prefill_sm90.run(problem, out, lse, chosen.rows, chosen.capacity))
    if chosen.decode:
        launches.append(decode_sm90.run(problem, out, lse, chosen.rows))
    return together(launches)


def _route_of(problem: AttentionProblem) -> Route:
    total_q, heads, head_size = problem.q.shape
    kv_heads = problem.k.shape[-2]
    bounds = Bounds(
        problem.cu_seqlens_q.shape[0] - 1,
        total_q,
        problem.max_seqlen_q,
        heads // kv_heads,
        kv_heads,
        head_size,
        problem.deterministic,
        problem.kv_format,
        _keys_of(problem),
    )
    return route(bounds, device_arch(problem.q.device.index).sm_count)


def _keys_of(problem: AttentionProblem) -> int:
    """Upper bound of a sequence's keys."""
    table, k = problem.block_table, problem.k
    most = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    bound = widen_sm90.rounded_keys(problem.max_seqlen_q, problem.max_seqlen_k)
    return min(most, bound) if bound else most
