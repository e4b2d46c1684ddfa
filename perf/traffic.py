"""What a case must move and compute, and what this card can read.

The floor of a decode call is its traffic over the read bandwidth. Bandwidths in this project
(`tb_per_s`) count every visible K and V byte once and nothing else, so they compare with the
figures of other reports; the bytes of Q, O and the block table are listed beside (under 1 % of
every decode case).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from perf.cases import DecodeCase

ELEMENT_BYTES = {
    "fp8_e4m3": 1.0,
    "nvfp4": 0.5625,
    **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16"), 2.0),
}
BLOCK_TABLE_BYTES = 4
# Past the L2 cache, and not much more: on an H200 a copy of 2 GiB reached 2.8 TB/s, one of 201 MB
# 4.2 (2026-11-30).
_COPIED_BYTES = 1 << 28


@dataclass(frozen=True)
class Traffic:
    """Bytes that one call must move: every input read once, every output written once."""

    kv: int
    q: int
    out: int
    block_table: int

    @property
    def total(self) -> int:
        return self.kv + self.q + self.out + self.block_table


def visible_keys(case: DecodeCase, kv_len: int) -> int:
    """Keys of a sequence of `kv_len` that at least one of its queries sees.

    With a window, the first of the q_len queries sees `window` keys and each later one a new key.
    """
    if case.window == 0:
        return kv_len
    return min(kv_len, case.window + case.q_len - 1)


def visible_pairs(case: DecodeCase, kv_len: int) -> int:
    """(query token, key) pairs of a sequence of `kv_len` inside the causal mask and the window."""
    pairs = 0
    for token in range(case.q_len):
        keys = max(kv_len - case.q_len + token + 1, 0)
        pairs += min(keys, case.window) if case.window else keys
    return pairs


def traffic(case: DecodeCase) -> Traffic:
    """Bytes of one call of a case."""
    keys = [visible_keys(case, kv_len) for kv_len in case.kv_lens]
    elements = sum(keys) * case.num_kv_heads * case.head_size
    rows = case.batch * case.q_len * case.num_q_heads * case.head_size
    q_bytes = int(rows * ELEMENT_BYTES[case.q_dtype])
    unseen = [
        (length - seen) // case.page_size for length, seen in zip(case.kv_lens, keys, strict=True)
    ]
    return Traffic(
        kv=int(2 * elements * ELEMENT_BYTES[case.kv_cache_dtype]),
        q=q_bytes,
        out=q_bytes,
        block_table=(sum(case.pages) - sum(unseen)) * BLOCK_TABLE_BYTES,
    )


def flops(case: DecodeCase) -> int:
    """Multiplications and additions of Q K^T and P V over the visible pairs."""
    pairs = sum(visible_pairs(case, kv_len) for kv_len in case.kv_lens)
    return 4 * pairs * case.num_q_heads * case.head_size


class ReadProbe(Protocol):
    """Something that reads `bytes_read` bytes of device memory per call and writes next to none.

    A loader-only variant of a kernel is one: its figure, if higher, is the ceiling to quote.
    """

    name: str
    bytes_read: int

    def run(self) -> None:
        """Enqueue one call on the current stream; capturable in a CUDA graph."""


class ReductionProbe:
    """A torch reduction over a large buffer: the ceiling that needs no kernel of ours."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.name = "reduction"
        # The bytes are arbitrary; as float32 they hold NaNs, which cost a sum nothing.
        self._values = buffer.view(-1).view(torch.float32)
        self.bytes_read = self._values.numel() * 4

    def run(self) -> None:
        torch.sum(self._values)


def ceiling_buffer() -> torch.Tensor:
    """2 GiB of the current GPU's memory, which no cache holds."""
    return torch.zeros(1 << 31, dtype=torch.uint8, device="cuda")


def device_ceilings(
    buffer: torch.Tensor, median_us: Callable[[Callable[[], object]], float], size: int = 8192
) -> dict[str, float]:
    """What this device reaches in this process: the bounds that times are read against.

    Args:
        buffer: uint8, much larger than the L2 cache.
        median_us: times one callable on the device.
        size: of the square bf16 matrices.

    Returns:
        read_tb_per_s of a reduction of read_gib, copy_tb_per_s (bytes read and written) of a copy
        of copy_gib, matmul_tflops of torch's bf16 product.
    """
    probe = ReductionProbe(buffer)
    source = buffer[:_COPIED_BYTES]
    copied = torch.empty_like(source)
    copy_us = median_us(lambda: copied.copy_(source))
    a, b = (torch.randn(size, size, device=buffer.device).bfloat16() for _ in "ab")
    product = torch.empty_like(a)
    matmul_us = median_us(lambda: torch.mm(a, b, out=product))
    return {
        "read_tb_per_s": read_ceilings([probe], median_us)[probe.name],
        "read_gib": probe.bytes_read / 2**30,
        "copy_tb_per_s": 2 * source.numel() / copy_us / 1e6,
        "copy_gib": source.numel() / 2**30,
        "matmul_tflops": 2 * size**3 / matmul_us / 1e6,
    }


def read_ceilings(
    probes: Sequence[ReadProbe], median_us: Callable[[Callable[[], None]], float]
) -> dict[str, float]:
    """TB/s that each probe reaches, by name; `median_us` times one callable on the device."""
    return {probe.name: probe.bytes_read / median_us(probe.run) / 1e6 for probe in probes}
