"""Build a bundle: ``python -m cute_kernels.compile.build --out DIR``. No GPU needed."""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import click
from tqdm import tqdm

from cute_kernels.attention.decode_sm90.config import DecodeConfig, support_table
from cute_kernels.attention.decode_sm90.op import compile_options
from cute_kernels.compile import bundle
from cute_kernels.compile.key import compile_key


def build_one(config: DecodeConfig, target: str, directory: Path) -> Path:
    """Compile one variant of the decode kernel and write it to a bundle."""
    from cute_kernels.attention.decode_sm90.build import compile_decode

    compiled = compile_decode(config, compile_options(target))
    return bundle.write(compile_key(config, target), compiled, directory)


@click.command(context_settings={"show_default": True})
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", default="sm_90a", type=click.Choice(["sm_90a"]))
@click.option("--match", default="", help="Regular expression on variant names.")
@click.option("--workers", default=2, type=click.IntRange(min=1), help="Compiling processes.")
def main(out: Path, target: str, match: str, workers: int) -> None:
    """Compile the support table's kernels into a directory for CUTE_KERNELS_BUNDLE."""
    configs = [config for config in support_table() if re.search(match, config.name)]
    if not configs:
        raise click.ClickException(f"--match {match!r}: no variant has such a name")
    # Workers start anew: the DSL must not be forked after it has been imported.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [pool.submit(build_one, config, target, out) for config in configs]
        for job in tqdm(as_completed(jobs), total=len(jobs), unit="kernel", disable=None):
            job.result()
    click.echo(f"{len(configs)} kernels in {out}")


if __name__ == "__main__":
    main()
