"""Who takes part in the decode benchmark.

A provider that cannot run says why and gets a row that says so; it is never left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING

from perf import peers
from perf.baselines.tuning import tuning
from perf.cases import DecodeCase
from perf.inputs import InputSet
from perf.timing import Call

if TYPE_CHECKING:
    from perf.baselines.triton_decode import DecodeBatch

NOT_INSTALLED = "not installed"
NOT_IMPLEMENTED = "not implemented here"
# ||out - reference|| / ||reference||; rounding the output to bf16 alone costs 1.7e-3.
MAX_RELATIVE_ERROR = 3e-3


@dataclass(frozen=True)
class Provider:
    """name: as in result rows. module: what must be importable. bind: the call for an input set,
    which writes `inputs.out`; None where the module is known but nobody has written its call.
    on_request: takes part only where it is named. kv_cache_dtypes: what it reads. obstacle: what
    else it needs and does not find here; None where nothing is missing. tuning: of its
    configuration for a case, see `perf.rows`; None of providers that choose for themselves."""

    name: str
    module: str
    bind: Callable[[InputSet], Call] | None
    max_relative_error: float = MAX_RELATIVE_ERROR
    on_request: bool = False
    kv_cache_dtypes: tuple[str, ...] = ("fp8_e4m3",)
    obstacle: Callable[[], str | None] = lambda: None
    tuning: Callable[[DecodeCase], str] | None = None

    def why_not(self, kv_cache_dtype: str = "fp8_e4m3") -> str | None:
        """Why this provider cannot run here; None if it can."""
        if find_spec(self.module) is None:
            return NOT_INSTALLED
        if kv_cache_dtype not in self.kv_cache_dtypes:
            return f"reads no {kv_cache_dtype} cache"
        if self.bind is None:
            return NOT_IMPLEMENTED
        missing = self.obstacle()
        return None if missing is None else f"{NOT_INSTALLED}: {missing}"


def _bind_cute_kernels(inputs: InputSet, deterministic: bool = False) -> Call:
    from cute_kernels import flash_attn_varlen_func

    arguments = {**varlen_arguments(inputs), "deterministic": deterministic}
    return partial(flash_attn_varlen_func, **arguments, out=inputs.out)


def varlen_arguments(inputs: InputSet) -> dict[str, object]:
    """Keyword arguments of `flash_attn_varlen_func`, `out` aside."""
    arguments: dict[str, object] = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "max_seqlen_q": inputs.max_seqlen_q,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "max_seqlen_k": inputs.max_seqlen_k,
        "seqused_k": inputs.seqused_k,
        "block_table": inputs.block_table,
        "softmax_scale": inputs.softmax_scale,
        "causal": True,
        "window_size": (inputs.window_left, 0),
        "k_descale": inputs.k_descale,
        "v_descale": inputs.v_descale,
    }
    if inputs.k_block_scale is not None:  # peers, which are given these arguments too, have none
        arguments["k_block_scale"] = inputs.k_block_scale
        arguments["v_block_scale"] = inputs.v_block_scale
    return arguments


def triton_batch(inputs: InputSet) -> DecodeBatch:
    """The baseline's operands of an input set."""
    from perf.baselines.triton_decode import DecodeBatch

    same = {name: getattr(inputs, name) for name in DecodeBatch._fields if hasattr(inputs, name)}
    return DecodeBatch(**same)


def _bind_triton_baseline(inputs: InputSet) -> Call:
    from perf.baselines.triton_decode import decode_attention

    return partial(decode_attention, triton_batch(inputs), inputs.out, inputs.lse)


def _bind_vllm_fa4(inputs: InputSet) -> Call:
    return peers.vllm_fa4(inputs, varlen_arguments(inputs))


def _inductor_obstacle() -> str | None:
    """What torch.compile needs for a GPU and does not find."""
    if find_spec("triton") is None:
        return "torch.compile needs triton"
    named = os.environ.get("CC")
    if any(which(name) for name in ([named] if named else ["cc", "gcc", "clang"])):
        return None
    return f"torch.compile needs a C compiler, found no {named or 'cc, gcc or clang'}"


def _bind_flex_attention(inputs: InputSet) -> Call:
    from perf.flex_peer import torch_flex_attention

    return torch_flex_attention(inputs)


# XQA computes with FP8 queries at head sizes up to 256: 3.2e-2 on such inputs. SDPA rounds K and V
# to 16 bits once more, vLLM's Triton kernel the probabilities to bf16: 3.7e-3 (H200, 2026-11-30).
PROVIDERS = (
    Provider(
        "cute_kernels",
        "cute_kernels",
        _bind_cute_kernels,
        kv_cache_dtypes=("fp8_e4m3", "nvfp4", "bf16", "fp16"),
    ),
    # the same kernel with bits that do not depend on the batch: what that costs
    Provider(
        "cute_kernels_deterministic",
        "cute_kernels",
        partial(_bind_cute_kernels, deterministic=True),
        on_request=True,
        kv_cache_dtypes=("fp8_e4m3", "nvfp4"),
    ),
    Provider("triton_baseline", "triton", _bind_triton_baseline, tuning=tuning),
    Provider("flashinfer_xqa", "flashinfer", peers.flashinfer_xqa, max_relative_error=5e-2),
    # Reads no quantized cache; asked for by name, as each case takes seconds to compile.
    Provider(
        "torch_flex_attention",
        "torch.nn.attention.flex_attention",
        _bind_flex_attention,
        max_relative_error=6e-3,
        on_request=True,
        kv_cache_dtypes=("bf16", "fp16"),
        obstacle=_inductor_obstacle,
    ),
    Provider("flashinfer_fa2", "flashinfer", peers.flashinfer_fa2),
    Provider("vllm_fa4", "vllm", _bind_vllm_fa4, kv_cache_dtypes=("fp8_e4m3", "bf16", "fp16")),
    Provider(
        "vllm_triton",
        "vllm",
        peers.vllm_triton,
        max_relative_error=6e-3,
        kv_cache_dtypes=("fp8_e4m3", "bf16", "fp16"),
    ),
    Provider(
        "torch_sdpa",
        "torch",
        peers.torch_sdpa,
        max_relative_error=6e-3,
        on_request=True,
        kv_cache_dtypes=("fp8_e4m3", "bf16", "fp16"),
    ),
)


def select_providers(names: tuple[str, ...]) -> list[Provider]:
    """Providers by name; without names all but those that want to be named.

    Raises:
        ValueError: an unknown name.
    """
    known = {provider.name: provider for provider in PROVIDERS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown provider {unknown[0]!r}; known: {', '.join(known)}")
    return [known[name] for name in names] or [p for p in PROVIDERS if not p.on_request]
