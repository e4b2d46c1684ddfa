"""The store kernels: quantize new keys and values into the slots of a paged cache.

Shapes: X (tokens, kv_heads, D) bf16 or fp16, D a multiple of 16 and contiguous; slots (tokens,)
int64; a cache side in pages of any strides, as ``reference/store.py`` documents them.

One thread stores one group: 16 elements of one head of one token; K and V too in calls that fill
the device, else K in the grid's y = 0 and V in y = 1. A thread shares nothing with its neighbours
but the search for repeated slots, so shapes stay run-time values. The elements are loaded before
the slot is known: a store moves few bytes, and hiding latency is what can be done for it.

Two tokens with one slot must not leave the codes of one beside the scale of the other. One of them
stores and the others do nothing: in short calls the last one (each warp looks for its tokens' slots
in the rest of the list), in longer ones the one that ``ClaimSlots``, launched before, let win.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels import dsl, dsl_store
from cute_kernels.store.config import GROUP, THREADS, StoreConfig
from cute_kernels.store.quantize import QuantizeFp8, QuantizeNvfp4, Stored

_X_BYTES = 2
_WARP = 32
# Slots that a lane has in flight while its warp looks for repeated ones.
_BATCH = 8


class Side(NamedTuple):
    """K or V: addresses, and strides in bytes.

    x: of the new tokens. data, block_scale: of a cache side (block_scale of nvfp4 only); both
    regions have the stride ``page`` between pages. scale: a float32, or ``scale_value`` where the
    address is 0. vector: data rows allow one store a group.
    """

    x: Int64
    x_token: Int32
    x_head: Int32
    data: Int64
    data_token: Int32
    data_head: Int32
    block_scale: Int64
    block_scale_token: Int32
    block_scale_head: Int32
    page: Int64
    scale: Int64
    scale_head: Int32
    scale_value: Float32
    vector: Int32


class Divisor(NamedTuple):
    """n // divisor is 2 n * magic >> (32 + shift), unsigned (``op.divisor`` makes them)."""

    divisor: Int32
    magic: Int32
    shift: Int32


class Shape(NamedTuple):
    """tokens with a slot; groups of a token and of a head; tokens of a page; slots of the cache.

    quarter: a quarter of the groups of a head where the block scales of V are swizzled within 4
    tokens; its divisor is 0 where they are linear. owner: address of (capacity,) int32, the token
    that a slot belongs to; 0 for short calls. both: 1 where a thread stores K and V, 0 where they
    have threads of their own.
    """

    tokens: Int32
    token_groups: Divisor
    head_groups: Divisor
    page_tokens: Divisor
    quarter: Divisor
    capacity: Int64
    owner: Int64
    both: Int32


class Place(NamedTuple):
    """Where a group is stored: page, token of the page, head, group of the head."""

    page: Int32
    token: Int32
    head: Int32
    group: Int32


@cute.jit
def divided(n: Int32, by: Divisor):
    """(quotient, remainder) of 0 <= n < 2^31."""
    quotient = dsl_store.divide_by_magic(n, by.magic, by.shift)
    return quotient, n - quotient * by.divisor


def offset(i: Int32, stride: Int32) -> Int64:
    return Int64(i) * Int64(stride)


@cute.jit
def owns(owners: Int64, token: Int32, slot: Int64) -> bool:
    """In a long call, where the address of the slots' owners is not 0: whether the slot is this
    token's. Asked as late as possible, because the answer comes from the kernel before this one."""
    owner = token
    if owners != 0:
        cute.arch.griddepcontrol_wait()
        owner = dsl_store.ld_global_b32(owners + slot * 4)
    return owner == token


