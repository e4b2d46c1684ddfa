"""Pages of one layer's K and V, and the block tables that say whose they are.

Plain torch, for the adapters whose framework has no paged cache of its own. A page holds
`page_size` tokens of one sequence, and the pages of a layer are two tensors, K and V, of shape
(num_pages, page_size, Hkv, F): F is the head size D, what `cute_kernels.flash_attn_varlen_func`
takes, or for nvfp4 the 9 D / 16 bytes of `cute_kernels.reshape_and_cache`, which attention takes as
codes and block scales.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

import cute_kernels
from kvcache.checks import check_positive
from kvcache.scales import KVScales

FP8_MAX = 448.0
_HALF_DTYPES = (torch.bfloat16, torch.float16)


class Step(NamedTuple):
    """Where one forward pass writes its tokens, and what its attention calls read."""

    slots: torch.Tensor  # (B * q_len,) int64: page id * page_size + offset in the page
    block_table: torch.Tensor  # (B, max_pages) int32; -1 for pages not held (any more)
    seqused_k: torch.Tensor  # (B,) int32
    cu_seqlens_q: torch.Tensor  # (B + 1,) int32
    q_len: int
    kv_len: int


class Attended(NamedTuple):
    """K and V as `cute_kernels.flash_attn_varlen_func` takes them, by its names."""

    k: torch.Tensor  # (pages, page_size, Hkv, D); of nvfp4 codes, D / 2 bytes
    v: torch.Tensor
    k_descale: torch.Tensor | None  # float32 (1,) or (Hkv,); None for 1
    v_descale: torch.Tensor | None
    k_block_scale: torch.Tensor | None = None  # nvfp4: (pages, page_size, Hkv, D / 16)
    v_block_scale: torch.Tensor | None = None


class PageTable:
    """Page ids of every sequence of a batch, for all layers that see the same tokens.

    Args:
        page_size: tokens in a page.
        sliding_window: how many keys a query of these layers sees, itself included. Pages that
            later queries cannot see are freed, except for the last one of them: up to `page_size`
            tokens can always be taken back.

    Raises:
        ValueError: a page_size that is no int > 0.
    """

    def __init__(self, page_size: int, sliding_window: int | None = None) -> None:
        check_positive("page_size", page_size)
        self.page_size = page_size
        self.sliding_window = sliding_window
        self.num_pages = 0  # ids in use or free: the size that the layers' pools must have
        self.first_page = 0  # the pages before this one have been freed
        self._rows: list[list[int]] = []  # -1 for a freed page
        self._free: list[int] = []
        self._block_table: torch.Tensor | None = None
        self._last: tuple[tuple[int, int], Step] | None = None

    @property
    def pages_in_use(self) -> int:
        return sum(len(row) - self.first_page for row in self._rows)

    def check_start(self, start: int) -> None:
        """Refuse to continue at token `start` where its window has been freed.

        Raises:
            ValueError: keys that the next query sees are gone.
        """
        first_key = self._first_key(start)
        if first_key < self.first_page * self.page_size:
            raise ValueError(
                f"length: got {start} tokens; the window of the next one begins at token "
                f"{first_key}, and the pages before token {self.first_page * self.page_size} have "
                "been freed"
            )

    def advance(self, start: int, q_len: int, batch: int, device: torch.device) -> Step:
        """The step that puts tokens [start, start + q_len) behind each of `batch` sequences.

        Idempotent: the first layer of a forward pass takes the pages, the others find them taken
        and share the step's tensors.

        Raises:
            ValueError: another batch size than that of the tokens already held, or a `start` whose
                window has been freed.
        """
        if start == 0 and len(self._rows) != batch:
            self.reset()  # pages that hold no token any more
        self._rows = self._rows or [[] for _ in range(batch)]
        if len(self._rows) != batch:
            raise ValueError(f"batch: got {batch}; this cache holds {len(self._rows)} sequences")
        if self._last is not None and self._last[0] == (start, q_len):
            return self._last[1]
        self.check_start(start)
        kv_len = start + q_len
        # In this order: a step that is taken back must not have written to the pages that it freed.
        taken = self._reserve(-(-kv_len // self.page_size))
        freed = self._free_before(self._first_key(start) // self.page_size - 1)
        if freed or taken:
            columns = max(len(self._rows[0]), self.num_pages // batch)
            padded = [row + [-1] * (columns - len(row)) for row in self._rows]
            self._block_table = torch.tensor(padded, dtype=torch.int32, device=device)
        position = torch.arange(start, kv_len, device=device)
        page = self._block_table[:, position // self.page_size].long()
        step = Step(
            slots=(page * self.page_size + position % self.page_size).flatten(),
            block_table=self._block_table,
            seqused_k=torch.full((batch,), kv_len, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len,
            q_len=q_len,
            kv_len=kv_len,
        )
        self._last = (start, q_len), step
        return step

    def state(self) -> tuple[Any, ...]:
        """What `restore` needs to undo the steps that follow."""
        return self._rows, self.first_page, self._block_table, self._last

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be as at the time of `state`, one step or a reset ago. The pools keep their size."""
        self._rows, self.first_page, self._block_table, self._last = state
        held = {page for row in self._rows for page in row}
        self._free = [page for page in range(self.num_pages) if page not in held]

    def reset(self) -> None:
        """Free every page. The pools keep their memory."""
        self._free += [page for row in self._rows for page in row[self.first_page :]]
        self._rows, self.first_page = [], 0
        self._last = self._block_table = None

    def _first_key(self, start: int) -> int:
        return 0 if self.sliding_window is None else max(0, start - self.sliding_window + 1)

    def _free_before(self, page: int) -> bool:
        if page <= self.first_page:
            return False
        self._free += [x for row in self._rows for x in row[self.first_page : page]]
        self._rows = [[-1] * page + row[page:] for row in self._rows]  # new lists: see `state`
        self.first_page = page
        return True

    def _reserve(self, per_sequence: int) -> bool:
        missing = per_sequence - len(self._rows[0])
        if missing <= 0:
            return False
        needed = self.pages_in_use + missing * len(self._rows)
        if needed > self.num_pages:
            # Doubling: a growing pool copies each page about once.
            grown = max(needed, 2 * self.num_pages)
            self._free += range(self.num_pages, grown)
            self.num_pages = grown
        self._rows = [list(row) for row in self._rows]  # new lists: see `state`
        for _ in range(missing):
            for row in self._rows:
                row.append(self._free.pop())
        return True


