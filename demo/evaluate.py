"""Greedy decoding and token losses over a KV cache, and what two runs differ by."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcache.integrations.transformers import PagedKVCache, forward

CHUNK = 256  # query tokens of a forward pass


class Generation(NamedTuple):
    ids: list[int]  # generated tokens, the end-of-text token included
    logits: list[torch.Tensor]  # float32 (vocabulary,) that each token was chosen from
    decode_seconds: float  # for all tokens but the first


class Choices(NamedTuple):
    """What two attention functions choose from one cache, see `choices_from_one_cache`."""

    steps: int
    equal: int
    leading: int  # steps before the first where they differ
    widest_gap: float | None  # where they differ: the other one's logits of both choices
    max_logit_difference: float


class Comparison(NamedTuple):
    equal_tokens: int  # leading tokens that both runs chose
    identical: bool
    logit_gap: float | None  # see `compare`
    max_logit_difference: float  # over the steps before which both runs read the same tokens


@contextlib.contextmanager
def noting_fallbacks(notes: set[str]) -> Iterator[None]:
    """Collect the warnings with which the public function says that no kernel served a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if "torch reference" in str(warning.message):
            notes.add(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    cache: Cache,
    max_tokens: int,
    label: str = "generate",
) -> Generation:
    """Up to `max_tokens` tokens behind `prompt_ids` (1, L), the likeliest one at each step."""
    stop = model.generation_config.eos_token_id
    stop = set(stop) if isinstance(stop, list) else {stop}
    for chunk in prompt_ids.split(CHUNK, dim=1):
        last = forward(model, chunk, cache, logits_to_keep=1).logits[0, -1].float()
    # Reading a token id waits for the device, so the clock sees finished steps.
    ids, logits = [int(last.argmax())], [last]
    started = time.perf_counter()
    with tqdm(total=max_tokens, initial=1, desc=label, unit="token", disable=None) as bar:
        while len(ids) < max_tokens and ids[-1] not in stop:
            token = torch.tensor([ids[-1:]], device=prompt_ids.device)
            last = forward(model, token, cache).logits[0, -1].float()
            ids.append(int(last.argmax()))
            logits.append(last)
            bar.update()
    return Generation(ids, logits, time.perf_counter() - started)


@torch.inference_mode()
def token_losses(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, label: str = "losses"
) -> torch.Tensor:
    """Negative log likelihoods, float64 (L - 1,), of tokens 1 to L - 1 of `ids` (1, L).

    `cache` is empty at first. Tokens go through the model in chunks, and attention reads the keys
    and values of every position, the chunk's own included, from the cache.
    """
    if ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}; accepted: (1, L) with L >= 2")
    losses, start = [], 0
    with tqdm(total=ids.shape[1], desc=label, unit="token", disable=None) as bar:
        for chunk in ids.split(CHUNK, dim=1):
            targets = ids[0, start + 1 : start + 1 + chunk.shape[1]]
            logits = forward(model, chunk, cache).logits[0, : len(targets)].float()
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            losses.append(loss.double().cpu())
            start += chunk.shape[1]
            bar.update(chunk.shape[1])
    return torch.cat(losses)


@contextlib.contextmanager
def _stored_before(cache: PagedKVCache) -> Iterator[None]:
    """Forward passes find the K and V of their own tokens in the pages, too, and store none."""
    for layer in cache.layers:
        layer.pages.write = lambda *args: None
    try:
        yield
    finally:
        for layer in cache.layers:
            del layer.pages.write


@torch.inference_mode()
def choices_from_one_cache(
    model: PreTrainedModel,
    implementation: str,
    prompt_ids: torch.Tensor,
    run: Generation,
    cache: PagedKVCache,
) -> Choices:
    """What another attention implementation chooses at each step of a greedy run, from its bytes.

    `cache` is the one that the run filled. The other implementation reads prompt and text in one
    pass, each token with the K and V before it, and its own, as the run stored them. If every
    choice is the run's, its text is the other's greedy text. With a cache each, requantized keys
    and values of later layers are compared with it: rounding turns a difference of 2e-4 in an
    output into FP8 codes that differ by 6 %, and logits of SmolLM2 by up to 1, whichever the two
    functions are.

    Raises:
        ValueError: a sliding window has freed pages of the beginning.
    """
    read = torch.tensor([run.ids[:-1]], dtype=prompt_ids.dtype, device=prompt_ids.device)
    ids = torch.cat([prompt_ids, read], dim=1)
    own = model.config._attn_implementation
    cache.crop(-ids.shape[1])
    model.set_attn_implementation(implementation)
    try:
        with _stored_before(cache):
            logits = forward(model, ids, cache, logits_to_keep=len(run.ids)).logits[0].float()
    finally:
        model.set_attn_implementation(own)
    tried, chosen = torch.tensor(run.ids, device=ids.device), logits.argmax(-1)
    gaps = (logits.gather(1, chosen[:, None]) - logits.gather(1, tried[:, None])).flatten()
    same = tried == chosen
    return Choices(
        steps=len(same),
        equal=int(same.sum()),
        leading=int(same.long().cumprod(0).sum()),
        widest_gap=None if same.all() else gaps[~same].max().item(),
        max_logit_difference=(torch.stack(run.logits) - logits).abs().max().item(),
    )


def perplexity(losses: torch.Tensor) -> float:
    """exp of the mean negative log likelihood."""
    return math.exp(losses.mean())


def perplexity_change(losses: torch.Tensor, baseline: torch.Tensor) -> tuple[float, float]:
    """Relative change of the perplexity from `baseline`, and its standard error over the tokens."""
    difference = losses - baseline
    change = math.exp(difference.mean()) - 1.0
    return change, (1.0 + change) * difference.std().item() / math.sqrt(len(difference))


def compare(run: Generation, reference: Generation) -> Comparison:
    """How far two greedy runs from one prompt agree.

    `logit_gap`: at the first step where they differ, the reference's logit of its own choice less
    its logit of the other run's choice; None where nothing differs. Near 0 it was a tie.
    """
    equal = 0
    for ours, theirs in zip(run.ids, reference.ids, strict=False):
        if ours != theirs:
            break
        equal += 1
    identical = run.ids == reference.ids
    shared = min(equal + 1, len(run.ids), len(reference.ids))
    difference = max(
        (run.logits[i] - reference.logits[i]).abs().max().item() for i in range(shared)
    )
    gap = None
    if not identical:
        logits = reference.logits[equal]
        gap = (logits[reference.ids[equal]] - logits[run.ids[equal]]).item()
    return Comparison(equal, identical, gap, difference)
