"""Markdown of result files: one table a file, with where and by which command it was measured.

Nothing here measures or rounds towards a claim: a ratio is `perf.compare.compare` of two rows of
one run, which raises where their workloads differ, and every row of a file gets its line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from demo.report import MAX_PERPLEXITY_CHANGE
from perf import bench_load, ceilings
from perf.compare import (
    MACHINE,
    Differences,
    NotComparable,
    Row,
    WithoutTime,
    compare,
    in_words,
    pairs,
    unpaired,
)
from perf.report import absent_providers, by_case
from perf.rivals import MARKS, ratio_title, rivals, tuning_in_words, tunings
from perf.rows import OK
from perf.targets import OURS, tflops, verdicts

# Two times closer than this are a tie: runs of one kernel differ by as much.
TIE = 0.01
BASELINE = "bf16"  # of perplexities
FEW = 3  # of what differs between two devices, case by case
IN_L2 = "`L2`: of calls whose inputs and outputs, all sets together, fit in the L2 cache."
CEILING = {"decode": "read ceiling", "store": "copy", "indexer": "copy"}


class ResultFile(NamedTuple):
    """A committed file. label: its name without date and suffix; rows: as its reader gave them."""

    path: Path
    kind: str
    label: str
    date: str
    rows: list[dict[str, Any]]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; columns without any content are left out."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    used = [i for i in range(len(header)) if any(line[i] for line in lines)]
    header, lines = [header[i] for i in used], [[line[i] for i in used] for line in lines]
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows)


def number(value: float | None) -> str:
    """Three or four significant digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speedup(theirs: Row, ours: Row) -> str:
    """How many times our time theirs is; bold where we lose."""
    factor = compare(theirs, ours, one_run=True).speedup
    return f"**{factor:.2f}**" if factor < 1 - TIE else f"{factor:.2f}"


def targets_of(row: Row, rows: Sequence[Row]) -> str:
    return ", ".join(
        f"{verdict.wanted}: {'met' if verdict.met else '**missed**'}"
        for verdict in verdicts(row, rows)
    )


def _ours(group: Sequence[Row]) -> Row | None:
    return next((row for row in group if row["provider"] == OURS), None)