class Pages:
    """The K and V pages of one layer, elements stored as they are (bf16 or fp16).

    A quantized format is a subclass: `encode` makes the stored elements, `descales` are the
    factors that undo it.

    Args:
        key: any (B, Hkv, q_len, D) keys of the layer: gives Hkv, D, dtype and device.
        page_size: tokens in a page.
        scales: of a format that needs them.
    """

    needs_scales = False

    def __init__(self, key: torch.Tensor, page_size: int, scales: KVScales | None = None) -> None:
        _, num_kv_heads, _, head_size = key.shape
        self.query_dtype = self.compute_dtype(key.dtype)
        self.k = torch.empty(
            (0, page_size, num_kv_heads, head_size),
            dtype=self.storage_dtype(key.dtype),
            device=key.device,
        )
        self.v = torch.empty_like(self.k)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of K and one of V."""
        _, page_size, num_kv_heads, head_size = self.k.shape
        return 2 * page_size * num_kv_heads * head_size * self.k.element_size()

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The queries' dtype in attention: the model's if it has 16 bits, otherwise bf16."""
        return dtype if dtype in _HALF_DTYPES else torch.bfloat16

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute_dtype(dtype)

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return key.to(self.k.dtype), value.to(self.v.dtype)

    def descales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """float32 (1,) or (Hkv,) factors of K and V, None for 1."""
        return None, None

    def attended(self) -> Attended:
        """What an attention call reads, through the block table of its step."""
        return Attended(self.k, self.v, *self.descales())

    def grow(self, num_pages: int) -> None:
        """Make room for `num_pages` pages. Pages already there keep their contents; new ones have
        none, as attention never reads past a sequence's end."""
        if num_pages > self.k.shape[0]:
            self.k, self.v = (_grown(pages, num_pages) for pages in (self.k, self.v))

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store (B, Hkv, q_len, D) keys and values; `slots` run over sequences, then tokens."""
        for pages, x in zip((self.k, self.v), self.encode(key, value), strict=True):
            tokens = _as_bytes(x.transpose(1, 2).contiguous()).flatten(0, 1)
            _as_bytes(pages).flatten(0, 1).index_copy_(0, slots, tokens)

    def read(self, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens: K and V as float32 (B, length, Hkv, D), scales applied."""
        page_size = self.k.shape[1]
        block_table = block_table[:, : -(-length // page_size)]
        out = []
        for pages, scale in zip((self.k, self.v), self.descales(), strict=True):
            x = _as_bytes(pages)[block_table].view(pages.dtype).flatten(1, 2)[:, :length].float()
            out.append(x if scale is None else x * scale.unsqueeze(-1))
        return out[0], out[1]


class BF16Pages(Pages):
    """bf16 whatever the model computes in."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16


class ScaledPages(Pages):
    """A format with float32 scales for K and V, one for all KV heads or one for each."""

    needs_scales = True

    def __init__(self, key: torch.Tensor, page_size: int, scales: KVScales | None = None) -> None:
        super().__init__(key, page_size)
        if scales is None:
            raise ValueError("scales: got None; a quantized layer needs KVScales")
        if {len(scales.k), len(scales.v)} - {1, key.shape[1]}:
            raise ValueError(
                f"scales: got {scales}; accepted: 1 number, or {key.shape[1]}, one a head"
            )
        self.k_scale, self.v_scale = (side.reshape(-1) for side in scales.tensors(key.device))

    def descales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_scale, self.v_scale


class FP8Pages(ScaledPages):
    """Elements are float8_e4m3fn codes."""

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float8_e4m3fn

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(key, self.k_scale), quantize_fp8(value, self.v_scale)


class NVFP4Pages(ScaledPages):
    """E2M1 codes and E4M3 block scales, `[data | scales]` in each page of K and of V.

    Elements are rounded to 16 bits before they are stored, as a serving engine's keys and values
    are. Subclasses differ in how the store chooses block scales.
    """

    kv_cache_dtype = "nvfp4"

    def __init__(self, key: torch.Tensor, page_size: int, scales: KVScales | None = None) -> None:
        super().__init__(key, page_size, scales)
        head_size = key.shape[-1]
        if head_size % 16:
            raise ValueError(f"head size: got {head_size}; nvfp4 accepts multiples of 16")
        self.k, self.v = (
            side.new_empty((*side.shape[:3], head_size // 16 * 9)) for side in (self.k, self.v)
        )

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        key, value = (x.to(self.query_dtype).transpose(1, 2).flatten(0, 1) for x in (key, value))
        cute_kernels.reshape_and_cache(
            key, value, self.k, self.v, slots, self.kv_cache_dtype, self.k_scale, self.v_scale
        )

    def read(self, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = block_table[:, : -(-length // self.k.shape[1])]
        out = []
        for side, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            data, block_scale = cute_kernels.split_nvfp4(side)
            block_scale = _as_bytes(block_scale)[pages]
            x = cute_kernels.dequantize_nvfp4(data[pages], block_scale, scale)
            out.append(x.flatten(1, 2)[:, :length])
        return out[0], out[1]

    def attended(self) -> Attended:
        (k, k_scales), (v, v_scales) = (cute_kernels.split_nvfp4(side) for side in (self.k, self.v))
        return Attended(k, v, *self.descales(), k_scales, v_scales)


class FourOverSixPages(NVFP4Pages):
    kv_cache_dtype = "nvfp4_4over6"


class FourOverSixKeysPages(NVFP4Pages):
    kv_cache_dtype = "nvfp4_4over6_k"


class MSEPages(NVFP4Pages):
    kv_cache_dtype = "nvfp4_mse"


PAGE_FORMATS: dict[str, type[Pages]] = {
    "auto": Pages,
    "bf16": BF16Pages,
    "fp8": FP8Pages,
    **{
        pages.kv_cache_dtype: pages
        for pages in (NVFP4Pages, FourOverSixPages, FourOverSixKeysPages, MSEPages)
    },
}


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`e4m3(x * (1 / scale))`: to nearest even, saturating at +-448, NaN to 0x7F.

    `x` has any float dtype; `scale` is float32 on x's device: one number for any shape, or (Hkv,)
    for (B, Hkv, tokens, D). The reciprocal and the product are rounded to float32. Returns
    float8_e4m3fn of x's shape.
    """
    per_head = scale[:, None, None] if scale.numel() > 1 else scale
    scaled = (x.float() * (1.0 / per_head)).clamp(-FP8_MAX, FP8_MAX)
    # torch keeps the sign of a NaN; the hardware conversion gives 0x7F for every NaN.
    return torch.where(scaled.isnan(), math.nan, scaled).to(torch.float8_e4m3fn)


def check_rotatable(size: int) -> None:
    """
    Raises:
        ValueError: a head size that `hadamard` has no matrix for.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"rotated keys: head size {size}; accepted: powers of two")


def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthogonal, symmetric Hadamard matrix of Sylvester's construction, float32 (size, size).

    Multiplied by it, queries and keys keep their products, and large elements that always sit in
    the same few places are spread over all of them (FlashAttention-3, arXiv:2407.08608, section
    3.3, treats its FP8 operands so, with random signs besides).
    """
    check_rotatable(size)
    index = torch.arange(size)
    common = index[:, None] & index[None, :]
    parity = sum((common >> bit) & 1 for bit in range(max(1, size.bit_length() - 1))) % 2
    return ((1.0 - 2.0 * parity) * size**-0.5).to(device)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    # Indexing fp8 tensors is not implemented on every device.
    return x.view(torch.uint8)


def _grown(pages: torch.Tensor, num_pages: int) -> torch.Tensor:
    new = pages.new_empty((num_pages, *pages.shape[1:]))
    new[: pages.shape[0]].copy_(pages)
    return new
