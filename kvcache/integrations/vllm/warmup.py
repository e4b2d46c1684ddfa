"""The compile units of a group of layers, for vLLM's CuTe DSL warmup."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit
from vllm.v1.kv_cache_interface import AttentionSpec

from cute_kernels import compile_cache
from kvcache.dtypes import KV_CACHE_DTYPES, query_dtype_name
from kvcache.integrations.vllm.dtypes import config_of_spec
from kvcache.selection import select_kernel


def compile_units(
    spec: AttentionSpec,
    num_q_heads: int,
    query_dtype: torch.dtype,
    max_query_tokens: int,
    stored_as: str,
) -> tuple[CuTeDSLCompileUnit, ...]:
    """What these layers ask for, attention and store, with up to so many query tokens a sequence.

    A unit is loaded from a cache or bundle where one has it, and compiled otherwise.

    Args:
        spec: of a layer; its block size is the kernel block.
        stored_as: the dtype that the user named, which the store writes: a spec knows the format.

    Raises:
        NotImplementedError: no kernel serves the spec.
    """
    config = config_of_spec(spec)
    named = KV_CACHE_DTYPES.get(stored_as)
    if named is not None and named.storage == config.dtype.storage:
        config = replace(config, kv_cache_dtype=stored_as)
    workload = compile_cache.AttentionWorkload(
        head_size=spec.head_size,
        num_q_heads=num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        q_dtype=query_dtype_name(query_dtype),
        kv_cache_dtype=config.kv_cache_dtype,
        page_sizes=(spec.block_size,),
        max_query_tokens=max_query_tokens,
    )
    (target,) = select_kernel(config).architectures
    return tuple(
        CuTeDSLCompileUnit(unit.name, unit.key, partial(compile_cache.warmup, [unit]))
        for unit in compile_cache.units_for(workload, target)
    )
