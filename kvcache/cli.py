"""The command line: `kvcache explain | warmup | cache | doctor`, or `python -m kvcache ...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cute_kernels
from cute_kernels.compile.build import print_any_path
from kvcache.blocks import get_preferred_block_size_for_config
from kvcache.cli_cache import cache_group
from kvcache.cli_common import (
    batch_invariant_option,
    console,
    kv_cache_dtype_option,
    print_whole,
    read_model,
    refusing,
    text_only_option,
)
from kvcache.cli_doctor import doctor_command
from kvcache.cli_kernels import warmup_command
from kvcache.config import capability_of
from kvcache.hybrid import LayerGroup, plan_pages
from kvcache.models import LayerKind, layer_kinds
from kvcache.selection import caveats, explain, select_kernel, select_kernels
from kvcache.warmup import explain_indexers


@click.group()
@click.version_option(cute_kernels.__version__, prog_name="kvcache")
def main() -> None:
    """What the kernels of cute-kernels can do for a model, and how to have them ready."""
    print_any_path()


main.add_command(warmup_command)
main.add_command(cache_group)
main.add_command(doctor_command)


@main.command("explain")
@click.option(
    "--model",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="A model's config.json in the Hugging Face format, or its folder.",
)
@click.option(
    "--arch",
    default="sm_90a",
    show_default=True,
    callback=refusing(capability_of),
    help="The GPU, like sm_90a.",
)
@kv_cache_dtype_option
@text_only_option
@batch_invariant_option
@click.option("--verbose", is_flag=True, help="Also say what each kernel refuses, and why.")
def explain_command(
    model: Path, arch: str, kv_cache_dtype: str, verbose: bool, **asked: bool
) -> None:
    """Say for each kind of layer which kernels decode and prefill it, or why none does.

    The exit status is 1 where a kind of layer with a KV cache has no kernel. Heads are the whole
    model's: tensor parallelism divides them.
    """
    try:
        fields = read_model(model)
        kinds = layer_kinds(fields, kv_cache_dtype, arch, **asked)
        indexers = explain_indexers(fields, arch)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{model}: {error}") from error
    reasons = [kind.why_unserved() for kind in kinds]
    screen = console()
    print_whole(screen, _table(kinds, reasons))
    for kind, reason in zip(kinds, reasons, strict=True):
        if verbose and kind.config is not None:
            screen.print(Text(f"{kind.name}: {explain(kind.config, reason)}"))
        elif reason is not None:
            screen.print(Text(f"{kind.name}: {reason}"))
        elif kind.config is not None:
            for caveat in caveats(kind.config):
                screen.print(Text(f"{kind.name}: {caveat}"))
    for line in indexers:
        screen.print(Text(line))
    if any(reason is not None for reason in reasons):
        raise SystemExit(1)
    _print_plan(screen, kinds)


def _table(kinds: Sequence[LayerKind], reasons: Sequence[str | None]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    titles = "layers # window heads size decode prefill page bytes/token"
    for title in titles.split():
        table.add_column(title, no_wrap=True)
    for kind, reason in zip(kinds, reasons, strict=True):
        count = str(len(kind.layers))
        config = kind.config
        if config is None:
            served = "none" if reason else "not needed"
            table.add_row(Text(kind.name), count, "", "", "", served)
            continue
        served = reason is None
        table.add_row(
            Text(kind.name),
            count,
            str(config.sliding_window or ""),
            f"{config.num_q_heads}/{config.num_kv_heads}",
            str(config.head_size),
            select_kernel(config).name if served else "none",
            select_kernels(config)[-1].name if served else "",
            str(get_preferred_block_size_for_config(1, config)) if served else "",
            str(config.bytes_per_token) if served else "",
        )
    return table


def _print_plan(screen: Console, kinds: Sequence[LayerKind]) -> None:
    groups = [
        LayerGroup(kind.name, kind.config, len(kind.layers) - kind.shared)
        for kind in kinds
        if kind.config is not None and len(kind.layers) > kind.shared
    ]
    if len(groups) < 2:
        return
    plan = plan_pages(groups)
    parts = [
        f"{part.group.name} {part.block_size} tokens ({float(part.waste_percent):.2f} % unused)"
        for part in plan.groups
    ]
    screen.print(
        Text(
            f"one pool for all layers: pages of {plan.page_bytes} bytes, {', '.join(parts)}; "
            f"{float(plan.waste_percent):.2f} % of the pool unused"
        )
    )
