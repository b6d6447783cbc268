"""`lake put`: local files, folders and stdin into the lake."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from cli.terminal.completing import complete_names, complete_sources
from cli.terminal.output import json_option
from cli.terminal.streams import stdin_content
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import InvalidArgument, LakeError, LocalFileError
from lakefs.names import check_new_bucket_name

if TYPE_CHECKING:
    from cli.objects.transfer import Account
    from lakefs.client.blocking.lake import Lake
    from lakefs.names import Name
    from lakefs.trees.put_tree import PutOptions


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SRC...", shell_complete=complete_sources)
@click.argument("target", metavar="BUCKET/KEY", shell_complete=complete_names)
@click.option("-r", "--recursive", is_flag=True, help="Folders too; what a folder holds lands under KEY/.")
@click.option("--follow", is_flag=True, help="Follow symbolic links inside folders instead of skipping them.")
@click.option("--no-create", is_flag=True, help="Fail when the bucket does not exist, instead of making it.")
@click.option("--if-absent", is_flag=True, help="Fail when the name exists.")
@click.option("--content-type", default="", metavar="TYPE", help="Media type to note with the objects.")
@click.option("-j", "--jobs", type=click.IntRange(1, 32), default=4, help="Batches of small files in flight.")
@click.option("-q", "--quiet", is_flag=True, help="No bar, no summary.")
@json_option
@engine_options
@pass_target
def put(
    where: Target,
    sources: tuple[str, ...],
    target: str,
    recursive: bool,
    follow: bool,
    no_create: bool,
    if_absent: bool,
    content_type: str,
    jobs: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Store files, durably.  A SRC of - is stdin.

    One SRC gets the name BUCKET/KEY; a KEY that ends in / is a folder, in which files get their own last names.
    Several SRC need such a folder.  With -r, what is in the folder SRC lands under KEY/ (of several folders, each
    under KEY/ and its own last name); files that are stored already with the same content are left alone.
    A bucket that does not exist is made, and that is reported.
    """
    from cli.objects.transfer import Account
    from lakefs.trees.put_tree import PutOptions

    options = PutOptions(
        compare=recursive, if_absent=if_absent, create_bucket=not no_create, content_type=content_type, jobs=jobs
    )
    places = _places(sources, target, recursive)
    with where.open(create=True) as lake:
        total_bytes = _total_bytes(sources) if sys.stderr.isatty() else None
        with (
            Account("put", total_bytes, as_json=as_json, quiet=quiet) as account,
            _new_bucket_noted(lake, places[0][1].bucket, options, account),
        ):
            if sources == ("-",):
                _put_stdin(lake, places[0][1], options, account)
            else:
                _put_files(lake, places, follow, _refused(lake, where, recursive), options, account)
        account.finish()


@contextlib.contextmanager
def _new_bucket_noted(lake: Lake, bucket: str, options: PutOptions, account: Account) -> Iterator[None]:
    """Report a bucket that the put makes, however the put ends."""
    may_be_made = options.create_bucket and not lake.exists(bucket)
    if may_be_made:
        check_new_bucket_name(bucket)
    try:
        yield
    finally:
        with contextlib.suppress(LakeError):
            if may_be_made and lake.exists(bucket):
                account.note_made_bucket(bucket)


def _put_files(
    lake: Lake,
    places: list[tuple[str, Name]],
    follow: bool,
    refused: frozenset[tuple[int, int]],
    options: PutOptions,
    account: Account,
) -> None:
    from lakefs.trees.put_tree import put_tree
    from lakefs.trees.walk import Walk, WalkOptions

    walk_options = WalkOptions(follow, folders=True, refused=refused)
    walks = [Walk(source, name.key, walk_options) for source, name in places]
    driver = driver_of(lake)
    driver.run(put_tree(driver.steps, walks, places[0][1].bucket, options, account.observer))


