"""Result rows for people: one compact table on the terminal, one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.providers import NOT_IMPLEMENTED, NOT_INSTALLED
from perf.rows import OK

Row = Mapping[str, Any]
OURS = "cute_kernels"
WIDTH = 118


def by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows grouped by case, in order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["case"], []).append(row)
    return groups


def absent_providers(rows: Sequence[Row]) -> dict[str, str]:
    """Providers that ran nowhere because they are not there: name -> status."""
    absent = (NOT_INSTALLED, NOT_IMPLEMENTED)
    return {row["provider"]: row["status"] for row in rows if row["status"].startswith(absent)}


def _times_ours(row: Row, group: Sequence[Row]) -> str:
    """How many times our time a row took."""
    ours = next((r for r in group if r["provider"] == OURS and r["status"] == OK), None)
    if ours is None or row["status"] != OK or row is ours:
        return ""
    return f"{row['median_us'] / ours['median_us']:.2f}x"


def _cells(row: Row, group: Sequence[Row]) -> list[str]:
    if row["status"] != OK:
        return [row["status"].split(":")[0], *[""] * 8]
    return [
        f"{row['median_us']:.1f}",
        f"{row['min_us']:.1f}..{row['max_us']:.1f}",
        _times_ours(row, group),
        f"{row['tb_per_s']:.2f}",
        f"{row['pct_of_ceiling']:.0f}%",
        f"{row['pct_of_loader']:.0f}%" if "pct_of_loader" in row else "",
        f"{row['single_call_us']:.1f}",
        f"{row['host_us']:.0f}",
        f"{row['rel_error']:.1e}",
    ]


def make_table(rows: Sequence[Row]) -> Table:
    """Cases in order, the providers of a case below each other; absent providers left to a note."""
    table = Table(box=None, padding=(0, 1))
    table.add_column("case", no_wrap=True)
    table.add_column("provider", no_wrap=True)
    columns = ("us", "min..max", "vs ours", "TB/s", "ceiling", "loader")
    columns += ("1/graph us", "host us", "error")
    for name in columns:
        table.add_column(name, justify="right")
    absent = absent_providers(rows)
    for case, group in by_case(rows).items():
        shown = [row for row in group if row["provider"] not in absent]
        for i, row in enumerate(shown):
            table.add_row(case if i == 0 else "", row["provider"], *_cells(row, group))
    return table


def print_report(rows: Sequence[Row], console: Console | None = None) -> None:
    """The table, then the read ceiling and who is absent: last on the terminal, under 6 KB."""
    console = console or Console(width=WIDTH, markup=False)
    console.print(make_table(rows))
    first = rows[0]
    console.print(
        f"{first['gpu']}, driver {first['driver']}, read ceiling {first['read_ceiling_tb_per_s']}"
        f" TB/s, commit {first['commit'][:12]}, {first['date']}",
        markup=False,
        highlight=False,
    )
    notes = [f"{name}: {status}" for name, status in absent_providers(rows).items()]
    notes += [
        f"{row['case']}, {row['provider']}: {row['status'][:WIDTH]}"
        for row in rows
        if row["status"] != OK and row["provider"] not in absent_providers(rows)
    ]
    reasons = {row["no_loader"]: row["case"] for row in rows if "no_loader" in row}
    notes += [f"no loader, as at {case}: {reason}" for reason, case in reasons.items()]
    for note in notes:
        console.print(note, markup=False, highlight=False)


def title_of(rows: Sequence[Row]) -> str:
    """Of a plot of rows: operation, card, and the dtypes of all caches that it shows."""
    dtypes = list(dict.fromkeys(row["kv_cache_dtype"] for row in rows))
    caches = f"{dtypes[0]} KV cache" if len(dtypes) == 1 else f"KV caches {', '.join(dtypes)}"
    return f"{rows[0]['op']}, {caches}, {rows[0]['gpu']}"


def plot_bandwidth(
    rows: Sequence[Row], path: str | Path, metadata: Mapping[str, str | None] | None = None
) -> None:
    """Bars of TB/s per case and provider under a line at the read ceiling.

    `metadata` is what the file says about itself, matplotlib's defaults without.

    Raises:
        ImportError: matplotlib is missing (the extra `bench` has it).
        ValueError: no row has a time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["status"] == OK]
    if not timed:
        raise ValueError("no row has a time, nothing to plot")
    cases = list(by_case(timed))
    providers = list(dict.fromkeys(row["provider"] for row in timed))
    figure, axes = pyplot.subplots(figsize=(10, 0.6 + 0.5 * len(cases)), layout="constrained")
    height = 0.8 / len(providers)
    for i, provider in enumerate(providers):
        own = [row for row in timed if row["provider"] == provider]
        at = [cases.index(row["case"]) + (i - (len(providers) - 1) / 2) * height for row in own]
        bars = axes.barh(at, [row["tb_per_s"] for row in own], height, label=provider)
        labels = [f"{row['median_us']:.1f} us" for row in own]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=7)
    ceiling = timed[0]["read_ceiling_tb_per_s"]
    axes.axvline(ceiling, color="black", linestyle="--", label=f"read ceiling {ceiling} TB/s")
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TB/s of K and V, each byte counted once")
    axes.set_title(title_of(timed))
    figure.legend(loc="outside lower center", ncols=len(providers) + 1, fontsize=8)
    figure.savefig(path, dpi=150, metadata=metadata)
    pyplot.close(figure)


def plot_speedups(ratios: Sequence[tuple[str, str, float]], path: str | Path) -> None:
    """Bars of how many times faster, by case and what it is compared with: (case, name, ratio).

    Raises:
        ImportError: matplotlib is missing (the extra `bench` has it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{case}, {name}" for case, name, _ in ratios]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(labels)), layout="constrained")
    bars = axes.barh(range(len(labels)), [ratio for *_, ratio in ratios])
    axes.bar_label(bars, [f"{ratio:.2f}" for *_, ratio in ratios], fontsize=7)
    axes.axvline(1, color="black", linestyle="--")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times faster")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
