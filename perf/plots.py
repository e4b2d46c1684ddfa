"""Plots of result files as SVG, the same bytes for the same data and matplotlib.

A plot is drawn from its `data` alone, and the file carries their fingerprint and the matplotlib
that drew it: a check whether the committed plots are those of the committed results draws them
again where it can, and needs no matplotlib.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from perf.ceilings import share
from perf.report import plot_bandwidth, title_of
from perf.rows import OK, fingerprint
from perf.sections import BASELINE, ResultFile
from perf.targets import OURS, tflops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Text stays text, ids and dates do not change from run to run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "perf"}
_DRAWN_BY = re.compile(r">Matplotlib ([^<]+)<")


@dataclass(frozen=True)
class Plot:
    """name: of the file; data: JSON that `draw` turns into the file at a path."""

    name: str
    data: Mapping[str, Any]
    draw: Callable[[Mapping[str, Any], Path, Mapping[str, str | None]], None]

    @property
    def digest(self) -> str:
        return fingerprint(self.data)

    def is_current(self, folder: Path) -> bool:
        """Whether the file in a folder shows these data: where the matplotlib is here that drew it,
        it must be what is drawn now."""
        path = folder / self.name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        drawn_by = _DRAWN_BY.search(text)
        if self.digest not in text or drawn_by is None:
            return False
        return drawn_by.group(1) != _matplotlib() or text == self.drawn()

    def drawn(self) -> str:
        """The file's text.

        Raises:
            ImportError: matplotlib is missing (the extra `bench` has it).
        """
        import matplotlib

        creator = f"Matplotlib {matplotlib.__version__}"
        metadata = {"Date": None, "Creator": creator, "Identifier": self.digest}
        with TemporaryDirectory() as folder, matplotlib.rc_context(STYLE):
            path = Path(folder) / self.name
            self.draw(self.data, path, metadata)
            lines = path.read_text(encoding="utf-8").splitlines()
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def write(self, folder: Path) -> None:
        """Draw the file.

        Raises:
            ImportError: as `drawn`.
        """
        text = self.drawn()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.name).write_text(text, encoding="utf-8")


def _matplotlib() -> str | None:
    """The release that is here."""
    try:
        import matplotlib
    except ImportError:
        return None
    return matplotlib.__version__


def _figure(width: float, height: float) -> Figure:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw_decode(data: Mapping[str, Any], path: Path, metadata: Mapping[str, str | None]) -> None:
    plot_bandwidth(data["rows"], path, metadata)


def decode(file: ResultFile) -> Plot | None:
    """Bars of TB/s under the read ceiling."""
    names = ("case", "provider", "op", "kv_cache_dtype", "gpu", "status", "median_us", "tb_per_s")
    rows = [
        {name: row[name] for name in (*names, "read_ceiling_tb_per_s")}
        for row in file.rows
        if row["status"] == OK
    ]
    data = {"title": title_of(rows), "rows": rows} if rows else {}
    return Plot(f"{file.label}.svg", data, _draw_decode) if rows else None


def _draw_prefill(data: Mapping[str, Any], path: Path, metadata: Mapping[str, str | None]) -> None:
    series = data["tflops"]
    cases = list(dict.fromkeys(case for points in series.values() for case in points))
    figure = _figure(9, 0.9 + 0.5 * len(cases))
    axes, height = figure.subplots(), 0.8 / len(series)
    for i, (provider, points) in enumerate(series.items()):
        at = [cases.index(case) + (i - (len(series) - 1) / 2) * height for case in points]
        bars = axes.barh(at, list(points.values()), height, label=provider)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s of the pairs inside the causal mask")
    axes.set_title(data["title"])
    axes.legend(fontsize=8)
    figure.savefig(path, metadata=metadata)


def prefill(file: ResultFile) -> Plot | None:
    """Bars of TFLOP/s."""
    series: dict[str, dict[str, float]] = {}
    for row in file.rows:
        if row["status"] == OK:
            series.setdefault(row["provider"], {})[row["case"]] = round(tflops(row), 1)
    if not series:
        return None
    title = title_of([row for row in file.rows if row["status"] == OK])
    return Plot(f"{file.label}.svg", {"title": title, "tflops": series}, _draw_prefill)


def _draw_store(data: Mapping[str, Any], path: Path, metadata: Mapping[str, str | None]) -> None:
    figure = _figure(9, 4.5)
    axes = figure.subplots()
    dtypes = list(dict.fromkeys(line["kv_cache_dtype"] for line in data["lines"]))
    for line in data["lines"]:
        ours = line["provider"] == OURS
        axes.plot(
            line["tokens"],
            line["pct_of_ceiling"],
            color=f"C{dtypes.index(line['kv_cache_dtype'])}",
            linestyle="-" if ours else ":",
            marker="o" if ours else "x",
            label=line["kv_cache_dtype"] + ("" if ours else f", {line['provider']}"),
        )
    axes.axhline(100, color="black", linestyle="--", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens a call")
    axes.set_ylabel("% of the rate of a copy")
    axes.set_title(data["title"])
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, metadata=metadata)


def store(file: ResultFile) -> Plot | None:
    """Share of the copy against tokens, for the shape of the first row."""
    timed = [row for row in file.rows if row["status"] == OK]
    if not timed:
        return None
    shape = ("num_kv_heads", "head_size")
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in timed:
        if all(row[name] == timed[0][name] for name in shape):
            provider, dtype = row["provider"], row["kv_cache_dtype"]
            new = {"provider": provider, "kv_cache_dtype": dtype}
            line = lines.setdefault((provider, dtype), new | {"tokens": [], "pct_of_ceiling": []})
            line["tokens"].append(row["batch"])
            line["pct_of_ceiling"].append(round(share(row, file.rows), 1))
    heads, size = (timed[0][name] for name in shape)
    title = f"store, {heads} KV heads, head size {size}, {timed[0]['gpu']}"
    return Plot(f"{file.label}.svg", {"title": title, "lines": [*lines.values()]}, _draw_store)


def _panels(rows: Sequence[Mapping[str, Any]], label: str) -> tuple[Any, dict[str, Any]]:
    """A figure with axes side by side, one for each model of some rows."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = _figure(9, 4)
    panels = dict(
        zip(models, figure.subplots(1, len(models), squeeze=False, sharey=True)[0], strict=True)
    )
    for model, axes in panels.items():
        axes.set_title(model)
    panels[models[0]].set_ylabel(label)
    return figure, panels


