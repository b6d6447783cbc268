"""`lake mv` and `lake cp`: other names for content that stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cli.objects.patterns import is_meant, matches
from cli.terminal.completing import complete_names
from cli.terminal.output import escaped, json_option, notice, write_json
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import AlreadyExists, InvalidArgument, KeyNotFound, LakeError
from lakefs.limits import COPY_WINDOW
from lakefs.names import Name, check_path, parse_name, parse_object_name

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.steps.steps import Steps
    from lakefs.wire.messages import ObjectStat

PAGE = 1000


@click.command()
@click.argument("source", shell_complete=complete_names)
@click.argument("target", shell_complete=complete_names)
@click.option("-n", "--no-clobber", is_flag=True, help="Fail when the target exists.")
@json_option
@engine_options
@pass_target
def mv(where: Target, source: str, target: str, no_clobber: bool, as_json: bool) -> None:
    """Rename an object or a folder, atomically, whatever its size.

    An object whose TARGET ends in / keeps its last name there.  A folder's TARGET is its new name, which
    must be free or an empty folder.

    SOURCE may be a pattern, in quotes: *, ?, [a-z], and ** for any folders; a name that exists as written wins.
    What it matches goes into the folder TARGET; a name that cannot be moved is reported, and the others are.
    """
    with where.open() as lake:
        moved, failures = _move_all(lake, _pairs(lake, source, target), replace=not no_clobber)
    if moved or not failures:
        _tell_result("moved", len(moved), moved[0] if moved else None, as_json)
    for error in failures[:-1]:
        notice(f"lake: {escaped(error.message)}")
    if failures:
        raise failures[-1]


@click.command()
@click.argument("source", shell_complete=complete_names)
@click.argument("target", shell_complete=complete_names)
@click.option("-r", "--recursive", is_flag=True, help="A folder, object by object.")
@click.option("-n", "--no-clobber", is_flag=True, help="Fail when the target exists; with -r leave it.")
@json_option
@engine_options
@pass_target
def cp(where: Target, source: str, target: str, recursive: bool, no_clobber: bool, as_json: bool) -> None:
    """Give an object's content a second name, or all of a folder's with -r.

    SOURCE and TARGET are names in the lake.  No byte moves: content is stored once, whatever its names.

    SOURCE may be a pattern, in quotes: *, ?, [a-z], and ** for any folders; a name that exists as written wins.
    What it matches goes into the folder TARGET.
    """
    with where.open() as lake:
        pairs = _pairs(lake, source, target)
        folders = [pair for pair in pairs if pair[0].is_folder]
        if folders and not recursive:
            text = str(folders[0][0]).rstrip("/")
            raise InvalidArgument(f"{text} is a folder; copy it with: lake cp -r", subject=text)
        driver = driver_of(lake)
        copied = sum(driver.run(_copy_tree(old, new, no_clobber)) for old, new in folders)
        results = driver.run(_copy_batch([pair for pair in pairs if not pair[0].is_folder], no_clobber))
    for found in results:
        if isinstance(found, LakeError):
            raise found
    one = results[0] if results and not isinstance(results[0], LakeError) and not folders else None
    _tell_result("copied", copied + len(results), one, as_json)


def _move_all(lake: Lake, pairs: list[tuple[Name, Name]], *, replace: bool) -> tuple[list[ObjectStat], list[LakeError]]:
    """Move names, but for those that go with a folder among them; return what was moved, and what failed."""
    from lakefs.trees.walk import is_fatal

    moved: list[ObjectStat] = []
    failures: list[LakeError] = []
    gone: Name | None = None  # what was in it follows it
    for old, new in pairs:
        if gone is not None and old.bucket == gone.bucket and old.key.startswith(gone.key):
            continue
        try:
            moved.append(lake.move(str(old), str(new), replace=replace))
        except LakeError as error:
            failures.append(error)
            if is_fatal(error):
                break
            continue
        if old.is_folder:
            gone = old
    return moved, failures


def _tell_result(done: str, count: int, found: ObjectStat | None, as_json: bool) -> None:
    """Write the new name of a single object, else how many there are."""
    if as_json and found is not None and count == 1:
        write_json({"name": f"{found.bucket}/{found.key}", "size_bytes": found.size_bytes, "etag": found.etag})
    elif as_json:
        write_json({done: count})


def _pairs(lake: Lake, source: str, target: str) -> list[tuple[Name, Name]]:
    """Return old and new names: what a pattern matches goes into the target, which must be a folder.

    InvalidArgument if two would get one name.
    """
    if not is_meant(lake, source):
        return [_ends(lake, source, target)]
    into = parse_name(target)
    if not into.is_folder:
        raise InvalidArgument(f"a pattern needs a folder to go to; end it with a slash: {target}/", subject=target)
    pairs: dict[Name, Name] = {}
    for old in matches(lake, source):
        base = old.key.rstrip("/").rpartition("/")[2] or old.bucket
        new = check_path(Name(into.bucket, into.key + base + ("/" if old.is_folder else "")))
        if new in pairs:
            raise InvalidArgument(f"{pairs[new]} and {old} would both become {new}", subject=source)
        pairs[new] = old
    return [(old, new) for new, old in pairs.items()]


def _ends(lake: Lake, source: str, target: str) -> tuple[Name, Name]:
    """Return both full names: of a folder with their slashes, of an object's target with its last name.

    InvalidName if no path can say the target.
    """
    old, new = parse_object_name(source), check_path(parse_name(target))
    if not old.is_folder:
        driver = driver_of(lake)
        as_object, as_folder = driver.run(driver.steps.stat_many([old, Name(old.bucket, old.key + "/")]))
        if isinstance(as_object, LakeError):
            if isinstance(as_folder, LakeError):
                raise as_object
            old = Name(old.bucket, old.key + "/")
    if not old.is_folder:
        return old, check_path(Name(new.bucket, new.key + old.key.rpartition("/")[2])) if new.is_folder else new
    if not new.key:
        return old, check_path(Name(new.bucket, old.key.rstrip("/").rpartition("/")[2] + "/"))
    return old, new if new.is_folder else Name(new.bucket, new.key + "/")


def _copy_tree(old: Name, new: Name, no_clobber: bool) -> Steps[int]:
    """Copy every object below a folder; returns how many.  The first failure is raised after its page."""
    from lakefs.steps.steps import send
    from lakefs.wire.messages import Listed, ListNames

    if old.bucket == new.bucket and new.key.startswith(old.key):
        raise InvalidArgument(f"{new} is inside {old}; a folder cannot be copied into itself", subject=str(new))
    copied = 0
    after = ""
    while True:
        reply = yield from send(ListNames(old.bucket, old.key, after, "", PAGE))
        assert isinstance(reply.message, Listed)
        page = reply.message
        if not page.entries and not copied:
            raise KeyNotFound(f"{old} does not exist or is empty", subject=str(old))
        pairs = [
            (Name(old.bucket, entry.key), Name(new.bucket, new.key + entry.key[len(old.key) :]))
            for entry in page.entries
        ]
        for found in (yield from _copy_batch(pairs, no_clobber)):
            if not isinstance(found, LakeError):
                copied += 1
            elif not isinstance(found, AlreadyExists):
                raise found
        after = page.next_after
        if not after:
            return copied


def _copy_batch(pairs: list[tuple[Name, Name]], no_clobber: bool) -> Steps[list[ObjectStat | LakeError]]:
    """Copy with several requests in flight; returns a stat or an error for each.

    The error is AlreadyExists for a taken target with `no_clobber`.
    """
    from lakefs.errors import PreconditionFailed
    from lakefs.put.upload import only_result
    from lakefs.steps.steps import Pipeline, Send
    from lakefs.wire.engine_port import Reply
    from lakefs.wire.messages import Condition, Copy

    found: list[ObjectStat | LakeError] = []
    pipeline = Pipeline(COPY_WINDOW)

    def done(reply: Reply) -> None:
        try:
            found.append(only_result(reply))
        except LakeError as error:
            failed(error)

    def failed(error: Exception) -> None:
        if not isinstance(error, LakeError):
            raise error
        taken = no_clobber and isinstance(error, PreconditionFailed)
        found.append(AlreadyExists(f"the target exists already: {error.message}") if taken else error)

    for old, new in pairs:
        request = Copy(*old, *new, condition=Condition(absent=no_clobber))
        yield from pipeline.submit(Send(request), done, failed)
    yield from pipeline.drain()
    return found
