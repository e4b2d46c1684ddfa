"""The softmax of a tile: scaling and masking scores, keeping each row's reference, storing P^T.

Scores are in log2 units relative to the row's reference (see lane.py). The first tile of an item
sets the references, in one exchange over all warps. Later a warp that sees a score above
``HEADROOM`` moves the reference of its own P and sums at once (``check``) and leaves the shifts in
``maxima``; before the tile's values are added, all warps agree on one shift a row (``settle``).

A row has no reference before the first tile in which it sees a key: the exact test is its position
against the window, so no state is kept for it. In tiles where rows may see their first keys every
warp publishes what it found, and such rows take the maximum as it is, not only upwards.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import dsl
from cute_kernels.attention.prefill_sm90.lane import HEADROOM, WARPS, ConsumerLane, Place, Softmax
from cute_kernels.attention.prefill_sm90.schedule import View


def _or_zero(x: Float32) -> Float32:
    """x, or 0 for -inf: a shift of a row that has seen no key."""
    return cutlass.select_(x == dsl.NEG_INF, Float32(0.0), x)


class SoftmaxMath(ConsumerLane):
    def has_reference(self, position: Int32, place: Place):
        """Whether a row may have seen a key before tile ``place`` (not the item's first)."""
        return position - self.shape.window_left < place.first_token

    @cute.jit
    def relative_scores(self, rS: cute.Tensor, place: Place, view: View):
        """Raw products -> log2-domain scores relative to the reference, -inf where masked."""
        reference = self.smem.reference + 2 * self.pair
        if self.softcap != 0.0:
            # cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)); x is in log2 units already
            inverse = 2.0 / self.softcap
            cap = self.softcap * dsl.LOG2_E
            for n in cutlass.range_constexpr(self.row_blocks):
                row = dsl.ld_shared_f32x4(reference + 64 * n)
                for i in cutlass.range_constexpr(4):
                    e = dsl.exp2(rS[4 * n + i] * row[i % 2] * inverse)
                    capped = cap - (2.0 * cap) * cute.arch.rcp_approx(1.0 + e)
                    rS[4 * n + i] = capped + row[2 + i % 2]
        else:
            for n in cutlass.range_constexpr(self.row_blocks):
                row = dsl.ld_shared_f32x4(reference + 64 * n)
                for i in cutlass.range_constexpr(4):
                    rS[4 * n + i] = dsl.fma(rS[4 * n + i], row[i % 2], row[2 + i % 2])
        if (place.first_token < view.low) | (place.first_token + 128 > view.high):
            self._mask(rS, place.first_token + self.token_in_tile)

    @cute.jit
    def _mask(self, rS: cute.Tensor, token: Int32):
        left, right, used = self.shape.window_left, self.shape.window_right, self.item.used
        for n in cutlass.range_constexpr(self.row_blocks):
            own = dsl.ld_shared_b32x2(self.smem.position + self.pair + 32 * n)
            for i in cutlass.range_constexpr(4):
                low = own[i % 2] - left
                high = cutlass.min(own[i % 2] + right + 1, used)
                position = token + 8 * (i // 2)
                if (position < low) | (position >= high):
                    rS[4 * n + i] = Float32(dsl.NEG_INF)

    def _column_maxima(self, rS: cute.Tensor, n: int) -> list[Float32]:
        """Maxima over the warp's 16 tokens of the lane's two rows of a block."""
        top = []
        for r in range(2):
            x = dsl.fmax(rS[4 * n + r], rS[4 * n + 2 + r])
            for step in range(3):
                x = dsl.fmax(x, dsl.shuffle_xor_f32(x, Int32(4 << step)))
            top.append(x)
        return top

    @cute.jit
    def set_references(self, rS: cute.Tensor):
        """First tile: the maxima over all warps become the references (0 where no key is seen)."""
        for n in cutlass.range_constexpr(self.row_blocks):
            top = self._column_maxima(rS, n)
            if self.g == 0:
                dsl.st_shared_f32x2(self.maxima_of(self.index) + 32 * n, top[0], top[1])
        self.barrier()
        if self.tid < self.config.rows:
            highest = Float32(dsl.NEG_INF)
            for w in cutlass.range_constexpr(len(WARPS)):
                highest = dsl.fmax(highest, dsl.ld_shared_f32(self.maximum_of(w, self.tid)))
            dsl.st_shared_f32(self.reference_of(self.tid), -_or_zero(highest))
        self.barrier()
        for n in cutlass.range_constexpr(self.row_blocks):
            negated = dsl.ld_shared_f32x2(self.smem.reference + 2 * self.pair + 64 * n + 8)
            for i in cutlass.range_constexpr(4):
                rS[4 * n + i] = rS[4 * n + i] + negated[i % 2]

    @cute.jit
    def check(self, state: Softmax, place: Place, opening: Int32):
        """Move the references of this warp if a score is too far above one of them.

        opening: not 0 in a tile where some row may see its first key.
        """
        rS, rSum = state.rS, state.rSum
        top = []
        for i in cutlass.range_constexpr(4):
            x = rS[i]
            for n in cutlass.range_constexpr(1, self.row_blocks):
                x = dsl.fmax(x, rS[4 * n + i])
            top.append(x)
        highest = dsl.fmax(dsl.fmax(top[0], top[1]), dsl.fmax(top[2], top[3]))
        moves = opening
        if cute.arch.vote_any_sync(highest > HEADROOM):
            moves = Int32(1)
        if moves != 0:
            for n in cutlass.range_constexpr(self.row_blocks):
                shift = self._column_maxima(rS, n)
                own = dsl.ld_shared_b32x2(self.smem.position + self.pair + 32 * n)
                for r in cutlass.range_constexpr(2):
                    if self.has_reference(own[r], place):
                        shift[r] = dsl.fmax(shift[r], Float32(0.0))
                    # Without a reference yet the sum is 0: keep the factor finite.
                    keep = dsl.exp2(-dsl.fmax(shift[r], Float32(0.0)))
                    rSum[2 * n + r] = rSum[2 * n + r] * keep
                by = [_or_zero(shift[0]), _or_zero(shift[1])]
                for i in cutlass.range_constexpr(4):
                    rS[4 * n + i] = rS[4 * n + i] - by[i % 2]
                if self.g == 0:
                    dsl.st_shared_f32x2(self.maxima_of(self.index) + 32 * n, shift[0], shift[1])
            if self.lane == 0:
                flag = self.smem.flags + (place.number & 1) * 32 + self.index * 4
                dsl.st_shared_b32(flag, place.number)

    def exponentiate(self, state: Softmax, n: int):
        """Probabilities of row block n: their sums, and 16-bit pairs."""
        p = [dsl.exp2(state.rS[4 * n + i]) for i in range(4)]
        for r in range(2):
            state.rSum[2 * n + r] = state.rSum[2 * n + r] + (p[r] + p[2 + r])
        pack = dsl.pack_f16x2 if self.config.mma_dtype == "fp16" else dsl.pack_bf16x2
        state.rP[2 * n] = pack(p[0], p[1])
        state.rP[2 * n + 1] = pack(p[2], p[3])

    def store_probabilities(self, state: Softmax, number: Int32):
        """P^T of tile ``number`` to its buffer, for all warps.

        Waits for this warp's own MMAs first: the arrival also says that the other buffer is free.
        """
        buffer = number & 1
        address = self.p_address + buffer * (self.config.rows * 256)
        for n in range(0, self.row_blocks, 2):
            p = [state.rP[2 * n + i] for i in range(4)]
            dsl.stmatrix_x4_trans(address + n * 1024, *p)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)
        self.arrive(self.smem.p_full + buffer)

    @cute.jit
    def settle(self, state: Softmax, acc: cute.Tensor, place: Place):
        """Bring the published P, the sums and O to common references, if a warp moved its own.

        place: the tile whose P was published last.
        """
        flags = self.smem.flags + (place.number & 1) * 32
        flag = dsl.ld_shared_b32(flags + (self.lane & 7) * 4)
        if cute.arch.vote_any_sync(flag == place.number):
            warpgroup.wait_group(0)
            self.barrier()
            # The other buffer of P is free: its values have been added, the next P comes later.
            factors = self.smem.p + ((place.number & 1) ^ 1) * (self.config.rows * 256)
            if self.tid < self.config.rows:
                self._common_shift(place, flags, factors)
            self.barrier()
            self._scale_stored_probabilities(place)
            cute.arch.fence_proxy("async.shared", space="cta")
            for n in cutlass.range_constexpr(self.row_blocks):
                factor = dsl.ld_shared_f32x2(self.maxima_of(self.index) + 32 * n)
                for r in cutlass.range_constexpr(2):
                    state.rSum[2 * n + r] = state.rSum[2 * n + r] * factor[r]
            for n in cutlass.range_constexpr(self.value_row_blocks):
                keep = dsl.ld_shared_f32x2(factors + self.pair + 32 * n + 4 * self.row_offset)
                for u in cutlass.range_constexpr(self.config.value_blocks):
                    for i in cutlass.range_constexpr(4):
                        at = (u * self.value_row_blocks + n) * 4 + i
                        acc[at] = acc[at] * keep[i % 2]
            self.barrier()

    @cute.jit
    def _common_shift(self, place: Place, flags: Int32, factors: Int32):
        """One row, that of this thread's number: the shift of its reference.

        Replaces the warps' shifts in ``maxima`` by factors for their P and sums, and leaves the
        factor of O in ``factors``. A warp that moved nothing counts as 0; a row without a reference
        takes what was found.
        """
        shift = Float32(0.0)
        position = dsl.ld_shared_b32(self.smem.position + 4 * self.tid)
        if not self.has_reference(position, place):
            shift = Float32(dsl.NEG_INF)
        theirs = []
        for w in cutlass.range_constexpr(len(WARPS)):
            moved = Float32(0.0)
            if dsl.ld_shared_b32(flags + 4 * w) == place.number:
                moved = dsl.ld_shared_f32(self.maximum_of(w, self.tid))
                shift = dsl.fmax(shift, moved)
            theirs.append(moved)
        shift = _or_zero(shift)
        for w in cutlass.range_constexpr(len(WARPS)):
            dsl.st_shared_f32(self.maximum_of(w, self.tid), dsl.exp2(theirs[w] - shift))
        # Downwards only where the row had no reference, hence no output.
        keep = dsl.exp2(-dsl.fmax(shift, Float32(0.0)))
        dsl.st_shared_f32(factors + 4 * self.tid, keep)
        entry = self.reference_of(self.tid)
        dsl.st_shared_f32(entry, dsl.ld_shared_f32(entry) - shift)

    @cute.jit
    def _scale_stored_probabilities(self, place: Place):
        """The warp's own 16 tokens of the stored P^T, a lane for every 32nd row."""
        rows = self.config.rows
        kind = "f16" if const_expr(self.config.mma_dtype == "fp16") else "bf16"
        slab = self.smem.p + (place.number & 1) * (rows * 256) + self.half * (rows * 128)
        for block in cutlass.range_constexpr(rows // 32):
            row = 32 * block + self.lane
            scale = dsl.ld_shared_f32(self.maximum_of(self.index, row))
            for c in cutlass.range_constexpr(2):
                at = slab + row * 128 + (((2 * self.warp + c) ^ (self.lane & 7)) * 16)
                words = dsl.ld_shared_b32x4(at)
                dsl.st_shared_b32x4(at, *(dsl.mul_pair(word, scale, kind) for word in words))
