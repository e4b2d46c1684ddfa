"""Figures in the pages about kernels: each stands in a block that is written from the results.

<!-- measured:NAME -->
what `BLOCKS[NAME]` gives; edited by hand it is stale, and `perf.render --check` says so
<!-- measured:end -->
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cute_kernels.attention.decode_sm90.config import DecodeConfig, row_buckets, support_table
from perf import ceilings
from perf.reading import naming, read_json
from perf.rows import is_number
from perf.sections import ResultFile, compare, markdown, number
from perf.targets import OURS, tflops

Row = Mapping[str, Any]
Found = Mapping[str, list[list[ResultFile]]]
DOCS, RESOURCES = "docs", "perf/results/resources_sm90a.json"
BASELINE = "triton_baseline"
_BLOCK = re.compile(
    r"<!-- measured:(?P<name>[a-z0-9-]+) -->\n(?P<text>.*?)<!-- measured:end -->", re.S
)
_BEGIN = "<!-- measured:"


class _File:
    """The newest file of a label: rows by provider and case, and how to name it in a page."""

    def __init__(self, found: Found, label: str, results: str = "../perf/results") -> None:
        kind = label.partition("_")[0]
        files = [files[0] for files in found.get(kind, ()) if files[0].label == label]
        self.rows = files[0].rows if files else []
        name = files[0].path.name if files else ""
        self.link = f"[{name}]({results}/{name})" if files else f"no file {label}"

    def get(self, case: str, provider: str = OURS) -> Row | None:
        """A row with a time."""
        for row in self.rows:
            if (row["provider"], row["case"]) == (provider, case) and row["median_us"] is not None:
                return row
        return None

    def us(self, case: str) -> str:
        row = self.get(case)
        return "not measured" if row is None else f"{number(row['median_us'])} us"

    def beside_loader(self, case: str) -> str:
        """Our time and that of the loader alone."""
        row = self.get(case)
        if row is None or "loader_us" not in row:
            return f"{case}: {self.us(case)}"
        return f"{case}: {self.us(case)}, the loader alone {number(row['loader_us'])}"

    def share(self, case: str) -> str:
        row = self.get(case)
        return "not measured" if row is None else ceilings.in_words(row, self.rows)


def decode_registers(found: Found, root: Path) -> str:
    """What the compiler made of the decode kernel's variants."""
    record = read_json(root / RESOURCES)
    with naming(Path(RESOURCES).name):
        return _registers(record)


def _registers(record: Any) -> str:
    names = record["columns"]
    lines = []
    for config in support_table():
        buckets = row_buckets(config.head_size)
        usual = config.q_dtype == "bf16" and config.box_tokens == 64
        if usual and not config.loader_only and config.rows in (buckets[0], buckets[-1]):
            values = record["variants"].get(config.name)
            if values is not None and not (
                isinstance(values, list) and all(map(is_number, values))
            ):
                raise ValueError(f"{config.name} is {values!r}")
            of = dict(zip(names, values, strict=True)) if values else {}
            lines.append(_variant(config, of))
    header = ("KV cache", "head size", "rows", "CTAs per SM", "warpgroups", "registers")
    table = markdown([*header, "spilled, bytes", "ring slots x KiB"], lines)
    link = f"[{Path(RESOURCES).name}](../{RESOURCES})"
    about = (
        f"Compiled by DSL {record['dsl']}; all variants, other page sizes among them "
        f"(`python -m tests.compile.variants` reads them again): {link}."
    )
    return f"{about}\n\n{table}"


def _variant(config: DecodeConfig, resources: Mapping[str, int]) -> list[str]:
    shape = (config.head_size, config.rows, config.ctas_per_sm, config.warpgroups)
    counts = [str(resources.get(name, "")) for name in ("registers", "stack_bytes")]
    ring = f"{config.stages} x {config.stage_bytes / 1024:g}"
    return [f"`{config.kv_format}`", *map(str, shape), *counts, ring]


def decode_limits(found: Found, root: Path) -> str:
    """Where the decode kernel is furthest from what its loads alone take."""
    main, ragged = _File(found, "decode_h200"), _File(found, "decode_ragged_h200")
    many = ("B32 S8192 8/1 D512 q4", "B32 S8192 64/8 D128 q4", "B32 S8192 64/8 D128 q8")
    of_main = [main.beside_loader(many[0])]
    of_ragged = [ragged.beside_loader(case) for case in many[1:]]
    uneven = [
        (row["case"], row["pct_of_loader"])
        for row in ragged.rows
        if row["provider"] == OURS and "kv_lens" in row["workload"] and "pct_of_loader" in row
    ]
    lines = [
        f"- Many rows: {'; '.join([*of_main, *of_ragged])} ({main.link}, {ragged.link}).",
        f"- NVFP4 at 8 rows and head size 128: {main.beside_loader('B32 S8192 64/8 D128 nvfp4')}.",
    ]
    if uneven:
        shares = ", ".join(f"{case} {share:.0f} %" for case, share in uneven)
        lines.append(
            f"- Ragged batches, of the loader's rate: {shares}. Each item costs 2 to 3 us."
        )
    return "\n".join(lines)


def decode_16_bits(found: Found, root: Path) -> str:
    main = _File(found, "decode_h200")
    cases = ("B64 S8192 32/4 D512 bf16", "B32 S8192 64/8 D128 bf16", "B32 S8192 64/8 D64 bf16")
    return f"From 16 bits {'; '.join(map(main.beside_loader, cases))} ({main.link})."


