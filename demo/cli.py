"""The command line: run the demo, print and save its numbers, fail where they are wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import cute_kernels
from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from demo import evaluate, report, texts
from demo.models import MODELS, find_gguf, load
from kvcache.integrations.transformers import (
    KVScales,
    PagedKVCache,
    calibrate_scales,
    register,
)

KERNEL, REFERENCE = "cute_kv", "cute_kv_reference"


class Session(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    scales: list[KVScales]
    rotate_keys: bool

    def fp8_cache(self) -> PagedKVCache:
        return PagedKVCache(self.model.config, "fp8", self.scales, rotate_keys=self.rotate_keys)

    def bf16_cache(self) -> PagedKVCache:
        return PagedKVCache(self.model.config, "bf16")


def _reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`flash_attn_varlen_func` in plain torch, on the device of its arguments."""
    return attention_reference(validate(*args, **kwargs))[0]


@contextlib.contextmanager
def _reference_attention(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation(REFERENCE)
    try:
        yield
    finally:
        model.set_attn_implementation(KERNEL)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU")
    return torch.device(name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _load(model: str, model_dir: Path | None, device: torch.device, rotate: bool) -> Session:
    gguf = find_gguf(model, model_dir)
    register(KERNEL)
    register(REFERENCE, _reference)
    click.echo(f"loading {gguf.name} for {_device_name(device)} ...")
    tokenizer, loaded = load(gguf, device, KERNEL)
    ids = texts.encode(tokenizer, texts.CALIBRATION_TEXT).to(device)
    scales = calibrate_scales(loaded, ids, rotate_keys=rotate)
    return Session(tokenizer, loaded, scales, rotate)


def _generate(session: Session, prompt: str, tokens: int, compare: bool) -> dict[str, Any]:
    """Greedy text from an FP8 cache; to compare, once more with the torch reference."""
    model, tokenizer = session.model, session.tokenizer
    prompt_ids = texts.encode_prompt(tokenizer, prompt).to(model.device)
    if model.device.type == "cuda":  # compiles the kernels and warms torch up
        evaluate.generate(model, prompt_ids, session.fp8_cache(), 2, "warm up")
    cache = session.fp8_cache()
    run = evaluate.generate(model, prompt_ids, cache, tokens)
    steps = len(run.ids) - 1
    result = {
        "prompt": prompt,
        "text": tokenizer.decode(
            run.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
        "token_ids": run.ids,
        "tokens_per_second": steps / run.decode_seconds if steps else None,
    }
    if compare:
        with _reference_attention(model):
            reference = evaluate.generate(
                model, prompt_ids, session.fp8_cache(), tokens, "generate, reference"
            )
        choices = evaluate.choices_from_one_cache(model, REFERENCE, prompt_ids, run, cache)
        result["comparison"] = evaluate.compare(run, reference)._asdict()
        result["choices"] = choices._asdict()
    return result


def _measure_perplexity(session: Session, tokens: int) -> dict[str, Any]:
    ids = texts.encode(session.tokenizer, texts.docstring_text())
    ids = ids[:, :tokens].to(session.model.device)
    bf16_cache, fp8_cache = session.bf16_cache(), session.fp8_cache()
    baseline = evaluate.token_losses(session.model, ids, bf16_cache, "perplexity, bf16 KV")
    losses = evaluate.token_losses(session.model, ids, fp8_cache, "perplexity, fp8 KV")
    change, error = evaluate.perplexity_change(losses, baseline)
    return {
        "tokens": ids.shape[1],
        "perplexity_bf16": evaluate.perplexity(baseline),
        "perplexity_fp8": evaluate.perplexity(losses),
        "change": change,
        "change_standard_error": error,
        "cache_bytes_bf16": bf16_cache.nbytes,
        "cache_bytes_fp8": fp8_cache.nbytes,
    }


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Choice(list(MODELS)), default="smollm2")
@click.option(
    "--model-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the model's .gguf file; without it, the installed package has the file.",
)
@click.option("--prompt", help="Question (smollm2) or beginning of a text (gemma3-270m).")
@click.option("--tokens", type=click.IntRange(min=1), default=64, help="Tokens to generate.")
@click.option(
    "--ppl-tokens",
    type=click.IntRange(min=3),
    help="Tokens of standard-library docstrings to measure perplexity on.  "
    "[default: 4096 on a GPU, 1024 on a CPU]",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option(
    "--rotate-keys/--no-rotate-keys",
    default=None,
    help="Multiply queries and keys by a Hadamard matrix before rounding.  "
    "[default: on for smollm2]",
)
@click.option(
    "--compare-reference",
    is_flag=True,
    help="Generate once more with the torch reference and compare.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all numbers to this file.",
)
def main(
    model: str,
    model_dir: Path | None,
    prompt: str | None,
    tokens: int,
    ppl_tokens: int | None,
    device: str,
    rotate_keys: bool | None,
    compare_reference: bool,
    json_file: Path | None,
) -> None:
    """Generate text with a small real model that keeps its K and V in a paged FP8 cache.

    Attention runs through cute_kernels.flash_attn_varlen_func: the CuTe DSL kernels on a Hopper
    GPU, the torch reference elsewhere. Ends with exit status 1 when FP8 changes the perplexity by
    more than 1 % (and the standard error of that figure), or when kernel and reference, reading
    the same cache, choose different tokens at a step that was not a tie.
    """
    started = time.perf_counter()
    where, spec = _device(device), MODELS[model]
    rotate = spec.rotate_keys if rotate_keys is None else rotate_keys
    ppl_tokens = ppl_tokens or (4096 if where.type == "cuda" else 1024)
    session = _load(model, model_dir, where, rotate)
    fallbacks: set[str] = set()
    with evaluate.noting_fallbacks(fallbacks):
        generation = _generate(session, prompt or spec.prompt, tokens, compare_reference)
        quality = _measure_perplexity(session, ppl_tokens)
    result = {
        "model": model,
        "device": _device_name(where),
        "attention": "kernel" if where.type == "cuda" and not fallbacks else "torch reference",
        "fallbacks": sorted(fallbacks),
        "rotate_keys": rotate,
        "scales": [dataclasses.asdict(each) for each in session.scales],
        "generation": generation,
        "quality": quality,
        "seconds": time.perf_counter() - started,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cute_kernels": cute_kernels.__version__,
        },
    }
    click.echo(report.summary(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    problems = report.failures(result)
    for problem in problems:
        click.secho(f"FAILED: {problem}", fg="red", err=True)
    sys.exit(1 if problems else 0)
