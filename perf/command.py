"""What the commands of all benchmarks begin and end with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from perf.cases import AnyCase, select
from perf.rows import Machine, describe_machine, write_rows


def begin(module: str, commit: str | None) -> Machine:
    """The machine of a run, with the command line that made it.

    Raises:
        ClickException: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise click.ClickException("the benchmark needs a CUDA device")
    return describe_machine(shlex.join(["python", "-m", module, *sys.argv[1:]]), commit)


def choose(cases: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """As `perf.cases.select`, for a command line.

    Raises:
        UsageError: a pattern that no case matches.
    """
    try:
        return select(cases, patterns)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def folder_of(path: str | Path) -> Path:
    """Where a file is to be written; asked before what takes long.

    Raises:
        ClickException: there is no such folder.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise click.ClickException(f"{path}: no such folder")
    return folder


Keep = Callable[[list[dict[str, Any]]], None]


def keeper(json_path: str | None) -> Keep:
    """Writes the rows so far, for runs that may be cut off; nothing without a path.

    Raises:
        ClickException: there is no folder for it.
    """
    if json_path:
        folder_of(json_path)

    def keep(rows: list[dict[str, Any]]) -> None:
        if json_path:
            write_rows(json_path, rows)

    return keep


def finish(
    rows: list[dict[str, Any]],
    json_path: str | None,
    show: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Keep and show the rows; exit status 1 where a result was wrong or failed."""
    keeper(json_path)(rows)
    show(rows)
    if any("wrong" in row["status"] or row["status"].startswith("failed") for row in rows):
        raise SystemExit(1)
