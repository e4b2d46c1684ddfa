"""Token ids of a text, made on one host and read on another.

Tokenizers of one model differ between releases of transformers (5.17 reads that of the Gemma-3 file
wrongly), and a GPU host may have no other. With ids from a file no tokenizer is asked, both hosts
read the same tokens, and the vocabulary need not be parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from click import ClickException
from transformers import PreTrainedTokenizerBase

from demo import texts
from demo.models import MODELS, find_gguf, load_tokenizer
from perf.reading import read_json


class Ids(NamedTuple):
    """Of what a decoder reads. bos: the token that the model expects before any text."""

    text: list[int]
    calibration: list[int]
    bos: int | None

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Text and calibration, (1, L) each."""
        return [torch.tensor([ids], device=device) for ids in (self.text, self.calibration)]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    found = [texts.encode(tokenizer, each)[0].tolist() for each in (text, texts.CALIBRATION_TEXT)]
    return Ids(*found, tokenizer.bos_token_id)


def write(path: Path, names: Iterable[str], model_dir: Path | None, text: str) -> None:
    """Ids of those models that are decoders, by model."""
    found = {
        name: ids_of(load_tokenizer(find_gguf(name, model_dir)), text)._asdict()
        for name in names
        if name in MODELS
    }
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def read(path: Path, name: str) -> Ids:
    """Ids of one model.

    Raises:
        ClickException: the file has none of it, or something else.
    """
    try:
        return Ids(**read_json(path)[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ClickException(f"{path} has no ids of {name}: {error}") from None
