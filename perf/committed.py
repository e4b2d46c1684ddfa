"""The files in perf/results: `DATE_LABEL.json`, read by kind, with which a label begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from perf import origin
from perf.accuracy_reading import read_accuracy
from perf.reading import (
    BadFile,
    Rows,
    naming,
    read_demo,
    read_json,
    read_load,
    read_perplexity,
    read_rows,
    read_serving,
)
from perf.rows import is_line
from perf.sections import ResultFile

RESULTS = "perf/results"
_NAME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)_(?P<label>(?P<kind>[a-z]+)_\w+)\.json")

READERS: Mapping[str, Callable[[Path], Rows]] = {
    **dict.fromkeys(("decode", "prefill", "store", "indexer"), read_rows),
    "serving": read_serving,
    "load": read_load,
    "accuracy": read_accuracy,
    "perplexity": read_perplexity,
    "demo": read_demo,
}


class Results(NamedTuple):
    """What a folder holds. files: by kind, label by label, the newest first. remarks: by file.
    commits: see `perf.origin`."""

    folder: Path
    files: dict[str, list[list[ResultFile]]]
    remarks: dict[str, str]
    commits: dict[str, str]


def check_date(file: ResultFile) -> None:
    """The newest file of a label is shown: its name's date must be that of its rows, or that of the
    day before, when a run of several began.

    Raises:
        ValueError: it is not.
    """
    day = date.fromisoformat(file.date)
    for row in file.rows:
        if "date" in row and not 0 <= (date.fromisoformat(row["date"][:10]) - day).days <= 1:
            raise ValueError(f"{file.path.name}: a row of {row['date']}")


def size(rows: Rows) -> int:
    """How many cases, or rows of kinds without cases, there are."""
    return len({row["case"] if "case" in row else index for index, row in enumerate(rows)})


def fewer(files: Sequence[ResultFile]) -> str:
    """What the newest file lacks that the one before has, in words."""
    counts = [size(file.rows) for file in files[:2]]
    if len(counts) < 2 or counts[0] >= counts[1]:
        return ""
    return f"{counts[0]} cases or rows, {files[1].path.name} has {counts[1]}"


def read_remarks(folder: Path) -> dict[str, str]:
    """What whoever measured has to say about files that their rows cannot tell.

    Raises:
        BadFile: it is about no file, or no line of text.
    """
    path = folder / "remarks.json"
    if not path.exists():
        return {}
    with naming(path.name):
        remarks = dict(read_json(path))
        for name, remark in remarks.items():
            if not is_line(remark) or not (folder / name).is_file():
                raise ValueError(f"{name!r}: {remark!r} is about no file, or no line")
    return remarks


def find(
    folder: Path, remarks: Mapping[str, str] | None = None
) -> dict[str, list[list[ResultFile]]]:
    """Files of each kind by label, newest first, short labels first.

    Args:
        remarks: by file; None: the folder's.

    Raises:
        BadFile: a result file that its reader refuses, or `check_date` does; a newest file that has
            fewer cases than the one before and no remark that says why.
    """
    found: dict[str, dict[str, list[ResultFile]]] = {name: {} for name in READERS}
    remarks = read_remarks(folder) if remarks is None else remarks
    for path in sorted(folder.glob("*.json"), reverse=True):
        name = _NAME.fullmatch(path.name)
        if name and name["kind"] in READERS:
            rows = READERS[name["kind"]](path)
            file = ResultFile(path, name["kind"], name["label"], name["date"], rows)
            with naming(path.name):
                check_date(file)
            found[name["kind"]].setdefault(name["label"], []).append(file)
    for files in (files for labels in found.values() for files in labels.values()):
        name = files[0].path.name
        if fewer(files) and name not in remarks:
            how = "give it another label, or say in remarks.json why"
            raise BadFile(f"{name}: {fewer(files)}; {how}")
    return {
        kind: sorted(labels.values(), key=lambda files: (files[0].label.count("_"), files[0].label))
        for kind, labels in found.items()
    }


def newest(folder: Path, file: Path, other: bool = False) -> Path | None:
    """The newest file of a file's label, by its name.

    Args:
        other: not this file itself.
    """
    label = file.stem.partition("_")[2]
    for path in sorted(folder.glob(f"*_{label}.json"), reverse=True):
        name = _NAME.fullmatch(path.name)
        if name and name["label"] == label and not (other and path.resolve() == file.resolve()):
            return path
    return None


def read_results(root: Path) -> Results:
    """What is in a tree's results.

    Raises:
        BadFile: as `find`; a file of remarks or commits that is none.
    """
    folder = root / RESULTS
    remarks = read_remarks(folder)
    files = find(folder, remarks)
    shown = (row for labels in files.values() for file, *_ in labels for row in file.rows)
    commits = origin.commits_of(root, folder, shown)
    return Results(folder, files, remarks, commits)
