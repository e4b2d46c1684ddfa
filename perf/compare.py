"""Compare result rows, or refuse to.

    python -m perf.compare results.json
        providers of one run against `--provider`, case by case
    python -m perf.compare old.json new.json
        `--provider` in two runs
    python -m perf.compare old.json new.json --allow driver --allow versions --within 5
        the same for runs made on another day or machine, and whether they agree within 5 %
    python -m perf.compare results.json --json ratios.json --png ratios.png

Two rows are put side by side only if their workloads agree in every field: shapes, dtypes,
lengths, seeds, page size, scales, masks, timing method, library versions, driver, card. A refusal
names the fields and makes the exit status 1, as does a time outside `--within`. What tells two
machines apart may be allowed to differ; it is then printed with the result. Nothing else may.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from perf.report import plot_speedups
from perf.rows import OK, check_row, read_rows

Row = Mapping[str, Any]
Differences = dict[str, tuple[Any, Any]]
_ABSENT = "(absent)"
# What of a workload describes the machine, not the work.
MACHINE = ("gpu", "driver", "versions")


class NotComparable(ValueError):
    """Two rows whose workloads differ; the message names every differing field."""


class WithoutTime(ValueError):
    """A row whose provider was absent, refused, failed or was wrong."""


@dataclass(frozen=True)
class Comparison:
    """speedup: how many times faster `new` is than `old`.

    machines: fields of the two machines that differ, each with both values.
    """

    old: Row
    new: Row
    machines: Differences = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        return self.old["median_us"] / self.new["median_us"]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted name: `versions.torch`."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        leaves.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def differing_fields(old: Row, new: Row) -> Differences:
    """Fields of the workloads that differ, each with both values."""
    a, b = flatten(old["workload"]), flatten(new["workload"])
    return {
        name: (a.get(name, _ABSENT), b.get(name, _ABSENT))
        for name in sorted({*a, *b})
        if a.get(name, _ABSENT) != b.get(name, _ABSENT)
    }


def in_words(fields: Differences) -> str:
    return "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in fields.items())


def compare(old: Row, new: Row, allow: Collection[str] = ()) -> Comparison:
    """Put two rows side by side.

    Args:
        old, new: rows that `check_row` accepts.
        allow: which of MACHINE may differ. The comparison then says how they do.

    Raises:
        NotComparable: their workloads differ in anything else.
        WithoutTime: a row that has none.
        ValueError: a row that `check_row` refuses; an `allow` that is not of the machine.
    """
    for name in allow:
        if name not in MACHINE:
            raise ValueError(f"{name!r} may not differ; what may: {', '.join(MACHINE)}")
    for row in (old, new):
        check_row(row)
    fields = differing_fields(old, new)
    machines = {name: both for name, both in fields.items() if name.split(".")[0] in allow}
    refused = {name: both for name, both in fields.items() if name not in machines}
    if refused:
        raise NotComparable(f"{old['case']}: the workloads differ in {in_words(refused)}")
    for row in (old, new):
        if row["status"] != OK:
            raise WithoutTime(f"{row['provider']} has no time: {row['status']}")
    return Comparison(old, new, machines)


def described(row: Row) -> str:
    """Where, from what and when a row was measured, and what that device reached."""
    clocks = f", {row['clocks']}" if "clocks" in row else ""
    reached = "".join(f", {name} {value:g}" for name, value in row.get("ceilings", {}).items())
    return (
        f"{row['gpu']}, driver {row['driver']}{clocks}, commit {row['commit']}, {row['date']}"
        f"{reached}"
    )


def kernels_by_provider(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What a provider's calls spent most of their time in, each once."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for name in (row.get("kernels") or ())[:1]:
            found.setdefault(row["provider"], {})[name] = None
    return {provider: list(names) for provider, names in found.items()}


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as JSON: both rows' provenance and times, and how many times faster."""
    names = ("provider", "median_us", "min_us", "max_us", "gpu", "driver", "versions")
    names += ("clocks", "kernels", "commit", "date")
    old, new = ({name: row.get(name) for name in names} for row in (comparison.old, comparison.new))
    return {
        "case": comparison.new["case"],
        "old": old,
        "new": new,
        "speedup": comparison.speedup,
        "machines_differ": comparison.machines,
    }


