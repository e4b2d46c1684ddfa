"""Token ids of a text, made on one host and read on another.

Tokenizers of one model differ between releases of transformers (5.17 reads that of the Gemma-3 file
wrongly), and a GPU host may have no other. With ids from a file no tokenizer is asked, both hosts
read the same tokens, and the vocabulary need not be parsed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from click import ClickException, echo
from transformers import PreTrainedTokenizerBase

from demo import texts
from demo.models import MODELS, find_gguf, load_tokenizer
from perf.reading import read_json


class Ids(NamedTuple):
    """Of what a decoder reads. bos: the token that the model expects before any text. text_sha256:
    of what the ids were made from; None in files of before it was recorded."""

    text: list[int]
    calibration: list[int]
    bos: int | None
    text_sha256: str | None = None

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Text and calibration, (1, L) each."""
        return [torch.tensor([ids], device=device) for ids in (self.text, self.calibration)]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    found = [texts.encode(tokenizer, each)[0].tolist() for each in (text, texts.CALIBRATION_TEXT)]
    return Ids(*found, tokenizer.bos_token_id, digest(text))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, names: Iterable[str], model_dir: Path | None, text: str) -> None:
    """Ids of those models that are decoders, by model."""
    found = {
        name: ids_of(load_tokenizer(find_gguf(name, model_dir)), text)._asdict()
        for name in names
        if name in MODELS
    }
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(number) is int and number >= 0 for number in value)
    )


def read(path: Path, names: Sequence[str], text: str | None) -> dict[str, Ids]:
    """Ids of some models.

    Args:
        text: that they must be of; None where any will do.

    Raises:
        ClickException: the file does not have them, has something else, or ids of another text.
    """
    try:
        found = read_json(path)
        ids = {name: Ids(**found[name]) for name in names}
    except (KeyError, TypeError, ValueError) as error:
        raise ClickException(f"{path} has no ids of {', '.join(names)}: {error}") from None
    for name, each in ids.items():
        numbers = (each.text, each.calibration, [each.bos or 0])
        if not all(map(_are_ids, numbers)):
            raise ClickException(f"{path}: ids of {name} are none or no token numbers")
        if text is not None and each.text_sha256 is None:
            echo(f"{path} does not say whether it is of the text; {name} reads the ids", err=True)
        elif text is not None and each.text_sha256 != digest(text):
            raise ClickException(f"{path}: ids of {name} are of another text")
    return ids
