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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def _lift(function: Callable, reflected: bool) -> Callable:
    def apply(self: Lanes, other: Any) -> Lanes:
        operands = (_values(other), self.values) if reflected else (self.values, _values(other))
        return Lanes(function(*operands))

    return apply


for _name in ("add", "sub", "mul", "floordiv", "rshift", "and", "or"):
    for _reflected in (False, True):
        _method = f"__{'r' if _reflected else ''}{_name}__"
        setattr(Lanes, _method, _lift(getattr(operator, f"__{_name}__"), _reflected))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Lanes, f"__{_name}__", _lift(getattr(operator, _name), False))


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
    """`yes` in the lanes where the condition holds; a name that only one branch binds is its own."""
    if yes is no or no is None:
        return yes
    if isinstance(yes, tuple):
        return type(yes)(*(_select(condition, y, n) for y, n in zip(yes, no, strict=True)))
    return Lanes(np.where(condition.values, _values(yes), _values(no)))


_DIVERGENT_IF = """
if _diverges(_c := TEST):
    _before = [locals().get(name) for name in NAMES]
    with _lanes_in(_c, True):
        THEN
    _then = [TARGETS]
    TARGETS = _before
    with _lanes_in(_c, False):
        ELSE
    TARGETS = [_select(_c, *pair) for pair in zip(_then, [TARGETS])]
elif _c:
    THEN
else:
    ELSE
"""


class _Branches(ast.NodeTransformer):
    """Rewrites `if` so that lanes may disagree. Nothing but assignment may happen in such a branch."""

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        stored = {
            name.id
            for statement in (*node.body, *node.orelse)
            for name in ast.walk(statement)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        return node
