"""The options that choose names, of `lake sync` and `lake diff`: rclone's filters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from lakefs.errors import LocalFileError

if TYPE_CHECKING:
    from lakefs.sync.filters import Rules

Command = TypeVar("Command", bound=Callable[..., Any])
_PATH: Final = click.Path(path_type=Path)
_OPTIONS: Final[tuple[tuple[str, str, Any, str], ...]] = (
    ("--filter-from", "FILE", _PATH, "Rules of a file, one a line."),
    ("--filter", "RULE", str, "A rule, '+ PATTERN' or '- PATTERN'; the first that matches decides."),
    ("--exclude-from", "FILE", _PATH, "Patterns of a file, one a line."),
    ("--exclude", "PATTERN", str, "Leave these names out."),
    ("--include-from", "FILE", _PATH, "Patterns of a file, one a line."),
    ("--include", "PATTERN", str, "Only these names."),
)
"""Flag, metavar, type and help; the last one is listed first."""


def filter_options(command: Command) -> Command:
    """Add the options, which may all be repeated; the command gets them as keyword arguments, for `rules_given`."""
    text = "Capital and small letters match each other."
    command = click.option("--ignore-case", is_flag=True, help=text)(command)
    for flag, metavar, kind, text in _OPTIONS:
        command = click.option(flag, multiple=True, metavar=metavar, type=kind, help=text)(command)
    return command


def rules_given(options: dict[str, Any]) -> Rules:
    """Take the options out of a command's keyword arguments, and return the rules.  InvalidArgument, LocalFileError."""
    from lakefs.sync.filters import rules_of

    chosen: list[list[str]] = []
    for name in ("include", "exclude", "filter"):
        patterns = [*options.pop(name)]
        for file in options.pop(f"{name}_from"):
            patterns += _lines_in(file)
        chosen.append(patterns)
    return rules_of(*chosen, ignore_case=options.pop("ignore_case"))


def _lines_in(file: Path) -> list[str]:
    from lakefs.sync.filters import lines_of

    try:
        return lines_of(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise LocalFileError(f"{file}: {reason}", subject=str(file)) from error
