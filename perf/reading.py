"""Result files as they are read: what is no result is refused, in a line with the file and the row.

Also refused: a file without rows, two rows for the same, rows of several runs where one process
makes a file, keys given twice, figures that are not what the file's others make them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perf.ceilings import beside_copies
from perf.rows import RUN_FIELDS, UNKNOWN, canonical, check_row, is_line, is_number
from perf.workloads import check_workload

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
# What code that takes a row for one raises where it is none.
_BROKEN = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    OSError,
)
MESSAGE_CHARACTERS = 400
# Of a relative change: one that is less certain says nothing, one that is more is none.
MOST_STANDARD_ERROR, LEAST_STANDARD_ERROR = 0.1, 1e-12
CHANGE_TOLERANCE = 1e-6


class BadFile(ValueError):
    """A file, or a row of it, that is no result; the message is one line and begins with it."""


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Whatever goes wrong inside is a BadFile about `where`."""
    try:
        yield
    except _BROKEN as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        line = " ".join(f"{where}: {said}".split())[:MESSAGE_CHARACTERS]
        raise BadFile(line.encode("utf-8", "backslashreplace").decode()) from error


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"given twice: {', '.join(twice)}")
    return found


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def read_json(path: str | Path) -> Any:
    """A file's JSON, which has no NaN, no key twice, and text that can be written again.

    Raises:
        BadFile: it is none.
    """
    with naming(Path(path).name):
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        return found


def check_rows(
    path: str | Path,
    rows: Any,
    check: Callable[[dict[str, Any]], None],
    identity: Sequence[str],
) -> Rows:
    """The rows of a file, if they are some and no two are for the same.

    Args:
        check: refuses a row.
        identity: fields that tell two rows apart.

    Raises:
        BadFile: they are not.
    """
    name = Path(path).name
    if not isinstance(rows, list) or not rows:
        raise BadFile(f"{name}: no list of rows")
    seen = set()
    for index, row in enumerate(rows):
        with naming(f"{name}, row {index + 1}"):
            if not isinstance(row, dict):
                raise ValueError(f"{row!r} is no JSON object")
            check(row)
            key = canonical([row.get(field) for field in identity])
            if key in seen:
                raise ValueError(f"two rows for {key}; a file holds one run")
            seen.add(key)
    return rows


