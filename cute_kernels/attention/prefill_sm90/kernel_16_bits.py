"""SM90 prefill attention over a 16-bit KV cache: queries are the M of both products.

K and V are the B operands as they lie in shared memory; see kernel.py for shapes and the launch.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.attention.common.launch import Scales
from cute_kernels.attention.common.output import Output
from cute_kernels.attention.prefill_sm90.consumer_16_bits import Consumer16Bits, Smem
from cute_kernels.attention.prefill_sm90.kernel import PrefillSm90, shared_arrays
from cute_kernels.attention.prefill_sm90.mailbox import Mailbox
from cute_kernels.attention.prefill_sm90.schedule import Shape
from cute_kernels.attention.prefill_sm90.turns import Turns


class PrefillSm90For16Bits(PrefillSm90):
    consumer = Consumer16Bits

    def _mmas(self):
        """Of a tile's first scores, its other scores, its values: 64 rows by keys or elements."""
        config, k_major = self.config, OperandMajorMode.K
        source = warpgroup.OperandSource

        def mma(columns: int, a_source, b_major) -> cute.TiledMma:
            op = warpgroup.MmaF16BF16Op(
                self.mma_type, Float32, (64, columns, 16), a_source, k_major, b_major
            )
            return cute.make_tiled_mma(op)

        scores = (mma(config.tile_tokens, source.SMEM, k_major) for _ in range(2))
        return (*scores, mma(config.value_columns, source.RMEM, OperandMajorMode.MN))

    @cute.jit
    def _consume(
        self,
        mmas,
        rings,
        smem: Smem,
        mailbox: Mailbox,
        mQ: cute.Tensor,
        scales: Scales,
        shape: Shape,
        output: Output,
    ):
        turns = Turns()
        turns.open()
        PrefillSm90._consume(self, mmas, rings, smem, mailbox, mQ, scales, shape, output)
        turns.close()

    def _init_consumers(self, smem: Smem):
        """Nothing that outlives an item."""

    def _allocate(self):
        config = self.config
        rows, D, tile = config.rows, config.head_size, config.tile_tokens
        array = shared_arrays()
        k, v = self._allocate_slots(array)
        q = array(self.mma_type, rows * D, 1024)
        reference = array(Float32, 2 * rows, 16)
        rings = self._allocate_barriers(array, k, v)
        kinds = warpgroup.SmemLayoutAtomKind
        k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, self.mma_type)
        n_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, self.mma_type)
        columns = config.value_columns  # of a slot of K, too
        k_layout = cute.tile_to_shape(k_major, (tile, columns, config.k_slots), order=(0, 1, 2))
        v_layout = cute.tile_to_shape(n_major, (columns, tile, config.v_slots), order=(1, 0, 2))
        smem = Smem(
            q.toint(),
            reference.toint(),
            self._operand(q, cute.tile_to_shape(k_major, (rows, D), order=(0, 1))),
            self._operand(k, k_layout),
            self._operand(v, v_layout),
        )
        return rings, smem, self._allocate_mailbox(array)
