"""When keys are copied, and what the copying warps copy of a batch, without a GPU: what rows see,
each key once, in the order in which the producer asks for it. The code is the kernel's own, run as
Python by tests/lanes.py.
"""

from __future__ import annotations

from types import SimpleNamespace

from cute_kernels.attention.decode_sm90.config import TILE_TOKENS
from cute_kernels.attention.route_sm90 import Bounds, route
from cute_kernels.attention.widen_sm90.config import BLOCK_TOKENS, UNIT_TOKENS, units_per_block
from tests.compile_cache import replay
from tests.lanes import Memory, device_functions
from tests.requires import requires_module

hypothesis = requires_module("hypothesis")
st = requires_module("hypothesis.strategies")

line = device_functions("cute_kernels/attention/common/line.py")
common = device_functions("cute_kernels/attention/common/tile_schedule.py", TILE_TOKENS=TILE_TOKENS)
copier = device_functions(
    "cute_kernels/attention/widen_sm90/copier.py",
    inclusive_scan=line.inclusive_scan,
    BLOCK_TOKENS=BLOCK_TOKENS,
    UNIT_TOKENS=UNIT_TOKENS,
)
LENGTHS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 900)), min_size=1, max_size=70)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    LENGTHS, st.sampled_from((1, 3, 8)), st.integers(1, 3),
    st.sampled_from((common.UNLIMITED, 0, 5, 130)), st.sampled_from((0, 8, 64)),
    st.sampled_from((common.UNLIMITED, 640)), st.sampled_from((128, 256)),
)  # fmt: skip
def test_every_visible_key_is_copied_once(
    lengths, group, kv_heads, left, skip_rows, most_keys, head_size
):
    q_lens, kv_lens = (tuple(side) for side in zip(*lengths, strict=True))
    starts = [sum(q_lens[:b]) for b in range(len(q_lens) + 1)]
    of_batch = common.Lengths(Memory(starts), Memory(kv_lens), None, 1)
    shape = SimpleNamespace(
        batch=len(q_lens), kv_heads=kv_heads, group=group, window_left=left, skip_rows=skip_rows,
        most_keys=most_keys,
    )  # fmt: skip
    per_block = units_per_block(head_size)
    wanted = [b for b, q_len in enumerate(q_lens) if q_len * group > skip_rows]
    for copy, b in enumerate(wanted):
        assert int(copier.copied_before(of_batch, shape, b)) == copy
        found = copier.sequence_to_copy(of_batch, shape, 1, copy)
        used = min(kv_lens[b], most_keys)
        low = max(used - q_lens[b] - left, 0)
        assert (int(found.b), int(found.used), int(found.low)) == (b, used, low)
        units = [
            tuple(map(int, copier.place_of(found, kv_heads, unit, per_block)))
            for unit in range(int(found.blocks) * kv_heads * per_block)
        ]
        assert units == sorted(units, key=lambda unit: unit[0]), "block by block"
        blocks = range(low // BLOCK_TOKENS, -(-used // BLOCK_TOKENS)) if used else ()
        assert sorted(units) == [
            (block, head, block * BLOCK_TOKENS + first, side)
            for block in blocks
            for head in range(kv_heads)
            for first in range(0, BLOCK_TOKENS, UNIT_TOKENS)
            for side in range(per_block // 2)
        ]
    none = copier.sequence_to_copy(of_batch, shape, 1, len(wanted))
    assert (int(none.b), int(none.blocks)) == (len(q_lens), 0)


def test_crowds_of_short_chunks_are_read_directly():
    """What `tests.compile_cache.replay` sends, so that each of a server's kernels is asked for."""
    crowd, q_len = replay.CROWD, replay.CROWD_Q_LENGTH
    for group, kv_heads, head_size in ((16, 4, 128), (8, 1, 64)):
        bounds = (crowd, crowd * q_len, q_len, group, kv_heads, head_size, False, "fp8_e4m3", 256)
        assert route(Bounds(*bounds), 132) == (False, True, 0, 0)
