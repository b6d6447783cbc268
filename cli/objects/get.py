"""`lake get` and `lake cat`: objects into files, folders and stdout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from cli.objects.patterns import STATS_MAX, expand, is_meant, matches
from cli.objects.streams_as_targets import is_stdout, is_stream, open_stream
from cli.terminal.completing import complete_files, complete_names
from cli.terminal.output import json_option
from cli.terminal.streams import stdout_descriptor
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import InvalidArgument, InvalidName, IsAFolder, KeyNotFound, LakeError, LocalFileError
from lakefs.names import parse_name

if TYPE_CHECKING:
    from cli.objects.transfer import Account
    from lakefs.client.blocking.lake import Lake
    from lakefs.names import Name
    from lakefs.steps.steps import Steps
    from lakefs.trees.get_file import GetOptions
    from lakefs.trees.walk import FileOutcome

ALL = 1 << 62


@click.command()
@click.argument("name", metavar="BUCKET/KEY", shell_complete=complete_names)
@click.argument("target", metavar="DST", shell_complete=complete_files)
@click.option("-r", "--recursive", is_flag=True, help="A folder: what is under KEY/ lands in the folder DST.")
@click.option("--follow", is_flag=True, help="Write through symbolic links to folders inside DST.")
@click.option("-n", "--no-clobber", is_flag=True, help="Leave files that exist; without -r fail.")
@click.option("-f", "--force", is_flag=True, help="With -r: replace also files that were changed after the object.")
@click.option("-q", "--quiet", is_flag=True, help="No bar, no summary.")
@json_option
@engine_options
@pass_target
def get(
    where: Target,
    name: str,
    target: str,
    recursive: bool,
    follow: bool,
    no_clobber: bool,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Fetch an object into a file, checked.  A DST of - is stdout; in an existing folder it keeps its name.

    A DST that is a named pipe, a device or a descriptor (/dev/stdout, /dev/fd/N) gets the content and nothing else.

    A file is replaced when it is complete; mode and modification time are those that were stored.  A get that was
    killed continues where it stopped, from a hidden file that it left beside the target.

    With -r, files that have the right content already are left alone, and folders get their modes too.  A file here
    that was changed after the object, and differs, is not replaced, unless --force is given; nor can a name be fetched
    that no path can say (S3 clients may make a//b or a/../b).  Both are reported; the exit code is then 1.

    A DST that is a symbolic link is followed.  Inside DST none is: a file takes the place of a link of its name, and
    what belongs below a link to a folder is not fetched, unless --follow is given.

    The name may be a pattern, in quotes: *, ?, [a-z], and ** for any folders; a name that exists as written wins.
    What it matches goes into the folder DST, which is made.
    """
    from cli.objects.transfer import Account
    from lakefs.trees.get_file import GetOptions

    to_stdout = target == "-" or (not recursive and is_stdout(target))
    if to_stdout and (as_json or recursive):
        raise InvalidArgument(f"stdout takes the content of one object: {target} goes with neither --json nor -r")
    with where.open() as lake:
        wanted = _wanted(lake, name, target, recursive, follow)
        if to_stdout:
            for one in wanted:
                _print(lake, one.name, 0, ALL, _writer(stdout_descriptor(), "stdout"))
            return 0
        total_bytes = _total_bytes(lake, wanted) if sys.stderr.isatty() else None
        keep_newer = recursive and not force
        options = GetOptions(compare=recursive, replace=not no_clobber, follow=follow, keep_newer=keep_newer)
        with Account("get", total_bytes, as_json=as_json, quiet=quiet) as account:
            for one in wanted:
                if one.is_folder:
                    _get_folder(lake, where, parse_name(one.name), one.target, options, account)
                else:
                    _get_file(lake, one.name, one.target, options, account)
        return account.finish()


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@click.option("--offset", type=click.IntRange(0), default=0, help="First byte of each.")
@click.option("--length", type=click.IntRange(0), default=ALL, show_default="to the end", help="Bytes of each.")
@engine_options
@pass_target
def cat(where: Target, names: tuple[str, ...], offset: int, length: int) -> None:
    """Write objects to stdout, one behind the other, checked.

    A NAME may be a pattern, in quotes: *, ?, [a-z], and ** for any folders.  A name that exists as written wins.
    """
    write = _writer(stdout_descriptor(), "stdout")
    with where.open() as lake:
        for name in expand(lake, names):
            _print(lake, name, offset, length, write)