def check_one_run(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows that two processes made.

    Raises:
        BadFile: there are some.
    """
    for row in rows:
        both = [
            (name, rows[0].get(name, UNKNOWN), row.get(name, UNKNOWN))
            for name in (*RUN_FIELDS, "clocks")
        ]
        apart = "; ".join(f"{name}: {a!r} and {b!r}" for name, a, b in both if a != b)
        if apart:
            raise BadFile(f"{Path(path).name}: rows of two runs, which differ in {apart}")


def check_ceilings(path: str | Path, rows: Sequence[Row]) -> None:
    """Refuse rows of a process that were not held against the same: what it measured once, or, of
    rows beside copies, once a case.

    Raises:
        BadFile: there are some.
    """
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(row["case"] if beside_copies(row) else "", row)
        pairs = [(each["read_ceiling_tb_per_s"], each.get("ceilings")) for each in (first, row)]
        alike = set(rows[0].get("ceilings", ())) == set(row.get("ceilings", ()))
        if not alike or pairs[0] != pairs[1]:
            where = f"{Path(path).name}: {row['provider']}, {row['case']}"
            raise BadFile(f"{where}: its ceilings are not those of the other rows")


def read_rows(path: str | Path) -> Rows:
    """Rows of a benchmark's result file.

    Raises:
        BadFile: no JSON, a row that `perf.rows.check_row` or `perf.workloads.check_workload`
            refuses, two rows of one provider and case, rows of two runs or beside other ceilings.
    """

    def check(row: dict[str, Any]) -> None:
        check_row(row)
        with naming(f"{row['provider']}, {row['case']}"):
            check_workload(row)

    rows = check_rows(path, read_json(path), check, ("provider", "case"))
    check_one_run(path, rows)
    check_ceilings(path, rows)
    return rows


def read_serving(path: Path) -> Rows:
    """Rows of `perf.bench_serving`: attention and store of each configuration, in one cache size.

    Raises:
        BadFile: as `read_rows`; a part without the other; steps or caches that are not alike.
    """
    rows = read_rows(path)
    parts: dict[str, set[str]] = {}
    alike: dict[str, dict[str, Any]] = {}
    for row in rows:
        work = row["workload"]
        cell = ("model", "tp_size", "kv_cache_dtype", "kind")
        parts.setdefault(canonical([work[name] for name in cell]), set()).add(row["op"])
        same = {name: work[name] for name in ("trace", "kv_gib", "steps_measured")}
        if canonical(alike.setdefault(work["kind"], same)) != canonical(same):
            raise BadFile(f"{path.name}: {row['case']}: {same}, of others {alike[work['kind']]}")
    for cell, found in parts.items():
        if found != {"serving_attention", "serving_store"}:
            raise BadFile(f"{path.name}: {cell} has {', '.join(sorted(found))} alone")
    return rows


def _require(row: Mapping[str, Any], names: Sequence[str], right: Callable[[Any], bool]) -> None:
    for name in names:
        if not right(row[name]):
            raise ValueError(f"{name} is {row[name]!r}")


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def is_error(value: object) -> bool:
    """Whether it is the standard error of a relative change: 0 where all values are the same."""
    return is_number(value) and (value == 0 or LEAST_STANDARD_ERROR < value <= MOST_STANDARD_ERROR)


def check_change(change: Any, perplexity: float, baseline: float) -> None:
    """Refuse a relative change of a perplexity that is not that of the two.

    Raises:
        ValueError: it is not.
    """
    wanted = perplexity / baseline - 1
    if not is_number(change) or abs(change - wanted) > CHANGE_TOLERANCE:
        raise ValueError(f"the change is {change!r}; of {baseline:g} to {perplexity:g} {wanted:g}")


def read_load(path: Path) -> Rows:
    """Rows of `perf.bench_load`, each with what the file says about the machine.

    Raises:
        BadFile: they are not.
    """
    times = ("load_ms", "first_call_ms", "later_call_ms")
    lines = ("gpu", "driver", "commit", "command", "date")

    def check(row: dict[str, Any]) -> None:
        _require(row, ("kernel", *lines), is_line)
        _require(row, times, is_positive)
        wanted = row["first_call_ms"] - row["later_call_ms"]
        if not abs(row["first_call_extra_ms"] - wanted) < 2e-3:
            raise ValueError(f"first_call_extra_ms is {row['first_call_extra_ms']}, not {wanted:g}")

    about = read_json(path)
    with naming(path.name):
        rows = about.pop("rows")
        _require(about["first_of_process"], times, is_positive)
        rows = [about | row for row in rows]
    return check_rows(path, rows, check, ("kernel",))


def read_demo(path: Path) -> Rows:
    """Runs of the demo: what it wrote, or a list of that, made flat.

    Raises:
        BadFile: they are not.
    """

    def check(row: dict[str, Any]) -> None:
        _require(row, ("model", "device", "attention"), is_line)
        _require(row, ("tokens", "cache_bytes_bf16", "cache_bytes_fp8"), is_count)
        _require(row, ("perplexity_bf16", "perplexity_fp8"), is_positive)
        _require(row, ("change_standard_error",), is_error)
        check_change(row["change"], row["perplexity_fp8"], row["perplexity_bf16"])
        if "choices" in row and not 0 <= row["choices"]["equal"] <= row["choices"]["steps"]:
            raise ValueError(f"choices are {row['choices']}")

    found = read_json(path)
    with naming(path.name):
        runs = [
            run | run.get("quality", {}) | run.get("generation", {})
            for run in (found if isinstance(found, list) else [found])
        ]
    return check_rows(path, runs, check, ("model", "device", "attention", "rotate_keys"))


def read_perplexity(path: Path) -> Rows:
    """Perplexities by model, KV cache dtype and whether keys were rotated.

    Raises:
        BadFile: they are not; changes that are not from the bf16 cache's perplexity.
    """
    rows = read_json(path)
    with naming(path.name):
        bases = {row["model"]: row for row in rows if row["kv_cache_dtype"] == "bf16"}

    def check(row: dict[str, Any]) -> None:
        _require(row, ("model", "device", "kv_cache_dtype", "scales"), is_line)
        _require(row, ("tokens", "bytes_per_token_and_layer"), is_count)
        _require(row, ("perplexity",), is_positive)
        _require(row, ("change_standard_error",), is_error)
        _require(row, ("rotate_keys",), lambda value: isinstance(value, bool))
        base = bases[row["model"]]
        if row["tokens"] != base["tokens"]:
            raise ValueError(f"{row['tokens']} tokens, with a bf16 cache {base['tokens']}")
        check_change(row["change"], row["perplexity"], base["perplexity"])

    return check_rows(path, rows, check, ("model", "kv_cache_dtype", "rotate_keys", "scales"))
