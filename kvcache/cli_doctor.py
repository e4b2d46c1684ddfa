"""`kvcache doctor`."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.text import Text

from kvcache.cli_common import JsonCommand, console, json_option

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}


@click.command("doctor", cls=JsonCommand)
@json_option
def doctor_command(as_json: bool) -> None:
    """Say what is installed, which of it is broken, and how to mend it.

    The exit status is 1 if something is broken.
    """
    from kvcache.doctor import examine

    findings = examine()
    broken = any(finding.status == "broken" for finding in findings)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"broken": broken, "findings": rows}, indent=1))
    else:
        screen = console()
        for finding in findings:
            status = Text(f"{finding.status:8}", style=_STYLES[finding.status])
            screen.print(status, Text(f"{finding.check}: {finding.found}"))
            if finding.mend:
                screen.print(Text(f"         -> {finding.mend}"))
    if broken:
        raise SystemExit(1)
