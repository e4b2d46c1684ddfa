"""Build a bundle of all kernels: ``python -m cute_kernels.compile.build --out DIR``. Needs no GPU.

``kvcache warmup`` builds what one model needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tqdm import tqdm

from cute_kernels.compile.bundle import check_name
from cute_kernels.compile.errors import CompilerUnavailableError
from cute_kernels.compile.plans import CompileUnit, all_units
from cute_kernels.compile.pool import Outcome, compile_into, default_workers


@click.command(context_settings={"show_default": True})
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", multiple=True, help="Architecture, like sm_90a; all without it.")
@click.option("--match", default="", help="Regular expression on variant names.")
@click.option("--workers", default=default_workers, type=click.IntRange(min=1))
def main(out: Path, target: tuple[str, ...], match: str, workers: int) -> None:
    """Compile the kernels into a directory for CUTE_KERNELS_BUNDLE."""
    print_any_path()
    try:
        check_name(out)
    except ValueError as error:
        raise click.BadParameter(f"--out {error}") from error
    known = sorted({unit.target for unit in all_units()})
    unknown = [each for each in target if each not in known]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}; accepted: {', '.join(known)}")
    build(matching(all_units(target or None), match), out, workers)


def print_any_path() -> None:
    """Let paths that are no UTF-8 be printed, as the bytes that they are."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="surrogateescape")


def matching(units: Sequence[CompileUnit], match: str) -> list[CompileUnit]:
    """The units whose variants' names have a match of a regular expression.

    Raises:
        click.BadParameter: it is none. click.ClickException: no name has one.
    """
    try:
        wanted = re.compile(match)
    except re.error as error:
        raise click.BadParameter(f"--match {match!r}: {error}") from error
    found = [unit for unit in units if wanted.search(unit.config.name)]
    if not found:
        raise click.ClickException(f"--match {match!r}: no variant has such a name")
    return found


def build(units: Sequence[CompileUnit], out: Path, workers: int) -> None:
    """Compile what is not there yet, with a progress bar and, at the end, how much it was.

    Raises:
        click.ClickException: nothing could be compiled, or be written there.
        SystemExit: status 1 where a unit failed, after the reasons on stderr.
    """
    with tqdm(total=len(units), unit="kernel", disable=None) as bar:

        def show(outcome: Outcome) -> None:
            bar.set_postfix_str(outcome.unit.config.name)
            bar.update()

        try:
            outcomes = compile_into(units, out, workers, show, shared=True)
        except (OSError, CompilerUnavailableError) as error:
            raise click.ClickException(str(error)) from error
    failed = [outcome for outcome in outcomes if outcome.result == "failed"]
    for outcome in failed:
        click.echo(f"{outcome.unit.name}: {outcome.error}", err=True)
    if failed:
        raise SystemExit(1)
    compiled = sum(outcome.result == "compiled" for outcome in outcomes)
    click.echo(f"{len(outcomes)} kernels in {out}, {compiled} of them compiled now")


if __name__ == "__main__":
    main()