def pairs(files: Sequence[Sequence[Row]], provider: str) -> Iterator[tuple[Row, Row]]:
    """(old, new) rows of equal case: two runs of a provider, or others against it in one run."""
    newest = {row["case"]: row for row in files[-1] if row["provider"] == provider}
    for row in files[0]:
        same_provider = row["provider"] == provider
        if same_provider == (len(files) == 2) and row["case"] in newest:
            yield row, newest[row["case"]]


def unpaired(files: Sequence[Sequence[Row]], provider: str) -> list[str]:
    """Cases of a provider that one of two runs has and the other has not."""
    cases = [{row["case"]: 0 for row in rows if row["provider"] == provider} for rows in files]
    return [case for one, other in (cases, cases[::-1]) for case in one if case not in other]


def _read(path: str) -> list[dict[str, Any]]:
    try:
        return read_rows(path)
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from None


def _kinds(rows: list[dict]) -> str:
    return "/".join(sorted({str(row.get("op")) for row in rows})) or "nothing"


@click.command(help="Compare result rows of equal workloads; refuse all others.")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--provider", default="cute_kernels", show_default=True)
@click.option(
    "--allow", multiple=True, type=click.Choice(MACHINE), help="what of two machines may differ"
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the comparisons")
@click.option("--png", "png_path", type=click.Path(dir_okay=False), help="write a plot of them")
@click.option(
    "--within", type=click.FloatRange(min=0), metavar="PERCENT", help="fail where times differ more"
)
def main(
    results: tuple[str, ...],
    provider: str,
    allow: tuple[str, ...],
    json_path: str | None,
    png_path: str | None,
    within: float | None,
) -> None:
    if len(results) > 2:
        raise click.UsageError("one or two result files")
    files = [_read(path) for path in results]
    table = Table(box=None)
    for column in ("case", "against", "us", f"{provider} us", "times faster"):
        table.add_column(column, justify="left" if column in ("case", "against") else "right")
    refused: list[str] = []
    skipped: Counter[str] = Counter()
    differences: Differences = {}
    apart: list[str] = []
    found: list[Comparison] = []
    for old, new in pairs(files, provider):
        try:
            result = compare(old, new, allow)
        except NotComparable as error:
            refused.append(str(error))
            continue
        except WithoutTime as error:
            skipped[str(error)] += 1
            continue
        found.append(result)
        differences |= result.machines
        if within is not None and abs(result.speedup - 1) > within / 100:
            apart.append(f"{old['case']}: {result.speedup:.3f} times as fast")
        against = old["provider"] if len(results) == 1 else old["commit"][:12]
        figures = (f"{old['median_us']:.1f}", f"{new['median_us']:.1f}", f"{result.speedup:.2f}")
        table.add_row(old["case"], against, *figures)
    if not (table.row_count or refused or skipped):
        given = [
            f"{path}: {len(rows)} rows of {_kinds(rows)}"
            for path, rows in zip(results, files, strict=True)
        ]
        text = f"nothing to compare with {provider}: no case has another row ({'; '.join(given)})"
        raise click.ClickException(text)
    for path, rows in zip(results, files, strict=True):
        for machine in dict.fromkeys(map(described, rows)):
            click.echo(f"{path}: {machine}")
        for name, kernels in kernels_by_provider(rows).items():
            click.echo(f"{path}: {name} ran {', '.join(kernels)}")
    Console(width=120).print(table)
    if json_path:
        text = json.dumps([as_json(each) for each in found], indent=1)
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    if png_path and found:
        plot_speedups([(c.old["case"], c.old["provider"], c.speedup) for c in found], png_path)
    if differences:
        click.echo(f"the machines differ in {in_words(differences)}")
    for case in unpaired(files, provider) if len(files) == 2 else ():
        click.echo(f"in one run only: {case}")
    for reason, cases in skipped.items():
        click.echo(f"skipped: {reason} ({cases} case{'s' if cases > 1 else ''})")
    for reason in refused:
        click.echo(f"refused: {reason}")
    for case in apart:
        click.echo(f"not within {within:g} %: {case}")
    if refused or apart:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
