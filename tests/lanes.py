"""Run scalar device code of the kernels as Python, one warp at a time, without the DSL.

The kernels' control code (who takes which tile) is integer arithmetic, warp shuffles and Python
control flow, so its own source can be executed here instead of a copy of its formulas:
`device_functions` loads the functions of a kernel file, with the DSL's names bound to the stand-ins
below. A value that may differ between the lanes of a warp is a `Lanes`, any other a Python int. A
branch about which lanes disagree runs both ways, each for its own lanes (as the hardware does it).

Left out, so not tested this way: that the compiler does the same, wrap-around (an overflow is an
error here), and what the warps of a grid do to each other.
"""

from __future__ import annotations

import ast
import operator
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

WARP = 32
ROOT = Path(__file__).resolve().parent.parent
_LANE = np.arange(WARP)
# The lanes that take the branch being executed: only theirs are real values.
_active = np.ones(WARP, dtype=bool)


def _values(x: Any) -> Any:
    return x.values if isinstance(x, Lanes) else x


class Lanes:
    """One int32 (or bool) per lane of a warp."""

    def __init__(self, values: Any) -> None:
        self.values = np.broadcast_to(np.asarray(values), (WARP,))
        if self.values.dtype != bool and (np.abs(self.values[_active]) >= 2**31).any():
            raise OverflowError(f"an int32 of a lane overflows: {self.values}")

    def agree(self) -> bool:
        active = self.values[_active]
        return bool((active == active[0]).all())

    def __int__(self) -> int:
        if not self.agree():
            raise ValueError(f"the lanes of a warp disagree: {self.values}")
        return int(self.values[_active][0])

    def __bool__(self) -> bool:
        return bool(int(self))


def _floordiv(x: Any, y: Any) -> Any:
    zero = np.broadcast_to(y == 0, (WARP,))
    if (zero & _active).any():
        raise ZeroDivisionError("a lane of a warp divides by 0")
    return x // np.where(zero, 1, y)


def _lift(function: Callable, reflected: bool) -> Callable:
    def apply(self: Lanes, other: Any) -> Lanes:
        operands = (_values(other), self.values) if reflected else (self.values, _values(other))
        return Lanes(function(*operands))

    return apply


