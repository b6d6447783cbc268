"""Output of commands: JSON documents, sizes, times, and names with any characters.

Rules kept here:
- stdout holds results only; notices and progress go to stderr.
- On a terminal, control characters of a name are escaped: a name cannot control the terminal.  Pipes get names
  unchanged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; errors too, on stderr."
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def write_line(text: str) -> None:
    """Write one line of result."""
    sys.stdout.write(text + "\n")


def write_json(document: object) -> None:
    """Write one JSON document of result."""
    write_line(json.dumps(document, indent=2, ensure_ascii=False))


def notice(text: str) -> None:
    """Write one line for people, on stderr."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")


def shown(name: str) -> str:
    """Return a name as it may be written to stdout."""
    return escaped(name) if sys.stdout.isatty() else name


def escaped(name: str) -> str:
    """Return a name with its control characters and lone surrogates written as escapes."""
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


def human_bytes(size_bytes: float) -> str:
    """Return a size in the unit that reads best: `17 B`, `4.0 KiB`, `1.5 GiB`."""
    for unit in UNITS:
        if size_bytes < 1024 or unit == UNITS[-1]:
            break
        size_bytes /= 1024
    return f"{int(size_bytes)} B" if unit == "B" else f"{size_bytes:.1f} {unit}"


def counted(count: int, what: str) -> str:
    """Return a number of things: `1 object`, `2 objects`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def iso_time(time_ns: int) -> str:
    """Return a time as `2026-11-21T03:49:00Z`; empty for none."""
    if not time_ns:
        return ""
    try:
        return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):
        return f"{time_ns} ns"  # a time outside the calendar


class JsonList:
    """`{NAME: [...], ...}`, written element by element so that a million of them need no memory."""

    def __init__(self, name: str) -> None:
        sys.stdout.write(f'{{"{name}": [')
        self._first = True

    def add(self, element: dict[str, object]) -> None:
        """Write one element."""
        sys.stdout.write("\n  " if self._first else ",\n  ")
        self._first = False
        sys.stdout.write(json.dumps(element, ensure_ascii=False))

    def end(self, totals: dict[str, object]) -> None:
        """Close the list, and the document with the other members."""
        members = json.dumps(totals, ensure_ascii=False)[1:-1]
        sys.stdout.write(("]" if self._first else "\n]") + (f", {members}" if members else "") + "}\n")
