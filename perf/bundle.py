"""The kernels that the measurements launch, in a folder for CUTE_KERNELS_BUNDLE. Needs no GPU.

    python -m perf.bundle --out DIR                    all kernels, and the loaders
    python -m perf.bundle --out DIR --match loader     the loaders alone, beside what is there

`python -m cute_kernels.compile.build` makes what the public functions ask for. The decode kernel's
loader (`perf.baselines.loader`) is asked for by `perf.bench_decode` alone; it is here. What is in
DIR already is not compiled again.
"""

from __future__ import annotations

from pathlib import Path

import click

from cute_kernels.compile.build import build, matching
from cute_kernels.compile.plans import CompileUnit, all_units
from cute_kernels.compile.pool import default_workers
from perf.baselines.loader import loader_config
from perf.bench_load import Q_DTYPES
from perf.cases import ALL_CASES

TARGET = "sm_90a"


def loader_units() -> list[CompileUnit]:
    """A loader for each head size, cache format, dtype of queries and page size of the cases."""
    short = {name: q_dtype for q_dtype, name in Q_DTYPES.items()}
    configs = [
        loader_config(case.head_size, short[case.q_dtype], case.page_size, case.kv_cache_dtype)
        for case in ALL_CASES
    ]
    return [CompileUnit("decode_sm90", config, TARGET) for config in dict.fromkeys(configs)]


def units() -> list[CompileUnit]:
    return all_units([TARGET]) + loader_units()


@click.command(context_settings={"show_default": True}, help=(__doc__ or "").split("\n")[0])
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--match", default="", help="Regular expression on variant names.")
@click.option("--workers", default=default_workers, type=click.IntRange(min=1))
def main(out: Path, match: str, workers: int) -> None:
    build(matching(units(), match), out, workers)


if __name__ == "__main__":
    main()