for _name in ("add", "sub", "mul", "floordiv", "rshift", "and", "or"):
    _operator = _floordiv if _name == "floordiv" else getattr(operator, f"__{_name}__")
    setattr(Lanes, f"__{_name}__", _lift(_operator, reflected=False))
    setattr(Lanes, f"__r{_name}__", _lift(_operator, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Lanes, f"__{_name}__", _lift(getattr(operator, _name), reflected=False))


class Memory:
    """A one-dimensional int32 tensor; reading outside it is an error."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, dtype=np.int64)

    def __getitem__(self, index: Any) -> Any:
        wanted = np.broadcast_to(_values(index), (WARP,))
        outside = (wanted < 0) | (wanted >= len(self.values))
        if (outside & _active).any():
            raise IndexError(f"{wanted[_active]} of {len(self.values)}")
        if not isinstance(index, Lanes):
            return int(self.values[index])
        return Lanes(self.values[np.where(outside, 0, wanted)])


# ---- branches ----------------------------------------------------------------------------------


@contextmanager
def _lanes_in(condition: Lanes, taken: bool) -> Iterator[None]:
    global _active
    before = _active
    _active = before & (condition.values == taken)
    try:
        yield
    finally:
        _active = before


def _diverges(condition: Any) -> bool:
    return isinstance(condition, Lanes) and not condition.agree()


def _select(condition: Lanes, yes: Any, no: Any) -> Any:
    """`yes` in the lanes where the condition holds; None is a name that a branch does not bind."""
    if yes is no or no is None:
        return yes
    if yes is None:
        return no
    if isinstance(yes, tuple):
        return type(yes)(*(_select(condition, y, n) for y, n in zip(yes, no, strict=True)))
    return Lanes(np.where(condition.values, _values(yes), _values(no)))


def _bound(scope: dict[str, Any], names: list[str]) -> list[Any]:
    return [scope.get(name) for name in names]


def _merged(condition: Lanes, yes: list[Any], no: list[Any]) -> list[Any]:
    return [_select(condition, *pair) for pair in zip(yes, no, strict=True)]


_DIVERGENT_IF = """
if _diverges({test}):
    _before{n} = _bound(locals(), {names})
    with _lanes_in({c}, True):
{then}
    _then{n} = [{targets}]
    {targets} = _before{n}
    with _lanes_in({c}, False):
{other}
    {targets} = _merged({c}, _then{n}, [{targets}])
elif {c}:
{then}
else:
{other}
"""


class _Branches(ast.NodeTransformer):
    """Rewrites every `if` so that lanes may disagree about it.

    In such a branch nothing but assignments to names may happen: a return or a store would act for
    all lanes. Neither is allowed in a branch at all.
    """

    def __init__(self) -> None:
        self.count = 0

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        self.generic_visit(node)
        inner = [part for statement in (*node.body, *node.orelse) for part in ast.walk(statement)]
        names = [
            part for part in inner if isinstance(part, (ast.Name, ast.Subscript, ast.Attribute))
        ]
        stored = [part for part in names if isinstance(part.ctx, ast.Store)]
        if any(isinstance(part, ast.Return) for part in inner) or not all(
            isinstance(part, ast.Name) for part in stored
        ):
            raise NotImplementedError(f"line {node.lineno}: a branch that does more than assign")
        self.count += 1
        targets = sorted({part.id for part in stored if not part.id.startswith("_")})
        text = _DIVERGENT_IF.format(
            n=self.count,
            c=f"_c{self.count}",
            test=f"_c{self.count} := {ast.unparse(node.test)}",
            names=targets,
            targets=", ".join(targets) + ",",
            then=_indented(node.body),
            other=_indented(node.orelse) if node.orelse else "        pass",
        )
        return ast.parse(text).body


def _indented(statements: list[ast.stmt]) -> str:
    return textwrap.indent("\n".join(map(ast.unparse, statements)), " " * 8)


# ---- the DSL's names ---------------------------------------------------------------------------


def _either(function: Callable) -> Callable:
    def apply(x: Any, y: Any) -> Any:
        result = function(_values(x), _values(y))
        return Lanes(result) if isinstance(x, Lanes) or isinstance(y, Lanes) else int(result)

    return apply


def _int32(x: Any) -> Any:
    if not isinstance(x, Lanes) and not -(2**31) <= x < 2**31:
        raise OverflowError(f"{x} does not fit an int32")
    return x


def _quotient(x: Any, y: Any) -> Any:
    if (np.broadcast_to((_values(x) < 0) | (_values(y) < 0), (WARP,)) & _active).any():
        raise ValueError(f"a division of {x} by {y} takes negatives for large numbers")
    return x // y


def _over_the_warp(function: Callable) -> Callable:
    def reduce(x: Any) -> int:
        assert _active.all(), "a warp reduction in a branch that some lanes do not take"
        return _int32(int(function(np.broadcast_to(_values(x), (WARP,)))))

    return reduce


def _from_lane(x: Any, lane: Any) -> int:
    return int(np.broadcast_to(_values(x), (WARP,))[int(lane) % WARP])


def _up_or_zero(x: Any, distance: int) -> Lanes:
    values = np.broadcast_to(_values(x), (WARP,))
    return Lanes(np.concatenate([np.zeros(distance, dtype=np.int64), values[:-distance]]))


_NAMES = {
    "NamedTuple": NamedTuple,
    "Int32": _int32,
    "Int64": lambda x: x,
    "cute": SimpleNamespace(
        jit=lambda function: function,
        arch=SimpleNamespace(lane_idx=lambda: Lanes(_LANE)),
    ),
    "cutlass": SimpleNamespace(
        max=_either(np.maximum),
        min=_either(np.minimum),
        range=lambda *bounds, unroll: range(*map(int, bounds)),
        range_constexpr=range,
    ),
    "dsl": SimpleNamespace(
        warp_sum_b32=_over_the_warp(np.sum),
        warp_max_b32=_over_the_warp(np.max),
        warp_min_b32=_over_the_warp(np.min),
        shuffle_from_lane=_from_lane,
        shuffle_up_or_zero=_up_or_zero,
        quotient=_quotient,
        count_le=lambda x, y: _over_the_warp(np.sum)(x <= y),
    ),
    "_diverges": _diverges,
    "_bound": _bound,
    "_lanes_in": _lanes_in,
    "_merged": _merged,
}


def device_functions(path: str, **names: Any) -> SimpleNamespace:
    """The functions, named tuples and constants at the top level of a kernel file, as Python.

    Args:
        path: of the file, relative to the repository.
        names: what the file imports from our own modules and its functions use.
    """
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module == "__future__"
        if isinstance(node, ast.ClassDef):
            return any(getattr(base, "id", "") == "NamedTuple" for base in node.bases)
        return isinstance(node, (ast.FunctionDef, ast.Assign))

    tree.body = [node for node in tree.body if wanted(node)]
    tree = ast.fix_missing_locations(_Branches().visit(tree))
    namespace = {**_NAMES, **names, "__name__": path}
    exec(compile(tree, path, "exec"), namespace)
    return SimpleNamespace(**namespace)