def store_searches(found: Found, root: Path) -> str:
    """What choosing scales costs."""
    store = _File(found, "store_h200")
    lines = []
    for dtype, error in ERRORS.items():
        large, small = (f"{dtype} T{tokens} 8x128" for tokens in (65536, 256))
        lines.append([f"`{dtype}`", error, store.us(large), store.us(small)])
    header = ("", "relative squared error on real K and V (`tests/data`)")
    table = markdown([*header, "65,536 tokens, 8 heads x 128", "256 tokens"], lines)
    shares = ", ".join(
        f"{store.share(f'nvfp4 T{tokens} 8x128')} at {tokens:,}" for tokens in (65536, 16384, 4096)
    )
    return f"{table}\n\nTimes from {store.link}. `nvfp4` reaches of a copy's rate: {shares} tokens."


# Of rounding, whatever it ran on: tests/numerics hold them.
ERRORS = {"nvfp4": "0.0091", "nvfp4_4over6_k": "0.0078", "nvfp4_4over6": "0.0076"}
ERRORS |= {"nvfp4_mse": "0.0067"}


def indexer_standing(found: Found, root: Path) -> str:
    """Shares of the copy at the targets' size, and where Triton is ahead."""
    indexer = _File(found, "indexer_h200")
    shares = [
        f"{step} {dtype} {indexer.share(f'{step} {dtype} T8192')}"
        for step in ("Q", "K ratio 4", "K ratio 128")
        for dtype in ("mxfp4", "fp8_e4m3")
    ]
    ahead = []
    for theirs in indexer.rows:
        ours = indexer.get(theirs["case"])
        if theirs["provider"] == BASELINE and theirs["median_us"] is not None and ours is not None:
            factor = compare(theirs, ours, one_run=True).speedup
            if factor < 1:
                ahead.append(f"{theirs['case']} ({factor:.2f})")
    behind = (
        f"takes less than our time in: {', '.join(ahead)}" if ahead else "never takes less time"
    )
    return (
        f"At 8,192 tokens, of a copy's rate (80 % are wanted): {', '.join(shares)}. "
        f"Triton {behind}; it does not look for repeated slots. {indexer.link}"
    )


def prefill_16_bits(found: Found, root: Path) -> str:
    prefill = _File(found, "prefill_h200")
    parts = []
    for case in ("B1 S8192 32/4 D512 q8192", "B4 S4096 32/4 D512 q4096"):
        rates = [
            "not measured" if row is None else f"{tflops(row):.0f}"
            for row in (prefill.get(f"{case} bf16"), prefill.get(case))
        ]
        parts.append(f"{case}: {rates[0]} TFLOP/s from bf16, {rates[1]} from FP8")
    return f"- Head size 512 is slower from 16 bits: {'; '.join(parts)} ({prefill.link})."


def loading(found: Found, root: Path) -> str:
    """Of kernels from a bundle: medians and worst."""
    load = _File(found, "load_h200")
    if not load.rows:
        return f"{load.link}."
    figures = []
    for column in ("load_ms", "first_call_extra_ms"):
        values = [row[column] for row in load.rows]
        figures.append(f"{statistics.median(values):.1f} ms (median; at most {max(values):.1f})")
    first = load.rows[0]["first_of_process"]["load_ms"]
    return (
        f"On an H200 ({load.link}) loading a kernel takes {figures[0]}, its first call beyond a "
        f"later one {figures[1]}. The first kernel of a process takes {first:.0f} ms, TVM-FFI's "
        "import included."
    )


def demo_cpu(found: Found, root: Path) -> str:
    """What the demo reports on a CPU."""
    header = ("model", "keys", "tokens", "bf16 KV", "fp8 KV", "change", "file")
    lines = []
    for label in ("demo_cpu", "demo_default_cpu"):
        file = _File(found, label, "perf/results")
        for row in file.rows:
            change = (100 * row[name] for name in ("change", "change_standard_error"))
            lines.append(
                [
                    row["model"],
                    "rotated" if row["rotate_keys"] else "as they are",
                    f"{row['tokens']:,}",
                    f"{row['perplexity_bf16']:.2f}",
                    f"{row['perplexity_fp8']:.2f}",
                    "{:+.2f} % +- {:.2f}".format(*change),
                    file.link,
                ]
            )
    return markdown(header, lines)


BLOCKS: Mapping[str, Callable[[Found, Path], str]] = {
    "decode-registers": decode_registers,
    "decode-limits": decode_limits,
    "decode-16-bits": decode_16_bits,
    "store-searches": store_searches,
    "indexer-standing": indexer_standing,
    "prefill-16-bits": prefill_16_bits,
    "loading": loading,
    "demo-cpu": demo_cpu,
}


def with_blocks(name: str, text: str, found: Found, root: Path) -> str:
    """A page with its blocks written anew.

    Raises:
        ValueError: a block without an end, or of an unknown name.
    """

    def written(block: re.Match[str]) -> str:
        if block["name"] not in BLOCKS or _BEGIN in block["text"]:
            raise ValueError(f"{name}: unknown or open block {block['name']!r}")
        inside = BLOCKS[block["name"]](found, root)
        return f"<!-- measured:{block['name']} -->\n{inside}\n<!-- measured:end -->"

    blocks = len(_BLOCK.findall(text))
    if text.count(_BEGIN) != 2 * blocks:
        raise ValueError(f"{name}: a block without a beginning or an end")
    return _BLOCK.sub(written, text)


def pages(root: Path, found: Found) -> dict[str, str]:
    """The pages with blocks as they should be, by path below `root`."""
    texts = {
        f"{DOCS}/{path.name}": path.read_text(encoding="utf-8")
        for path in sorted((root / DOCS).glob("*.md"))
    }
    return {
        name: with_blocks(name, text, found, root) for name, text in texts.items() if _BEGIN in text
    }
