from __future__ import annotations

from demo.cli import main

main(prog_name="python -m demo")
