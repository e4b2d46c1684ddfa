"""A process that asks for kernels and prints JSON: `python -m tests.compile_cache.child NAME...`

Prints {"compiled": names that this process compiled, "error": "Type: message" or "", "warnings"}.
Each kernel is called with wrong arguments, which it reports itself, without a GPU. One that could
not be kept on disk is called through the DSL, which says that it has no device to load it to.
"""

from __future__ import annotations

import json
import sys
import warnings

from cute_kernels import compile_cache
from cute_kernels.compile.obtain import launcher

ANSWERS = ("Expects 5 parameters", "TVM FFI function is not initialized")


def ask(names: list[str]) -> None:
    units = {unit.config.name: unit for unit in compile_cache.all_units()}
    for name in names:
        launch = launcher(units[name])
        try:
            launch(1, 2)
        except Exception as error:
            if not any(said in str(error) for said in ANSWERS):
                raise


def main() -> None:
    report = {"compiled": [], "error": "", "warnings": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ask(sys.argv[1:])
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
    report["compiled"] = [unit.config.name for unit in compile_cache.compiled()]
    report["warnings"] = [
        str(warning.message) for warning in caught if warning.category is RuntimeWarning
    ]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