class ClaimSlots:
    """owner[slot] = token for every token, whichever of several comes last.

    Nothing need be initialised: only entries that were just written are read.
    """

    @cute.jit
    def __call__(self, mSlots: cute.Tensor, tokens: Int32, capacity: Int64, owner: Int64, stream):
        self.kernel(mSlots, tokens, capacity, owner).launch(
            grid=(cute.ceil_div(tokens, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mSlots: cute.Tensor, tokens: Int32, capacity: Int64, owner: Int64):
        # In this order: what is launched now may read what the kernels before this one wrote.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        token = cta * THREADS + tid
        if token < tokens:
            slot = mSlots[token]
            if slot >= 0 and slot < capacity:
                dsl.st_global_b32(owner + slot * 4, token)


class StoreKv:
    def __init__(self, config: StoreConfig):
        self.config = config
        quantizers = []
        for search in config.searches:
            if config.storage == "nvfp4":
                quantizer = QuantizeNvfp4(config.x_dtype, search, config.e2m1_instruction)
            else:
                quantizer = QuantizeFp8(config.x_dtype)
            quantizers.append(quantizer)
        self.quantizers = quantizers

    @cute.jit
    def __call__(self, mSlots: cute.Tensor, key: Side, value: Side, shape: Shape, stream):
        groups = shape.tokens * shape.token_groups.divisor
        # Its launch overlaps with its predecessor (`kernel` waits), which `ClaimSlots` lets it do
        # from the start.
        self.kernel(mSlots, key, value, shape).launch(
            grid=(cute.ceil_div(groups, THREADS), 2 - shape.both, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(self, mSlots: cute.Tensor, key: Side, value: Side, shape: Shape):
        # Behind `ClaimSlots`, the kernels that wrote K and V have ended: `owns` waits for it.
        if shape.owner == 0:
            cute.arch.griddepcontrol_wait()
        tid, _, _ = cute.arch.thread_idx()
        cta, is_value, _ = cute.arch.block_idx()
        groups = shape.tokens * shape.token_groups.divisor
        item = cta * THREADS + tid
        in_range = item < groups
        # Every lane of a warp takes part in the search for repeated slots.
        if not in_range:
            item = groups - 1
        token, group = divided(item, shape.token_groups)
        head, group = divided(group, shape.head_groups)
        # Where K and V have threads of their own, each loads the other's elements too, in vain:
        # such calls are short, and a choice would cost all calls more.
        slot = mSlots[token]
        words = [self._load(side, token, head, group) for side in (key, value)]
        scales = [self._scale(side, head) for side in (key, value)]
        repeated = self._is_repeated(mSlots, shape, token, slot)
        if in_range and slot >= 0 and slot < shape.capacity and not repeated:
            page, row = divided(Int32(slot), shape.page_tokens)
            place = Place(page, row, head, group)
            if is_value == 0:
                stored = self.quantizers[0](words[0], scales[0])
                if owns(shape.owner, token, slot):
                    self._store(key, stored, place, place)
            if is_value + shape.both != 0:
                stored = self.quantizers[1](words[1], scales[1])
                if owns(shape.owner, token, slot):
                    self._store(value, stored, place, self._swizzled(shape, place))

    def _load(self, side: Side, token: Int32, head: Int32, group: Int32):
        """The 8 words of a group."""
        x = side.x + offset(token, side.x_token) + offset(head, side.x_head)
        x = x + group * (GROUP * _X_BYTES)
        return [*dsl_store.ld_global_b32x4(x), *dsl_store.ld_global_b32x4(x + 16)]

    @cute.jit
    def _scale(self, side: Side, head: Int32) -> Float32:
        scale = side.scale_value
        if side.scale != 0:
            at = side.scale + offset(head, side.scale_head)
            scale = dsl.bits_to_f32(dsl_store.ld_global_b32(at))
        return scale

    def _store(self, side: Side, stored: Stored, place: Place, scale_place: Place):
        size = self.quantizers[0].data_bytes
        at = side.data + place.page * side.page + place.group * size
        at = at + offset(place.token, side.data_token) + offset(place.head, side.data_head)
        self._store_data(at, side.vector, stored[: size // 4])
        if self.config.storage == "nvfp4":
            at = side.block_scale + place.page * side.page + scale_place.group
            at = at + offset(scale_place.token, side.block_scale_token)
            at = at + offset(scale_place.head, side.block_scale_head)
            dsl_store.st_global_b8(at, stored.w2)

    @cute.jit
    def _store_data(self, at: Int64, vector: Int32, words):
        if vector != 0:
            if const_expr(len(words) == 4):
                dsl_store.st_global_b32x4(at, *words)
            else:
                dsl.st_global_b32x2(at, *words)
        else:
            for i in cutlass.range_constexpr(4 * len(words)):
                dsl_store.st_global_b8(at + i, words[i // 4] >> (8 * (i % 4)))

    @cute.jit
    def _is_repeated(self, mSlots: cute.Tensor, shape: Shape, token: Int32, slot: Int64) -> bool:
        """In a short call: whether a later token has this token's slot."""
        repeated = Int32(0)
        if shape.owner == 0:
            lane = cute.arch.lane_idx()
            first = dsl.shuffle_from_lane(token, Int32(0))
            last = dsl.shuffle_from_lane(token, Int32(_WARP - 1))
            for one in cutlass.range(first, last + 1, unroll=1):
                wanted = mSlots[one]
                found = Int32(0)
                for start in cutlass.range(one + 1, shape.tokens, _WARP * _BATCH, unroll=1):
                    found = found | self._occurs(mSlots, wanted, start + lane, shape.tokens)
                found = dsl.warp_max_b32(found)
                if token == one:
                    repeated = found
        return repeated != 0

    def _occurs(self, mSlots: cute.Tensor, wanted: Int64, at: Int32, tokens: Int32) -> Int32:
        """Whether one of the slots at, at + 32, ... is ``wanted``; loads first, all of them."""
        places = [at + k * _WARP for k in range(_BATCH)]
        slots = [mSlots[dsl_store.min_s32(place, tokens - 1)] for place in places]
        found = Int32(0)
        for place, slot in zip(places, slots, strict=True):
            found = found | (Int32(slot == wanted) & Int32(place < tokens))
        return found

    @cute.jit
    def _swizzled(self, shape: Shape, place: Place) -> Place:
        """Where the SM100 reader looks for the block scale of a token (of a page) and group."""
        token, group = place.token, place.group
        if shape.quarter.divisor != 0:
            row = token & 3
            moved, group = divided(group, shape.quarter)
            token = token - row + moved
            group = group * 4 + row
        return Place(place.page, token, place.head, group)
