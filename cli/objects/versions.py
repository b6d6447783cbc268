"""`lake versions ls|get|restore|rm`: what a bucket with versions keeps of objects that were overwritten or removed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from cli.objects.remove import EXIT_DECLINED
from cli.terminal.completing import complete_files, complete_names
from cli.terminal.output import JsonList, counted, escaped, iso_time, json_option, notice, shown, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import InvalidArgument, KeyNotFound, LakeError, VersionNotFound
from lakefs.limits import COPY_WINDOW
from lakefs.names import Name, parse_name, parse_object_name

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.steps.steps import Steps
    from lakefs.wire.messages import ListedVersions, NameResult, VersionEntry


@click.group()
@engine_options
def versions() -> None:
    """List, fetch, bring back and remove old versions of objects.

    A bucket keeps them after: lake bucket set NAME --versioning enabled
    """


@versions.command("ls")
@click.argument("name", shell_complete=complete_names)
@json_option
@engine_options
@pass_target
def list_(where: Target, name: str, as_json: bool) -> None:
    """List the versions of an object, or of all objects below a folder or in a bucket; of each the newest first.

    The columns are time, size, version, state (latest, deleted) and name.
    """
    with where.open() as lake:
        found = _versions(lake, parse_name(name))
        if as_json:
            document = JsonList("versions")
            for entry in found:
                document.add(_document(entry))
            document.end({})
            return
        for entry in found:
            write_line(_line(entry))


@versions.command()
@click.argument("name", metavar="BUCKET/KEY", shell_complete=complete_names)
@click.argument("version")
@click.argument("target", metavar="DST", shell_complete=complete_files)
@engine_options
@pass_target
def get(where: Target, name: str, version: str, target: str) -> None:
    """Fetch a version of an object into the file DST, checked; - is stdout."""
    from cli.objects.get import get_version

    with where.open() as lake:
        get_version(lake, name, target, version)


@versions.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@click.option("--version", metavar="VERSION", default="", help="This one; else the newest with another content.")
@click.option("-r", "--recursive", is_flag=True, help="Below folders, or in buckets: the objects that were removed.")
@json_option
@engine_options
@pass_target
def restore(where: Target, names: tuple[str, ...], version: str, recursive: bool, as_json: bool) -> None:
    """Bring back an object that was removed or overwritten: an old version becomes the newest one.

    The versions stay, and so does what was the newest one.  Empty folders have no versions.
    """
    if version and (recursive or len(names) > 1):
        raise InvalidArgument("--version is of one object; give one name, and no -r")
    restored: list[str] = []
    with where.open() as lake:
        for name in names:
            if recursive:
                restored += driver_of(lake).run(_restore_below(parse_name(name)))
            else:
                restored.append(_restore(lake, parse_object_name(name), version))
    if as_json:
        write_json({"restored": restored})
    elif recursive:
        notice(f"{counted(len(restored), 'object')} restored")


@versions.command()
@click.argument("name", shell_complete=complete_names)
@click.argument("wanted", nargs=-1, metavar="[VERSION...]")
@click.option("-r", "--recursive", is_flag=True, help="All old versions below a folder, or in a bucket.")
@click.option("-y", "--yes", is_flag=True, help="Nothing is asked.")
@json_option
@engine_options
@pass_target
def rm(where: Target, name: str, wanted: tuple[str, ...], recursive: bool, yes: bool, as_json: bool) -> int:
    """Remove versions of an object for good, also delete markers: without its newest one, an object is there again.

    With -r all that objects are not bound to now; what is there stays.  Then a bucket that is empty can be removed.
    """
    if recursive == bool(wanted):
        raise InvalidArgument("give the versions to remove, or -r for all old ones below a folder or in a bucket")
    with where.open() as lake:
        if not recursive:
            removed = _remove(lake, parse_object_name(name), wanted)
        else:
            folder = _folder_of(parse_name(name))
            asked = not (yes or as_json) and sys.stdin.isatty() and sys.stderr.isatty()
            if asked and not click.confirm(f"Remove all old versions below {escaped(str(folder))} for good?", err=True):
                notice("lake: nothing was removed")
                return EXIT_DECLINED
            removed = driver_of(lake).run(_remove_below(folder))
    if as_json:
        write_json({"removed": removed})
    elif recursive:
        notice(f"{counted(removed, 'version')} removed")
    return 0


# --- listing -----------------------------------------------------------------------------------------


def _versions(lake: Lake, name: Name) -> Iterator[VersionEntry]:
    """Yield the versions of an object; if there are none, of what is below the folder of that name.  KeyNotFound."""
    any_found = False
    if not name.is_folder:
        for entry in _below(lake, name):
            if entry.key != name.key:
                break  # longer keys come behind it
            any_found = True
            yield entry
    if not any_found:
        for entry in _below(lake, name if name.is_folder else Name(name.bucket, name.key + "/")):
            any_found = True
            yield entry
    if not any_found and name.key:
        raise KeyNotFound(f"{name} does not exist, and nothing is kept of it", subject=str(name))


def _below(lake: Lake, name: Name) -> Iterator[VersionEntry]:
    driver = driver_of(lake)
    page = driver.run(_page(name, "", ""))
    while True:
        yield from page.entries
        if not page.next_after:
            return
        page = driver.run(_page(name, page.next_after, page.next_version))


def _page(name: Name, after: str, after_version: str) -> Steps[ListedVersions]:
    from lakefs.steps.steps import send
    from lakefs.wire.messages import ListedVersions, ListVersions

    request = ListVersions(name.bucket, name.key, after=after, after_version=after_version)
    reply = yield from send(request)
    assert isinstance(reply.message, ListedVersions)
    return reply.message


def _state(entry: VersionEntry) -> str:
    if entry.is_marker:
        return "deleted"
    return "latest" if entry.is_latest else ""


def _line(entry: VersionEntry) -> str:
    size = "-" if entry.is_marker else str(entry.size_bytes)
    return f"{iso_time(entry.mtime_ns):>20} {size:>15} {entry.version:<16} {_state(entry):<7}  {shown(entry.key)}"


def _document(entry: VersionEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "version": entry.version,
        "is_latest": entry.is_latest,
        "is_marker": entry.is_marker,
        "size_bytes": entry.size_bytes,
        "etag": entry.etag,
        "mtime": iso_time(entry.mtime_ns),
        "mtime_ns": entry.mtime_ns,
    }


# --- removing ----------------------------------------------------------------------------------------


def _remove(lake: Lake, name: Name, wanted: Sequence[str]) -> int:
    """Remove versions of one object; return how many.  VersionNotFound, after the others were removed."""
    from lakefs.put.upload import result_of

    for version, result in zip(
        wanted, driver_of(lake).run(_delete([(name.key, v) for v in wanted], name)), strict=True
    ):
        if result.failure is None and result.stat is None:
            raise VersionNotFound(f"{name} has no version {version}", subject=str(name))
        result_of(result)
    return len(wanted)


def _remove_below(folder: Name) -> Steps[int]:
    """Remove all versions that no key is bound to, then the delete markers on top; return how many.

    In this order nothing that was removed is there again meanwhile; a marker stays that has got a version below it.
    """
    from lakefs.put.upload import result_of

    removed = 0
    for of_markers in (False, True):
        after, after_version = "", ""
        waiting: list[VersionEntry] = []
        while True:
            page = yield from _page(folder, after, after_version)
            if of_markers:
                # What stands below the last one of a page is at the beginning of the next.
                entries = [*waiting, *page.entries]
                waiting = entries[-1:] if page.next_after else []
                old = [entry for entry in _lone_markers(entries) if entry not in waiting]
            else:
                old = [entry for entry in page.entries if not entry.is_latest]
            if old:
                results = yield from _delete([(entry.key, entry.version) for entry in old], folder)
                removed += len([result_of(result) for result in results if result.failure or result.stat])
            after, after_version = page.next_after, page.next_version
            if not after:
                break
    return removed


def _lone_markers(entries: Sequence[VersionEntry]) -> list[VersionEntry]:
    """Return the delete markers on top that have nothing below them."""
    following = [*(entry.key for entry in entries[1:]), None]
    return [
        entry
        for entry, below in zip(entries, following, strict=False)
        if entry.is_latest and entry.is_marker and entry.key != below
    ]


def _delete(versions_of: Sequence[tuple[str, str]], name: Name) -> Steps[list[NameResult]]:
    from lakefs.steps.steps import send
    from lakefs.wire.messages import DeleteNames, NameResults

    names = [(name.bucket, key) for key, _ in versions_of]
    reply = yield from send(DeleteNames(names, versions=[version for _, version in versions_of]))
    assert isinstance(reply.message, NameResults)
    return reply.message.results


def _folder_of(name: Name) -> Name:
    return name if name.is_folder else Name(name.bucket, name.key + "/")


# --- bringing back -----------------------------------------------------------------------------------


def _restore(lake: Lake, name: Name, version: str) -> str:
    """Make a version the newest one; return the name.  KeyNotFound, VersionNotFound, VersionIsMarker."""
    from lakefs.put.upload import only_result
    from lakefs.steps.steps import send
    from lakefs.wire.messages import Copy

    if not version:
        version = _newest_other(lake, name)
    only_result(driver_of(lake).run(send(Copy(*name, *name, version=version))))
    return str(name)


def _newest_other(lake: Lake, name: Name) -> str:
    """Return the newest version with content that the object is not bound to now."""
    kept = [entry for entry in _versions_of(lake, name) if not entry.is_marker]
    for entry in kept:
        if not entry.is_latest:
            return entry.version
    if kept:
        raise VersionNotFound(f"{name} is there, and has no older version", subject=str(name))
    if lake.exists(f"{name}/") or any(True for _ in _below(lake, Name(name.bucket, name.key + "/"))):
        raise KeyNotFound(f"{name} is a folder; bring back what was in it with: lake versions restore -r {name}")
    raise KeyNotFound(f"{name} does not exist, and nothing is kept of it", subject=str(name))


def _versions_of(lake: Lake, name: Name) -> Iterator[VersionEntry]:
    for entry in _below(lake, name):
        if entry.key != name.key:
            return
        yield entry


def _restore_below(name: Name) -> Steps[list[str]]:
    """Bring back each removed object below a folder; return their names.  The first failure is raised at the end."""
    from lakefs.put.upload import only_result
    from lakefs.steps.steps import Pipeline, Send
    from lakefs.wire.engine_port import Reply
    from lakefs.wire.messages import Copy

    folder = _folder_of(name)
    restored: list[str] = []
    errors: list[LakeError] = []
    pipeline = Pipeline(COPY_WINDOW)

    def done(reply: Reply) -> None:
        try:
            found = only_result(reply)
            restored.append(f"{found.bucket}/{found.key}")
        except LakeError as error:
            failed(error)

    def failed(error: Exception) -> None:
        if not isinstance(error, LakeError):
            raise error
        if errors:
            notice(f"lake: {escaped(error.message)}")
        errors.append(error)

    copies = _RemovedObjects()
    after, after_version = "", ""
    while True:
        page = yield from _page(folder, after, after_version)
        for key, version in copies.in_page(page):
            yield from pipeline.submit(
                Send(Copy(folder.bucket, key, folder.bucket, key, version=version)), done, failed
            )
        after, after_version = page.next_after, page.next_version
        if not after:
            break
    yield from pipeline.drain()
    if errors:
        raise errors[0]
    if not restored:
        raise KeyNotFound(f"nothing that was removed is kept below {folder}", subject=str(folder))
    return restored


class _RemovedObjects:
    """Finds the removed objects in pages of versions, each with its newest version that has content."""

    def __init__(self) -> None:
        self._removed_key: str | None = None

    def in_page(self, page: ListedVersions) -> Iterator[tuple[str, str]]:
        """Yield key and version of each whose version is in the page."""
        for entry in page.entries:
            if entry.is_latest:
                self._removed_key = entry.key if entry.is_marker else None
            elif entry.key == self._removed_key and not entry.is_marker:
                self._removed_key = None
                yield entry.key, entry.version
