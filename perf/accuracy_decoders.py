"""What a KV cache dtype does to a decoder: the same text through one cache of each dtype at once.

The text goes through the model in chunks. After each chunk the logits and hidden states of every
dtype are compared with those of the bf16 cache and dropped, so that long texts and large
vocabularies fit. Every attention call, the chunk's own tokens included, reads K and V back from
the cache; weights and everything but attention are float32 in all runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

from kvcache.dtypes import bytes_per_token
from kvcache.integrations.transformers import PagedKVCache, calibrate_scales, forward
from kvcache.scales import KVScales
from perf.paired import Estimate, over_blocks, relative_perplexity

BASELINE = "bf16"


class Text(NamedTuple):
    """What a decoder reads. windows (W, L): each its own context, scored. prompts (P, n): greedily
    continued by `new_tokens`. calibration (1, n): other text, for the scales."""

    windows: torch.Tensor
    prompts: torch.Tensor
    calibration: torch.Tensor
    new_tokens: int
    block: int


@dataclass
class Scores:
    """Of one dtype, by chunk; per token (W, tokens), on the host."""

    losses: list[torch.Tensor] = field(default_factory=list)
    divergences: list[torch.Tensor] = field(default_factory=list)
    agreements: list[torch.Tensor] = field(default_factory=list)
    layer_errors: torch.Tensor | float = 0.0  # (layers,) sums of squares
    layer_norms: torch.Tensor | float = 0.0

    def relative_layer_errors(self) -> list[float]:
        return (self.layer_errors / self.layer_norms).sqrt().tolist()


class _Output(NamedTuple):
    log_p: torch.Tensor  # (W, tokens, vocabulary) float32
    hidden: tuple[torch.Tensor, ...]  # behind each layer, (W, tokens, width)


def _run(model: transformers.PreTrainedModel, ids: torch.Tensor, cache: PagedKVCache) -> _Output:
    out = forward(model, ids, cache, output_hidden_states=True)
    return _Output(out.logits.float().log_softmax(-1), out.hidden_states[1:])


def _score(scores: Scores, out: _Output, base: _Output, targets: torch.Tensor) -> None:
    log_p = out.log_p
    chosen = log_p[:, : targets.shape[1]].gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    scores.losses.append(-chosen.double().cpu())
    divergence = (base.log_p.exp() * (base.log_p - log_p)).sum(-1)
    scores.divergences.append(divergence.double().cpu())
    scores.agreements.append((log_p.argmax(-1) == base.log_p.argmax(-1)).double().cpu())
    pairs = list(zip(out.hidden, base.hidden, strict=True))
    scores.layer_errors += torch.stack([(x - y).double().square().sum() for x, y in pairs]).cpu()
    scores.layer_norms += torch.stack([y.double().square().sum() for _, y in pairs]).cpu()


@torch.inference_mode()
def score(
    model: transformers.PreTrainedModel,
    windows: torch.Tensor,
    caches: dict[str, PagedKVCache],
    chunk: int,
) -> dict[str, Scores]:
    """Losses, KL divergences and choices of every token, and errors behind every layer.

    Args:
        windows: token ids (W, L); L - 1 of each are predicted.
        caches: empty, by dtype; that of BASELINE first.
        chunk: query tokens of a forward pass.
    """
    found = {dtype: Scores() for dtype in caches}
    with tqdm(total=windows.shape[1], desc="scoring", file=sys.stderr, disable=None) as bar:
        for start in range(0, windows.shape[1], chunk):
            ids = windows[:, start : start + chunk]
            targets = windows[:, start + 1 : start + 1 + ids.shape[1]]
            base = _run(model, ids, caches[BASELINE])
            for dtype, cache in caches.items():
                out = base if dtype == BASELINE else _run(model, ids, cache)
                _score(found[dtype], out, base, targets)
            bar.update(ids.shape[1])
    return found


@torch.inference_mode()
def greedy(
    model: transformers.PreTrainedModel, text: Text, cache: PagedKVCache, chunk: int
) -> torch.Tensor:
    """Token ids (P, new_tokens), the likeliest at each step; an end of text is a token as others
    are, so that every prompt gets as many."""
    for ids in text.prompts.split(chunk, dim=1):
        logits = forward(model, ids, cache, logits_to_keep=1).logits
    found = [logits[:, -1].argmax(-1, keepdim=True)]
    for _ in tqdm(range(text.new_tokens - 1), desc="generating", file=sys.stderr, disable=None):
        logits = forward(model, found[-1], cache, logits_to_keep=1).logits
        found.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(found, dim=1).cpu()


def leading_equal(ids: torch.Tensor, baseline: torch.Tensor) -> list[int]:
    """Tokens before the first difference, by prompt."""
    return (ids == baseline).long().cumprod(dim=1).sum(dim=1).tolist()


def make_caches(
    model: transformers.PreTrainedModel, scales: dict[str, list[KVScales]], rotate_keys: bool
) -> dict[str, PagedKVCache]:
    """One empty cache of each dtype, that of BASELINE first and with keys as they are."""
    return {
        BASELINE: PagedKVCache(model.config, BASELINE),
        **{
            dtype: PagedKVCache(model.config, dtype, each, rotate_keys=rotate_keys)
            for dtype, each in scales.items()
        },
    }


def measure(
    model: transformers.PreTrainedModel,
    text: Text,
    dtypes: Sequence[str],
    rotate_keys: bool,
    chunk: int,
    per_head: bool = False,
) -> list[dict[str, Any]]:
    """One row for BASELINE and for each of `dtypes`, which have scales: one a layer, or a head."""
    scales = {
        dtype: calibrate_scales(
            model,
            text.calibration,
            kv_cache_dtype=dtype,
            rotate_keys=rotate_keys,
            per_head=per_head,
        )
        for dtype in dtypes
    }
    config = model.config.get_text_config(decoder=True)
    scores = score(model, text.windows, make_caches(model, scales, rotate_keys), chunk)
    base = torch.cat(scores[BASELINE].losses, dim=1)
    chosen: dict[str, torch.Tensor] = {}
    rows = []
    for dtype, cache in make_caches(model, scales, rotate_keys).items():
        chosen[dtype] = greedy(model, text, cache, chunk)
        of, losses = scores[dtype], torch.cat(scores[dtype].losses, dim=1)
        equal = leading_equal(chosen[dtype], chosen[BASELINE])
        row = {
            "kv_cache_dtype": dtype,
            "rotate_keys": rotate_keys and dtype != BASELINE,
            "per_head": per_head and dtype != BASELINE,
            "bytes_per_token_and_layer": bytes_per_token(
                dtype, config.num_key_value_heads, config.head_dim
            ),
            "perplexity": losses.mean().exp().item(),
        }
        if dtype != BASELINE:
            agreements = torch.cat(of.agreements, dim=1)
            divergences = torch.cat(of.divergences, dim=1)
            row |= {
                "perplexity_change": relative_perplexity(losses - base, text.block)._asdict(),
                "kl": over_blocks(divergences, text.block)._asdict(),
                "top1_agreement": over_blocks(agreements, text.block)._asdict(),
                "greedy_equal_tokens": equal,
                "greedy": over_prompts(equal)._asdict(),
                "layer_errors": of.relative_layer_errors(),
            }
        rows.append(row)
    return rows


def over_prompts(equal: Sequence[int]) -> Estimate:
    """Mean number of equal leading tokens; prompts are independent."""
    return over_blocks(torch.tensor([equal]), 1)
