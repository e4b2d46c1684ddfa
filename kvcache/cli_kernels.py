"""`kvcache warmup`: compile what a model needs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from tqdm import tqdm

from cute_kernels.compile.bundle import check_name, locate
from cute_kernels.compile.errors import CompilerUnavailableError
from cute_kernels.compile.pool import Outcome, compile_into, default_workers
from cute_kernels.env import cache_directory
from kvcache.cli_common import (
    JsonCommand,
    batch_invariant_option,
    console,
    json_option,
    kv_cache_dtype_option,
    read_model,
    refusing,
    text_only_option,
)
from kvcache.config import capability_of
from kvcache.warmup import WarmupPlan, plan_warmup


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _check_archs(value: str) -> None:
    """Raises ValueError as `capability_of` does, also for a list of none."""
    for arch in _parts(value) or [value]:
        capability_of(arch)


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers; of none only where that is the default."""
    try:
        numbers = tuple(map(int, _parts(value)))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers like 1,2,4") from error
    if any(number < 1 for number in numbers):
        raise click.BadParameter(f"{value!r} has a number below 1")
    if not numbers and (value or parameter.default):
        raise click.BadParameter(f"{value!r} has no number in it")
    return numbers


@click.command("warmup", cls=JsonCommand, context_settings={"show_default": True})
@click.option(
    "--model",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="A model's config.json in the Hugging Face format, or its folder.",
)
@click.option(
    "--arch",
    default="sm_90a",
    callback=refusing(_check_archs),
    help="Architectures, like sm_90a,sm_100a.",
)
@kv_cache_dtype_option
@click.option("--tp", default="1", callback=_numbers, help="Tensor-parallel sizes, like 1,2,4.")
@click.option("--max-model-len", type=click.IntRange(min=1), help="Longest sequence, in tokens.")
@click.option(
    "--max-batched-tokens",
    default=8192,
    type=click.IntRange(min=1),
    help="Most tokens that the engine puts into one batch.",
)
@click.option("--page-size", default="", callback=_numbers, help="Tokens of a page, like 16,64.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="What the model computes in.")
@text_only_option
@batch_invariant_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    callback=refusing(lambda out: None if out is None else check_name(out)),
    help="Bundle to write, for CUTE_KERNELS_BUNDLE; the user's cache, for what no bundle has, "
    "without it.",
)
@click.option("--workers", default=default_workers, type=click.IntRange(min=1))
@click.option("--dry-run", is_flag=True, help="Only say what would be compiled.")
@json_option
def warmup_command(out: Path | None, workers: int, dry_run: bool, as_json: bool, **options: Any):
    """Compile the kernels that a model asks for, on any machine with a C compiler. No GPU needed.

    The exit status is 1 where a layer has no kernel or a kernel could not be compiled.
    """
    plan = _plan(**options)
    directory = out or cache_directory()
    if directory is None:
        raise click.ClickException("there is no home directory for a cache: give --out")
    start, outcomes = time.monotonic(), []
    if not dry_run:
        try:
            outcomes = _compile(plan, directory, workers, shared=out is not None)
        except (OSError, CompilerUnavailableError) as error:
            raise click.ClickException(str(error)) from error
    report = _warmup_report(plan, outcomes, directory, time.monotonic() - start)
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _print_warmup(report, dry_run)
    if plan.unserved or report["failed"]:
        raise SystemExit(1)


def _plan(
    model: Path,
    arch: str,
    kv_cache_dtype: str,
    tp: tuple[int, ...],
    max_model_len: int | None,
    max_batched_tokens: int,
    page_size: tuple[int, ...],
    dtype: str | None,
    text_only: bool,
    batch_invariant: bool,
) -> WarmupPlan:
    try:
        return plan_warmup(
            read_model(model),
            _parts(arch),
            kv_cache_dtype,
            tp_sizes=tp,
            max_query_tokens=min(max_batched_tokens, max_model_len or max_batched_tokens),
            page_sizes=page_size,
            query_dtype=dtype,
            text_only=text_only,
            batch_invariant=batch_invariant,
        )
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{model}: {error}") from error


def _compile(plan: WarmupPlan, directory: Path, workers: int, shared: bool) -> list[Outcome]:
    """shared: it is a bundle, with everything; the user's cache does without what bundles have."""
    with tqdm(total=len(plan.units), unit="kernel", disable=None) as bar:

        def show(outcome: Outcome) -> None:
            bar.set_postfix_str(outcome.unit.config.name)
            bar.update()

        elsewhere = {} if shared else {"elsewhere": locate}
        return compile_into(
            plan.compile_units, directory, workers, show, shared=shared, **elsewhere
        )


def _warmup_report(
    plan: WarmupPlan, outcomes: Sequence[Outcome], directory: Path, seconds: float
) -> dict[str, Any]:
    by_unit = {outcome.unit: outcome for outcome in outcomes}
    units = []
    for planned in plan.units:
        outcome = by_unit.get(planned.unit)
        units.append(
            {
                "kernel": planned.unit.kernel,
                "name": planned.unit.config.name,
                "target": planned.unit.target,
                "digest": planned.unit.key.digest,
                "reasons": list(planned.reasons),
                "result": outcome.result if outcome else "planned",
                "path": str(outcome.path) if outcome and outcome.path else None,
                "error": outcome.error if outcome else "",
            }
        )
    counts = {
        result: sum(unit["result"] == result for unit in units)
        for result in ("planned", "present", "compiled", "failed")
    }
    return {
        "directory": str(directory),
        "units": units,
        "unserved": list(plan.unserved),
        **counts,
        "seconds": round(seconds, 1),
    }


def _print_warmup(report: dict[str, Any], dry_run: bool) -> None:
    table = Table(box=SIMPLE_HEAD)
    for title in ("kernel", "for", "result", "asked for by"):
        table.add_column(title, no_wrap=title != "asked for by")
    for unit in report["units"]:
        table.add_row(unit["name"], unit["target"], unit["result"], "; ".join(unit["reasons"]))
    screen = console()
    screen.print(table)
    for unit in report["units"]:
        if unit["error"]:
            click.echo(f"{unit['name']}: {unit['error']}", err=True)
    for line in report["unserved"]:
        click.echo(f"not served: {line}", err=True)
    if dry_run:
        click.echo(f"{report['planned']} kernels would be in {report['directory']}")
        return
    click.echo(
        f"{report['compiled']} compiled, {report['present']} were there, {report['failed']} failed "
        f"in {report['seconds']} s: {report['directory']}"
    )
