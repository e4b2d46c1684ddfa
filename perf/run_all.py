"""Every measurement of this project, one after the other, and whether it agrees with the committed.

    python -m perf.run_all                              all of it, into build/results
    python -m perf.run_all --out DIR --model-dir DIR    DATE_LABEL_CARD.json files there; the models
    python -m perf.run_all --out perf/results --only store --only serving
    python -m perf.run_all --out DIR --total 230        what fits, in the order of `--list`
    python -m perf.run_all --out DIR --dry-run          the commands, and run none

Each measurement is a process of its own, which a failure of another does not touch and which is
ended when its time is up (`--limit`); its rows are written as they come into a file in
DIR/unchecked. Those with times are then compared with the newest committed file of their label
(`perf.compare`, on the same card and clocks; driver, versions and rounds may differ and are
printed). A file that is whole goes to DIR; one that is not, or that would take the place of another
with which it does not agree, stays where it is. The exit status is 1 where a measurement failed,
did not begin, has fewer rows than before, or a time was not within `--within`.

Kernels come from a bundle, so that none is compiled while it is measured: that of `--bundle`, that
of CUTE_KERNELS_BUNDLE, or one that is built first (`perf.bundle`; 7 minutes on two cores). With one
the CuTe DSL need not be installed.

`python -m perf.render` makes the pages and plots from what is in perf/results.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from perf import committed
from perf.reading import BadFile

ROOT = Path(__file__).resolve().parents[1]
BUNDLE, BUNDLE_VARIABLE, BUNDLE_LIMIT = "bundle", "CUTE_KERNELS_BUNDLE", 1200
UNCHECKED = "unchecked"
# The least that is worth beginning with, seconds.
LEAST = 10


class Given(NamedTuple):
    """What is passed on to the measurements that take it."""

    commit: str | None = None
    model_dir: Path | None = None
    text: Path | None = None
    ids: Path | None = None


@dataclass(frozen=True)
class Measurement:
    """kind: as in `perf.render`, the label's beginning. output: the option that takes the file.

    limit: seconds, some times what it takes. suffix: of the name, where a kind has several; each
    has a file of its own, but for parts, which add to the kind's. timed: its rows can be compared.
    commit: it takes --commit. models: it reads the demo's models, and takes --model-dir. text: it
    takes --text and --ids.
    """

    kind: str
    module: str
    limit: int
    arguments: tuple[str, ...] = ()
    suffix: str = ""
    output: str = "--json"
    timed: bool = True
    commit: bool = True
    models: bool = False
    text: bool = False
    part: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.suffix}" if self.suffix else self.kind

    @property
    def label(self) -> str:
        return self.kind if self.part else self.name

    @property
    def model(self) -> str | None:
        """Whose rows a part adds; None of what makes a whole file."""
        return self.arguments[self.arguments.index("--model") + 1] if self.part else None

    def command(self, file: Path, given: Given) -> list[str]:
        found = [sys.executable, "-m", self.module, *self.arguments, self.output, str(file)]
        wanted = (self.commit, self.models, self.text, self.text)
        for wants, (name, value) in zip(wanted, given._asdict().items(), strict=True):
            if wants and value:
                found += [f"--{name.replace('_', '-')}", str(value)]
        return found


def _providers(*names: str) -> tuple[str, ...]:
    return tuple(f"--providers={name}" for name in names)


def _cases(*names: str) -> tuple[str, ...]:
    return tuple(f"--cases={name}" for name in names)


OURS, BASELINE, FLEX = "cute_kernels", "triton_baseline", "torch_flex_attention"
PEERS = (FLEX, "torch_sdpa", "vllm_triton", "vllm_fa4", "flashinfer_xqa", "flashinfer_fa2")
# A case a head size and one of few sequences: peers compile for each.
COMPARED = (
    "B32 S8192 64/8 D128",
    "B8 S8192 32/4 D512",
    "B64 S8192 32/16 D256 w1024",
    "B1 S32768 64/8 D128",
    "B32 S8192 64/8 D64",
)
MODELS = ("smollm2", "gemma3-270m", "minilm")
# What matters most comes first: `--total` may end before the last.
MEASUREMENTS = (
    Measurement(
        "decode", "perf.bench_decode", 150, ("--group=fp8", "--group=nvfp4", "--group=bf16")
    ),
    Measurement("serving", "perf.bench_serving", 200, ("--steps", "6", "--rounds", "6")),
    Measurement("prefill", "perf.bench_prefill", 90),
    Measurement(
        "decode",
        "perf.bench_decode",
        200,
        (
            "--one-scale",
            *_cases(*COMPARED, *(f"{name} bf16" for name in COMPARED)),
            *_providers(OURS, BASELINE, *PEERS),
        ),
        suffix="peers",
    ),
    Measurement(
        "decode", "perf.bench_decode", 150, ("--group=ragged", "--group=verify"), suffix="ragged"
    ),
    Measurement("indexer", "perf.bench_indexer", 150),
    Measurement("store", "perf.bench_store", 90),
    Measurement(
        "decode",
        "perf.bench_decode",
        60,
        ("--group=fp8", *_providers(OURS, f"{OURS}_deterministic")),
        suffix="deterministic",
    ),
    Measurement("load", "perf.bench_load", 90, output="--out", timed=False, commit=False),
    Measurement(
        "prefill",
        "perf.bench_prefill",
        150,
        (*_cases("q8192 bf16"), *_providers(OURS, FLEX)),
        suffix="flex",
    ),
    *(
        Measurement(
            "accuracy",
            "perf.accuracy",
            240,
            ("--device", "cuda", "--model", model),
            suffix=model.split("-")[0],
            timed=False,
            models=True,
            text=True,
            part=True,
        )
        for model in MODELS
    ),
    *(
        Measurement(
            "demo",
            "demo",
            240,
            ("--model", model, "--compare-reference"),
            suffix=model.split("-")[0],
            timed=False,
            commit=False,
            models=True,
        )
        for model in MODELS[:2]
    ),
)


def card() -> str:
    """The GPU in a file name: "h200" of "NVIDIA H200"."""
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return "_".join(word for word in words if word != "nvidia")


def comparison(old: Path, new: Path, within: float) -> list[str]:
    """A command that puts our times in two runs side by side."""
    allowed = [f"--allow={name}" for name in ("driver", "versions", "rounds")]
    command = [sys.executable, "-m", "perf.compare", str(old), str(new)]
    return [*command, *allowed, "--within", f"{within:g}"]


def run(command: Sequence[str], limit: int | None = None, bundle: Path | None = None) -> str:
    """Run from the repository's root, its output on ours; what went wrong, "" if nothing did.

    After `limit` seconds the process and all that it started are ended.
    """
    click.echo(f"$ {shlex.join(command)}")
    sys.stdout.flush()
    environment = dict(os.environ)
    if bundle is not None:
        environment[BUNDLE_VARIABLE] = str(bundle)
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
    rows = f"{len(found)} rows are" if isinstance(found, list) else "its file is"
    return f"{rows} in {file.parent.name}/{file.name}"


def what_is_missing(what: Measurement, file: Path, old: Path | None) -> str:
    """Why a file is not whole: it cannot be read, or has fewer cases or rows than the old one has;
    of a part's model. "" if it is."""
    counts = []
    for path in (file, old or file):
        try:
            rows = committed.READERS[what.kind](path)
        except BadFile as error:
            return str(error)
        counts.append(committed.size([r for r in rows if what.model in (None, r.get("model"))]))
    if not counts[0] or counts[0] < counts[1]:
        return f"{counts[0]} cases or rows" + (f", {old.name} has {counts[1]}" if old else "")
    return ""


