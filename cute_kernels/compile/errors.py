"""What can go wrong when a kernel is asked for, as named errors, and warnings given once."""

from __future__ import annotations

import warnings

_GIVEN: set[object] = set()


class UnplannedCompileError(RuntimeError):
    """A kernel would have been compiled after ``cute_kernels.compile_cache.freeze()``."""


class CompilerUnavailableError(RuntimeError):
    """A kernel is in no bundle or cache, and the CuTe DSL is missing or does not import."""


def warn_once(about: object, message: str) -> None:
    """A warning, the first time in this process that something is wrong with ``about``.

    Python's own "once" follows the line of the warning and the filters of the host application.
    """
    if about not in _GIVEN:
        _GIVEN.add(about)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