def get_version(lake: Lake, text: str, target: str, version: str) -> None:
    """Write a version of an object to the file `target`, or to stdout, checked."""
    from lakefs.trees.get_file import GetOptions, get_to_file
    from lakefs.trees.walk import Observer

    source, driver = _object_name(lake, text), driver_of(lake)
    if target == "-" or is_stdout(target):
        driver.run(_stream(lake, source, 0, ALL, _writer(stdout_descriptor(), "stdout"), version))
        return
    if is_stream(target):
        _get_into_special(lake, source, target, version)
        return
    if os.path.isdir(target):
        target = os.path.join(target, source.key.rpartition("/")[2])
    elif target.endswith("/"):
        raise LocalFileError(f"{target}: there is no such folder", subject=target)
    path = os.path.realpath(target)
    driver.run(get_to_file(driver.steps, source, path, GetOptions(compare=False), Observer(), version))


@dataclass(frozen=True)
class _Wanted:
    """One name to get.  `target`: the file, the folder that a file goes into, or the place of a whole folder."""

    name: str
    target: str
    is_folder: bool


def _wanted(lake: Lake, text: str, target: str, recursive: bool, follow: bool) -> list[_Wanted]:
    """Return what to get: what a pattern matches goes into the folder `target`, under its last name.

    Below it no link is followed, as in every get of a folder.
    """
    from lakefs.trees.get_tree import make_local_folder

    if not is_meant(lake, text):
        return [_Wanted(text, target, recursive)]
    found = matches(lake, text)
    if target == "-" or (len(found) == 1 and not found[0].is_folder and not target.endswith("/")):
        return [_Wanted(str(name), target, False) for name in found]
    places: dict[str, Name] = {}
    for name in found:
        last = name.key.rstrip("/").rpartition("/")[2] or name.bucket
        if last in (".", ".."):
            raise InvalidName(f"{name} ends in no name that a file can have; get it by itself", subject=str(name))
        place = os.path.join(target, last)
        if place in places:
            raise InvalidArgument(f"{places[place]} and {name} would both become {place}; get one by itself")
        if recursive and name.is_folder and not follow and os.path.islink(place):
            raise LocalFileError(
                f"{place} is a symbolic link; give --follow to write where it points to", subject=place
            )
        places[place] = name
    make_local_folder(target)
    return [
        _Wanted(str(name), place if recursive and name.is_folder else target, recursive and name.is_folder)
        for place, name in places.items()
    ]


def _total_bytes(lake: Lake, wanted: Sequence[_Wanted]) -> int | None:
    """Return the bytes that a get will fetch, for the bar; None if the get will raise the error itself."""
    files = [parse_name(one.name) for one in wanted if not one.is_folder]
    driver = driver_of(lake)
    stats = driver.run(driver.steps.stat_many(files[:STATS_MAX])) if files else []
    sizes = [found.size_bytes for found in stats if not isinstance(found, LakeError)]
    if len(sizes) < len(files):
        return None
    folders = [one.name if one.name.endswith("/") else f"{one.name}/" for one in wanted if one.is_folder]
    return sum(sizes) + sum(entry.size_bytes for folder in folders for entry in lake.ls(folder))


def _get_folder(lake: Lake, where: Target, source: Name, target: str, options: GetOptions, account: Account) -> None:
    from lakefs.names import Name
    from lakefs.trees.get_tree import get_tree

    if where.data is not None and _is_inside(target, str(where.data)):
        raise InvalidArgument(f"{target} is inside the store's data folder; choose another folder", subject=target)
    folder = source if source.is_folder else Name(source.bucket, source.key + "/")
    driver = driver_of(lake)
    driver.run(get_tree(driver.steps, folder, target, options, account.observer))