def measure(
    what: Measurement, file: Path, given: Given, within: float, limit: int, bundle: Path | None
) -> str:
    """Run one measurement and its comparison; what is wrong, "" if nothing is. What is there under
    the file's name stays until what takes its place is whole, and agrees with it."""
    new = file.parent / UNCHECKED / file.name.replace(what.label, what.name, 1)
    new.parent.mkdir(exist_ok=True)
    new.unlink(missing_ok=True)
    if what.part and file.exists():
        shutil.copy(file, new)
    old = committed.newest(ROOT / committed.RESULTS, file, other=what.part)
    if problem := run(what.command(new, given), limit, bundle):
        return f"failed: {problem}; {rows_in(new)}"
    if problem := what_is_missing(what, new, old):
        return f"not whole: {problem}; {rows_in(new)}"
    agrees = old is None or not what.timed or not run(comparison(old, new, within))
    if agrees or not file.exists():
        new.replace(file)
        return "" if agrees else f"not as {old.name}"
    return f"not as {old.name}, which stays; {rows_in(new)}"


def measure_all(
    files: Mapping[Measurement, Path],
    given: Given,
    within: float,
    limit: int | None,
    total: int | None,
    bundle: Path | None,
) -> list[tuple[str, str, str]]:
    """Name, seconds and problem of each measurement; the last ones do not begin where `total`
    seconds are over."""
    lines = []
    end = math.inf if total is None else time.monotonic() + total
    for what, file in files.items():
        start = time.monotonic()
        bound = min(what.limit, limit or what.limit, end - start)
        problem = "not run: no time left"
        if bound >= min(LEAST, limit or LEAST):
            problem = measure(what, file, given, within, math.ceil(bound), bundle)
        lines.append((what.name, f"{time.monotonic() - start:.0f} s", problem))
    return lines


