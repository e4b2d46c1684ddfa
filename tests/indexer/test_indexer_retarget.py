"""The retargeting of the SM100 variants gives PTX that assembles for SM90, and changes no more.

That the result writes the right bytes are GPU tests, `test_q_gpu.py` and `test_k_gpu.py`.
"""

from __future__ import annotations

import pytest

from cute_kernels.indexer.config import k_support_table, q_support_table
from tests.store import retarget
from tests.store.test_retarget import without_blocks

Q, K = q_support_table("sm_100a"), k_support_table("sm_100a")


@pytest.mark.parametrize("config", (Q[0], Q[1], K[0], K[1]), ids=lambda config: config.name)
def test_of_real_kernels(config, tmp_path):
    from cute_kernels.indexer import build

    compiler = build.compile_q if config in Q else build.compile_k
    ptx = retarget.compiled_ptx(compiler, config, tmp_path)
    text, count = retarget.retargeted(ptx)
    chunks = 2 * config.heads_per_thread if config in Q else config.vectors
    assert count == 4 * chunks, "4 conversions a chunk"
    assert without_blocks(text) == without_blocks(ptx)
    assert ".target sm_90a" in text and "e2m1x2" not in text