def _get_file(lake: Lake, text: str, target: str, options: GetOptions, account: Account) -> None:
    """Get one object into a file, or as a stream into a device or pipe.

    A link that the user names is followed.  A link inside a folder, under the object's name, is replaced.
    """
    from lakefs.trees.get_file import get_to_file

    source = _object_name(lake, text)
    is_special = options.replace and is_stream(target)
    path = os.path.realpath(target) if options.replace else target
    if os.path.isdir(target) and not is_special:
        target = path = os.path.join(target, _last_name(lake, source, text))
    elif target.endswith("/"):
        raise LocalFileError(f"{target}: there is no such folder", subject=target)
    try:
        with _folders_explained(lake, text):
            if is_special:
                outcome = _get_into_special(lake, source, target)
            else:
                driver = driver_of(lake)
                outcome = driver.run(get_to_file(driver.steps, source, path, options, account.observer))
    except LakeError as error:
        outcome = _failed(source, target, error)
    account.note(outcome)


def _last_name(lake: Lake, source: Name, text: str) -> str:
    """Return the name that an object keeps in a folder.  Raises IsAFolder; InvalidName if no file can have the name."""
    name = source.key.rpartition("/")[2]
    if name in ("", ".", ".."):
        if not lake.stat(str(source)).blob:
            raise _is_a_folder(text, "folder")
        raise InvalidName(f"{text} ends in no name that a file can have; give the file's name as DST", subject=text)
    return name


def _object_name(lake: Lake, text: str) -> Name:
    """Return the name of an object.  Raises IsAFolder for a bucket, BucketNotFound."""
    name = parse_name(text)
    if not name.key:
        lake.bucket(name.bucket)
        raise _is_a_folder(text, "bucket")
    return name


@contextlib.contextmanager
def _folders_explained(lake: Lake, text: str) -> Iterator[None]:
    """Raise IsAFolder in place of KeyNotFound if a folder has that name."""
    try:
        yield
    except (KeyNotFound, IsAFolder) as error:
        if lake.exists(text.rstrip("/") + "/"):
            raise _is_a_folder(text, "folder") from error
        raise


def _is_a_folder(text: str, kind: str) -> IsAFolder:
    return IsAFolder(
        f"{text} is a {kind}; fetch what is in it with: lake get -r {text} DST; see it with: lake ls {text}",
        subject=text,
    )


def _failed(source: Name, target: str, error: LakeError) -> FileOutcome:
    from lakefs.trees.walk import Fate, FileOutcome

    return FileOutcome(target, str(source), Fate.FAILED, error=error)


def _get_into_special(lake: Lake, source: Name, target: str, version: str = "") -> FileOutcome:
    from lakefs.trees.walk import Fate, FileOutcome

    descriptor = open_stream(target)
    try:
        size = driver_of(lake).run(_stream(lake, source, 0, ALL, _writer(descriptor, target), version))
    finally:
        os.close(descriptor)
    return FileOutcome(target, str(source), Fate.FETCHED, size, size)


def _is_inside(path: str, folder: str) -> bool:
    resolved, outer = os.path.realpath(path), os.path.realpath(folder)
    return resolved == outer or resolved.startswith(outer + os.sep)


def _print(lake: Lake, text: str, offset: int, length: int, write: Callable[[bytes], None]) -> None:
    name = _object_name(lake, text)
    with _folders_explained(lake, text):
        driver_of(lake).run(_stream(lake, name, offset, length, write))


def _stream(
    lake: Lake, source: Name, offset: int, length: int, write: Callable[[bytes], None], version: str = ""
) -> Steps[int]:
    from lakefs.get.objects import close_object, open_object
    from lakefs.trees.get_file import stream_range

    access = driver_of(lake).steps.access(None)
    opened = yield from open_object(access, source, version=version)
    try:
        return (yield from stream_range(access, opened, offset, length, write))
    finally:
        yield from close_object(opened)


def _writer(descriptor: int, path: str) -> Callable[[bytes], None]:
    """Return a function that writes all of a payload to a descriptor.

    It raises BrokenPipeError as it is; other errors become LocalFileError.
    """

    def write(payload: bytes) -> None:
        view = memoryview(payload)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LocalFileError(f"{path}: {error.strerror}", subject=path) from error

    return write
