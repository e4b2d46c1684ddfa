"""Inputs of benchmark cases: one pool of random e4m3 bytes that all cases look at (of 16-bit caches
one of normally distributed elements).

A case's K and V are views of the pool, so that a run over all cases creates its gigabytes once.
Input sets of a case have block tables over disjoint random pages; a timer that rotates over them
reads `ROTATED_BYTES` before it meets a page again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from cute_kernels import split_nvfp4
from perf.cases import DecodeCase
from perf.traffic import ELEMENT_BYTES, traffic

ROTATED_BYTES = 400_000_000
MAX_SETS = 32
# Bytes drawn in one go: randint's temporary is of the same size.
_CHUNK = 1 << 28
# Root mean square of uniformly drawn e4m3 codes, and of e2m1 codes times such block scales:
# descales bring values to about unit variance.
CODE_RMS = 100.0
# Caches in the queries' dtype.
WIDE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NVFP4_RMS = 293.0


@dataclass(frozen=True)
class InputSet:
    """Arguments of one call: the names of `flash_attn_varlen_func`.

    q, out (batch * q_len, Hq, D); k, v (num_blocks, page, Hkv, D) float8_e4m3fn, q's dtype, or
    codes of nvfp4 with their block scales; block_table (batch, pages) int32; descales (batch, Hkv)
    float32, None of 16 bits; lse (Hq, batch * q_len) float32 is scratch for providers that always
    write one.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seqused_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: int
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None

    def poison(self) -> None:
        """Make an output that a kernel forgets to write visible."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def rows_of(self, indices: list[int]) -> list[int]:
        """Rows of q and out that belong to some of the sequences."""
        return [i * self.max_seqlen_q + t for i in indices for t in range(self.max_seqlen_q)]

    def sequences(self, indices: list[int]) -> InputSet:
        """The same call for some of the sequences, with q, tables and scales of its own."""
        rows = self.rows_of(indices)
        scales = {name: getattr(self, name) for name in ("k_descale", "v_descale")}
        return replace(
            self,
            q=self.q[rows],
            block_table=self.block_table[indices].contiguous(),
            seqused_k=self.seqused_k[indices],
            cu_seqlens_q=self.cu_seqlens_q[: len(indices) + 1],
            out=self.out[rows],
            lse=self.lse[:, rows],
            **{name: None if x is None else x[indices] for name, x in scales.items()},
        )


def kv_side_bytes(case: DecodeCase) -> int:
    """Bytes of K (or of V) of all sequences of a case, keys outside the window included."""
    tokens = sum(case.pages) * case.page_size
    return int(tokens * case.num_kv_heads * case.head_size * ELEMENT_BYTES[case.kv_cache_dtype])


def set_count(case: DecodeCase) -> int:
    """Input sets that together read ROTATED_BYTES; one call of a large case does by itself."""
    return min(MAX_SETS, -(-ROTATED_BYTES // traffic(case).kv))


class KVPool:
    """K and V for the largest of some cases: (bytes,) uint8 each, no e4m3 NaN.

    wide: the same by 16-bit cache dtype, (elements,) of it.
    """

    def __init__(self, cases: Iterable[DecodeCase], device: str, seed: int = 0) -> None:
        wanted: dict[str, int] = {}
        for case in cases:
            kind = case.kv_cache_dtype if case.kv_cache_dtype in WIDE_DTYPES else "bytes"
            size = kv_side_bytes(case) * set_count(case)
            wanted[kind] = max(wanted.get(kind, 0), size)
        generator = torch.Generator(device).manual_seed(seed)
        self.k, self.v = (random_codes(max(wanted.values()), generator) for _ in "kv")
        self.wide = {
            name: [random_elements(wanted[name] // 2, dtype, generator) for _ in "kv"]
            for name, dtype in WIDE_DTYPES.items()
            if name in wanted
        }

    def views(self, case: DecodeCase) -> dict[str, torch.Tensor]:
        """K and V of a case, by their names in an input set: as many pages as the pool holds."""
        if case.kv_cache_dtype in WIDE_DTYPES:
            shape = (-1, case.page_size, case.num_kv_heads, case.head_size)
            size = shape[1] * shape[2] * shape[3]
            sides = self.wide[case.kv_cache_dtype]
            return {
                name: side[: side.numel() // size * size].view(shape)
                for name, side in zip("kv", sides, strict=True)
            }
        row = int(case.head_size * ELEMENT_BYTES[case.kv_cache_dtype])
        page_bytes = case.page_size * case.num_kv_heads * row
        pages = self.k.numel() // page_bytes
        found = {}
        for name, side in (("k", self.k), ("v", self.v)):
            used = side[: pages * page_bytes]
            if case.kv_cache_dtype == "nvfp4":
                heads_first = used.view(-1, case.num_kv_heads, case.page_size, row)
                data, scales = split_nvfp4(heads_first.transpose(1, 2))
                found[name], found[f"{name}_block_scale"] = data, scales
            else:
                shape = (-1, case.page_size, case.num_kv_heads, row)
                found[name] = used.view(shape).view(torch.float8_e4m3fn)
        return found


def random_codes(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) uint8 of uniformly drawn e4m3 codes, none of them NaN."""
    codes = torch.empty(count, dtype=torch.uint8, device=generator.device)
    for chunk in codes.split(_CHUNK):
        # 254 codes: 0x00..0x7E and 0x80..0xFE.
        chunk.random_(0, 254, generator=generator)
        chunk += (chunk >= 0x7F).to(torch.uint8)
    return codes


