"""Perplexity per KV cache dtype: rows, their baseline, the table."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.requires import requires_module

requires_module("transformers")

from kvcache.integrations.transformers import register  # noqa: E402 - needs transformers
from perf import perplexity  # noqa: E402
from tests.demo import models  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows():
    register("cute_kv")
    model = models.llama()
    model.set_attn_implementation("cute_kv")
    variants = [("fp8", False), ("nvfp4", True)]
    text, calibration = models.tokens(1, 120), models.tokens(1, 60, seed=2)
    with torch.inference_mode():
        found = perplexity.measure(model, text, calibration, variants, per_head=False)
    return [{"model": "a model"} | row for row in found]


def test_the_first_row_is_the_baseline(rows):
    assert [(row["kv_cache_dtype"], row["rotate_keys"]) for row in rows] == [
        ("bf16", False),
        ("fp8", False),
        ("nvfp4", True),
    ]
    assert (rows[0]["change"], rows[0]["change_standard_error"]) == (0.0, 0.0)


def test_changes_are_of_the_baselines_perplexity(rows):
    for row in rows[1:]:
        ratio = row["perplexity"] / rows[0]["perplexity"]
        assert row["change"] == pytest.approx(ratio - 1, abs=1e-9)
        assert 0 < row["change_standard_error"] < math.inf
    assert rows[1]["change_standard_error"] < rows[2]["change_standard_error"]


def test_bytes_are_the_formats(rows):
    assert [row["bytes_per_token_and_layer"] for row in rows] == [512, 256, 144]


def test_the_table_is_whole(rows):
    screen = Console(width=perplexity.WIDTH, file=io.StringIO())
    screen.print(perplexity.table(rows))
    text = screen.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for cell in ("a model", "nvfp4", "rotated", "144", f"{rows[2]['perplexity']:.3f}"):
        assert cell in text


def test_the_documented_table_is_the_committed_result():
    rows = json.loads((ROOT / "perf/results/2026-11-30_perplexity_kv_cpu.json").read_text("utf-8"))
    text = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    table = text.split("<!-- perplexity:begin -->")[1].split("<!-- perplexity:end -->")[0]
    lines = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.split("\n")[3:-1]
    ]
    for kv_cache_dtype, sizes, *cells in lines:
        mine = [row for row in rows if row["kv_cache_dtype"] == kv_cache_dtype]
        assert sizes == ", ".join(
            str(row["bytes_per_token_and_layer"]) for row in mine if not row["rotate_keys"]
        )
        if kv_cache_dtype == perplexity.BASELINE:
            assert cells == [f"{mine[0]['perplexity']:.3f}", "", f"{mine[1]['perplexity']:.3f}", ""]
        else:
            assert cells == [
                f"{100 * row['change']:+.2f} % +- {100 * row['change_standard_error']:.2f}"
                for row in mine
            ]
    assert [line[0] for line in lines] == [perplexity.BASELINE, *perplexity.DTYPES]