def _put_stdin(lake: Lake, name: Name, options: PutOptions, account: Account) -> None:
    from lakefs.trees.walk import Fate, FileOutcome

    result = lake.put(
        str(name),
        stdin_content(),
        content_type=options.content_type,
        if_absent=options.if_absent,
        create_bucket=options.create_bucket,
        progress=account.progress,
    )
    account.note(FileOutcome("-", str(name), Fate.STORED, result.size_bytes, result.new_bytes))


def _places(sources: tuple[str, ...], target: str, recursive: bool) -> list[tuple[str, Name]]:
    """Return each source with its name in the lake.  Raises InvalidArgument, LocalFileError."""
    from lakefs.names import Name, check_path, parse_name

    name = check_path(parse_name(target))
    if "-" in sources:
        if len(sources) > 1:
            raise InvalidArgument("stdin (-) cannot be put together with other sources")
        if name.is_folder:
            raise InvalidArgument(f"stdin needs the full name of an object, not the folder {target}", subject=target)
        return [("-", name)]
    if len(sources) > 1 and not name.is_folder:
        raise InvalidArgument(f"several sources need a folder to go to; end it with a slash: {target}/", subject=target)
    places: list[tuple[str, Name]] = []
    taken: dict[str, str] = {}
    for source in sources:
        key = _key_of(source, name.key, alone=len(sources) == 1, recursive=recursive)
        if key in taken:
            raise InvalidArgument(
                f"{taken[key]} and {source} would both be stored as {name.bucket}/{key}", subject=source
            )
        taken[key] = source
        places.append((source, Name(name.bucket, key)))
    return places


def _key_of(source: str, key: str, *, alone: bool, recursive: bool) -> str:
    """Return the key of a source: a folder's ends in `/` (or is empty, a bucket's root)."""
    if not os.path.lexists(source):
        raise LocalFileError(f"{source}: No such file or directory", subject=source)
    in_folder = not key or key.endswith("/")
    if os.path.isfile(source):
        return key + _base_of(source) if in_folder else key
    if not os.path.isdir(source):
        reason = f"{source} is not a regular file; give what it holds to stdin: lake put - {key or 'BUCKET/KEY'}"
        raise LocalFileError(reason, subject=source)
    if not recursive:
        raise LocalFileError(f"{source}: is a folder; use -r", subject=source)
    if not alone:
        return f"{key}{_base_of(source)}/"
    return key if in_folder else key + "/"


def _base_of(source: str) -> str:
    """Return the last name of a source, as a part of a key."""
    base = os.path.basename(os.path.abspath(source))
    try:
        base.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(source).decode(errors="backslashreplace")
        raise InvalidArgument(f"{shown}: the name is not UTF-8; give a key for it", subject=shown) from None
    return base


def _refused(lake: Lake, where: Target, recursive: bool) -> frozenset[tuple[int, int]]:
    """Return device and inode of each of the target's data folders on this machine: a lake cannot store itself."""
    if not recursive:
        return frozenset()
    refused = set()
    for data in [where.data] if where.data else _served_data(lake, where):
        with contextlib.suppress(OSError):
            found = os.stat(data)
            refused.add((found.st_dev, found.st_ino))
    return frozenset(refused)


def _served_data(lake: Lake, where: Target) -> list[str]:
    if not where.address().startswith("unix:"):
        return []
    status = lake.status()
    folders = [status.get("data"), *[each["folder"] for each in status.get("folders", ())]]
    return [folder for folder in folders if isinstance(folder, str)]


def _total_bytes(sources: tuple[str, ...]) -> int | None:
    """Return the bytes of all sources, for the bar; None if one is a stream."""
    total = 0
    for source in sources:
        if source == "-":
            return None
        if not os.path.isdir(source):
            total += os.path.getsize(source) if os.path.exists(source) else 0
            continue
        for folder, _, names in os.walk(source):
            for name in names:
                path = os.path.join(folder, name)
                total += os.path.getsize(path) if os.path.isfile(path) and not os.path.islink(path) else 0
    return total
