"""Compare result rows, or refuse to.

    python -m perf.compare results.json
        providers of one run against `--provider`, case by case
    python -m perf.compare old.json new.json
        `--provider` in two runs
    python -m perf.compare old.json new.json --allow driver --allow versions --within 5
        the same for runs made on another day or machine, and whether they agree within 5 %
    python -m perf.compare results.json --json ratios.json --png ratios.png

Two rows are put side by side only if their workloads agree in every field: shapes, dtypes,
lengths, seeds, page size, scales, masks, timing method, library versions, driver, card; and the
card's clocks, where both rows say them. A refusal names the fields and makes the exit status 1.
What tells two machines apart, and the number of rounds, may be allowed to differ (`--allow`); it is
then printed with the result. Nothing else may. Rows of one file are compared if one process made
them; of two files, if they are not one run.

With `--within` the exit status is also 1 where a time is further off, where a case that had a time
has none now or is not there, and where no two times were found. What the two devices reached
(`ceilings`) is compared too: times of a device that was slowed down say nothing about the code.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from perf.reading import BadFile, read_rows
from perf.report import plot_speedups
from perf.rows import DIRTY, OK, RUN_FIELDS, UNKNOWN, canonical, check_row

Row = Mapping[str, Any]
Differences = dict[str, tuple[Any, Any]]
_ABSENT = "(absent)"
# What does not describe the work, but the machine it was measured on, and how often.
MACHINE = ("gpu", "driver", "versions", "clocks", "rounds")
# Ceilings of one card differ by up to 2 % from day to day.
CEILINGS_APART = 0.03


class NotComparable(ValueError):
    """Two rows whose workloads differ, or that are not of one run, or one row; the message names
    every differing field."""


class WithoutTime(ValueError):
    """A row whose provider was absent, refused, failed or was wrong."""


@dataclass(frozen=True)
class Comparison:
    """speedup: how many times faster `new` is than `old`.

    machines: fields of the two machines that differ, each with both values. state: what the two
    devices reached, where that is so far apart that it says more than the times.
    """

    old: Row
    new: Row
    machines: Differences = field(default_factory=dict)
    state: Differences = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        return self.old["median_us"] / self.new["median_us"]


def flatten(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Leaves of nested mappings by their path; an empty mapping is one."""
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    leaves: dict[tuple[str, ...], Any] = {}
    for key, inner in value.items():
        leaves.update(flatten(inner, (*path, str(key))))
    return leaves


def _name(path: tuple[str, ...]) -> str:
    """`versions.torch`; a key with a dot of its own is quoted."""
    return ".".join(repr(key) if "." in key else key for key in path)


def differing(old: Row, new: Row) -> Differences:
    """Fields of two mappings that differ, be it in their type, each with both values."""
    a, b = flatten(old), flatten(new)
    both = {path: (a.get(path, _ABSENT), b.get(path, _ABSENT)) for path in sorted({*a, *b})}
    return {_name(path): two for path, two in both.items() if len(set(map(canonical, two))) > 1}


def differing_fields(old: Row, new: Row) -> Differences:
    """Fields of the workloads that differ, and clocks; each with both values."""
    return differing(
        *({**row["workload"], "clocks": row.get("clocks", UNKNOWN)} for row in (old, new))
    )


def apart_in_state(old: Row, new: Row) -> Differences:
    """Ceilings of two runs that differ by more than CEILINGS_APART."""
    one, other = (row.get("ceilings") or {} for row in (old, new))
    return {
        name: (one[name], other[name])
        for name in one
        if name in other and abs(one[name] / other[name] - 1) > CEILINGS_APART
    }


def in_words(fields: Differences) -> str:
    return "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in fields.items())


def compare(old: Row, new: Row, allow: Collection[str] = (), one_run: bool = False) -> Comparison:
    """Put two rows side by side.

    Args:
        old, new: rows that `check_row` accepts.
        allow: which of MACHINE may differ. The comparison then says how they do. Clocks that one
            of the rows does not know are no reason to refuse, but said.
        one_run: they must be of one process; else they must not be one row.

    Raises:
        NotComparable: their workloads differ in anything else; rows of two runs, or of one.
        WithoutTime: a row that has none.
        ValueError: a row that `check_row` refuses; an `allow` that is not of the machine.
    """
    for name in allow:
        if name not in MACHINE:
            raise ValueError(f"{name!r} may not differ; what may: {', '.join(MACHINE)}")
    for row in (old, new):
        check_row(row)
    fields = differing_fields(old, new)
    machines = {
        name: both
        for name, both in fields.items()
        if name.split(".")[0] in allow or (name == "clocks" and UNKNOWN in both)
    }
    refused = {name: both for name, both in fields.items() if name not in machines}
    if refused:
        raise NotComparable(f"{old['case']}: the workloads differ in {in_words(refused)}")
    runs = differing(*({name: row.get(name, UNKNOWN) for name in RUN_FIELDS} for row in (old, new)))
    if one_run and runs:
        raise NotComparable(f"{old['case']}: rows of two runs, which differ in {in_words(runs)}")
    if not one_run and not runs and old["provider"] == new["provider"]:
        raise NotComparable(f"{old['case']}: one run, not two: {old['date']}")
    for row in (old, new):
        if row["status"] != OK:
            raise WithoutTime(f"{row['provider']} has no time: {row['status']}")
    return Comparison(old, new, machines, apart_in_state(old, new))


