"""What varies between the compiled variants of the store kernels, and what they accept.

Import-light: no DSL here, because planners, tests and the registry read these facts.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats import KV_CACHE_DTYPES, ScaleSearch

# Elements that one thread stores: a scale group of nvfp4, 16 bytes of fp8.
GROUP = 16
THREADS = 128
# With this many threads an SM, each stores K and V: half the address arithmetic.
BOTH_SIDES_THREADS = 1280
# Calls of up to this many tokens look for repeated slots in the kernel itself: each warp compares
# its tokens' slots with all later ones. Longer calls are preceded by a launch of `ClaimConfig`.
SCANNED_TOKENS = 1024

X_DTYPES = ("bf16", "fp16")
HEAD_SIZES = tuple(range(64, 513, GROUP))
# Targets whose assembler has cvt.rn.satfinite.e2m1x2.f32; sm_90a rejects it.
E2M1_TARGETS = ("sm_100a", "sm_103a", "sm_120a")
TARGETS = ("sm_90a", *E2M1_TARGETS)

# Names that differ in nothing that the kernel does share a variant.
_VARIANTS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"} | {
    name: name for name, dtype in KV_CACHE_DTYPES.items() if dtype.storage == "nvfp4"
}
KV_CACHE_DTYPE_NAMES = tuple(_VARIANTS)


@dataclass(frozen=True)
class StoreConfig:
    """Compile-time parameters of one variant; head sizes, strides and layouts are run-time values.

    kv_cache_dtype: "fp8_e4m3", or the nvfp4 dtype, which says how block scales are chosen.
    x_dtype: "bf16" or "fp16", of the keys and values.
    e2m1_instruction: convert to E2M1 by the instruction that only some targets have.
    """

    kv_cache_dtype: str
    x_dtype: str
    e2m1_instruction: bool

    @property
    def name(self) -> str:
        by = "_cvt" if self.e2m1_instruction else ""
        return f"store_{self.kv_cache_dtype}_{self.x_dtype}{by}"

    @property
    def storage(self) -> str:
        return KV_CACHE_DTYPES[self.kv_cache_dtype].storage

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs that registers are budgeted for: 48 or 64 registers a thread.

        Without a budget the assembler aims at 32 and spills. Of 8, 10, 12 and 16 on the H200
        (2026-11-30) 10 was the fastest where nothing is searched, by 3 to 10 %, and 8 for
        nvfp4_mse, by 4 %; the others are within 3 % of each other.
        """
        return 10 if self.searches[0] in (None, ScaleSearch.DEFAULT) else 8

    @property
    def searches(self) -> tuple[ScaleSearch | None, ScaleSearch | None]:
        """How block scales of keys and of values are chosen; None where there are none."""
        search = KV_CACHE_DTYPES[self.kv_cache_dtype].scale_search
        if search is ScaleSearch.FOUR_OVER_SIX_K_ONLY:
            return ScaleSearch.FOUR_OVER_SIX, ScaleSearch.DEFAULT
        return search, search


@dataclass(frozen=True)
class ClaimConfig:
    """The kernel that gives each slot to one of the tokens that name it. Nothing varies."""

    name: str = "store_claim"


def kernel_name(target: str) -> str:
    """The kernel's entry in ``compile.plans.KERNELS`` for an architecture."""
    return "store_sm100" if target in E2M1_TARGETS else "store_sm90"


def make_config(kv_cache_dtype: str, x_dtype: str, target: str) -> StoreConfig:
    """The variant for a dtype as users name it, on an architecture."""
    dtype = _VARIANTS[kv_cache_dtype]
    nvfp4 = KV_CACHE_DTYPES[dtype].storage == "nvfp4"
    return StoreConfig(dtype, x_dtype, nvfp4 and target in E2M1_TARGETS)


def support_table(target: str) -> list[StoreConfig]:
    """Every variant that the public function can ask for on an architecture."""
    return [
        make_config(dtype, x_dtype, target)
        for dtype in dict.fromkeys(_VARIANTS.values())
        for x_dtype in X_DTYPES
    ]
