"""The retargeting of SM100 kernels changes what it says, and gives PTX that assembles for SM90.

That the result stores the right bytes is a GPU test, in `test_store_gpu.py`.
"""

from __future__ import annotations

import re

import pytest

from cute_kernels.store.config import make_config
from tests.store import retarget

PTX = """.version 9.4
.target sm_100a
\tcvt.rn.satfinite.e2m1x2.f32 b0, %r87, %f8;
\tmov.b32 %r85, {b0, b1, b2, b3};
"""


def test_the_conversion_is_replaced_and_nothing_else():
    text, count = retarget.retargeted(PTX)
    assert count == 1
    assert ".version 8.6\n.target sm_90a\n" in text
    assert text.endswith("}\n\tmov.b32 %r85, {b0, b1, b2, b3};\n")
    assert "abs.f32 mag, %f8;\nmov.b32 lo, %f8;" in text, "the second operand is the low nibble"
    assert "abs.f32 mag, %r87;\nmov.b32 hi, %r87;" in text
    assert "cvt.u8.u32 b0, lo;" in text
    assert "e2m1" not in text


def without_blocks(ptx: str) -> list[str]:
    """Lines outside of the replacements, and the header's two lines blanked."""
    text = re.sub(r"\{ \.reg \.pred pr;.*?\n\}", "CONVERSION", ptx, flags=re.S)
    text = retarget.CONVERSION.sub("CONVERSION", text)
    return re.sub(r"^\.(version|target) .*$", "", text, flags=re.M).splitlines()


@pytest.mark.parametrize("dtype", ("nvfp4", "nvfp4_4over6_k"))
def test_of_a_real_kernel(dtype, tmp_path):
    ptx = retarget.sm100_ptx(make_config(dtype, "bf16", "sm_100a"), tmp_path)
    text, count = retarget.retargeted(ptx)
    assert count == 16, "8 conversions a group, K and V"
    assert without_blocks(text) == without_blocks(ptx)