def random_elements(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """(count,) of unit variance."""
    return torch.empty(count, dtype=dtype, device=generator.device).normal_(generator=generator)


def make_input_sets(
    case: DecodeCase, pool: KVPool, seed: int | None = None, count: int | None = None
) -> list[InputSet]:
    """Input sets of a case over disjoint pages; by default enough to rotate ROTATED_BYTES."""
    kv = pool.views(case)
    k = kv["k"]
    device = str(k.device)
    pages_per_set = sum(case.pages)
    count = min(count or set_count(case), k.shape[0] // pages_per_set)
    generator = torch.Generator(device).manual_seed(case.seed if seed is None else seed)
    order = torch.randperm(k.shape[0], generator=generator, device=device).to(torch.int32)
    pages = order[: count * pages_per_set].view(count, pages_per_set)
    return [_make_set(case, kv, _block_table(case, each), generator) for each in pages]


def _block_table(case: DecodeCase, pages: torch.Tensor) -> torch.Tensor:
    """(batch, most pages of a sequence) int32: these pages, sequence by sequence; 0 behind them."""
    counts = torch.tensor(case.pages, device=pages.device)
    used = torch.arange(max(case.pages), device=pages.device) < counts[:, None]
    table = torch.zeros(used.shape, dtype=torch.int32, device=pages.device)
    table[used] = pages
    return table


def _make_set(
    case: DecodeCase,
    kv: dict[str, torch.Tensor],
    table: torch.Tensor,
    generator: torch.Generator,
) -> InputSet:
    device = generator.device
    shape = (case.batch * case.q_len, case.num_q_heads, case.head_size)
    q = torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.q_dtype))
    shape_of_scales = (case.batch, case.num_kv_heads)

    def descale() -> torch.Tensor | None:
        """Values within 2x of each other, so that a scale of the wrong sequence or head shows."""
        if case.kv_cache_dtype in WIDE_DTYPES:
            return None
        rms = NVFP4_RMS if case.kv_cache_dtype == "nvfp4" else CODE_RMS
        if case.one_scale:
            return torch.full((1, 1), 1 / rms, device=device).expand(shape_of_scales)
        random = torch.rand(shape_of_scales, generator=generator, device=device)
        return (0.7 + 0.7 * random) / rms

    return InputSet(
        **kv,
        q=q,
        block_table=table,
        seqused_k=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len,
        k_descale=descale(),
        v_descale=descale(),
        out=torch.empty_like(q),
        lse=torch.empty((shape[1], shape[0]), dtype=torch.float32, device=device),
        max_seqlen_q=case.q_len,
        max_seqlen_k=case.longest,
        softmax_scale=case.head_size**-0.5,
        window_left=case.window_left,
    )
