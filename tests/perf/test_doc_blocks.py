"""Figures in the pages about kernels are those of the results, and others are not cited there."""

from __future__ import annotations

import re

import pytest

from perf import committed, doc_blocks, render
from perf.doc_blocks import BLOCKS, with_blocks

ROOT = render.ROOT
FOUND = committed.find(ROOT / committed.RESULTS)
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "performance.md"]
PAGES += [ROOT / name for name in ("README.md", "CHANGELOG.md")]
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
