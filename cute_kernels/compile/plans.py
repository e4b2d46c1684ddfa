"""What can be compiled, and which of it a model needs: the kernels' compile units.

Each kernel that is compiled has an entry in `KERNELS`: where its variants are listed, what compiles
one, and which of them a layer can ask for. Import-light: no DSL, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

from cute_kernels.attention.decode_sm90 import config as decode_sm90
from cute_kernels.attention.prefill_sm90 import config as prefill_sm90
from cute_kernels.attention.widen_sm90 import config as widen_sm90
from cute_kernels.compile.errors import CompilerUnavailableError
from cute_kernels.compile.key import CompileKey, compile_key
from cute_kernels.formats import get_kv_cache_dtype
from cute_kernels.indexer import config as indexer
from cute_kernels.store import config as store


@dataclass(frozen=True)
class AttentionWorkload:
    """What the attention layers of one kind ask of the kernels, on one device.

    head_size: elements of a head. num_q_heads, num_kv_heads: on the device.
    q_dtype: "bf16" or "fp16". kv_cache_dtype: a name of `formats.KV_CACHE_DTYPES`.
    page_sizes: tokens of a page; all that may occur. ragged: keys and values without pages too.
    max_query_tokens: the most query tokens of one sequence in a call; all numbers from 1 on occur.
    deterministic: the calls are made with deterministic=True. Other kernels may serve those.
    """

    head_size: int
    num_q_heads: int
    num_kv_heads: int
    q_dtype: str
    kv_cache_dtype: str
    page_sizes: tuple[int, ...]
    max_query_tokens: int
    ragged: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        get_kv_cache_dtype(self.kv_cache_dtype)
        if self.max_query_tokens < 1:
            raise ValueError(f"max_query_tokens: got {self.max_query_tokens}; accepted: >= 1")

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True)
class IndexerWorkload:
    """What a sparse-attention indexer asks of the kernels: its heads, their size, and its input."""

    num_heads: int
    head_size: int
    q_dtype: str


@dataclass(frozen=True)
class StoreWorkload:
    """What layers ask of the stores alone, where others read the cache. Fields as of attention."""

    q_dtype: str
    kv_cache_dtype: str


Workload = AttentionWorkload | IndexerWorkload | StoreWorkload


@dataclass(frozen=True)
class Compilable:
    """A kernel that is compiled.

    name: its folder. targets: architectures. config: the frozen dataclass that a variant is.
    compiler: "module:function", called with a variant and cute.compile's options.
    variants: lists every variant that the public functions can ask for. needed: lists those that
    layers of a workload can ask for; none where it does not serve them.
    """

    name: str
    targets: tuple[str, ...]
    config: type
    compiler: str
    variants: Callable[[], list[Any]]
    needed: Callable[[Workload], list[Any]]


@dataclass(frozen=True)
class CompileUnit:
    """One variant of one kernel for one architecture. config: its frozen dataclass, with a name."""

    kernel: str
    config: Any
    target: str

    @property
    def name(self) -> str:
        return f"{self.config.name} for {self.target}"

    @property
    def key(self) -> CompileKey:
        return compile_key(self.config, self.target)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CompileUnit:
        config = KERNELS[fields["kernel"]].config(**fields["config"])
        return cls(fields["kernel"], config, fields["target"])

    def compile(self) -> Any:
        """Compile it with the DSL, in this process, whatever caches have.

        Raises:
            CompilerUnavailableError: the DSL is missing, or breaks when it is imported.
        """
        module, _, function = KERNELS[self.kernel].compiler.partition(":")
        try:
            compiler = getattr(import_module(module), function)
        except Exception as error:
            # AttributeError too: releases of the DSL drop names that modules use when imported.
            raise CompilerUnavailableError(
                f"{self.name} is unavailable: importing its compiler failed: "
                f"{type(error).__name__}: {error}; `python -m kvcache doctor` looks for the cause"
            ) from error
        return compiler(self.config, compile_options(self.target))


def compile_options(target: str) -> str:
    """cute.compile's options for an architecture."""
    return f"--enable-tvm-ffi --gpu-arch={target}"


def all_units(targets: Iterable[str] | None = None) -> list[CompileUnit]:
    """Every variant of every kernel, for these architectures or for all."""
    return [
        CompileUnit(kernel.name, config, target)
        for kernel in KERNELS.values()
        for target in kernel.targets
        if targets is None or target in targets
        for config in kernel.variants()
    ]


def units_for(workload: Workload, target: str) -> list[CompileUnit]:
    """The compile units that layers of this kind can ask for on a device of this architecture."""
    return [
        CompileUnit(kernel.name, config, target)
        for kernel in KERNELS.values()
        if target in kernel.targets
        for config in kernel.needed(workload)
    ]


def _sm90_boxes(workload: AttentionWorkload) -> list[int]:
    """The TMA boxes (tokens) that the SM90 attention kernels need for the workload's pages."""
    boxes = {decode_sm90.box_tokens_for_page(size) for size in workload.page_sizes} - {None}
    if workload.ragged:
        boxes.add(decode_sm90.TILE_TOKENS)
    return sorted(boxes)


