"""`lake status` shows the state of the engine; `lake gc` frees content that no name refers to."""

from __future__ import annotations

from typing import Any

import click

from cli.terminal.output import escaped, human_bytes, json_option, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import StoreReadOnly


@click.command()
@json_option
@engine_options
@pass_target
def status(where: Target, as_json: bool) -> int:
    """Show the state of the engine; exits with 0 when it serves, with 74 when it only reads."""
    with where.open() as lake:
        found = lake.status()
    if as_json:
        write_json(found)
    else:
        for line in _lines(found):
            write_line(line)
    return 0 if found.get("state") == "serving" else StoreReadOnly.exit_code


@click.command()
@click.option("--compact", is_flag=True, help="Also move what lives out of segments that hold little garbage.")
@json_option
@engine_options
@pass_target
def gc(where: Target, compact: bool, as_json: bool) -> None:
    """Free what no name refers to any more.  Runs beside readers and writers."""
    with where.open() as lake:
        report = lake.gc(compact=compact)
    if as_json:
        write_json(report)
        return
    for line in _lines(report):
        write_line(line)


def _lines(figures: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a nested report as lines of name and value; sizes in units."""
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines.extend(_lines(value, f"{prefix}{name}."))
            continue
        text = human_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
        lines.append(f"{prefix + name:<36} {escaped(text)}".rstrip())
    return lines
