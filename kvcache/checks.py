"""Types of arguments, refused by name: a list where a tensor belongs must not end in an
AttributeError somewhere inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_type(name: str, value: object, accepted: type | tuple[type, ...], words: str) -> Any:
    """`value`, if it is of an accepted type.

    Raises:
        TypeError: naming the argument, the type given and, in `words`, what is accepted.
    """
    # A bool is an int to Python, and a mistake where a number belongs.
    if not isinstance(value, accepted) or (accepted is int and isinstance(value, bool)):
        raise TypeError(f"{name}: got {described(value)}; accepted: {words}")
    return value


def check_all(
    name: str, values: object, accepted: type | tuple[type, ...], words: str
) -> list[Any]:
    """The members of an iterable, if they are all of the accepted type.

    Raises:
        TypeError: as `check_type`; a single one in the place of several is refused too.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {described(values)}; accepted: {words}")
    found = list(values)
    for index, value in enumerate(found):
        check_type(f"{name}[{index}]", value, accepted, words)
    return found


def check_positive(name: str, value: object) -> None:
    """
    Raises:
        ValueError: no int, or one < 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name}: got {value!r}; accepted: an int > 0")


def described(value: object) -> str:
    """A value's type, as a message names it."""
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"a {module}{kind.__qualname__}"
