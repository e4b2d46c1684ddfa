"""docs/performance.md, its plots, the README's results and the figures of docs/, from perf/results.

    python -m perf.render            write what is not as the results say
    python -m perf.render --check    write nothing; exit status 1 if something would be written

Of each kind of result and label (a file is `DATE_LABEL.json`, its label begins with the kind) the
newest file is shown, and the one before it next to it where it holds times. A plot is drawn anew
when its data have changed; that takes matplotlib (the extra `bench`), nothing else here does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from perf import doc_blocks, origin, plots
from perf.accuracy_sections import accuracy_summary, accuracy_table, agreement
from perf.committed import RESULTS, Results, fewer, read_results
from perf.reading import naming
from perf.sections import (
    ResultFile,
    between_runs,
    demo_table,
    indexer_summary,
    load_table,
    perplexity_table,
    provenance,
    source,
    standing,
    store_summary,
    timed_table,
)
from perf.serving_sections import serving_summary, serving_table
from perf.wording import COPIES, PREFILL, SHAPES, TIMES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, PLOTS, README = "docs/performance.md", "docs/plots", "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_COMMAND = "python -m perf.render"

INTRODUCTION = (
    f"Every number here comes from a file in `{RESULTS}`; `{_COMMAND}` writes this page anew. "
    "[perf/README.md](../perf/README.md) says what is measured and how, "
    "[perf/NOTES.md](../perf/NOTES.md) what was predicted before. All rows of a file are shown, "
    "those that we lose included. Compare rows of one file: other files come from other days and "
    "machines, which each names. A commit that ends in `-dirty` had changes that were not in it; "
    f"where rows recorded their sources, [{origin.FILE}](../{RESULTS}/{origin.FILE}) has those of "
    "the commits, and what differs is said."
)


class Kind(NamedTuple):
    """How a kind of result is shown.

    about, details: what its tables mean; the second for docs/performance.md only. brief: the
    README's table; kinds without one stay out of it. timed: rows of `perf.rows`. between: what two
    files of different labels say about each other.
    """

    name: str
    title: str
    table: Callable[[ResultFile], str]
    about: str = ""
    details: str = ""
    plot: Callable[[ResultFile], plots.Plot | None] | None = None
    brief: Callable[[ResultFile], str] | None = None
    timed: bool = False
    between: Callable[[ResultFile, ResultFile], str] | None = None


def _whole(file: ResultFile) -> str:
    return timed_table(file, details=True)


def _brief(file: ResultFile) -> str:
    return timed_table(file, details=False)


KINDS = (
    Kind(
        name="decode",
        title="Decode",
        table=_whole,
        about=f"{SHAPES} TB/s count each K and V byte that the mask shows once; the read ceiling "
        "is what a reduction of 2 GiB reads in the same process (before that size was recorded: of "
        "the cases' own inputs), and a kernel may read faster. "
        "`of the loader`: of what our kernel's loads alone reach there.",
        details="`min..max`: over the rounds. `1/graph` and `host`: us with one call per graph, "
        "and of the host for an eager call. `error`: relative, against float64.",
        plot=plots.decode,
        brief=_brief,
        timed=True,
    ),
    Kind(
        name="prefill",
        title="Prefill",
        table=_whole,
        about=PREFILL,
        details=f"{SHAPES} `error`: relative, against float64.",
        plot=plots.prefill,
        brief=_brief,
        timed=True,
    ),
    Kind(
        name="store",
        title="Storing new keys and values",
        table=_whole,
        about=COPIES,
        details="`reshape_and_cache` of T tokens, KV heads x head size. `error`: share of the "
        "bytes that differ from the reference.",
        plot=plots.store,
        brief=store_summary,
        timed=True,
    ),
    Kind(
        name="indexer",
        title="The DeepSeek-V4 indexer's fused steps",
        table=_whole,
        about="`fused_indexer_q_rope_quant` (Q, 64 heads of 128) and `compress_norm_rope_insert` "
        "(K, windows of 8 or 128 state rows) of T tokens. Of up to 256 tokens each completes a row "
        f"of K, of more every 4th or 128th. {COPIES}",
        details="`error`: share of the written bytes that differ from the reference.",
        brief=indexer_summary,
        timed=True,
    ),
    Kind(
        name="serving",
        title="Whole serving steps",
        table=serving_table,
        about="Attention and store over all layers of a model on one device, per step of a fixed "
        "trace (`perf/trace.py`): sequences that decode, sequences that verify draft tokens, and "
        "chunks of prompts. Each kind of layer is timed alone and counted as often as it occurs. "
        "A bf16 cache is stored by torch's `index_copy_`.",
        brief=serving_summary,
    ),
    Kind(name="load", title="Loading kernels from a bundle", table=load_table),
    Kind(
        name="accuracy",
        title="Accuracy: real models by KV cache dtype",
        table=accuracy_table,
        about="Against a bf16 cache on the same tokens, +- one standard error, over blocks of "
        "tokens: neighbours are alike, and errors that take them as independent are too small.",
        details="Of greedy tokens the error is over prompts, of embeddings over texts; where none "
        "differs none is shown, which n texts cannot tell from 3 / n. KL: of the next token's "
        "distribution from that with a bf16 cache. Greedy tokens: the mean number, by prompt, "
        "before the first that differs. Error: of the hidden states, relative, behind the last "
        "layer; the plot has all layers. MiniLM is an embedding model: its keys and values go "
        "through the cache's pages, and 1 - cosine is of its embedding.",
        plot=plots.accuracy,
        brief=accuracy_summary,
        between=agreement,
    ),
    Kind(
        name="perplexity",
        title="Perplexity with and without rotated keys",
        table=perplexity_table,
        about="Change against a bf16 cache, +- one standard error of the paired differences over "
        "tokens, taken as independent, so too small; read a change below two as none. By "
        "`perf.perplexity`, of which `perf.accuracy` has taken the place.",
        plot=plots.perplexity,
    ),
    Kind(
        name="demo",
        title="The demo",
        table=demo_table,
        about="What `make demo` reports: perplexity with a bf16 and an FP8 cache (errors take "
        "tokens as independent, so they are too small), and, where it "
        "compared them, the greedy tokens that kernel and torch reference choose alike: `as "
        "reference` at each step from one cache, `leading` with a cache each, until they differ.",
    ),
)


def _plots_of(kind: Kind, file: ResultFile) -> list[plots.Plot]:
    plot = kind.plot(file) if kind.plot else None
    return [plot] if plot else []


def said(results: Results, files: Sequence[ResultFile]) -> str:
    """What a file's tables do not tell: other sources, fewer cases, what someone remarked."""
    remark = results.remarks.get(files[0].path.name, "")
    parts = [origin.told(files[0].rows, results.commits)]
    parts.append(f"**This file has {fewer(files)}.**" if fewer(files) else "")
    return " ".join(part for part in [*parts, remark and f"Remark: {remark}"] if part)


