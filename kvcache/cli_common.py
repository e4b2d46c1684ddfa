"""What the commands share: reading a model's file, and a console that pipes can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvcache.dtypes import is_quantized_kv_cache


def refusing(check: Callable[[Any], object]) -> Callable[..., Any]:
    """A callback for an option: what `check` raises ValueError for is refused by the option's name,
    before it meets a model's file and is taken for a fault of that."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            check(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        return value

    return callback


class JsonCommand(click.Command):
    """A command that with --json prints an object also where it fails: {"error": why}."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if ctx.params.get("as_json"):
                click.echo(json.dumps({"error": error.format_message()}, indent=1))
            raise


kv_cache_dtype_option = click.option(
    "--kv-cache-dtype",
    default="auto",
    show_default=True,
    callback=refusing(is_quantized_kv_cache),
    help="Like fp8; auto is the model's.",
)
text_only_option = click.option(
    "--text-only", is_flag=True, help="No images will be sent to the model."
)
batch_invariant_option = click.option(
    "--batch-invariant", is_flag=True, help="Calls will have deterministic=True."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def console() -> Console:
    """Files and pipes have no width, and a cut table there cannot be widened."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def print_whole(screen: Console, table: Table) -> None:
    """A table that is wider than the terminal is wrapped by it, which loses nothing; one that is
    made to fit is cut."""
    unlimited = screen.options.update(max_width=10_000)
    screen.width = max(screen.width, screen.measure(table, options=unlimited).maximum)
    screen.print(table)


def read_model(path: Path) -> dict[str, Any]:
    """A `config.json`, or that of a model's folder.

    Raises:
        ValueError: it holds no JSON object. OSError: it cannot be read.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(model, dict):
        raise ValueError(f"a config.json holds an object, this is a {type(model).__name__}")
    return model
