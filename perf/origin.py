"""Whether what ran was the commit that a row names.

A commit is typed in where there is no git repository, and a tree that was packed for another host
may lack files. Rows have the SHA-256 of their sources (`perf.rows.sources`); `commits.json`, beside
the results, has those of the commits' own trees. `perf.render` writes it, and compares it with the
repository where that knows the commit: a shallow clone may not.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perf.reading import naming, read_json
from perf.rows import DIRTY, SOURCE_FOLDERS, sources

FILE = "commits.json"
Row = Mapping[str, Any]
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def sources_of(root: Path, commit: str) -> str | None:
    """`perf.rows.sources` of a commit's tree; None where the repository of `root` lacks it."""
    if not _COMMIT.fullmatch(commit):
        return None
    paths = (*SOURCE_FOLDERS, ":(exclude)perf/results")
    command = ("git", "-C", str(root), "archive", "--format=tar", commit, "--", *paths)
    try:
        archive = subprocess.run(command, capture_output=True, timeout=60)
        if archive.returncode:
            return None
        with TemporaryDirectory() as folder:
            subprocess.run(("tar", "-x", "-C", folder), input=archive.stdout, check=True)
            return sources(Path(folder))
    except (OSError, subprocess.SubprocessError):
        return None


def commits_of(root: Path, folder: Path, rows: Iterable[Row]) -> dict[str, str]:
    """Sources of the commits that rows name, those with changes aside: the repository's, else
    those of the file in `folder`; without those that neither knows.

    Raises:
        BadFile: the file is none.
    """
    path = folder / FILE
    with naming(FILE):
        stored = dict(read_json(path)) if path.exists() else {}
    named = {
        row["commit"] for row in rows if "sources" in row and not row["commit"].endswith(DIRTY)
    }
    found = {commit: sources_of(root, commit) or stored.get(commit) for commit in sorted(named)}
    return {commit: known for commit, known in found.items() if known}


def told(rows: Iterable[Row], commits: Mapping[str, str]) -> str:
    """What must be known of the code behind some rows; "" where it was that of their commit, and
    of rows that do not say."""
    lines: dict[str, None] = {}
    for row in rows:
        commit, ran = row.get("commit", ""), row.get("sources")
        if commit.endswith(DIRTY):
            clean = commit.removesuffix(DIRTY)
            lines[f"**There were changes that commit {clean[:12]} does not have.**"] = None
        elif ran and commit not in commits:
            lines[f"It is not known whether the sources were those of {commit[:12]}."] = None
        elif ran and commits[commit] != ran:
            both = zip(ran.split(", "), commits[commit].split(", "), strict=False)
            apart = "; ".join(f"{a}, the commit's {b}" for a, b in both if a != b)
            lines[f"**The sources are not those of commit {commit[:12]}**: {apart}."] = None
    return " ".join(lines)