def described(row: Row) -> str:
    """Where, from what and when a row was measured, and what that device reached."""
    clocks = f", {row['clocks']}" if "clocks" in row else ""
    reached = "".join(f", {name} {value:g}" for name, value in row.get("ceilings", {}).items())
    changed = " (not its code: there were changes)" if row["commit"].endswith(DIRTY) else ""
    return (
        f"{row['gpu']}, driver {row['driver']}{clocks}, commit {row['commit']}{changed}, "
        f"sources {row.get('sources', UNKNOWN)}, {row['date']}{reached}"
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
    names = ("provider", "median_us", "min_us", "max_us", "rel_error", "gpu", "driver", "versions")
    names += ("clocks", "kernels", "commit", "sources", "date")
    old, new = ({name: row.get(name) for name in names} for row in (comparison.old, comparison.new))
    return {
        "case": comparison.new["case"],
        "old": old,
        "new": new,
        "speedup": comparison.speedup,
        "machines_differ": comparison.machines,
        "ceilings_differ": comparison.state,
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
    except BadFile as error:
        raise click.ClickException(f"{Path(path).parent}/{error}") from None


def _kinds(rows: list[dict]) -> str:
    return "/".join(sorted({str(row.get("op")) for row in rows})) or "nothing"


@dataclass
class Found:
    """What two runs, or the providers of one, say about each other. skipped: cases by reason;
    lost: those that had a time before and have none now."""

    comparisons: list[Comparison] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)


def put_together(files: Sequence[Sequence[Row]], provider: str, allow: Collection[str]) -> Found:
    """All pairs of one file or of two, compared or not."""
    found = Found()
    for old, new in pairs(files, provider):
        try:
            found.comparisons.append(compare(old, new, allow, one_run=len(files) == 1))
        except NotComparable as error:
            found.refused.append(str(error))
        except WithoutTime as error:
            found.skipped[str(error)] += 1
            if old["status"] == OK:
                found.lost.append(f"{old['case']}: {new['status']}")
    if len(files) == 2:
        cases = {row["case"] for row in files[1] if row["provider"] == provider}
        for row in files[0]:
            if row["provider"] == provider and row["status"] == OK and row["case"] not in cases:
                found.lost.append(f"{row['case']}: not in the new run")
    return found


def check_outputs(results: Sequence[str], outputs: Sequence[str | None]) -> None:
    """Refuse to write where something is read, or where there is no folder.

    Raises:
        UsageError: such a path.
    """
    inputs = {Path(path).resolve() for path in results}
    for path in filter(None, outputs):
        if Path(path).resolve() in inputs:
            raise click.UsageError(f"{path} is a result that is read")
        if not Path(path).parent.is_dir():
            raise click.UsageError(f"{path}: no such folder")


def _percent(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} is no number of percent")
    return value


def make_table(found: Found, provider: str, one_run: bool) -> Table:
    table = Table(box=None)
    for column in ("case", "against", "us", f"{provider} us", "times faster", "errors"):
        table.add_column(column, justify="left" if column in ("case", "against") else "right")
    for each in found.comparisons:
        old, new = each.old, each.new
        against = old["provider"] if one_run else old["commit"][:12]
        times = (f"{old['median_us']:.1f}", f"{new['median_us']:.1f}", f"{each.speedup:.2f}")
        errors = f"{old['rel_error']:.1e}, {new['rel_error']:.1e}"
        table.add_row(old["case"], against, *times, errors)
    return table


def notes(files: Sequence[Sequence[Row]], provider: str, found: Found) -> list[str]:
    """What must be known to read the times."""
    lines = []
    machines = {name: both for each in found.comparisons for name, both in each.machines.items()}
    if machines:
        lines.append(f"the machines differ in {in_words(machines)}")
    states = dict.fromkeys(in_words(each.state) for each in found.comparisons if each.state)
    lines += [f"the devices reached other ceilings: {state}" for state in states]
    if len(files) == 2:
        lines += [f"in one run only: {case}" for case in unpaired(files, provider)]
    for reason, cases in found.skipped.items():
        lines.append(f"skipped: {reason} ({cases} case{'s' if cases > 1 else ''})")
    return lines + [f"refused: {reason}" for reason in found.refused]


def disagreements(found: Found, within: float) -> list[str]:
    """Why two runs do not agree within so many percent."""
    apart = [
        f"not within {within:g} %: {each.new['case']}: {each.speedup:.3f} times as fast"
        for each in found.comparisons
        if not abs(each.speedup - 1) <= within / 100
    ]
    apart += [f"had a time, has none: {case}" for case in found.lost]
    return apart if found.comparisons else [*apart, "no two times to compare"]


@click.command(help="Compare result rows of equal workloads; refuse all others.")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--provider", default="cute_kernels", show_default=True)
@click.option(
    "--allow", multiple=True, type=click.Choice(MACHINE), help="what of two machines may differ"
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the comparisons")
@click.option("--png", "png_path", type=click.Path(dir_okay=False), help="write a plot of them")
@click.option(
    "--within",
    type=float,
    callback=_percent,
    metavar="PERCENT",
    help="fail where times differ more",
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
    check_outputs(results, (json_path, png_path))
    files = [_read(path) for path in results]
    found = put_together(files, provider, allow)
    if not (found.comparisons or found.refused or found.skipped):
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
    Console(width=120, markup=False).print(make_table(found, provider, len(files) == 1))
    if json_path:
        text = json.dumps([as_json(each) for each in found.comparisons], indent=1)
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    if png_path and found.comparisons:
        ratios = [(c.old["case"], c.old["provider"], c.speedup) for c in found.comparisons]
        try:
            plot_speedups(ratios, png_path)
        except (ImportError, OSError, ValueError) as error:
            raise click.ClickException(f"{png_path}: {error}") from None
    apart = [] if within is None else disagreements(found, within)
    for line in [*notes(files, provider, found), *apart]:
        click.echo(line)
    if found.refused or apart:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
