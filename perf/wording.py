"""What the tables of the pages mean, where it takes more than a line."""

from __future__ import annotations

TIMES = (
    "`us`: median microseconds of a call inside a CUDA graph. `ratio`: how many times our time the "
    "other provider took in the same process; bold where we lose by more than 1 %. A baseline's "
    "configuration was tuned for the shape, unless the ratio is marked: `nearest` is that of the "
    "nearest tuned shape, `by hand` one that nobody searched for, which a tuned one may beat."
)
SHAPES = (
    "B sequences of S keys, query/KV heads, head size D; q query tokens each (else one), w keys of "
    "a sliding window."
)
COPIES = (
    "The ceiling is the fastest copy of as many bytes, half read and half written (kernels read "
    "more than they write), over as many sets in the same process, or of a similar size beside it."
)
PREFILL = (
    "TFLOP/s count the (query, key) pairs inside the mask, 4 D operations each. Clocks depend on "
    "what runs in turn with a call: under a sustained load the power limit sets them, beside a "
    "kernel that takes less power they are higher. Rows whose workload says `in_turn` were timed "
    "in turn with all others of their shape; in older ones fp8 alternates with Triton, which makes "
    "it faster, and the others ran alone."
)
