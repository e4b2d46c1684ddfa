"""Compiling the indexer's kernels (imports the DSL; no GPU needed)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.indexer import claims, k_kernel, q_kernel, tokens, window
from cute_kernels.indexer.config import IndexerKConfig, IndexerQConfig
from cute_kernels.store.build import ones, slots


def compile_q(config: IndexerQConfig, options: str):
    """The compiled launch function; ``options`` are cute.compile's (architecture, TVM-FFI)."""
    shape = (cute.sym_int(), cute.sym_int())
    weights = make_fake_compact_tensor(Float32, shape, stride_order=(1, 0), assumed_align=4)
    groups = (q_kernel.Addresses, q_kernel.Strides, q_kernel.Sizes, q_kernel.Factors)
    return _compile(q_kernel.IndexerQ(config), weights, groups, options)


def compile_k(config: IndexerKConfig, options: str):
    """The compiled launch function of ``IndexerK``."""
    groups = (
        tokens.Tokens, claims.Claims, window.State, k_kernel.Rotary, k_kernel.Norm, k_kernel.Cache,
    )  # fmt: skip
    return _compile(k_kernel.IndexerK(config), slots(), groups, options)


def _compile(kernel, tensor, groups, options: str):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, tensor, *map(ones, groups), stream, options=options)
