"""What each KV cache dtype costs real models, with standard errors.

    python -m perf.accuracy --json r.json                     torch reference, CPU
    python -m perf.accuracy --device cuda --json r.json       kernels

Decoders read a text (docstrings of the standard library) in windows; every position is predicted
with all keys and values read back from the cache. Against a bf16 cache, on the same tokens:

- perplexity and its relative change;
- `kl`: mean Kullback-Leibler divergence of the next token's distribution, in nats;
- `top1_agreement`: how often the likeliest token is the same;
- `greedy_equal_tokens`: of each prompt's greedy continuation, the tokens before the first that
  differs; ids are compared, and `new_tokens` means that none did;
- `layer_errors`: relative error of the hidden states behind each layer.

MiniLM, an embedding model, has the angle to the embedding with bf16 K and V instead (1 - cosine),
and how often a text's nearest other text is the same.

Errors are standard errors over blocks of consecutive tokens (`perf.paired`), over prompts, or over
texts. The text comes from the running Python, whose docstrings change with its version: give both
runs one `--text` (`--write-text` makes it), or the ids of it (`--write-ids`, `--ids`), to compare
them. With both, decoders read the ids, which must be of that text, and MiniLM the text.
`ids_sha256` and `calibration_sha256` say whether two runs read the same.

A file that is there keeps its rows of other models: a model at a time is a run, too.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table

from demo import evaluate, texts
from demo.models import MODELS, find_gguf, load, load_model
from kvcache.integrations.transformers import register
from perf import accuracy_decoders, accuracy_embeddings, accuracy_ids
from perf.accuracy_ids import Ids
from perf.accuracy_reading import read_accuracy
from perf.accuracy_sections import COLUMNS, accuracy_lines
from perf.command import folder_of
from perf.reading import BadFile
from perf.rows import describe_machine

DTYPES = ("fp8", "nvfp4", "nvfp4_4over6", "nvfp4_4over6_k", "nvfp4_mse")
NAMES = (*MODELS, accuracy_embeddings.NAME)
EMBEDDED_TOKENS = 128  # of each text whose embedding is taken
CHUNK = {"cpu": 128, "cuda": 512}
WIDTH = 230


class Size(NamedTuple):
    """How much is read. windows of window_tokens each; prompts continued by new_tokens."""

    windows: int
    window_tokens: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    block: int


def decoder_text(
    ids: torch.Tensor, calibration: torch.Tensor, size: Size, first: int | None = None
) -> accuracy_decoders.Text:
    """Windows from the beginning of the text; prompts evenly spread over what the windows hold.

    Args:
        ids, calibration: token ids (1, L).
        first: the token that the model expects before any text and `ids` begin with: then windows
            and prompts each begin with one, too, as such models always read it.

    Raises:
        ClickException: fewer tokens than are asked for.
    """
    if first is not None:
        ids = ids[:, 1:]
        own = size._replace(
            window_tokens=size.window_tokens - 1, prompt_tokens=size.prompt_tokens - 1
        )
        read = decoder_text(ids, calibration, own)
        begun = (
            torch.nn.functional.pad(rows, (1, 0), value=first)
            for rows in (read.windows, read.prompts)
        )
        return accuracy_decoders.Text(*begun, *read[2:])
    needed = size.windows * size.window_tokens
    if ids.shape[1] < needed or needed < size.prompts * size.prompt_tokens:
        raise click.ClickException(
            f"the text has {ids.shape[1]} tokens; asked for: {size.windows} windows of "
            f"{size.window_tokens}, and {size.prompts} prompts of {size.prompt_tokens} in them"
        )
    read = ids[0, :needed]
    starts = [needed // size.prompts * index for index in range(size.prompts)]
    prompts = torch.stack([read[start : start + size.prompt_tokens] for start in starts])
    windows = read.view(size.windows, size.window_tokens)
    return accuracy_decoders.Text(windows, prompts, calibration, size.new_tokens, size.block)


def measure_decoder(
    name: str,
    model_dir: Path | None,
    source: str | Ids,
    dtypes: Sequence[str],
    size: Size,
    rotate_keys: bool | None,
    per_head: bool,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Rows of one of the demo's models; it reads a text, or ids that were made of one."""
    register("cute_kv")
    gguf = find_gguf(name, model_dir)
    if isinstance(source, str):
        tokenizer, model = load(gguf, device, "cute_kv")
        source = accuracy_ids.ids_of(tokenizer, source)
    else:
        model = load_model(gguf, device, "cute_kv")
    vocabulary = model.get_input_embeddings().num_embeddings
    if max(*source.text, *source.calibration) >= vocabulary:
        raise click.ClickException(f"ids of {name}: some are not below {vocabulary}")
    ids, calibration = source.tensors(device)
    rotate = MODELS[name].rotate_keys if rotate_keys is None else rotate_keys
    first = source.bos if source.text[0] == source.bos else None
    read = decoder_text(ids, calibration, size, first)
    chunk = CHUNK[device.type]
    rows = accuracy_decoders.measure(model, read, dtypes, rotate, chunk, per_head=per_head)
    return [size._asdict() | about(read.windows, calibration) | row for row in rows]


