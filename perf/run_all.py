"""Every measurement of this project, one after the other, and whether it agrees with the committed.

    python -m perf.run_all                              all of it, into build/results
    python -m perf.run_all --out DIR --model-dir DIR    DATE_LABEL_CARD.json files there; the models
    python -m perf.run_all --out perf/results --only store --only serving
    python -m perf.run_all --out DIR --dry-run          the commands, and run none

Each measurement is a process of its own, which a failure of another does not touch and which is
ended when its time is up (`--limit`); its rows are written as they come, so a file has those that
were done. Those with times are then compared with the newest committed file of their label
(`perf.compare`, on the same card; driver and versions may differ and are printed). The exit status
is 1 where a measurement failed or a time was not within `--within`.

`python -m perf.render` makes the pages and plots from what is in perf/results.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from perf import render

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = "bundle"


@dataclass(frozen=True)
class Measurement:
    """kind: as in `perf.render`, the label's beginning. output: the option that takes the file.

    limit: seconds, some times what it takes. suffix: of the label, where a kind has several.
    timed: its rows can be compared. commit: it takes --commit. bundle: it runs from a bundle of all
    kernels. models: it reads the demo's models, and takes --model-dir.
    """

    kind: str
    module: str
    limit: int
    arguments: tuple[str, ...] = ()
    suffix: str = ""
    output: str = "--json"
    timed: bool = True
    commit: bool = True
    bundle: bool = False
    models: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.suffix}" if self.suffix else self.kind

    def command(self, file: Path, commit: str | None, model_dir: Path | None) -> list[str]:
        found = [sys.executable, "-m", self.module, *self.arguments, self.output, str(file)]
        if commit and self.commit:
            found += ["--commit", commit]
        if model_dir is not None and self.models:
            found += ["--model-dir", str(model_dir)]
        return found


SDPA = tuple(f"--providers={name}" for name in ("cute_kernels", "torch_sdpa", "triton_baseline"))
MEASUREMENTS = (
    Measurement("decode", "perf.bench_decode", 600, ("--all",)),
    Measurement("prefill", "perf.bench_prefill", 300),
    Measurement("store", "perf.bench_store", 600),
    Measurement("indexer", "perf.bench_indexer", 600),
    Measurement("serving", "perf.bench_serving", 900, ("--steps", "2", "--rounds", "5")),
    Measurement(
        "load", "perf.bench_load", 600, output="--out", timed=False, commit=False, bundle=True
    ),
    Measurement("accuracy", "perf.accuracy", 900, ("--device", "cuda"), timed=False, models=True),
    Measurement(
        "decode",
        "perf.bench_decode",
        300,
        (
            "--cases",
            "B64 S8192 16/1 D128",
            "--rounds",
            "5",
            *SDPA,
        ),
        suffix="sdpa",
    ),
    *(
        Measurement(
            "demo",
            "demo",
            300,
            ("--model", model, "--compare-reference"),
            suffix=model.split("-")[0],
            timed=False,
            commit=False,
            models=True,
        )
        for model in ("smollm2", "gemma3-270m")
    ),
)


def card() -> str:
    """The GPU in a file name: "h200" of "NVIDIA H200"."""
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return "_".join(word for word in words if word != "nvidia")


def committed(kind: str, label: str, new: Path) -> Path | None:
    """The newest committed file of a label, `new` aside."""
    for files in render.find(ROOT / render.RESULTS)[kind]:
        for file in files:
            if file.label == label and file.path.resolve() != new.resolve():
                return file.path
    return None


def comparison(old: Path, new: Path, within: float) -> list[str]:
    """A command that puts our times in two runs side by side."""
    allowed = ("--allow", "driver", "--allow", "versions", "--within", f"{within:g}")
    return [sys.executable, "-m", "perf.compare", str(old), str(new), *allowed]


def run(command: Sequence[str], limit: int | None = None, bundle: Path | None = None) -> str:
    """Run from the repository's root, its output on ours; what went wrong, "" if nothing did.

    After `limit` seconds the process and all that it started are ended.
    """
    click.echo(f"$ {shlex.join(command)}")
    sys.stdout.flush()
    environment = dict(os.environ)
    if bundle is not None:
        environment["CUTE_KERNELS_BUNDLE"] = str(bundle)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"not done after {limit} s"
    finally:
        if process.poll() is None:  # also where this process is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


def rows_in(file: Path) -> str:
    """How many rows of a measurement that failed there are, in words."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no rows"
    return f"{len(found)} rows are there" if isinstance(found, list) else "its file is there"


def measure(
    what: Measurement,
    file: Path,
    commit: str | None,
    model_dir: Path | None,
    within: float,
    limit: int,
) -> str:
    """Run one measurement and its comparison; what is wrong, "" if nothing is."""
    bundle = None
    if what.bundle:
        bundle = file.parent / BUNDLE
        build = [sys.executable, "-m", "cute_kernels.compile.build"]
        build += ["--target", "sm_90a", "--out", str(bundle)]
        if problem := run(build, limit):
            return f"the bundle could not be built: {problem}"
    if problem := run(what.command(file, commit, model_dir), limit, bundle):
        return f"failed: {problem}; {rows_in(file)}"
    old = committed(what.kind, file.stem.partition("_")[2], file) if what.timed else None
    if old is not None and run(comparison(old, file, within)):
        return f"not as {old.name}"
    return ""


@click.command(context_settings={"show_default": True}, help=(__doc__ or "").split("\n")[0])
@click.option(
    "--out",
    default=ROOT / "build" / "results",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the result files.",
)
@click.option(
    "--only", multiple=True, type=click.Choice([m.name for m in MEASUREMENTS]), help="Not all."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="Most seconds of a measurement, where that is less than its own limit.",
)
@click.option("--within", type=click.FloatRange(min=0), default=5.0, help="Percent, of times.")
@click.option(
    "--model-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With the models of perf.accuracy; without it, installed packages have them.",
)
@click.option("--commit", help="What to record where there is no git repository.")
@click.option("--dry-run", is_flag=True)
def main(
    out: Path,
    only: tuple[str, ...],
    within: float,
    limit: int | None,
    model_dir: Path | None,
    commit: str | None,
    dry_run: bool,
) -> None:
    if not dry_run and not torch.cuda.is_available():
        raise click.ClickException("the measurements need a CUDA device")
    name = "card" if dry_run else card()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    chosen = [m for m in MEASUREMENTS if not only or m.name in only]
    files = {m: out.resolve() / f"{date}_{m.name}_{name}.json" for m in chosen}
    if dry_run:
        for what, file in files.items():
            click.echo(shlex.join(what.command(file, commit, model_dir)))
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for what, file in files.items():
        start = time.monotonic()
        bound = min(what.limit, limit or what.limit)
        problem = measure(what, file, commit, model_dir, within, bound)
        lines.append((what.name, f"{time.monotonic() - start:.0f} s", problem))
    for label, seconds, problem in lines:
        click.echo(f"{label:12} {seconds:>7}  {problem or 'ok'}")
    if any(problem for *_, problem in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
