"""Compare result rows, or refuse to.

    python -m perf.compare results.json
        providers of one run against `--provider`, case by case
    python -m perf.compare old.json new.json
        `--provider` in two runs

Two rows are put side by side only if their workloads agree in every field: shapes, dtypes,
lengths, seeds, page size, scales, masks, timing method, library versions, card. A refusal names the
fields and makes the exit status 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from perf.rows import OK, check_row, read_rows

Row = Mapping[str, Any]
_ABSENT = "(absent)"


class NotComparable(ValueError):
    """Two rows whose workloads differ; the message names every differing field."""


class WithoutTime(ValueError):
    """A row whose provider was absent, refused, failed or was wrong."""


@dataclass(frozen=True)
class Comparison:
    """speedup: how many times faster `new` is than `old`."""

    old: Row
    new: Row

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


def differing_fields(old: Row, new: Row) -> dict[str, tuple[Any, Any]]:
    """Fields of the workloads that differ, each with both values."""
    a, b = flatten(old["workload"]), flatten(new["workload"])
    return {
        name: (a.get(name, _ABSENT), b.get(name, _ABSENT))
        for name in sorted({*a, *b})
        if a.get(name, _ABSENT) != b.get(name, _ABSENT)
    }


def compare(old: Row, new: Row) -> Comparison:
    """Put two rows side by side.

    Raises:
        NotComparable: their workloads differ.
        WithoutTime: a row that has none.
        ValueError: a row that `check_row` refuses.
    """
    for row in (old, new):
        check_row(row)
    fields = differing_fields(old, new)
    if fields:
        what = "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in fields.items())
        raise NotComparable(f"{old['case']}: the workloads differ in {what}")
    for row in (old, new):
        if row["status"] != OK:
            raise WithoutTime(f"{row['provider']} has no time: {row['status']}")
    return Comparison(old, new)


def pairs(files: list[list[Row]], provider: str) -> Iterator[tuple[Row, Row]]:
    """(old, new) rows of equal case: two runs of a provider, or others against it in one run."""
    newest = {row["case"]: row for row in files[-1] if row["provider"] == provider}
    for row in files[0]:
        same_provider = row["provider"] == provider
        if same_provider == (len(files) == 2) and row["case"] in newest:
            yield row, newest[row["case"]]


@click.command(help="Compare result rows of equal workloads; refuse all others.")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--provider", default="cute_kernels", show_default=True)
def main(results: tuple[str, ...], provider: str) -> None:
    if len(results) > 2:
        raise click.UsageError("one or two result files")
    table = Table(box=None)
    for column in ("case", "against", "us", f"{provider} us", "times faster"):
        table.add_column(column, justify="left" if column in ("case", "against") else "right")
    refused: list[str] = []
    skipped: Counter[str] = Counter()
    for old, new in pairs([read_rows(path) for path in results], provider):
        try:
            result = compare(old, new)
        except NotComparable as error:
            refused.append(str(error))
            continue
        except WithoutTime as error:
            skipped[str(error)] += 1
            continue
        against = old["provider"] if len(results) == 1 else old["commit"][:12]
        figures = (f"{old['median_us']:.1f}", f"{new['median_us']:.1f}", f"{result.speedup:.2f}")
        table.add_row(old["case"], against, *figures)
    if not (table.row_count or refused or skipped):
        raise click.ClickException(f"nothing to compare with {provider}")
    Console(width=120).print(table)
    for reason, cases in skipped.items():
        click.echo(f"skipped: {reason} ({cases} case{'s' if cases > 1 else ''})")
    for reason in refused:
        click.echo(f"refused: {reason}")
    if refused:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