def _section(kind: Kind, files: list[ResultFile], results: Results) -> list[str]:
    """Paragraphs of one label: the newest file, and times against the one before."""
    file, *older = files
    parts = [f"### {file.label}, {file.date}", provenance(file, f"../{RESULTS}")]
    parts.append(said(results, files))
    if kind.timed:
        parts.append(standing(file))
    parts.append(kind.table(file))
    for plot in _plots_of(kind, file):
        folder = Path(PLOTS).name
        parts.append(f"![{file.label}, {file.date}]({folder}/{plot.name})")
    if kind.timed and older:
        parts.append(
            f"Our times in [{older[0].path.name}](../{RESULTS}/{older[0].path.name}) and now, us:"
        )
        parts.append(between_runs(older[0], file))
    return parts


def document(results: Results) -> str:
    """docs/performance.md."""
    parts = [
        f"<!-- Written by `{_COMMAND}`; edit perf/render.py or the results, not this. -->",
        "# Measured performance",
        INTRODUCTION,
        TIMES,
    ]
    shown, found = {results.folder / origin.FILE}, results.files
    for kind in KINDS:
        if found[kind.name]:
            parts += [f"## {kind.title}", f"{kind.about} {kind.details}".strip()]
        for files in found[kind.name]:
            shown.add(files[0].path)
            with naming(files[0].path.name):
                parts += _section(kind, files, results)
                if kind.between is not None:
                    parts += [
                        kind.between(files[0], other[0])
                        for other in found[kind.name]
                        if other[0].label > files[0].label
                    ]
    others = [p for p in sorted(results.folder.iterdir()) if p.is_file() and p not in shown]
    parts += [
        "## Other result files",
        "Earlier runs, and files that other pages cite:",
        "\n".join(f"- [{path.name}](../{RESULTS}/{path.name})" for path in others),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme_region(results: Results) -> str:
    """What stands between BEGIN and END in the README: the main files, in short."""
    parts = [
        f"Written by `{_COMMAND}`; [docs/performance.md](docs/performance.md) has all rows and "
        f"columns, commands, versions and plots.\n\n{TIMES}"
    ]
    for kind in KINDS:
        labels = results.files[kind.name]
        shortest = min((files[0].label.count("_") for files in labels), default=0)
        for files in labels:
            file = files[0]
            if kind.brief is not None and file.label.count("_") == shortest:
                with naming(file.path.name):
                    parts.append(f"**{kind.title}.** {kind.about} {source(file, RESULTS)}.")
                    parts.append(said(results, files))
                    parts.append(kind.brief(file))
                    parts.append(standing(file) if kind.timed else "")
    return "\n\n".join(part for part in parts if part)


def with_region(readme: str, region: str) -> str:
    """The README with its results replaced.

    Raises:
        ValueError: it does not have one BEGIN before one END.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"the README needs one {BEGIN} and one {END}")
    return f"{before}{BEGIN}\n{region}\n{END}{after}"


def texts(root: Path, results: Results) -> dict[str, str]:
    """What the generated files should hold, by path below `root`."""
    with naming(README):
        readme = (root / README).read_text(encoding="utf-8")
        readme = with_region(readme, readme_region(results))
    found = {
        DOCUMENT: document(results),
        README: doc_blocks.with_blocks(README, readme, results.files, root),
        **doc_blocks.pages(root, results.files),
    }
    if results.commits:
        found[f"{RESULTS}/{origin.FILE}"] = json.dumps(results.commits, indent=1) + "\n"
    return found


def all_plots(results: Results) -> list[plots.Plot]:
    """The plots that docs/performance.md shows."""
    found = []
    for kind in KINDS:
        for file, *_ in results.files[kind.name]:
            with naming(file.path.name):
                found += _plots_of(kind, file)
    return found


def stale_texts(root: Path, results: Results) -> dict[str, str]:
    """Texts that are not as the results say."""
    return {
        name: text
        for name, text in texts(root, results).items()
        if not (root / name).exists() or (root / name).read_text(encoding="utf-8") != text
    }


def stale_plots(root: Path, results: Results) -> tuple[list[plots.Plot], list[Path]]:
    """Plots to draw, and files in their folder that no result asks for.

    Raises:
        ValueError: a folder among them, which is left alone.
    """
    wanted, folder = all_plots(results), root / PLOTS
    left = {path.name for path in folder.glob("*")} - {plot.name for plot in wanted}
    if folders := [name for name in sorted(left) if (folder / name).is_dir()]:
        raise ValueError(f"{PLOTS}: {', '.join(folders)} is a folder, no plot")
    return [p for p in wanted if not p.is_current(folder)], [folder / name for name in sorted(left)]


@click.command(help="Write docs/performance.md, its plots and the README's results.")
@click.option("--check", is_flag=True, help="write nothing; exit status 1 if something is stale")
@click.option("--redraw", is_flag=True, help="draw all plots, not only those with other data")
@click.option("--root", default=ROOT, type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(check: bool, redraw: bool, root: Path) -> None:
    try:
        results = read_results(root)
        stale = stale_texts(root, results)
        drawings, left = stale_plots(root, results)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if check:
        names = [*stale, *(f"{PLOTS}/{plot.name}" for plot in drawings)]
        names += [f"{PLOTS}/{path.name}" for path in left]
        if names:
            raise click.ClickException(
                f"not as the results say; run `{_COMMAND}`: {', '.join(names)}"
            )
        return
    for name, text in stale.items():
        (root / name).write_text(text, encoding="utf-8")
        click.echo(f"wrote {name}")
    for path in left:
        path.unlink()
        click.echo(f"removed {PLOTS}/{path.name}")
    for plot in all_plots(results) if redraw else drawings:
        try:
            plot.write(root / PLOTS)
        except ImportError as error:
            raise click.ClickException(f"{PLOTS}/{plot.name} is stale: {error}") from None
        click.echo(f"wrote {PLOTS}/{plot.name}")


if __name__ == "__main__":
    main()