def measure_encoder(
    model_dir: Path | None, text: str, dtypes: Sequence[str], size: Size, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of MiniLM."""
    encoder = accuracy_embeddings.Encoder(accuracy_embeddings.folder(model_dir), device)
    count = size.windows * size.window_tokens // EMBEDDED_TOKENS
    ids, calibration = (
        encoder.tokenizer(each, return_tensors="pt", add_special_tokens=False)["input_ids"]
        for each in (text, texts.CALIBRATION_TEXT)
    )
    if ids.shape[1] < count * EMBEDDED_TOKENS:
        raise click.ClickException(f"the text has {ids.shape[1]} tokens; asked for: {size}")
    read = ids[0, : count * EMBEDDED_TOKENS].view(count, EMBEDDED_TOKENS).to(device)
    rows = accuracy_embeddings.measure(encoder, read, calibration.to(device), dtypes)
    return [about(read, calibration) | row for row in rows]


def about(read: torch.Tensor, calibration: torch.Tensor) -> dict[str, Any]:
    """What was read: how much, and the SHA-256 of its token ids."""
    digests = (
        hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest() for ids in (read, calibration)
    )
    return {
        "tokens": read.numel(),
        "calibration_tokens": calibration.numel(),
        **dict(zip(("ids_sha256", "calibration_sha256"), digests, strict=True)),
    }


def machine_of(device: torch.device, commit: str | None) -> dict[str, Any]:
    command = shlex.join(["python", "-m", "perf.accuracy", *sys.argv[1:]])
    found = describe_machine(command, commit)
    versions = {**found.versions, "transformers": transformers.__version__}
    row = {"versions": versions, "commit": found.commit, "command": command, "date": found.date}
    row["sources"] = found.sources
    if device.type == "cuda":
        return {"device": found.gpu, "driver": found.driver, "clocks": found.clocks} | row
    return {"device": f"CPU, {torch.get_num_threads()} threads"} | row


def attention_of(name: str, device: torch.device, notes: set[str]) -> str:
    """What computed attention: kernels only where no call fell back to the reference."""
    if name == accuracy_embeddings.NAME:
        return "float32 over what the cache's pages give back"
    if device.type == "cuda" and not notes:
        return "kernels"
    return "; ".join(["torch reference", *sorted(notes)])


def default_text() -> str:
    return f"{texts.docstring_text()}\n\n{texts.member_docstrings()}"


def write_text(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        folder_of(path)
        path.write_text(default_text(), encoding="utf-8")
        context.exit()


def read_text(path: Path | None) -> str:
    """What is read; that of the running Python without a path.

    Raises:
        ClickException: the file is empty, or no UTF-8.
    """
    if path is None:
        return default_text()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path}: {error}") from None
    if not text.strip():
        raise click.ClickException(f"{path} is empty")
    return text


def rows_of_others(output: Path | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that a file has of other models.

    Raises:
        ClickException: there is no folder for it, or it is no such file.
    """
    if output is None:
        return []
    folder_of(output)
    try:
        found = read_accuracy(output) if output.exists() else []
    except BadFile as error:
        raise click.ClickException(f"{output} is kept as it is: {error}") from None
    return [row for row in found if row["model"] not in names]


def print_report(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 1))
    for title in COLUMNS:
        table.add_column(title, no_wrap=True)
    for line in accuracy_lines(rows):
        table.add_row(*line)
    Console(width=WIDTH, markup=False).print(table)


