"""Perplexity of a real model per KV cache dtype: `python -m perf.perplexity --json r.json`.

Every position of a text (docstrings of the standard library) is scored with all keys and values
read back from the cache, the chunk's own included. The model computes in float32, attention takes
bf16 queries, so that two runs differ in what the cache rounds. Scales come from another, short
text.

The change against a bf16 cache is the mean over tokens of the paired difference of log
likelihoods; its standard error is that of the same differences, taken as independent. Neighbouring
tokens are not quite: read a change below two errors as none.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import cute_kernels
from demo import evaluate, texts
from demo.models import MODELS, find_gguf, load
from kvcache.dtypes import bytes_per_token
from kvcache.integrations.transformers import PagedKVCache, calibrate_scales, register

BASELINE = "bf16"
DTYPES = ("fp8", "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
WIDTH = 100


def measure(
    model: transformers.PreTrainedModel,
    ids: torch.Tensor,
    calibration: torch.Tensor,
    variants: list[tuple[str, bool]],
    per_head: bool,
) -> list[dict[str, Any]]:
    """One row for the baseline and for each (KV cache dtype, rotate keys)."""
    config = model.config.get_text_config(decoder=True)
    rows, baseline = [], None
    for dtype, rotate in [(BASELINE, False), *variants]:
        scales = None
        if dtype != BASELINE:
            scales = calibrate_scales(model, calibration, rotate, dtype, per_head=per_head)
        cache = PagedKVCache(model.config, dtype, scales, rotate_keys=rotate)
        losses = evaluate.token_losses(model, ids, cache, f"{dtype}{' rotated' * rotate}")
        baseline = losses if baseline is None else baseline
        change, error = evaluate.perplexity_change(losses, baseline)
        rows.append(
            {
                "kv_cache_dtype": dtype,
                "rotate_keys": rotate,
                "scales": "per head" if per_head else "per layer",
                "perplexity": evaluate.perplexity(losses),
                "change": change,
                "change_standard_error": error,
                "bytes_per_token_and_layer": bytes_per_token(
                    dtype, config.num_key_value_heads, config.head_dim
                ),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(box=SIMPLE_HEAD)
    for title in ("model", "KV cache", "keys", "scales", "perplexity", "change", "bytes/token"):
        found.add_column(title, no_wrap=True)
    for row in rows:
        error = 100 * row["change_standard_error"]
        found.add_row(
            row["model"],
            row["kv_cache_dtype"],
            "rotated" if row["rotate_keys"] else "",
            "" if row["kv_cache_dtype"] == BASELINE else row["scales"],
            f"{row['perplexity']:.3f}",
            f"{100 * row['change']:+.2f} % +- {error:.2f}" if error else "",
            str(row["bytes_per_token_and_layer"]),
        )
    return found


@click.command(context_settings={"show_default": True})
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), default=[*MODELS])
@click.option("--model-dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=DTYPES)
@click.option("--tokens", type=click.IntRange(min=2), default=2048, help="Of the text.")
@click.option("--per-head", is_flag=True, help="A scale per KV head, not per layer.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    names: tuple[str, ...],
    model_dir: Path | None,
    dtypes: tuple[str, ...],
    tokens: int,
    per_head: bool,
    output: Path | None,
) -> None:
    """Perplexity of the demo's models per KV cache dtype, with the torch reference on the CPU."""
    register("cute_kv")
    rows = []
    for name in names:
        tokenizer, model = load(find_gguf(name, model_dir), torch.device("cpu"), "cute_kv")
        ids = texts.encode(tokenizer, texts.docstring_text())[:, :tokens]
        calibration = texts.encode(tokenizer, texts.CALIBRATION_TEXT)
        variants = [(dtype, rotate) for rotate in (False, True) for dtype in dtypes]
        about = {
            "model": name,
            "tokens": ids.shape[1],
            "calibration_tokens": calibration.shape[1],
            "device": f"CPU, {torch.get_num_threads()} threads",
            "command": f"python -m perf.perplexity --tokens {tokens}{' --per-head' * per_head}",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "cute_kernels": cute_kernels.__version__,
            },
        }
        rows += [about | row for row in measure(model, ids, calibration, variants, per_head)]
        if output is not None:
            output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    Console(width=WIDTH).print(table(rows))


if __name__ == "__main__":
    main()
