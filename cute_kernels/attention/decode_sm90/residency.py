"""How many CTAs of a decode variant share an SM, and what registers and warpgroups they have.

Import-light, as config.py.
"""

from __future__ import annotations

# (head size, rows) -> (CTAs per SM, consumer registers by setmaxnreg or 0, consumer warpgroups if
# more than one).
#
# One consumer warpgroup hides the latency of a 64-token tile only when the tile is large: small
# tiles want more CTAs beside each other. An SM partition of 16384 registers then holds 2, 3, 4 or
# 5 warps of 1, 2, 3 or 4 CTAs, which caps a thread at 255, 168, 128 or 96 registers; where the
# accumulators need more, the producer becomes a warpgroup that gives its registers away.
_RESIDENCY_FP8 = {
    (512, 8): (1, 0),
    (512, 16): (1, 232, 2),
    (512, 32): (1, 232, 2),
    (256, 8): (2, 0),
    (256, 16): (1, 0, 2),
    (256, 32): (2, 216),
    (256, 64): (1, 232, 2),
    (128, 8): (2, 0),
    (128, 16): (2, 0),
    (128, 32): (2, 0),
    (128, 64): (2, 216),
    (64, 8): (2, 0),
    (64, 16): (2, 0),
    (64, 32): (2, 0),
    (64, 64): (2, 216),
}
# NVFP4 is bound by the issue of instructions, not by loads: it wants more warps, as long as nothing
# spills. The best of what was tried on an H200 (perf/NOTES.md); for (256, 16), (256, 32), (64, 16)
# and (64, 32) what compiles without spills.
_RESIDENCY_NVFP4 = {
    (512, 8): (2, 0),
    (512, 16): (2, 216),
    (512, 32): (2, 216),
    (256, 8): (3, 0),
    (256, 16): (2, 216),
    (256, 32): (2, 216),
    (256, 64): (1, 232, 2),
    (128, 8): (4, 0),
    (128, 16): (2, 0),
    (128, 32): (2, 0),
    (128, 64): (2, 216),
    (64, 8): (4, 0),
    (64, 16): (3, 0),
    (64, 32): (3, 0),
    (64, 64): (2, 216),
}
# A tile of 16 bits is twice as large as one of FP8, so that half the CTAs keep as much in flight.
_RESIDENCY_16_BITS = {
    (512, 8): (1, 0),
    (512, 16): (1, 0),
    (512, 32): (1, 0),
    (256, 8): (1, 0),
    (256, 16): (1, 0),
    (256, 32): (1, 0),
    (256, 64): (1, 232, 2),
    (128, 8): (1, 0),
    (128, 16): (2, 0),
    (128, 32): (2, 0),
    (128, 64): (2, 216),
    (64, 8): (2, 0),
    (64, 16): (2, 0),
    (64, 32): (2, 0),
    (64, 64): (2, 216),
}
RESIDENCY = {
    "fp8_e4m3": _RESIDENCY_FP8,
    "nvfp4": _RESIDENCY_NVFP4,
    "bf16": _RESIDENCY_16_BITS,
    "fp16": _RESIDENCY_16_BITS,
}
