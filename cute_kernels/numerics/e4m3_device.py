"""E4M3FN on the device, bit for bit as ``e4m3.encode`` and ``decode``; imports the DSL.

SM90 and later have the conversions: to nearest even, saturating, every NaN to 0x7F.
"""

from __future__ import annotations

from cute_kernels import dsl_store

encode = dsl_store.f32_to_e4m3
encode_x4 = dsl_store.f32x4_to_e4m3x4
decode = dsl_store.e4m3_to_f32
