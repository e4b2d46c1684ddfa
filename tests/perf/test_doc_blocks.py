"""Figures in the pages about kernels are those of the results, and others are not cited there."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from perf import committed, doc_blocks, render
from perf.doc_blocks import BLOCKS, with_blocks
from perf.reading import read_json

ROOT = render.ROOT
FOUND = committed.find(ROOT / committed.RESULTS)
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "performance.md"]
PAGES += [ROOT / name for name in ("README.md", "CHANGELOG.md")]
NAME = "decode_sm90_fp8_e4m3_d64_r8_bf16_box64"
MEASURED = re.compile(r"\d (us|ms|TB/s|TFLOP/s)\b|\d -> \d")
# Regions that programs write, and tests compare.
WRITTEN = (r"<!-- ([a-z-]+):begin -->.*?<!-- \1:end -->", r"<!-- measured:.*?<!-- measured:end -->")


def by_hand(text):
    """A page without what is written from results."""
    for region in WRITTEN:
        text = re.sub(region, "", text, flags=re.DOTALL)
    return text


def test_every_block_stands_in_a_page_once():
    texts = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert sorted(re.findall(r"<!-- measured:(?!end)(\S+) -->", texts)) == sorted(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_figure_changed_by_hand_is_taken_back(name):
    page = next(path for path in PAGES if f"measured:{name} -->" in path.read_text("utf-8"))
    text = page.read_text(encoding="utf-8")
    assert with_blocks(page.name, text, FOUND, ROOT) == text
    start = text.index(f"measured:{name} -->") + len(f"measured:{name} -->")
    digit = re.compile(r"\d").search(text, start)
    other = text[: digit.start()] + str(9 - int(digit.group())) + text[digit.end() :]
    assert with_blocks(page.name, other, FOUND, ROOT) == text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_paragraph_outside_blocks_cites_a_result_and_types_a_time(path):
    for paragraph in by_hand(path.read_text(encoding="utf-8")).split("\n\n"):
        if "_h200.json" in paragraph:
            assert not MEASURED.search(paragraph), paragraph


def test_results_that_are_not_there_leave_no_figures(tmp_path):
    for name in set(BLOCKS) - {"decode-registers"}:
        text = BLOCKS[name](dict.fromkeys(FOUND, []), tmp_path)
        assert not MEASURED.search(text), text


BROKEN = {
    "nothing": lambda record: record.clear(),
    "a truth": lambda record: record["variants"].update({NAME: True}),
    "text": lambda record: record["variants"].update({NAME: "12345"}),
    "too few": lambda record: record["variants"].update({NAME: [1]}),
    "no variants": lambda record: record.update(variants=3),
    "no compiler": lambda record: record.pop("dsl"),
}


@pytest.mark.parametrize("breaking", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_of_resources_is_named_in_a_line(tmp_path, breaking):
    path = tmp_path / doc_blocks.RESOURCES
    path.parent.mkdir(parents=True)
    record = read_json(ROOT / doc_blocks.RESOURCES)
    breaking(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "docs" / "decode_sm90.md"
    page.parent.mkdir()
    shutil.copy(ROOT / "docs" / page.name, page)
    shutil.copy(ROOT / "README.md", tmp_path)
    done = CliRunner().invoke(render.main, ["--check", "--root", str(tmp_path)])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert re.fullmatch(r"Error: resources_sm90a.json: [^\n]+\n", done.output), done.output


@pytest.mark.parametrize(
    "text",
    (
        "<!-- measured:unknown -->\n<!-- measured:end -->",
        "<!-- measured:decode-limits -->\n",
        "<!-- measured:end -->\n",
        "<!-- measured:loading -->\n<!-- measured:decode-limits -->\n<!-- measured:end -->",
    ),
)
def test_blocks_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="page.md: "):
        doc_blocks.with_blocks("page.md", text, FOUND, ROOT)