def find_bundle(out: Path, bundle: Path | None) -> Path | None:
    """The bundle to run from; None where the environment names one.

    Raises:
        ClickException: none is named, and none could be built.
    """
    if bundle is not None or os.environ.get(BUNDLE_VARIABLE):
        return bundle
    build = [sys.executable, "-m", "perf.bundle", "--out", str(out / BUNDLE)]
    if problem := run(build, BUNDLE_LIMIT):
        raise click.ClickException(f"the bundle could not be built: {problem}")
    return out / BUNDLE


def print_list(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        for what in MEASUREMENTS:
            click.echo(f"{what.name:22} {what.limit:4} s at most")
        context.exit()


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
@click.option("--total", type=click.IntRange(min=1), help="Most seconds of all of them.")
@click.option("--within", type=click.FloatRange(min=0), default=5.0, help="Percent, of times.")
@click.option("--bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--model-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With the models of perf.accuracy; without it, installed packages have them.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What perf.accuracy reads.",
)
@click.option(
    "--ids",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Of what perf.accuracy reads, from its --write-ids.",
)
@click.option("--commit", help="What to record where there is no git repository.")
@click.option("--dry-run", is_flag=True)
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=print_list)
def main(
    out: Path,
    only: tuple[str, ...],
    limit: int | None,
    total: int | None,
    within: float,
    bundle: Path | None,
    dry_run: bool,
    **given: Any,
) -> None:
    if not dry_run and not torch.cuda.is_available():
        raise click.ClickException("the measurements need a CUDA device")
    passed = Given(**given)
    name = "card" if dry_run else card()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    chosen = [m for m in MEASUREMENTS if not only or m.name in only]
    files = {m: out.resolve() / f"{date}_{m.label}_{name}.json" for m in chosen}
    if dry_run:
        left = math.inf if total is None else total
        for what, file in files.items():
            # What took its whole limit would leave no time for those after it.
            note = "" if left >= LEAST else "  # if those before leave time"
            left -= min(what.limit, limit or what.limit)
            click.echo(shlex.join(what.command(file, passed)) + note)
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = measure_all(files, passed, within, limit, total, find_bundle(out.resolve(), bundle))
    for label, seconds, problem in lines:
        click.echo(f"{label:22} {seconds:>7}  {problem or 'ok'}")
    if any(problem for *_, problem in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
