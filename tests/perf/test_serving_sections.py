"""What the pages say of the serving benchmark's rows."""

from __future__ import annotations

from pathlib import Path

from perf import trace
from perf.rows import OK
from perf.sections import ResultFile
from perf.serving_sections import (
    LAST_WITHOUT_16_BIT_DECODE,
    NVFP4_PROMPTS,
    SERVING_COLUMNS,
    reservations,
    serving_lines,
    serving_summary,
    serving_table,
)
from tests.perf.test_bench_serving import rows_of


def test_the_table_has_times_capacity_and_reasons():
    ((*cells, status),) = serving_lines(rows_of())
    work = rows_of()[0]["workload"]
    assert cells[:3] == ["gemma-4-31b", "2", "`fp8`"] and len(cells) + 1 == len(SERVING_COLUMNS)
    assert cells[4:7] == ["3000", "500.0", "3500"] and status == ""
    assert cells[7] == f"{3500 * work['steps_in_trace'] / 1e6:.2f}"
    assert cells[8:] == ["8 %", f"{work['kv_capacity_tokens']:,} in 40 GiB"]
    ((*cells, status),) = serving_lines(rows_of("no kernel: nvfp4 (more); still more"))
    assert status == "no kernel: nvfp4" and cells[4:9] == [""] * 5
    assert cells[9] == f"{work['kv_capacity_tokens']:,} in 40 GiB"


def test_what_no_longer_holds_is_said_of_the_commit_alone():
    def said(status, commit):
        rows = [row | {"commit": commit} for row in rows_of(status)]
        file = ResultFile(Path("x.json"), "serving", "serving_x", "2026-01-02", rows)
        texts = {
            reservations(file) in text for text in (serving_table(file), serving_summary(file))
        }
        assert texts == {True}
        return reservations(file)

    assert said(OK, "abc") == ""
    assert "prefill kernel alone" in said(OK, LAST_WITHOUT_16_BIT_DECODE + "282")
    assert said("no kernel: nvfp4", "abc") == "`no kernel` holds for the commit that was measured."


def summary_of(rows):
    return serving_summary(ResultFile(Path("x.json"), "serving", "serving_x", "2026-01-02", rows))


def test_the_summary_has_a_step_a_trace_and_the_capacity_or_says_that_no_kernel_serves_it():
    work = rows_of()[0]["workload"]
    seconds = f"{3500 * work['steps_in_trace'] / 1e6:.1f} s"
    for status, time in ((OK, f"3500 us, {seconds}"), ("no kernel: nvfp4", "no kernel")):
        text = summary_of(rows_of(status))
        assert f"| gemma-4-31b | 2 | {time} |" in text.splitlines()
        assert text.splitlines()[-1] == f"| gemma-4-31b | 2 | {work['kv_capacity_tokens']:,} |"
        assert "from 2 sampled ones" in text and "40 GiB" in text
        assert f"sequences of {work['sequence_tokens']:,} tokens" in text
        assert f"up to {work['most_keys']:,} keys" in text
    attention, store = rows_of()
    rows = [attention | {"standard_error_us": 90.0}, store | {"standard_error_us": 20.0}]
    assert "3500 +- 110.0 us" in summary_of(rows)


def test_the_summary_says_where_fewer_bytes_take_longer():
    def of(dtype, kind, factor):
        rows = []
        for row in rows_of():
            work = row["workload"] | {"kv_cache_dtype": dtype, "kind": kind}
            time = factor * row["median_us"]
            rows.append(row | {"kv_cache_dtype": dtype, "workload": work, "median_us": time})
        return rows

    def both(dtype, plain, chunked):
        return of(dtype, trace.PLAIN, plain) + of(dtype, trace.CHUNKED, chunked)

    fp8 = both("fp8", 1.0, 1.0)
    assert "takes longer" not in summary_of(fp8 + both("nvfp4", 0.5, 1.2))
    text = summary_of(fp8 + both("nvfp4", 0.5, 2.0))
    assert "`nvfp4` takes longer than `fp8` in 1 of 1 lines (up to 1.25 times)" in text
    assert NVFP4_PROMPTS in text
    missing = both("nvfp4", 0.5, 2.0)
    missing[-1]["status"] = "no kernel: x"
    assert "takes longer" not in summary_of(fp8 + missing)