def _prefill_sm90(workload: Workload) -> list[prefill_sm90.PrefillConfig]:
    """One variant a box, where a sequence may have more rows than decode takes. Of nvfp4 only what
    reads widened keys."""
    if not isinstance(workload, AttentionWorkload) or workload.q_dtype not in decode_sm90.Q_DTYPES:
        return []
    storage, head_size = get_kv_cache_dtype(workload.kv_cache_dtype).storage, workload.head_size
    widened = _widened_sm90(workload, storage)
    if storage not in ("fp8_e4m3", workload.q_dtype):
        return widened
    if head_size not in prefill_sm90.head_sizes(storage):
        return []
    rows = workload.group * workload.max_query_tokens
    if rows <= prefill_sm90.decode_rows(head_size):
        return []
    needed = [
        prefill_sm90.make_config(head_size, workload.q_dtype, box, storage)
        for box in _sm90_boxes(workload)
    ]
    return needed + widened


def _widened_sm90(workload: AttentionWorkload, storage: str) -> list[prefill_sm90.PrefillConfig]:
    """Where a sequence of an FP8 or nvfp4 cache may have so many query tokens."""
    least = widen_sm90.min_rows(storage, workload.head_size)
    if workload.deterministic or least is None:
        return []
    if workload.group * workload.max_query_tokens < least:
        return []
    return [prefill_sm90.widened_config(workload.head_size, workload.q_dtype, storage)]


def _decode_sm90(workload: Workload) -> list[decode_sm90.DecodeConfig]:
    """Every row bucket from one query token's rows on: sequences may have any number of tokens."""
    if not isinstance(workload, AttentionWorkload):
        return []
    if workload.q_dtype not in decode_sm90.Q_DTYPES:
        return []
    storage = get_kv_cache_dtype(workload.kv_cache_dtype).storage
    if storage not in decode_sm90.formats_for(workload.q_dtype):
        return []
    if workload.head_size not in decode_sm90.HEAD_SIZES:
        return []
    rows = [
        decode_sm90.row_bucket(workload.head_size, workload.group * tokens)
        for tokens in (1, workload.max_query_tokens)
    ]
    return [
        decode_sm90.make_config(
            workload.head_size, bucket, workload.q_dtype, box, kv_format=storage
        )
        for bucket in decode_sm90.row_buckets(workload.head_size)
        if rows[0] <= bucket <= rows[1]
        for box in _sm90_boxes(workload)
    ]


def _store(target: str) -> Callable[[Workload], list[store.StoreConfig]]:
    def needed(workload: Workload) -> list[store.StoreConfig]:
        if isinstance(workload, IndexerWorkload) or workload.q_dtype not in store.X_DTYPES:
            return []
        if workload.kv_cache_dtype not in store.KV_CACHE_DTYPE_NAMES:
            return []
        return [store.make_config(workload.kv_cache_dtype, workload.q_dtype, target)]

    return needed


def _store_claim(workload: Workload) -> list[store.ClaimConfig]:
    return [store.ClaimConfig()] if _store("sm_90a")(workload) else []


def why_no_indexer(workload: IndexerWorkload) -> str | None:
    """Why no kernel serves an indexer on any architecture, or None."""
    if workload.q_dtype not in indexer.Q_DTYPES:
        return f"its kernels take {' or '.join(indexer.Q_DTYPES)}, not {workload.q_dtype}"
    if workload.head_size not in indexer.HEAD_SIZES:
        sizes = f"{indexer.HEAD_SIZES[0]} to {indexer.HEAD_SIZES[-1]}, multiples of 32"
        return f"its kernels take head sizes {sizes}, not {workload.head_size}"
    if workload.num_heads > indexer.MAX_HEADS:
        return f"its kernels take up to {indexer.MAX_HEADS} heads, not {workload.num_heads}"
    return None


def _indexer(part: str, target: str) -> Callable[[Workload], list[Any]]:
    """Both formats, windows and sizes of calls: engines choose the first, traffic the last."""

    def needed(workload: Workload) -> list[Any]:
        if not isinstance(workload, IndexerWorkload) or why_no_indexer(workload):
            return []
        table = indexer.q_support_table if part == "q" else indexer.k_support_table
        return table(target, (workload.head_size,))

    return needed


_INDEXER_PARTS = {
    "q": (indexer.IndexerQConfig, indexer.q_support_table),
    "k": (indexer.IndexerKConfig, indexer.k_support_table),
}

KERNELS = {
    kernel.name: kernel
    for kernel in (
        Compilable(
            "decode_sm90",
            ("sm_90a",),
            decode_sm90.DecodeConfig,
            "cute_kernels.attention.decode_sm90.build:compile_decode",
            decode_sm90.support_table,
            _decode_sm90,
        ),
        Compilable(
            "prefill_sm90",
            ("sm_90a",),
            prefill_sm90.PrefillConfig,
            "cute_kernels.attention.prefill_sm90.build:compile_prefill",
            prefill_sm90.support_table,
            _prefill_sm90,
        ),
        *(
            Compilable(
                store.kernel_name(targets[0]),
                targets,
                store.StoreConfig,
                "cute_kernels.store.build:compile_store",
                partial(store.support_table, targets[0]),
                _store(targets[0]),
            )
            for targets in (store.TARGETS[:1], store.E2M1_TARGETS)
        ),
        Compilable(
            "store_claim",
            store.TARGETS,
            store.ClaimConfig,
            "cute_kernels.store.build:compile_claim",
            lambda: [store.ClaimConfig()],
            _store_claim,
        ),
        *(
            Compilable(
                indexer.kernel_name(part, targets[0]),
                targets,
                config,
                f"cute_kernels.indexer.build:compile_{part}",
                partial(variants, targets[0]),
                _indexer(part, targets[0]),
            )
            for part, (config, variants) in _INDEXER_PARTS.items()
            for targets in (indexer.TARGETS[:1], indexer.E2M1_TARGETS)
        ),
    )
}
