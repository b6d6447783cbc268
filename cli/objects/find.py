"""`lake find`: names by their pattern, kind, size and age, below buckets and folders."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

import click

from cli.objects.ls import KINDS, entries_below, entry_document, long_line
from cli.objects.patterns import expand
from cli.terminal.completing import complete_names
from cli.terminal.output import JsonList, json_option, shown, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import InvalidArgument

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.wire.messages import ListEntry

_TYPES: Final = {"f": "object", "d": "folder", "l": "symlink"}
"""The letters of find(1)."""


@dataclass(frozen=True)
class _Wanted:
    """The conditions for a name.  Times are in ns, None is any; a size has a sign: 1 more than it, -1 less, 0 equal."""

    names: tuple[str, ...]
    paths: tuple[str, ...]
    kinds: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    after_ns: int | None
    before_ns: int | None
    depth: int | None

    def has(self, below: str, key: str, entry: ListEntry) -> bool:
        """Return True for such a name: `below` is its key below the folder that is searched."""
        bare = key.removesuffix("/")
        return (
            KINDS.get(entry.kind) in self.kinds
            and _any_matches(self.names, bare.rpartition("/")[2])
            and _any_matches(self.paths, bare)
            and (self.depth is None or below.removesuffix("/").count("/") < self.depth)
            and (self.after_ns is None or entry.mtime_ns > self.after_ns)
            and (self.before_ns is None or entry.mtime_ns < self.before_ns)
            and all(_sign(entry.size_bytes - size) == sign for sign, size in self.sizes)
        )


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=complete_names)
@click.option(
    "--name", "patterns", multiple=True, metavar="PATTERN", help="Its last part matches: '*.bin'; repeatable."
)
@click.option(
    "--path", "paths", multiple=True, metavar="PATTERN", help="Its key matches; * stands for / too; repeatable."
)
@click.option(
    "--type", "kinds", multiple=True, type=click.Choice([*_TYPES, *_TYPES.values()]), help="Without it: f and l."
)
@click.option(
    "--size", "sizes", multiple=True, metavar="[+-]SIZE", help="More than (+10M), less than (-1G), or exactly."
)
@click.option(
    "--newer", metavar="TIME", help="Changed after: an age (90s, 12h, 7d) or a time (2026-11-21, ...T03:49Z)."
)
@click.option("--older", metavar="TIME", help="Changed before.")
@click.option("--max-depth", type=click.IntRange(1), metavar="N", help="At most so many levels below.")
@click.option("-l", "--long", "long_format", is_flag=True, help="With mode, size and time.")
@click.option("-0", "--print0", is_flag=True, help="A NUL behind each name, for xargs -0.")
@json_option
@engine_options
@pass_target
def find(
    where: Target,
    names: tuple[str, ...],
    patterns: tuple[str, ...],
    paths: tuple[str, ...],
    kinds: tuple[str, ...],
    sizes: tuple[str, ...],
    newer: str | None,
    older: str | None,
    max_depth: int | None,
    long_format: bool,
    print0: bool,
    as_json: bool,
) -> None:
    """Find objects below buckets and folders; of all buckets without a NAME.  Prints BUCKET/KEY, one a line.

    All conditions must hold; of one that is repeated, any (of --size, all).  A NAME may be a pattern, in quotes.
    """
    wanted = _Wanted(
        patterns,
        paths,
        tuple(_TYPES.get(kind, kind) for kind in kinds) or ("object", "symlink"),
        tuple(map(_parse_size, sizes)),
        _parse_time(newer),
        _parse_time(older),
        max_depth,
    )
    with where.open() as lake:
        found = _found(lake, expand(lake, names) if names else [bucket.name for bucket in lake.buckets()], wanted)
        if as_json:
            document = JsonList("entries")
            for bucket, key, entry in found:
                document.add({"name": f"{bucket}/{key}", **entry_document(key, entry)})
            document.end({})
            return
        for bucket, key, entry in found:
            if print0:
                sys.stdout.write(f"{bucket}/{key}\0")
            else:
                write_line(long_line(f"{bucket}/{key}", entry) if long_format else shown(f"{bucket}/{key}"))


def _found(lake: Lake, names: list[str], wanted: _Wanted) -> Iterator[tuple[str, str, ListEntry]]:
    """Yield bucket, key and entry of each name that is wanted.  KeyNotFound, BucketNotFound."""
    from lakefs.names import parse_name

    for name in names:
        bucket = parse_name(name).bucket
        for key, below, entry in entries_below(lake, name, folders="folder" in wanted.kinds):
            if wanted.has(below, key, entry):
                yield bucket, key, entry


def _any_matches(patterns: tuple[str, ...], text: str) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _parse_size(text: str) -> tuple[int, int]:
    from lakefs.config.values import parse_size

    sign = {"+": 1, "-": -1}.get(text[:1], 0)
    return sign, parse_size(text[1:] if sign else text)


def _parse_time(text: str | None) -> int | None:
    """Return a time in ns from an age, or from a time by ISO 8601 (UTC without an offset).  InvalidArgument."""
    from lakefs.config.values import parse_duration

    if text is None:
        return None
    try:
        return time.time_ns() - int(parse_duration(text) * 1e9)
    except InvalidArgument:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is neither an age, as 90s, 12h or 7d, nor a time, as 2026-11-21 or 2026-11-21T03:49:00Z"
        ) from None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1e9)
