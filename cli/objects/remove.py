"""`lake rm`: removes objects and folders, and says what was removed and how to get it back.

On a terminal it asks before a whole bucket, or a folder with many objects, is removed; programs are never asked.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import click

from cli.objects.buckets import not_there
from cli.objects.patterns import expand
from cli.terminal.completing import complete_names
from cli.terminal.output import counted, escaped, human_bytes, json_option, notice, write_json
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import BucketNotFound, FolderNotEmpty, IsAFolder, KeyNotFound, LakeError
from lakefs.names import Name, parse_name, parse_object_name
from lakefs.trees.remove_tree import RemovedNames, remove_below

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake

MANY: Final = 100
"""Objects of a folder that are removed without a question."""
EXIT_DECLINED: Final = 1
_NAMED_MAX: Final = 3
"""Names that the command to get them back is given with."""


@dataclass
class _Removed(RemovedNames):
    """Counts of what was removed, and the names that were given for it."""

    names: list[Name] = field(default_factory=list)

    def summary(self) -> str:
        """Return `12 objects (3.0 GiB) and 2 folders removed`."""
        parts = [f"{counted(self.objects, 'object')} ({human_bytes(self.size_bytes)})"]
        if self.folders:
            parts.append(counted(self.folders, "folder"))
        return f"{' and '.join(parts)} removed"


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@click.option("-r", "--recursive", is_flag=True, help="Folders too, with all that is in them.")
@click.option("-f", "--force", is_flag=True, help="A name that is not there is no error; nothing is asked.")
@click.option("-y", "--yes", is_flag=True, help="Nothing is asked.")
@json_option
@engine_options
@pass_target
def rm(where: Target, names: tuple[str, ...], recursive: bool, force: bool, yes: bool, as_json: bool) -> int:
    """Remove objects.

    With -r also folders; -r BUCKET empties a bucket, and lake bucket rm removes it.  Each name is removed
    atomically; an interrupted -r leaves the rest.  On a terminal, -r asks before it empties a bucket, or removes a
    folder with more than a hundred objects.

    A NAME may be a pattern, in quotes: *, ?, [a-z], and ** for any folders.  A name that exists as written wins.
    """
    removed = _Removed()
    with where.open() as lake:
        names = _each_once(lake, names, recursive)
        if not (force or yes or as_json) and not _are_agreed(lake, names, recursive):
            notice("lake: nothing was removed")
            return EXIT_DECLINED
        failure = _remove_all(lake, names, recursive, force, removed)
        way_back = "" if as_json else _way_back(lake, removed.names, recursive)
    if as_json:
        write_json({"removed": removed.count})
    elif recursive and (removed.count or failure is None):
        notice(removed.summary())
    if way_back:
        notice(way_back)
    if failure is not None:
        raise failure
    return 0


def _each_once(lake: Lake, texts: Sequence[str], recursive: bool) -> tuple[str, ...]:
    """Return names in place of the patterns among texts.

    A name that only a pattern brings in is left out if it is there already, or goes with a folder that is removed.
    """
    names = list(dict.fromkeys(expand(lake, texts)))
    if not recursive:
        return tuple(names)
    typed = set(texts)
    given = set(names)
    folders = {name.removesuffix("/") for name in names}
    return tuple(name for name in names if name in typed or not _goes_with_another(name, given, folders))


def _goes_with_another(name: str, given: set[str], folders: set[str]) -> bool:
    """Return True if a name is in one of the folders, or is the folder beside an object that is given."""
    above = name.removesuffix("/")
    if above != name and above in given:
        return True
    while above := above.rpartition("/")[0]:
        if above in folders:
            return True
    return False


def _remove_all(lake: Lake, names: Sequence[str], recursive: bool, force: bool, removed: _Removed) -> LakeError | None:
    """Remove names, one after the other; return the last failure, after the others were reported."""
    failure: LakeError | None = None
    for name in names:
        try:
            before = removed.count
            _remove(lake, name, recursive, removed)
            if removed.count > before:
                removed.names.append(parse_name(name))
            elif not force and not _is_bucket(name):
                raise _missing(lake, name)
        except LakeError as error:
            if force and isinstance(error, KeyNotFound):
                continue
            if failure is not None:
                notice(f"lake: {escaped(failure.message)}")
            failure = not_there(name) if isinstance(error, BucketNotFound) else error
    return failure


def _are_agreed(lake: Lake, names: Sequence[str], recursive: bool) -> bool:
    """Ask on a terminal about whole buckets, folders with many objects, or many names; return the answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    if len(names) > MANY:
        return click.confirm(f"Remove {len(names)} names?", err=True)
    return not recursive or all(_is_agreed(lake, name) for name in names)


def _is_agreed(lake: Lake, text: str) -> bool:
    name = parse_name(text)
    folder = name if name.is_folder else Name(name.bucket, name.key + "/")
    driver = driver_of(lake)
    page = driver.run(driver.steps.list_page(str(folder)))
    if not page.entries or (name.key and len(page.entries) <= MANY):
        return True
    there = counted(len(page.entries), "object")
    if page.next_after:
        there = f"more than {there}"
    else:
        there += f" ({human_bytes(sum(entry.size_bytes for entry in page.entries))})"
    what = f"folder {folder}" if name.key else f"bucket {name.bucket}"
    return click.confirm(f"Remove all that is in the {escaped(what)}: {there}?", err=True)


def _way_back(lake: Lake, names: list[Name], recursive: bool) -> str:
    """Return a line that says how to get back what was removed; empty if no bucket keeps versions."""
    kept = {bucket for bucket in {name.bucket for name in names} if lake.bucket(bucket).versioning == "enabled"}
    wanted = [shlex.quote(str(name)) for name in names if name.bucket in kept]
    if not wanted:
        return ""
    command = " ".join(["lake versions restore", *(["-r"] if recursive else []), *wanted[:_NAMED_MAX]])
    more = " ..." if len(wanted) > _NAMED_MAX else ""
    return f"lake: older versions are kept; to get it back: {escaped(command)}{more}"


def _missing(lake: Lake, text: str) -> LakeError:
    """Return the error for a removal of nothing: the name does not exist, or only a folder of that name does."""
    folder = text.rstrip("/") + "/"
    if lake.exists(folder):
        return IsAFolder(f"{text} is a folder; remove it with: lake rm -r", subject=text)
    return KeyNotFound(f"{text} does not exist", subject=text)


def _is_bucket(text: str) -> bool:
    return not parse_name(text).key


def _remove(lake: Lake, text: str, recursive: bool, removed: _Removed) -> None:
    """Remove a name, with `recursive` all below it too, and count what was removed."""
    if not recursive:
        try:
            _remove_one(lake, parse_object_name(text), removed)
        except FolderNotEmpty as error:
            raise FolderNotEmpty(
                f"{text} is a folder that is not empty; remove it with: lake rm -r", subject=text
            ) from error
        return
    name = parse_name(text)
    if not name.is_folder:
        _remove_one(lake, name, removed)
    folder = name if name.is_folder else Name(name.bucket, name.key + "/")
    driver = driver_of(lake)
    driver.run(remove_below(driver.steps, folder, removed))


def _remove_one(lake: Lake, name: Name, removed: _Removed) -> None:
    """Remove one name, if it exists: where versions are kept, a missing one would get a delete marker."""
    driver = driver_of(lake)
    (found,) = driver.run(driver.steps.stat_many([name]))
    if isinstance(found, KeyNotFound):
        return
    if isinstance(found, LakeError):
        raise found
    removed.objects += driver.run(driver.steps.remove_many([name]))
    removed.size_bytes += found.size_bytes