@click.command(context_settings={"show_default": True}, help=(__doc__ or "").split("\n")[0])
@click.option("--model", "names", multiple=True, type=click.Choice(NAMES), default=NAMES)
@click.option("--model-dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=DTYPES)
@click.option("--device", "device_name", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--windows", type=click.IntRange(min=1), default=5)
@click.option("--window-tokens", type=click.IntRange(min=2), default=2048)
@click.option("--prompts", type=click.IntRange(min=1), default=16)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128)
@click.option("--new-tokens", type=click.IntRange(min=1), default=128)
@click.option("--block", type=click.IntRange(min=1), default=128, help="Tokens, for the errors.")
@click.option("--rotate-keys/--no-rotate-keys", default=None, help="Default: as in the demo.")
@click.option("--per-head", is_flag=True, help="A scale per KV head, not per layer (decoders).")
@click.option("--text", "text_path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--write-text",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=write_text,
    help="Write what is read without --text, and stop.",
)
@click.option(
    "--write-ids",
    "ids_to_write",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the ids of what is read, and stop.",
)
@click.option(
    "--ids",
    "ids_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read these, by no tokenizer.",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--commit", help="What to record where there is no git repository.")
def main(
    names: tuple[str, ...],
    model_dir: Path | None,
    dtypes: tuple[str, ...],
    device_name: str,
    rotate_keys: bool | None,
    per_head: bool,
    text_path: Path | None,
    ids_to_write: Path | None,
    ids_path: Path | None,
    output: Path | None,
    commit: str | None,
    **sizes: int,
) -> None:
    if device_name == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU")
    device, size = torch.device(device_name), Size(**sizes)
    names, dtypes = tuple(dict.fromkeys(names)), tuple(dict.fromkeys(dtypes))
    others, text = rows_of_others(output, names), read_text(text_path)
    ids = {}
    if ids_path is not None:
        decoders = [name for name in names if name in MODELS]
        ids = accuracy_ids.read(ids_path, decoders, None if text_path is None else text)
    if ids_to_write is not None:
        folder_of(ids_to_write)
        accuracy_ids.write(ids_to_write, names, model_dir, text)
        return
    machine, rows = machine_of(device, commit), []
    for name in names:
        notes: set[str] = set()
        with evaluate.noting_fallbacks(notes):
            if name == accuracy_embeddings.NAME:
                found = measure_encoder(model_dir, text, dtypes, size, device)
            else:
                found = measure_decoder(
                    name,
                    model_dir,
                    ids.get(name, text),
                    dtypes,
                    size,
                    rotate_keys,
                    per_head,
                    device,
                )
        attention = attention_of(name, device, notes)
        rows += [{"model": name, "attention": attention} | machine | row for row in found]
        if output is not None:
            kept = sorted([*others, *rows], key=lambda row: NAMES.index(row["model"]))
            text_of_rows = json.dumps(kept, indent=1, allow_nan=False)
            output.write_text(text_of_rows + "\n", encoding="utf-8")
    print_report(rows)


if __name__ == "__main__":
    main()