def _draw_perplexity(
    data: Mapping[str, Any], path: Path, metadata: Mapping[str, str | None]
) -> None:
    dtypes = list(dict.fromkeys(row["kv_cache_dtype"] for row in data["rows"]))
    figure, panels = _panels(data["rows"], "% change of perplexity, one standard error")
    for model, axes in panels.items():
        for rotated in (False, True):
            rows = _of(data["rows"], model, rotated)
            axes.errorbar(
                [dtypes.index(row["kv_cache_dtype"]) + 0.2 * rotated - 0.1 for row in rows],
                [100 * row["change"] for row in rows],
                [100 * row["change_standard_error"] for row in rows],
                fmt="s" if rotated else "o",
                capsize=3,
                label="keys rotated" if rotated else "keys as they are",
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(dtypes)), dtypes, rotation=20, fontsize=8)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata=metadata)


def _of(rows: Sequence[Mapping[str, Any]], model: str, rotated: bool) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["model"] == model and row["rotate_keys"] == rotated]


def perplexity(file: ResultFile) -> Plot | None:
    """Changes with their errors, by model."""
    names = ("model", "kv_cache_dtype", "rotate_keys", "change", "change_standard_error")
    rows = [
        {name: row[name] for name in names}
        for row in file.rows
        if row["kv_cache_dtype"] != BASELINE
    ]
    return Plot(f"{file.label}.svg", {"rows": rows}, _draw_perplexity) if rows else None


def _draw_accuracy(data: Mapping[str, Any], path: Path, metadata: Mapping[str, str | None]) -> None:
    dtypes = list(dict.fromkeys(line["kv_cache_dtype"] for line in data["lines"]))
    figure, panels = _panels(data["lines"], "relative error of hidden states")
    for model, axes in panels.items():
        for line in data["lines"]:
            if line["model"] == model:
                errors, dtype = line["layer_errors"], line["kv_cache_dtype"]
                color = f"C{dtypes.index(dtype)}"
                axes.plot(range(1, len(errors) + 1), errors, color=color, label=dtype)
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.legend(fontsize=8)
    figure.savefig(path, metadata=metadata)


def accuracy(file: ResultFile) -> Plot | None:
    """Errors behind each layer, by model."""
    lines = [
        {
            "model": row["model"],
            "kv_cache_dtype": row["kv_cache_dtype"],
            "layer_errors": [float(f"{error:.3g}") for error in row["layer_errors"]],
        }
        for row in file.rows
        if "layer_errors" in row
    ]
    return Plot(f"{file.label}.svg", {"lines": lines}, _draw_accuracy) if lines else None
