"""A trace of serving steps: which sequences a step holds, with how many queries and keys each.

A plain continuous-batching scheduler runs over requests with log-normal lengths: sequences that
decode go first, one query token each, or one and its draft tokens; what is left of the step's
tokens goes to chunks of waiting prompts. Numbers of input and output tokens are fixed by the seed,
so that two runs do the same work. Everything here is arithmetic: no text, no model, no torch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.config import AttentionConfig
from kvcache.models import layer_kinds
from kvcache.warmup import on_one_device

PLAIN, CHUNKED = "decode and verify", "with prefill chunks"


@dataclass(frozen=True)
class TraceSpec:
    """What a trace is made from. Lengths in tokens, medians and sigmas of log-normals.

    accept: the chance that a draft token is accepted if the one before it was. drafting: the share
    of requests with draft tokens.
    """

    requests: int = 1024
    prompt_median: int = 2048
    prompt_sigma: float = 0.8
    prompt_max: int = 16384
    output_median: int = 200
    output_sigma: float = 0.5
    output_max: int = 600
    max_sequences: int = 64
    token_budget: int = 4096
    drafts: int = 3
    drafting: float = 0.5
    accept: float = 0.7
    seed: int = 0


class Request(NamedTuple):
    prompt: int
    output: int
    drafts: int


class Work(NamedTuple):
    """One sequence in a step: query tokens, and keys with theirs among them."""

    query: int
    keys: int


class Step(NamedTuple):
    """chunk_tokens: of prompts, among the queries."""

    work: tuple[Work, ...]
    chunk_tokens: int

    @property
    def kind(self) -> str:
        return CHUNKED if self.chunk_tokens else PLAIN


class Layers(NamedTuple):
    """Layers that are alike, on one device. cached: those with a cache of their own."""

    name: str
    count: int
    cached: int
    config: AttentionConfig


def make_requests(spec: TraceSpec) -> list[Request]:
    """The trace's requests, in order of arrival; the first is there when the last is."""
    rng = random.Random(spec.seed)

    def length(median: int, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))

    return [
        Request(
            length(spec.prompt_median, spec.prompt_sigma, spec.prompt_max),
            length(spec.output_median, spec.output_sigma, spec.output_max),
            spec.drafts if rng.random() < spec.drafting else 0,
        )
        for _ in range(spec.requests)
    ]


class _Sequence:
    """A request in the batch: keys in the cache, tokens of the output still to come."""

    def __init__(self, request: Request) -> None:
        self.request, self.keys, self.left = request, 0, request.output

    @property
    def prefilled(self) -> bool:
        return self.keys >= self.request.prompt

    def decode(self, accept: float, rng: random.Random) -> Work:
        drafts = min(self.request.drafts, self.left - 1)
        work = Work(1 + drafts, self.keys + 1 + drafts)
        accepted = 0
        while accepted < drafts and rng.random() < accept:
            accepted += 1
        self.keys += 1 + accepted
        self.left -= 1 + accepted
        return work

    def prefill(self, tokens: int) -> Work:
        self.keys += tokens
        self.left -= self.prefilled  # the prompt's last token brings the first of the output
        return Work(tokens, self.keys)


def simulate(spec: TraceSpec) -> list[Step]:
    """All steps until the last request has its output.

    Raises:
        ValueError: a token budget that a batch of decoding sequences may exceed.
    """
    if spec.token_budget < spec.max_sequences * (1 + spec.drafts):
        raise ValueError(f"token_budget: {spec.token_budget} is less than decoding may take")
    rng = random.Random(spec.seed + 1)
    waiting, running, steps = deque(make_requests(spec)), [], []
    while waiting or running:
        while waiting and len(running) < spec.max_sequences:
            running.append(_Sequence(waiting.popleft()))
        decoding = [sequence for sequence in running if sequence.prefilled]
        work = [sequence.decode(spec.accept, rng) for sequence in decoding]
        budget = spec.token_budget - sum(item.query for item in work)
        chunks = 0
        for sequence in running:
            tokens = min(budget - chunks, sequence.request.prompt - sequence.keys)
            if sequence not in decoding and tokens > 0:
                work.append(sequence.prefill(tokens))
                chunks += tokens
        steps.append(Step(tuple(work), chunks))
        running = [sequence for sequence in running if sequence.left > 0]
    return steps


def sample(steps: Sequence[Step], kind: str, most: int) -> list[Step]:
    """Up to `most` steps of a kind: all of them in the order of their work, cut into as many equal
    shares, and of each share the middle one."""
    found = sorted((step for step in steps if step.kind == kind), key=_work)
    count = min(most, len(found))
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]


def _work(step: Step) -> int:
    """What a step takes longer for the more of it there is: keys to read, pairs to compute."""
    return sum(keys * (query if step.chunk_tokens else 1) for query, keys in step.work)


def layers_of(model: dict[str, Any], kv_cache_dtype: str, tp_size: int) -> list[Layers]:
    """Kinds of layers with a KV cache, of one of `tp_size` devices (SM90).

    Raises:
        ValueError: a config.json or a tensor-parallel size that cannot be right.
    """
    return [
        Layers(
            kind.name,
            len(kind.layers),
            len(kind.layers) - kind.shared,
            on_one_device(kind.config, tp_size),
        )
        for kind in layer_kinds(model, kv_cache_dtype, (9, 0), text_only=True)
        if kind.config is not None
    ]


def keys_read(work: Iterable[Work], window: int | None) -> int:
    """Keys that a layer must read for some sequences: those that a query sees."""
    return sum(keys if window is None else min(keys, window + query - 1) for query, keys in work)


def pairs_seen(work: Iterable[Work], window: int | None) -> float:
    """About how many (query, key) pairs the causal mask and the window show."""
    return sum(
        query * (keys - query / 2 if window is None else min(keys - query / 2, window))
        for query, keys in work
    )


def calls_of(layer: Layers, part: str) -> int:
    """How often a step runs "attention" or "store" for this kind of layer; layers that share a
    cache store nothing."""
    return layer.cached if part == "store" else layer.count


def sequence_bytes(layers: Iterable[Layers], length: int, page_size: int) -> int:
    """Bytes of cache of one sequence, whole pages; windows keep the pages they may touch."""
    total = 0
    for layer in layers:
        pages = -(-length // page_size)
        if layer.config.sliding_window is not None:
            pages = min(pages, -(-(layer.config.sliding_window - 1) // page_size) + 1)
        total += layer.cached * pages * page_size * layer.config.bytes_per_token
    return total


def capacity_tokens(
    layers: Sequence[Layers], budget_bytes: int, length: int, page_size: int
) -> int:
    """Tokens that fit into a device's cache in sequences of a length."""
    return budget_bytes // sequence_bytes(layers, length, page_size) * length
