"""`lake tree`: folders and objects as a tree, one folder listed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from cli.terminal.completing import complete_names
from cli.terminal.output import human_bytes, notice, shown, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import KeyNotFound
from lakefs.names import Name, parse_name

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake


@dataclass(frozen=True)
class _Entry:
    """One line: the text, and the folder to enter, if it is one."""

    text: str
    folder: Name | None = None
    size_bytes: int = 0


@dataclass
class _Level:
    """A folder that is being shown: what is left of it, one entry ahead, and what stands before its lines."""

    entries: Iterator[_Entry]
    indent: str
    ahead: _Entry | None = None

    def next(self) -> _Entry | None:
        """Return the next entry, None at the end; `ahead` is the one behind it."""
        found, self.ahead = self.ahead, next(self.entries, None)
        return found


@click.command()
@click.argument("name", required=False, shell_complete=complete_names)
@click.option("-L", "--depth", type=click.IntRange(1), metavar="N", help="At most so many levels.")
@click.option("-d", "--folders", "only_folders", is_flag=True, help="Folders only.")
@click.option("-s", "--size", "sizes", is_flag=True, help="With the size of each object.")
@engine_options
@pass_target
def tree(where: Target, name: str | None, depth: int | None, only_folders: bool, sizes: bool) -> None:
    """Show what is in a bucket or folder as a tree; all buckets without a NAME."""
    with where.open() as lake:
        if name is None:
            top = iter([_Entry(f"{bucket.name}/", Name(bucket.name, "")) for bucket in lake.buckets()])
        else:
            folder = _folder(lake, name)
            top = _in_folder(lake, folder, only_folders)
            write_line(shown(f"{folder.bucket}/{folder.key}"))
        folders = objects = size_bytes = 0
        for indent, entry in _lines(lake, top, depth, only_folders):
            size = f"[{human_bytes(entry.size_bytes):>10}]  " if sizes and entry.folder is None else ""
            write_line(indent + size + shown(entry.text))
            folders += entry.folder is not None
            objects += entry.folder is None
            size_bytes += entry.size_bytes
    counts = (
        f"{folders} folders" if only_folders else f"{folders} folders, {objects} objects, {human_bytes(size_bytes)}"
    )
    notice(counts)


def _lines(lake: Lake, top: Iterator[_Entry], depth: int | None, only_folders: bool) -> Iterator[tuple[str, _Entry]]:
    """Yield what stands before each entry, and the entry; without recursion: trees may be deep."""
    levels = [_Level(top, "")]
    levels[0].next()
    while levels:
        level = levels[-1]
        entry = level.next()
        if entry is None:
            levels.pop()
            continue
        is_last = level.ahead is None
        yield level.indent + ("└── " if is_last else "├── "), entry
        if entry.folder is not None and (depth is None or len(levels) < depth):
            inner = _Level(_in_folder(lake, entry.folder, only_folders), level.indent + ("    " if is_last else "│   "))
            inner.next()
            levels.append(inner)


def _in_folder(lake: Lake, folder: Name, only_folders: bool) -> Iterator[_Entry]:
    for entry in lake.ls(str(folder), delimiter="/", folders=True):
        text = entry.key[len(folder.key) :]
        if entry.key.endswith("/") and text:
            yield _Entry(text, Name(folder.bucket, entry.key))
        elif text and not only_folders:
            yield _Entry(text, size_bytes=entry.size_bytes)


def _folder(lake: Lake, text: str) -> Name:
    """Return the folder of a name.  KeyNotFound, BucketNotFound."""
    name = parse_name(text)
    folder = name if name.is_folder else Name(name.bucket, name.key + "/")
    if folder.key and not lake.exists(str(folder)):
        what = f"{name} is an object, not a folder" if lake.exists(str(name)) else f"{name} does not exist"
        raise KeyNotFound(f"{what}; see what is there with: lake tree {name.bucket}", subject=text)
    if not folder.key:
        lake.bucket(folder.bucket)
    return folder
