"""`kvcache warmup` and `kvcache cache`: compile what a model needs, keep what was compiled."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from tqdm import tqdm

from cute_kernels.compile.bundle import layers
from cute_kernels.compile.errors import CompilerUnavailableError
from cute_kernels.compile.key import installed_toolchain, source_fingerprint
from cute_kernels.compile.pool import Outcome, compile_into, default_workers
from cute_kernels.compile.store import Entry, Store
from cute_kernels.env import cache_directory
from kvcache.cli_common import (
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


@click.command("warmup", context_settings={"show_default": True})
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
    help="Bundle to write, for CUTE_KERNELS_BUNDLE; the user's cache without it.",
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
            outcomes = _compile(plan, directory, workers)
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


def _compile(plan: WarmupPlan, directory: Path, workers: int) -> list[Outcome]:
    with tqdm(total=len(plan.units), unit="kernel", disable=None) as bar:

        def show(outcome: Outcome) -> None:
            bar.set_postfix_str(outcome.unit.config.name)
            bar.update()

        return compile_into(plan.compile_units, directory, workers, show)


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


@click.group("cache")
def cache_group() -> None:
    """Look after compiled kernels, in the user's cache, CUTE_KERNELS_BUNDLE and other folders."""


def _directories(function: Callable[..., None]) -> Callable[..., None]:
    return click.argument(
        "directories", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path)
    )(function)


def _state(entry: Entry) -> str:
    """What is to be said about an entry, or "": it works, and calls of this version ask for it."""
    if entry.problem is not None:
        return entry.problem
    if entry.manifest["sources"] != source_fingerprint():
        return "built from other sources of cute_kernels"
    toolchain = installed_toolchain()
    if toolchain is not None and entry.manifest["dsl"] != toolchain.dsl:
        return f"built by DSL {entry.manifest['dsl']}, {toolchain.dsl} is installed"
    return ""


def _listing(directories: Sequence[Path]) -> list[dict[str, Any]]:
    found = []
    for directory in directories or [path for path in layers() if path.is_dir()]:
        for entry in Store(directory).entries():
            manifest = entry.manifest or {}
            found.append(
                {
                    "path": str(entry.path),
                    "name": manifest.get("name"),
                    "target": manifest.get("target"),
                    "digest": manifest.get("digest"),
                    "dsl": manifest.get("dsl"),
                    "tvm_ffi": manifest.get("tvm_ffi"),
                    "bytes": entry.size,
                    "modified": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.modified)),
                    "loadable": entry.problem is None,
                    "state": _state(entry),
                }
            )
    return found


@cache_group.command("ls")
@_directories
@json_option
def ls_command(directories: tuple[Path, ...], as_json: bool) -> None:
    """List compiled kernels."""
    listing = _listing(directories)
    if as_json:
        click.echo(json.dumps(listing, indent=1))
        return
    table = Table(box=SIMPLE_HEAD)
    for title in ("kernel", "for", "DSL", "KiB", "built", "state"):
        table.add_column(title, no_wrap=title not in ("kernel", "state"), overflow="fold")
    for row in listing:
        name = row["name"] or Path(row["path"]).name
        kib, built = str(row["bytes"] // 1024), row["modified"][:10]
        table.add_row(name, row["target"], row["dsl"], kib, built, row["state"] or "current")
    console().print(table)
    click.echo(f"{len(listing)} kernels, {sum(row['bytes'] for row in listing) / 2**20:.1f} MiB")


@cache_group.command("verify")
@_directories
@json_option
def verify_command(directories: tuple[Path, ...], as_json: bool) -> None:
    """Check every kernel's checksum, manifest and owner; exit status 1 if one would be refused."""
    listing = _listing(directories)
    bad = [row for row in listing if not row["loadable"]]
    if as_json:
        click.echo(json.dumps({"checked": len(listing), "bad": bad}, indent=1))
    else:
        for row in bad:
            click.echo(f"{row['path']}: {row['state']}")
        click.echo(f"{len(listing)} checked, {len(bad)} bad")
    if bad:
        raise SystemExit(1)


@cache_group.command("prune")
@_directories
@click.option("--all", "everything", is_flag=True, help="Remove the current ones too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def prune_command(
    directories: tuple[Path, ...], everything: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove kernels that no call asks for any more, broken ones, and what crashes left behind.

    Without folders in the user's cache only: bundles are somebody's product. Kernels that are
    refused for their owner or mode stay: chown or chmod mends them.
    """
    cache = cache_directory()
    removed = []
    for directory in directories or [path for path in (cache,) if path and path.is_dir()]:
        store = Store(directory)
        doomed = [(path, "left by a crash") for path in store.leftovers()]
        for entry in store.entries():
            state = _state(entry) or ("--all" if everything else "")
            if state and (everything or not entry.distrusted):
                doomed.append((entry.path, state))
        for path, why in doomed:
            if not dry_run:
                try:
                    store.remove(path)
                except OSError as error:
                    raise click.ClickException(f"{path}: {error}") from error
            removed.append({"path": str(path), "why": why})
    if as_json:
        click.echo(json.dumps(removed, indent=1))
        return
    for row in removed:
        click.echo(f"{row['path']}: {row['why']}")
    click.echo(f"{len(removed)} {'would be ' if dry_run else ''}removed")
