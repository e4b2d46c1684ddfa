"""The command line: run the demo, print and save its numbers, fail where they are wrong."""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import cute_kernels
from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from demo import evaluate, texts
from demo.models import MODELS, find_gguf, load
from kvcache.integrations.transformers import (
    LayerScales,
    PagedKVCache,
    calibrate_scales,
    register,
)

# What makes the demo fail.
MAX_PERPLEXITY_CHANGE = 0.01
MAX_LOGIT_GAP = 1e-2


class Session(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    scales: list[LayerScales]

    def fp8_cache(self) -> PagedKVCache:
        return PagedKVCache(self.model.config, "fp8", self.scales)

    def bf16_cache(self) -> PagedKVCache:
        return PagedKVCache(self.model.config, "bf16")


def _reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`flash_attn_varlen_func` in plain torch, on the device of its arguments."""
    return attention_reference(validate(*args, **kwargs))[0]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU")
    return torch.device(name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CuTe DSL kernels"
    return f"CPU with {torch.get_num_threads()} threads, torch reference"


def _generate(session: Session, prompt: str, tokens: int, compare: bool) -> dict[str, Any]:
    """Greedy text from an FP8 cache; to compare, once more with the torch reference."""
    model, tokenizer = session.model, session.tokenizer
    prompt_ids = texts.encode_prompt(tokenizer, prompt).to(model.device)
    if model.device.type == "cuda":  # compiles the kernels and warms torch up
        evaluate.generate(model, prompt_ids, session.fp8_cache(), 2, "warm up")
    run = evaluate.generate(model, prompt_ids, session.fp8_cache(), tokens)
    result = {
        "prompt": prompt,
        "text": tokenizer.decode(run.ids, skip_special_tokens=True),
        "token_ids": run.ids,
        "tokens_per_second": (len(run.ids) - 1) / run.decode_seconds if len(run.ids) > 1 else None,
    }
    if compare:
        model.set_attn_implementation("cute_kv_reference")
        reference = evaluate.generate(
            model, prompt_ids, session.fp8_cache(), tokens, "generate, reference"
        )
        model.set_attn_implementation("cute_kv")
        result["comparison"] = evaluate.compare(run, reference)._asdict()
    return result


def _measure_perplexity(session: Session, tokens: int) -> dict[str, Any]:
    ids = texts.encode(session.tokenizer, texts.docstring_text())
    ids = ids[:, :tokens].to(session.model.device)
    result: dict[str, Any] = {"tokens": ids.shape[1]}
    for name, cache in (("bf16", session.bf16_cache()), ("fp8", session.fp8_cache())):
        result[f"perplexity_{name}"] = evaluate.perplexity(
            session.model, ids, cache, f"perplexity, {name} KV"
        )
        result[f"cache_bytes_{name}"] = cache.nbytes
    result["change"] = result["perplexity_fp8"] / result["perplexity_bf16"] - 1.0
    return result


def _print(result: dict[str, Any]) -> None:
    text, quality = result["generation"], result["quality"]
    click.secho(f"\n{text['prompt']}", bold=True)
    click.echo(f"{text['text'].strip()}\n")
    rows = []
    if text["tokens_per_second"] is not None:
        speed = f"{text['tokens_per_second']:.1f} tokens/s (batch 1, decode steps only)"
        rows.append(("speed", speed))
    rows.append(
        (
            f"KV cache, {quality['tokens']} tokens",
            f"{quality['cache_bytes_fp8']:,} bytes in fp8, {quality['cache_bytes_bf16']:,} in bf16 "
            f"({quality['cache_bytes_fp8'] / quality['cache_bytes_bf16']:.2f}x)",
        )
    )
    rows.append(
        (
            "perplexity",
            f"{quality['perplexity_bf16']:.4f} with bf16 KV, {quality['perplexity_fp8']:.4f} with "
            f"fp8 KV ({quality['change']:+.2%})",
        )
    )
    rows.append(("", f"on docstrings of Python {result['versions']['python']}"))
    if comparison := text.get("comparison"):
        equal = f"{comparison['equal_tokens']} of {len(text['token_ids'])} leading tokens equal"
        if comparison["logit_gap"] is not None:
            equal += f", then a logit gap of {comparison['logit_gap']:.2e}"
        rows.append(("kernel against reference", equal))
        difference = f"{comparison['max_logit_difference']:.2e} at most"
        rows.append(("  difference of logits", difference))
    rows.append(("total time", f"{result['seconds']:.0f} s"))
    for name, value in rows:
        click.echo(f"{name:<26}{value}")


def failures(result: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers, in words; nothing if they are as they should be."""
    found = []
    change = result["quality"]["change"]
    if not abs(change) <= MAX_PERPLEXITY_CHANGE:
        found.append(
            f"perplexity with fp8 KV is {change:+.2%} off bf16 KV; accepted: "
            f"{MAX_PERPLEXITY_CHANGE:.0%}"
        )
    comparison = result["generation"].get("comparison")
    if comparison and comparison["logit_gap"] is not None:
        gap, step = comparison["logit_gap"], comparison["equal_tokens"]
        if not gap <= MAX_LOGIT_GAP:
            found.append(
                f"kernel and reference differ at token {step} with a logit gap of {gap:.2e}; "
                f"accepted: a tie within {MAX_LOGIT_GAP:.0e}"
            )
    return found


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
    type=click.IntRange(min=2),
    default=1024,
    help="Tokens of standard-library docstrings to measure perplexity on.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
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
    ppl_tokens: int,
    device: str,
    compare_reference: bool,
    json_file: Path | None,
) -> None:
    """Generate text with a small real model that keeps its K and V in a paged FP8 cache.

    Attention runs through cute_kernels.flash_attn_varlen_func: the Hopper kernels on a GPU, the
    torch reference on a CPU. Ends with exit status 1 when FP8 changes the perplexity by more than
    1 %, or when the compared texts differ at a step that was not a tie.
    """
    started = time.perf_counter()
    where = _device(device)
    gguf = find_gguf(model, model_dir)
    register("cute_kv")
    register("cute_kv_reference", _reference)
    click.echo(f"loading {gguf.name} for {_device_name(where)} ...")
    tokenizer, loaded = load(gguf, where, "cute_kv")
    calibration_ids = texts.encode(tokenizer, texts.CALIBRATION_TEXT).to(where)
    session = Session(tokenizer, loaded, calibrate_scales(loaded, calibration_ids))
    result = {
        "model": model,
        "gguf": gguf.name,
        "device": _device_name(where),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cute_kernels": cute_kernels.__version__,
        },
        "scales": session.scales,
        "generation": _generate(session, prompt or MODELS[model].prompt, tokens, compare_reference),
        "quality": _measure_perplexity(session, ppl_tokens),
        "seconds": time.perf_counter() - started,
    }
    _print(result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    problems = failures(result)
    for problem in problems:
        click.secho(f"FAILED: {problem}", fg="red", err=True)
    sys.exit(1 if problems else 0)
