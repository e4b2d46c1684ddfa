"""Attention test cases: frozen descriptions, the grids made of them, the builder of their inputs.

`make_inputs` poisons everything that a correct kernel must not let through: unused cache slots and
spare pages hold NaN (bytes 0x7F in fp8_e4m3), block-table entries past a sequence's last page, and
of pages wholly before its window, hold -1, 2**31 - 1 or the ids of spare pages.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

TILE = 64  # tokens a kernel tile covers; tests must span several
FP8 = torch.float8_e4m3fn
# Standard deviation of the fp8 codes: a descale of 1 / CODE_STD gives values of unit variance.
CODE_STD = 60.0
SPARE_PAGES = 5

LAYOUTS = ("NHD", "HND", "interleaved")
# The form of k_descale and v_descale; "expanded", "batch" and "head" are (B, Hkv) views with
# strides (0, 0), (1, 0) and (0, 1).
SCALE_KINDS = ("none", "scalar", "one", "per_head", "expanded", "batch", "head", "full")


@dataclass(frozen=True)
class AttentionCase:
    """One call of `flash_attn_varlen_func`; `page_size` None means ragged keys and values."""

    id: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    page_size: int | None = 64
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = FP8
    layout: str = "NHD"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    scale_kind: str = "full"
    k_scale: float = 1.0 / CODE_STD
    v_scale: float = 1.0 / CODE_STD
    softmax_scale: float | None = None
    q_magnitude: float = 1.0
    q_strided: bool = False  # q is a slice of a fused QKV projection
    num_splits: int = 0
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def tiles(self) -> int:
        """Tiles of the longest sequence."""
        return math.ceil(max(self.kv_lens, default=0) / TILE)

    @property
    def packed_rows(self) -> int:
        """Query rows that share one KV head in the longest query."""
        return self.group * max(self.q_lens, default=0)


def spread(batch: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    """`batch` lengths drawn from [low, high], both ends present when batch >= 2."""
    rng = random.Random(seed)
    lengths = [rng.randint(low, high) for _ in range(batch)]
    lengths[0] = high
    lengths[-1] = low if batch > 1 else high
    return tuple(lengths)


def _case(name: str, *, batch: int = 3, kv: int = 700, q_len: int = 1, **fields) -> AttentionCase:
    fields.setdefault("kv_lens", spread(batch, max(1, kv // 3), kv, seed=len(name)))
    fields.setdefault("q_lens", (q_len,) * len(fields["kv_lens"]))
    fields.setdefault("seed", sum(map(ord, name)))
    return AttentionCase(id=name, **fields)


def _default_grid() -> list[AttentionCase]:
    cases = []
    for head_size in (64, 128, 256, 512):
        for q_len in (1, 2, 4, 8):
            cases.append(_case(f"d{head_size}-q{q_len}", head_size=head_size, q_len=q_len))
    for group, heads in ((1, 2), (2, 2), (3, 2), (5, 1), (6, 2), (7, 4), (8, 1), (12, 1), (16, 2)):
        cases.append(_case(f"group{group}", num_q_heads=group * heads, num_kv_heads=heads))
    for q_len in (3, 5, 6, 7):
        cases.append(_case(f"group3-q{q_len}", num_q_heads=6, num_kv_heads=2, q_len=q_len))
    for page_size in (16, 32, 64, 128, 192, 256):
        for layout in LAYOUTS:
            cases.append(_case(f"page{page_size}-{layout}", page_size=page_size, layout=layout))
    for head_size in (64, 256, 512):
        for layout, page_size in (("HND", 32), ("interleaved", 64), ("NHD", 16)):
            name = f"d{head_size}-page{page_size}-{layout}"
            cases.append(_case(name, head_size=head_size, page_size=page_size, layout=layout))
    for kind in SCALE_KINDS:
        cases.append(_case(f"scale-{kind}", scale_kind=kind, num_q_heads=12, num_kv_heads=3))
    cases += [
        _case("scale-batch-equals-heads", scale_kind="per_head", batch=2),
        _case("fp16", q_dtype=torch.float16),
        _case("fp16-d512", q_dtype=torch.float16, head_size=512),
        _case("non-causal", causal=False, q_len=4),
        _case("window-left", window=(100, -1), q_len=4),
        _case("window-both", window=(100, 3), causal=False, q_len=8),
        _case("window-right-only", window=(-1, 2), causal=False, q_len=8),
        _case("window-0", window=(0, 0), q_len=2),
        _case("window-127-sinks", window=(127, 0), sinks=True, kv=3000),
        _case("window-d256", window=(1023, 0), head_size=256, kv=3000),
        _case("softcap", softcap=30.0, q_magnitude=8.0),
        _case("softcap-5", softcap=5.0, q_magnitude=8.0, q_len=2, head_size=256),
        _case("sinks", sinks=True, q_len=2),
        _case("sinks-d64", sinks=True, head_size=64, num_q_heads=64, num_kv_heads=8),
        _case("sinks-softcap-window", sinks=True, softcap=20.0, window=(200, 0), q_len=3),
        _case("scale-1.0-d512", softmax_scale=1.0, head_size=512),
        _case("sharp", q_magnitude=30.0, head_size=256),
        _case("q-strided", q_strided=True, q_len=2),
        _case("q-longer-than-kv", kv_lens=(3, 200, 1, 65), q_lens=(8, 8, 4, 2)),
        _case("varlen-with-zeros", kv_lens=(0, 500, 64, 0, 63, 129), q_lens=(1, 0, 3, 0, 8, 2)),
        _case("tile-edges", kv_lens=(1, 63, 64, 65, 127, 128, 129, 191, 192, 193), q_len=1),
        _case("64-packed-rows", q_len=8, num_q_heads=16, kv=3000),
        _case("64-packed-rows-d64", q_len=8, num_q_heads=16, kv=3000, head_size=64),
        _case("64-packed-rows-d256", q_len=8, num_q_heads=16, kv=3000, head_size=256),
        _case(
            "62-packed-rows-d256-page16",
            q_len=31,
            kv_lens=(33, 3000, 0),
            head_size=256,
            num_q_heads=2,
            num_kv_heads=1,
            page_size=16,
            window=(500, 0),
            sinks=True,
        ),
        _case("70-packed-rows", q_lens=(10, 1, 9), num_q_heads=14, num_kv_heads=2),
        _case("prefill-200", kv_lens=(200, 333, 500), q_lens=(200, 1, 130)),
        _case("prefill-longer-than-kv", kv_lens=(100, 30), q_lens=(150, 64)),
        _case("one-sequence", batch=1, kv=5000),
        # All sequences alike: whole items dealt round-robin, then stretches that split them evenly.
        _case("alike-d512", kv_lens=(128,) * 128, head_size=512, num_kv_heads=4),
        _case("alike-d256", kv_lens=(250,) * 40, head_size=256, num_q_heads=32, num_kv_heads=16),
        _case("alike-2", kv_lens=(256,) * 2, head_size=64, num_q_heads=16, num_kv_heads=16),
        _case("alike-16", kv_lens=(512,) * 16, num_q_heads=32, num_kv_heads=32),
        _case("alike-split", kv_lens=(4096,) * 4, q_len=2),
        _case("ragged-short", page_size=None, kv_lens=(3, 5)),
        _case("splits-2", num_splits=2, kv=2000),
        _case("splits-7-sinks", num_splits=7, kv=2000, sinks=True, q_len=4),
        _case("splits-32-short", num_splits=32, kv=200),
        _case("no-splits", num_splits=1, kv=2000),
        _case("ragged-d64", kv_lens=(40, 5000, 0, 64, 2100), head_size=64, num_kv_heads=8),
        _case("many-sequences", batch=90, kv=400, num_q_heads=16, num_kv_heads=4),
        _case("bf16-cache", kv_dtype=torch.bfloat16, scale_kind="none", q_len=2),
        _case("fp16-cache", kv_dtype=torch.float16, q_dtype=torch.float16, scale_kind="none"),
        _case("ragged-fp8", page_size=None, q_len=3),
        _case(
            "ragged-bf16", page_size=None, kv_dtype=torch.bfloat16, scale_kind="none", sinks=True
        ),
    ]
    return cases


def _full_grid() -> list[AttentionCase]:
    cases = []
    for head_size in (64, 128, 256, 512):
        for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
            for q_len in range(1, 9):
                name = f"d{head_size}-g{group}-q{q_len}"
                cases.append(
                    _case(
                        name,
                        head_size=head_size,
                        num_q_heads=2 * group,
                        num_kv_heads=2,
                        q_len=q_len,
                        kv=1300,
                    )
                )
        for page_size in (16, 32, 64, 128, 192, 256):
            for layout in LAYOUTS:
                for kind in ("expanded", "full"):
                    name = f"d{head_size}-p{page_size}-{layout}-{kind}"
                    cases.append(
                        _case(
                            name,
                            head_size=head_size,
                            page_size=page_size,
                            layout=layout,
                            scale_kind=kind,
                            q_len=2,
                            kv=1300,
                        )
                    )
        for batch, kv in ((1, 32768), (8, 8192), (33, 3000), (256, 300)):
            name = f"d{head_size}-b{batch}-kv{kv}"
            cases.append(_case(name, head_size=head_size, batch=batch, kv=kv, num_q_heads=16))
        for window, softcap, sinks in (
            ((127, 0), 0.0, True),
            ((1023, 0), 0.0, False),
            ((-1, 0), 50.0, True),
            ((300, 0), 15.0, True),
        ):
            name = f"d{head_size}-w{window[0]}-cap{softcap:g}-sinks{int(sinks)}"
            options = {"window": window, "softcap": softcap, "sinks": sinks, "q_magnitude": 4.0}
            cases.append(_case(name, head_size=head_size, kv=4000, q_len=3, **options))
            fp16 = _case(f"{name}-fp16", head_size=head_size, kv=4000, **options)
            cases.append(replace(fp16, q_dtype=torch.float16))
    return cases


# What a case's cache holds: FP8, or 16 bits as its queries.
CACHES = ("fp8", "bf16", "fp16")


def with_cache(case: AttentionCase, cache: str) -> AttentionCase:
    """The case with such a cache; one of `CACHES`. Of 16 bits the queries have its dtype, too."""
    if cache == "fp8":
        return replace(case, kv_dtype=FP8)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[cache]
    return replace(case, kv_dtype=dtype, q_dtype=dtype, scale_kind="none")


DEFAULT_CASES = _default_grid()
FULL_CASES = DEFAULT_CASES + _full_grid()


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _values(case: AttentionCase, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """(tokens, Hkv, D) in the cache's dtype, with two strong channels as real keys have."""
    x = _random((tokens, case.num_kv_heads, case.head_size), generator)
    x[..., :: max(1, case.head_size // 2)] *= 3.0
    if case.kv_dtype is FP8:
        return (x * CODE_STD).clamp(-448.0, 448.0).to(FP8)
    return x.to(case.kv_dtype)


def _empty_cache(
    case: AttentionCase, num_pages: int, fill: str, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V (num_pages, page_size, Hkv, D) in the case's layout; fill is "poison" or "zero"."""
    size, heads, dim = case.page_size, case.num_kv_heads, case.head_size

    def storage(*shape: int) -> torch.Tensor:
        if fill == "zero":
            return torch.zeros(shape, dtype=case.kv_dtype, device=device)
        if case.kv_dtype is FP8:
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(FP8)
        return torch.full(shape, math.nan, dtype=case.kv_dtype, device=device)

    if case.layout == "NHD":
        return storage(num_pages, size, heads, dim), storage(num_pages, size, heads, dim)
    if case.layout == "HND":
        k, v = storage(num_pages, heads, size, dim), storage(num_pages, heads, size, dim)
        return k.transpose(1, 2), v.transpose(1, 2)
    # One row of 2 * D elements per token and head: K on the left, V on the right.
    both = storage(num_pages, heads, size, 2 * dim).transpose(1, 2)
    return both[..., :dim], both[..., dim:]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as bytes: indexed writes are not implemented for fp8 on every device."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def write_pages(cache: torch.Tensor, pages: list[int], values: torch.Tensor) -> None:
    """Write a sequence's (tokens, Hkv, D) values to its pages, in order."""
    page_size = cache.shape[1]
    for index, page in enumerate(pages):
        part = values[index * page_size : (index + 1) * page_size]
        _bits(cache)[page, : part.shape[0]] = _bits(part)


def unseen_keys(case: AttentionCase, row: int) -> int:
    """Keys at the start of a sequence that lie before the windows of all of its queries."""
    if case.window[0] < 0:
        return 0
    return max(0, case.kv_lens[row] - case.q_lens[row] - case.window[0])


def make_descale(
    case: AttentionCase, base: float, generator: torch.Generator
) -> torch.Tensor | None:
    """A descale around `base` in the form `case.scale_kind` names; entries differ by up to 2x."""
    if case.scale_kind == "none":
        return None
    batch, heads, device = case.batch, case.num_kv_heads, generator.device
    shapes = {
        "scalar": (),
        "one": (1,),
        "per_head": (heads,),
        "expanded": (1, 1),
        "batch": (batch, 1),
        "head": (1, heads),
        "full": (batch, heads),
    }
    shape = shapes[case.scale_kind]
    scale = base * (0.7 + 0.7 * torch.rand(shape, generator=generator, device=device))
    return scale.expand(batch, heads) if len(shape) == 2 else scale


def cumulative(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """(B + 1,) int32 offsets."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _paged_kv(
    case: AttentionCase, generator: torch.Generator, fill: str
) -> dict[str, torch.Tensor | None]:
    device = str(generator.device)
    rng = random.Random(case.seed)
    needed = [math.ceil(n / case.page_size) for n in case.kv_lens]
    num_pages = sum(needed) + SPARE_PAGES
    k, v = _empty_cache(case, num_pages, fill, device)
    ids = list(range(num_pages))
    rng.shuffle(ids)
    freed, ids = ids[:SPARE_PAGES], ids[SPARE_PAGES:]
    width = max(needed, default=0) + 2
    table = torch.zeros(case.batch, width, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(case.kv_lens, needed, strict=True)):
        pages, ids = ids[:count], ids[count:]
        write_pages(k, pages, _values(case, length, generator))
        write_pages(v, pages, _values(case, length, generator))
        # Engines also free the pages that every window has left behind.
        gone = unseen_keys(case, row) // case.page_size
        dead = [rng.choice([-1, 2**31 - 1, *freed]) for _ in range(gone + width - count)]
        dead = dead if fill == "poison" else [0] * len(dead)
        table[row] = torch.tensor(dead[:gone] + pages[gone:] + dead[gone:])
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    return {"k": k, "v": v, "block_table": table.to(device), "seqused_k": lengths}


def _ragged_kv(case: AttentionCase, generator: torch.Generator) -> dict[str, torch.Tensor]:
    total = sum(case.kv_lens)
    k, v = _values(case, total, generator), _values(case, total, generator)
    return {"k": k, "v": v, "cu_seqlens_k": cumulative(case.kv_lens, str(generator.device))}


def make_inputs(
    case: AttentionCase, device: str = "cpu", fill: str = "poison"
) -> dict[str, object]:
    """Keyword arguments of `flash_attn_varlen_func` for a case, LSE requested.

    Args:
        case: what to build; equal cases give equal inputs on one device.
        device: a torch device string.
        fill: what unused slots, pages and table tails hold: "poison" or "zero".
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    total_q, heads, dim = sum(case.q_lens), case.num_q_heads, case.head_size
    columns = heads + 2 * case.num_kv_heads if case.q_strided else heads
    q = (_random((total_q, columns, dim), generator) * case.q_magnitude).to(case.q_dtype)[:, :heads]
    sinks = _random((heads,), generator) * 2.0 if case.sinks else None
    k_descale = make_descale(case, case.k_scale, generator)
    v_descale = make_descale(case, case.v_scale, generator)
    ragged = case.page_size is None
    kv = _ragged_kv(case, generator) if ragged else _paged_kv(case, generator, fill)
    return {
        "q": q,
        **kv,
        "max_seqlen_q": max(case.q_lens, default=0),
        "cu_seqlens_q": cumulative(case.q_lens, device),
        "max_seqlen_k": max(case.kv_lens, default=0),
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "s_aux": sinks,
        "num_splits": case.num_splits,
        "return_softmax_lse": True,
    }
