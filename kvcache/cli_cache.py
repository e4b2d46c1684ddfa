"""`kvcache cache`: list, check and remove compiled kernels."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cute_kernels.compile.bundle import layers
from cute_kernels.compile.key import installed_toolchain
from cute_kernels.compile.store import Entry, Store
from cute_kernels.env import cache_directory
from kvcache.cli_common import JsonCommand, console, json_option, print_whole


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
    if entry.of_other_sources:
        return "built from other sources of cute_kernels"
    toolchain = installed_toolchain()
    if toolchain is not None and entry.manifest["dsl"] != toolchain.dsl:
        return f"built by DSL {entry.manifest['dsl']}, {toolchain.dsl} is installed"
    return ""


def _looked_into(directories: Sequence[Path]) -> list[Path]:
    """The directories that are named, or else those that calls look into: the user's cache, where
    it is there, and every bundle."""
    cache = cache_directory()
    return list(directories) or [path for path in layers() if path != cache or os.path.isdir(path)]


def _listing(directory: Path) -> list[dict[str, Any]]:
    """Raises OSError where the directory cannot be read."""
    found = []
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
                "other_sources": entry.of_other_sources,
                "state": _state(entry),
            }
        )
    return found


@cache_group.command("ls", cls=JsonCommand)
@_directories
@json_option
def ls_command(directories: tuple[Path, ...], as_json: bool) -> None:
    """List compiled kernels; exit status 1 if a directory cannot be read."""
    listing, problems = [], []
    for directory in _looked_into(directories):
        problem = Store(directory).problem()
        if problem is None:
            listing += _listing(directory)
        else:
            problems.append(problem)
    if as_json:
        click.echo(json.dumps(listing, indent=1))
    else:
        _print_listing(listing)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        raise SystemExit(1)


def _print_listing(listing: Sequence[dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for title in ("kernel", "for", "DSL", "KiB", "built", "state"):
        table.add_column(title, no_wrap=title not in ("kernel", "state"), overflow="fold")
    for row in listing:
        name = row["name"] or Path(row["path"]).name
        kib, built = str(row["bytes"] // 1024), row["modified"][:10]
        table.add_row(name, row["target"], row["dsl"], kib, built, row["state"] or "current")
    screen = console()
    if sys.stdout.isatty():
        screen.print(table)
    else:
        print_whole(screen, table)
    click.echo(f"{len(listing)} kernels, {sum(row['bytes'] for row in listing) / 2**20:.1f} MiB")


@cache_group.command("verify", cls=JsonCommand)
@_directories
@json_option
def verify_command(directories: tuple[Path, ...], as_json: bool) -> None:
    """Check every kernel's checksum, manifest and owner.

    The exit status is 1 if one would be refused, and if a bundle or a folder that is named cannot
    be read or has no kernel that this version asks for.
    """
    listing, problems = [], []
    for directory in _looked_into(directories):
        problem = Store(directory).problem()
        rows = _listing(directory) if problem is None else []
        if problem is None and (directories or directory != cache_directory()):
            problem = _nothing_to_serve(directory, rows)
        listing += rows
        problems += [problem] if problem else []
    bad = [row for row in listing if not row["loadable"]]
    stale = [row for row in listing if row["other_sources"]]
    if as_json:
        report = {"checked": len(listing), "bad": bad, "stale": stale, "problems": problems}
        click.echo(json.dumps(report, indent=1))
    else:
        for row in (*bad, *stale):
            click.echo(f"{row['path']}: {row['state']}")
        for problem in problems:
            click.echo(problem)
        click.echo(f"{len(listing)} checked, {len(bad)} bad, {len(stale)} of other sources")
    if bad or problems:
        raise SystemExit(1)


def _nothing_to_serve(directory: Path, rows: Sequence[dict[str, Any]]) -> str | None:
    """Why calls of this version get nothing from a bundle, or None."""
    if all(row["path"].endswith(".json") for row in rows):
        return f"{directory} has no kernels"
    if all(row["other_sources"] for row in rows):
        return f"{directory} has kernels of other sources only: build it anew with this version"
    return None


@cache_group.command("prune", cls=JsonCommand)
@_directories
@click.option("--all", "everything", is_flag=True, help="Remove the current ones too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def prune_command(
    directories: tuple[Path, ...], everything: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove kernels that no call asks for any more, broken ones, and what crashes left behind.

    Without folders in the user's cache only: bundles are somebody's product, and may serve other
    hosts with other versions. From folders that are named and are not the user's cache only what
    is broken or left behind is removed. Kernels that are refused for their owner or mode stay:
    chown or chmod mends them.
    """
    cache = cache_directory()
    removed = []
    for directory in directories or [path for path in (cache,) if path and os.path.isdir(path)]:
        store = Store(directory)
        try:
            doomed = _doomed(store, cache, everything)
        except OSError as error:
            raise click.ClickException(store.problem() or str(error)) from error
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


def _doomed(store: Store, cache: Path | None, everything: bool) -> list[tuple[Path, str]]:
    """What `prune` removes from a directory, each with why."""
    is_cache = (
        cache is not None and os.path.isdir(cache) and os.path.samefile(store.directory, cache)
    )
    doomed = [(path, "left by a crash") for path in store.leftovers()]
    for entry in store.entries():
        why = _state(entry) if is_cache else entry.problem
        why = why or ("--all" if everything else "")
        if why and (everything or not entry.distrusted):
            doomed.append((entry.path, why))
    return doomed
