"""Shares of a ceiling: by which copy, and what is said where it was too slow."""

from __future__ import annotations

import pytest

from perf import ceilings, sections
from perf.bench_indexer import IndexerCase
from perf.ceilings import in_words, share
from perf.rows import BY_HAND, NEAREST, OK, TUNED, Measurement, make_row, make_workload
from perf.targets import OURS, verdicts
from perf.timing import Timing
from tests.perf.helpers import MACHINE, METHOD, make_test_row
from tests.perf.test_render import decode_file

BASELINE = "triton_baseline"


def row(tokens, rate, copy, ratio=4, method=METHOD):
    """A row of K at `rate` TB/s, whose own copy reached `copy`."""
    case = IndexerCase(tokens, "mxfp4", ratio)
    us = case.moved_bytes / rate / 1e6
    timing = Timing(us, us, us)
    workload = make_workload(case, MACHINE, method)
    measurement = Measurement(OK, 0.0, timing, timing, 50.0)
    return make_row(OURS, case, measurement, workload, MACHINE, copy, case.moved_bytes)


def test_a_slow_copy_is_replaced_by_a_fast_one_of_a_similar_size():
    slow = row(65536, 2.6, 2.5)
    assert share(slow, [slow]) == pytest.approx(104, abs=0.1)
    # 8,192 tokens are an eighth of the bytes, 49,152 three quarters.
    beside = row(49152, 3.0, 4.0)
    assert share(slow, [slow, row(8192, 3.0, 4.0)]) == pytest.approx(104, abs=0.1)
    assert share(slow, [slow, beside]) == pytest.approx(65, abs=0.1)
    assert in_words(slow, [slow, beside]) == "65 %"
    assert share(beside, [slow, beside]) == pytest.approx(75, abs=0.1)


def test_a_target_is_not_met_by_a_ceiling_that_is_too_low():
    """Nothing in the file says how fast a copy is: no share of one is known."""
    fast = row(65536, 3.0, 1.9)
    assert in_words(fast, [fast]) == "158 % (above its ceiling: the ceiling is too low)"
    assert [v.met for v in verdicts(fast, [fast])] == [False]
    elsewhere = row(8192, 3.0, 4.2)
    for rate, met in ((0.79 * 4.2, False), (0.81 * 4.2, True)):
        each = row(65536, rate, 1.9)
        assert [v.met for v in verdicts(each, [each, elsewhere])] == [met]
    beside = row(49152, 3.0, 4.2)
    assert in_words(fast, [fast, beside]) == "71 % (158 % of its own copy: too low a ceiling)"


def test_a_share_of_the_read_ceiling_is_as_measured_and_marked_where_it_cannot_be():
    above = make_test_row(median=0.01)
    assert share(above, [above]) == above["pct_of_ceiling"] > ceilings.ABOVE
    assert "above its ceiling" in in_words(above, [above])
    assert "Above their ceilings, which are then too low: " in sections.standing(
        decode_file([above])
    )


def test_what_fits_in_l2_is_told():
    warm = row(8, 1.0, 2.0, method=METHOD | {"input_sets": 200, "fits_in_l2": True})
    cold = row(65536, 1.0, 2.0, method=METHOD | {"input_sets": 4})
    assert ceilings.rotated(warm).endswith(", L2") and "L2" not in ceilings.rotated(cold)
    assert ceilings.fits_in_l2(row(8, 1.0, 2.0, method=METHOD | {"input_sets": 4}))


def test_ratios_say_how_the_baseline_was_tuned():
    ours, theirs = make_test_row(), make_test_row(BASELINE, median=200.0)

    def table(*tunings):
        rows = []
        for i, tuning in enumerate(tunings):
            name = {"case": f"case {i}"}
            rows += [ours | name, theirs | name | {"tuning": tuning}]
        return rows

    mixed = table(TUNED, NEAREST, BY_HAND)
    marks = [
        sections._rival_cells(BASELINE, mixed[i : i + 2], mixed)[1] for i in range(0, len(mixed), 2)
    ]
    assert marks == ["2.00", "2.00 (nearest)", "2.00 (by hand)"]
    words = sections.tuning_in_words(BASELINE, mixed)
    assert f"{TUNED} in 1 cases, {NEAREST} in 1 cases" in words
    alike = table(BY_HAND, BY_HAND)
    assert sections._rival_cells(BASELINE, alike[:2], alike)[1] == "2.00"
    assert sections.ratio_title(BASELINE, alike) == "ratio (by hand)"
    assert sections.tuning_in_words(BASELINE, alike) == f", {BY_HAND} in all cases"