def _rival_cells(name: str, group: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Time and ratio of a rival in one case."""
    row = next((row for row in group if row["provider"] == name), None)
    if row is None or row["status"] != OK:
        return [row["status"].split(":")[0] if row else "", ""]
    ours, ratio = _ours(group), ""
    if ours and ours["status"] == OK:
        mark = MARKS.get(row.get("tuning"), "") if len(tunings(name, rows)) > 1 else ""
        ratio = speedup(row, ours) + mark
    return [number(row["median_us"]), ratio]


def _figures(kind: str, rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Columns of our own rows by title, behind the time."""
    if kind == "prefill":
        return {"TFLOP/s": lambda row: f"{tflops(row):.0f}"}
    moving = {} if kind == "decode" else {"MB rotated": ceilings.rotated}
    return moving | {
        "TB/s": lambda row: f"{row['tb_per_s']:.3g}",
        f"of the {CEILING[kind]}": lambda row: ceilings.in_words(row, rows),
        "of the loader": lambda row: f"{row['pct_of_loader']:.0f} %" if "loader_us" in row else "",
    }


def _details() -> dict[str, Callable[[Row], str]]:
    return {
        "min..max": lambda row: f"{number(row['min_us'])}..{number(row['max_us'])}",
        "1/graph": lambda row: number(row["single_call_us"]),
        "host": lambda row: number(row["host_us"]),
        "error": lambda row: f"{row['rel_error']:.1e}",
    }


def timed_table(file: ResultFile, details: bool) -> str:
    """A line a case: our time and figures, each rival's time and ratio, the targets."""
    figures, names = _figures(file.kind, file.rows), rivals(file.rows)
    if details:
        figures = {**_details(), **figures}
    header = ["case", "us", *figures]
    for name in names:
        header += [f"{name} us", ratio_title(name, file.rows)]
    lines = []
    for case, group in by_case(file.rows).items():
        ours = _ours(group)
        if ours is None or ours["status"] != OK:
            own = [ours["status"].split(":")[0] if ours else "not run", *[""] * len(figures)]
            wanted = ""
        else:
            own = [number(ours["median_us"]), *(figure(ours) for figure in figures.values())]
            wanted = targets_of(ours, file.rows)
        others = [cell for name in names for cell in _rival_cells(name, group, file.rows)]
        lines.append([case, *own, *others, wanted])
    return markdown([*header, "target"], lines)


def standing(file: ResultFile) -> str:
    """In one paragraph: won, tied and lost cases against each rival, targets met, who is absent."""
    sentences = []
    for name in rivals(file.rows):
        factors = []
        for group in by_case(file.rows).values():
            ours = _ours(group)
            theirs = next((row for row in group if row["provider"] == name), None)
            if ours and theirs and ours["status"] == theirs["status"] == OK:
                factors.append(compare(theirs, ours, one_run=True).speedup)
        won, lost = (sum(f > 1 + TIE for f in factors), sum(f < 1 - TIE for f in factors))
        tied = len(factors) - won - lost
        sentences.append(
            f"Against `{name}`{tuning_in_words(name, file.rows)}: faster in {won} of "
            f"{len(factors)} cases, within {100 * TIE:g} % in {tied}, slower in {lost}."
        )
    found = [verdict for row in file.rows for verdict in verdicts(row, file.rows)]
    if found:
        sentences.append(f"Targets met: {sum(v.met for v in found)} of {len(found)}.")
    if file.kind != "prefill":
        timed = [row for row in file.rows if row["provider"] == OURS and row["status"] == OK]
        high = [row["case"] for row in timed if ceilings.share(row, file.rows) > ceilings.ABOVE]
        if high:
            cases = ", ".join(high)
            sentences.append(f"Above their ceilings, which are then too low: {cases}.")
    for name, status in absent_providers(file.rows).items():
        if name not in rivals(file.rows):
            sentences.append(f"`{name}`: {status}.")
    for row in file.rows:
        if row["status"].startswith(("wrong", "failed")):
            sentences.append(f"`{row['provider']}` at {row['case']}: {row['status']}.")
    return " ".join(sentences)


def _values(file: ResultFile, name: str) -> list[str]:
    """What the rows say about a field, each once."""
    return list(dict.fromkeys(str(row[name]) for row in file.rows if name in row))


def short(commit: str) -> str:
    """The first 12 digits, and whether there were other changes."""
    digits, dash, rest = commit.partition("-")
    return digits[:12] + dash + rest


def source(file: ResultFile, folder: str) -> str:
    """File, device, commit and date in short; `folder` leads to the results."""
    devices = _values(file, "gpu") or _values(file, "device")
    commits = [f"commit {short(commit)}" for commit in _values(file, "commit")]
    link = f"[{file.path.name}]({folder}/{file.path.name})"
    return ", ".join([*devices, *commits, file.date, link])


def provenance(file: ResultFile, folder: str) -> str:
    """File, card, driver, versions, commit, date and command; `folder` leads to the results."""
    versions = dict.fromkeys(
        ", ".join(f"{name} {number}" for name, number in row.get("versions", {}).items())
        for row in file.rows
    )
    facts = [
        ("", [f"[{file.path.name}]({folder}/{file.path.name})"]),
        ("", _values(file, "gpu") or _values(file, "device")),
        ("driver ", _values(file, "driver")),
        ("", _values(file, "clocks")),
        ("", list(versions)),
        ("commit ", _values(file, "commit") or ["not recorded"]),
        ("", _values(file, "date") or [file.date]),
    ]
    line = "; ".join(title + " and ".join(found) for title, found in facts if found)
    commands = ", ".join(f"`{command}`" for command in _values(file, "command"))
    return f"{line}. Command: {commands or 'not recorded'}."


def between_runs(old: ResultFile, new: ResultFile) -> str:
    """Our times in the file before and in the newest one, case by case, or why not."""
    alone = ", ".join(unpaired((old.rows, new.rows), OURS))
    lines, notes = [], [f"In one run only: {alone}."] if alone else []
    machines: Differences = {}
    states: dict[str, None] = {}
    refused: dict[str, list[str]] = {}
    for was, row in pairs((old.rows, new.rows), OURS):
        try:
            both = compare(was, row, MACHINE)
        except NotComparable as error:
            refused.setdefault(str(error).removeprefix(f"{row['case']}: "), []).append(row["case"])
            continue
        except WithoutTime as error:
            notes.append(f"Refused: {error}.")
            continue
        machines |= both.machines
        if both.state:
            states[in_words(both.state)] = None
        times = [number(was["median_us"]), number(row["median_us"]), f"{both.speedup:.2f}"]
        lines.append([row["case"], *times])
    notes.insert(0, f"The machines differ in: {in_words(machines) or 'nothing recorded'}.")
    notes += [f"Refused: {', '.join(cases)}: {reason}." for reason, cases in refused.items()]
    if states:
        more = f" and {len(states) - FEW} more" if len(states) > FEW else ""
        some = " and ".join(list(states)[:FEW])
        notes.insert(1, f"The devices reached other ceilings: {some}{more}.")
    commits = [
        " and ".join(dict.fromkeys(short(row["commit"]) for row in f.rows)) for f in (old, new)
    ]
    header = ["case", *(f"{commit}, us" for commit in commits), "times faster"]
    return markdown(header, lines) + "\n\n" + " ".join(notes)


def load_table(file: ResultFile) -> str:
    """Over all kernels of a file: median and worst against the targets."""
    targets = {
        "load_ms": bench_load.LOAD_TARGET_MS,
        "first_call_extra_ms": bench_load.FIRST_CALL_TARGET_MS,
        "later_call_ms": None,
    }
    titles = ("loading", "first call, beyond a later one", "later call, host and device")
    lines = []
    for title, (column, bound) in zip(titles, targets.items(), strict=True):
        found = [row[column] for row in file.rows]
        figures = [f"{value:.2f}" for value in (statistics.median(found), max(found))]
        late = sum(value > bound for value in found) if bound else 0
        wanted = f"<= {bound:g}: " + (f"**missed** by {late}" if late else "met") if bound else ""
        lines.append([title, *figures, wanted])
    first = file.rows[0]["first_of_process"]["load_ms"]
    table = markdown([f"ms, {len(file.rows)} kernels", "median", "worst", "target"], lines)
    return (
        f"{table}\n\nThe first kernel of a process, with what a process does once: {first:.0f} ms."
    )


def _change(row: Row) -> str:
    return f"{100 * row['change']:+.2f} % +- {100 * row['change_standard_error']:.2f}"


def perplexity_table(file: ResultFile) -> str:
    """A line a model and KV cache dtype; keys as they are and rotated side by side."""
    header = ["model", "tokens", "KV cache", "scales", "bytes/token", "perplexity", "change"]
    lines = []
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in file.rows:
        groups.setdefault((row["model"], row["kv_cache_dtype"], row["scales"]), []).append(row)
    for (model, dtype, scales), rows in groups.items():
        base = dtype == BASELINE
        cells = [model, f"{rows[0]['tokens']:,}", f"`{dtype}`", "" if base else scales]
        cells.append(str(rows[0]["bytes_per_token_and_layer"]))
        for rotated in (False, True):
            row = next((row for row in rows if row["rotate_keys"] == rotated), None)
            cells.append(f"{row['perplexity']:.3f}" if row else "")
            cells.append("" if row is None or base else _change(row))
        lines.append(cells)
    return markdown([*header, "perplexity, keys rotated", "change, keys rotated"], lines)


def store_summary(file: ResultFile) -> str:
    """A line a number of tokens, a column a dtype: us, share of the copy, ratio to each rival."""
    return _summary(
        file,
        ("tokens", "KV heads x head size"),
        lambda row: (f"{row['batch']:,}", f"{row['num_kv_heads']} x {row['head_size']}"),
    )


def indexer_summary(file: ResultFile) -> str:
    """A line a step and number of tokens, a column a format: as `store_summary`."""

    def about(row: Row) -> tuple[str, str]:
        what = f"K, {row['window']} state rows" if row["window"] else "Q"
        return what, f"{row['batch']:,}"

    return _summary(file, ("step", "tokens"), about)


def _summary(
    file: ResultFile, titles: tuple[str, ...], about: Callable[[Row], tuple[str, ...]]
) -> str:
    dtypes = list(dict.fromkeys(row["kv_cache_dtype"] for row in file.rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for group in by_case(file.rows).values():
        ours = _ours(group)
        if ours is None:
            continue
        cell = ours["status"].split(":")[0]
        if ours["status"] == OK:
            ratios = [_rival_cells(name, group, file.rows)[1] for name in rivals(file.rows)]
            time = number(ours["median_us"]) + (" L2" if ceilings.fits_in_l2(ours) else "")
            parts = [time, ceilings.in_words(ours, file.rows), *ratios]
            cell = ", ".join(part for part in parts if part)
        lines.setdefault(about(ours), {})[ours["kv_cache_dtype"]] = cell
    table = markdown(
        [*titles, *(f"`{dtype}`" for dtype in dtypes)],
        ([*line, *(cells.get(dtype, "") for dtype in dtypes)] for line, cells in lines.items()),
    )
    against = "".join(
        f", ratio to `{name}`{tuning_in_words(name, file.rows)}" for name in rivals(file.rows)
    )
    return f"Cells: us, share of the copy's rate{against}. {IN_L2}\n\n{table}"


def demo_table(file: ResultFile) -> str:
    """A line a run of the demo; where it compared kernel and reference, tokens that both choose."""
    header = ["model", "attention", "keys", "tokens", "bf16 KV", "fp8 KV", "change"]
    lines = []
    for row in file.rows:
        speed, bound = row.get("tokens_per_second"), 100 * MAX_PERPLEXITY_CHANGE
        choices, equal = row.get("choices"), row.get("comparison")
        met = abs(row["change"]) <= MAX_PERPLEXITY_CHANGE + row["change_standard_error"]
        lines.append(
            [
                row["model"],
                f"{row['attention']}, {row['device']}",
                "rotated" if row["rotate_keys"] else "",
                f"{row['tokens']:,}",
                f"{row['perplexity_bf16']:.3f}",
                f"{row['perplexity_fp8']:.3f}",
                _change(row),
                f"{row['cache_bytes_fp8'] / row['cache_bytes_bf16']:.2f}",
                "" if speed is None else f"{speed:.1f}",
                f"{choices['equal']} of {choices['steps']}" if choices else "",
                f"{equal['equal_tokens']} of {len(row['token_ids'])}" if equal else "",
                f"<= {bound:g} % and one standard error: {'met' if met else '**missed**'}",
            ]
        )
    return markdown(
        [*header, "KV bytes, fp8/bf16", "tokens/s", "as reference", "leading", "target"], lines
    )
