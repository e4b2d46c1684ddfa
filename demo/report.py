"""The demo's numbers in words, and which of them are wrong."""

from __future__ import annotations

from typing import Any

# What makes the demo fail.
MAX_PERPLEXITY_CHANGE = 0.01
MAX_LOGIT_GAP = 1e-2


def summary(result: dict[str, Any]) -> str:
    """The generated text and one line per number."""
    text, quality = result["generation"], result["quality"]
    lines = ["", f"> {text['prompt']}", "", text["text"].strip(), ""]
    rows = [("attention", f"{result['attention']} on {result['device']}")]
    rows += [("", reason) for reason in result["fallbacks"]]
    if text["tokens_per_second"] is not None:
        speed = f"{text['tokens_per_second']:.1f} tokens/s, one sequence, decode steps only"
        rows.append(("speed", speed))
    fp8, bf16 = quality["cache_bytes_fp8"], quality["cache_bytes_bf16"]
    size = f"{fp8:,} bytes in fp8, {bf16:,} in bf16 ({fp8 / bf16:.2f}x)"
    rows.append((f"KV of {quality['tokens']:,} tokens", size))
    rows.append(
        (
            "perplexity",
            f"{quality['perplexity_bf16']:.4f} with bf16 KV, {quality['perplexity_fp8']:.4f} with "
            f"fp8 KV: {quality['change']:+.2%} +- {quality['change_standard_error']:.2%}",
        )
    )
    rows.append(("", f"on docstrings of Python {result['versions']['python']}"))
    if comparison := text.get("comparison"):
        rows.append(("kernel and reference", _choices(text["choices"])))
        rows.append(("with a cache each", _agreement(comparison, len(text["token_ids"]))))
    rows.append(("total time", f"{result['seconds']:.0f} s"))
    return "\n".join(lines + [f"{name:<24}{value}".rstrip() for name, value in rows])


def _choices(choices: dict[str, Any]) -> str:
    words = f"{choices['equal']} of {choices['steps']} choices from one cache equal"
    if choices["widest_gap"] is not None:
        words += f", others between logits up to {choices['widest_gap']:.1e} apart"
    return f"{words}; logits differ by {choices['max_logit_difference']:.1e} at most"


def _agreement(comparison: dict[str, Any], length: int) -> str:
    words = f"{comparison['equal_tokens']} of {length} leading tokens equal"
    if comparison["logit_gap"] is not None:
        words += f", then a choice between logits {comparison['logit_gap']:.1e} apart"
    return f"{words}; logits differ by {comparison['max_logit_difference']:.1e} at most"


def failures(result: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers; empty if they are as they should be."""
    found = []
    quality = result["quality"]
    change, error = quality["change"], quality["change_standard_error"]
    # Few tokens cannot tell 1 % from a little more; a fault is far outside.
    if not abs(change) <= MAX_PERPLEXITY_CHANGE + error:
        found.append(
            f"perplexity with fp8 KV is {change:+.2%} off that with bf16 KV, +- {error:.2%}; "
            f"accepted: {MAX_PERPLEXITY_CHANGE:.0%}, give or take that error"
        )
    choices = result["generation"].get("choices")
    gap = choices and choices["widest_gap"]
    if gap is not None and not gap <= MAX_LOGIT_GAP:
        found.append(
            f"kernel and reference choose differently at {choices['steps'] - choices['equal']} of "
            f"{choices['steps']} steps, where the reference's logits were up to {gap:.1e} apart; "
            f"accepted: ties within {MAX_LOGIT_GAP:.0e}"
        )
    if choices and result["fallbacks"]:
        found.append("the reference was compared with itself, as no kernel ran")
    return found
