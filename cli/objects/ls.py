"""`lake ls`, `lake stat`, `lake du`: list and inspect names."""

from __future__ import annotations

import stat as stat_module
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cli.objects.patterns import STATS_MAX, expand, folder_of, is_meant, is_pattern, matches
from cli.terminal.completing import complete_names
from cli.terminal.output import JsonList, human_bytes, iso_time, json_option, shown, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import KeyNotFound, LakeError

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.names import Name
    from lakefs.wire.messages import ListEntry, ObjectStat

KINDS = {1: "folder", 2: "object", 3: "symlink"}


@click.command()
@click.argument("name", required=False, shell_complete=complete_names)
@click.option("-l", "--long", "long_format", is_flag=True, help="With size, time and mode.")
@click.option("-r", "--recursive", is_flag=True, help="All keys below, not only the next level.")
@json_option
@engine_options
@pass_target
def ls(where: Target, name: str | None, long_format: bool, recursive: bool, as_json: bool) -> None:
    """List buckets, or what is in a bucket or folder.  Folders end in /.

    The name of an object lists that object.  NAME may be a pattern, in quotes: *, ?, [a-z], and ** for any folders; a
    name that exists as written wins.  It lists what it matches, and not what is in folders.
    """
    with where.open() as lake:
        if name is None:
            _list_buckets(lake, long_format, as_json)
            return
        entries = _matched(lake, name) if is_meant(lake, name) else _entries(lake, name, recursive)
        if as_json:
            document = JsonList("entries")
            for key, _, entry in entries:
                document.add(entry_document(key, entry))
            document.end({})
            return
        for _, text, entry in entries:
            write_line(long_line(text, entry) if long_format else shown(text))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@json_option
@engine_options
@pass_target
def stat(where: Target, names: tuple[str, ...], as_json: bool) -> None:
    """Show the metadata of objects, folders and buckets.

    A NAME may be a pattern, in quotes: *, ?, [a-z], and ** for any folders.  A name that exists as written wins.
    """
    if any(map(is_pattern, names)):
        with where.open() as lake:
            names = tuple(expand(lake, names))
    documents = [_stat_document(found) for found in _stats(where, names)]
    if as_json:
        write_json(documents[0] if len(documents) == 1 else documents)
        return
    for index, document in enumerate(documents):
        if index:
            write_line("")
        for field, value in document.items():
            if value not in ("", {}, None):
                write_line(f"{field + ':':<14} {shown(str(value))}")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=complete_names)
@click.option("-b", "--bytes", "exact", is_flag=True, help="Sizes in bytes.")
@click.option("-d", "--depth", type=click.IntRange(0), default=0, help="Also folders so many levels below.")
@json_option
@engine_options
@pass_target
def du(where: Target, names: tuple[str, ...], exact: bool, depth: int, as_json: bool) -> None:
    """Sum sizes and count objects, of buckets, folders, or objects; of all buckets without a name.

    Sizes are those of the objects; content that is stored once and named often counts each time.

    A NAME may be a pattern, in quotes: *, ?, [a-z], and ** for any folders.  A name that exists as written wins.
    """
    with where.open() as lake:
        wanted = tuple(expand(lake, names)) or tuple(bucket.name for bucket in lake.buckets())
        rows = [row for name in wanted for row in _usage(lake, name, depth)]
    if as_json:
        write_json({"usage": [{"name": name, "size_bytes": size, "objects": count} for name, size, count in rows]})
        return
    for name, size, count in rows:
        write_line(f"{str(size) if exact else human_bytes(size):>12} {count:>10}  {shown(name)}")


def _list_buckets(lake: Lake, long_format: bool, as_json: bool) -> None:
    buckets = lake.buckets()
    if as_json:
        found = [{"name": bucket.name, "created": iso_time(bucket.created_ns)} for bucket in buckets]
        write_json({"buckets": found})
        return
    for bucket in buckets:
        write_line(f"{iso_time(bucket.created_ns):>20}  {bucket.name}" if long_format else bucket.name)


def entries_below(lake: Lake, name: str, *, folders: bool) -> Iterator[tuple[str, str, ListEntry]]:
    """Yield (key, key below the name, entry) of the object of that name, then of all that is below its folder.

    KeyNotFound, BucketNotFound.  `folders`: of bare folders too.
    """
    return _entries(lake, name, recursive=True, folders=folders)


def _entries(lake: Lake, name: str, recursive: bool, *, folders: bool = False) -> Iterator[tuple[str, str, ListEntry]]:
    """Yield (key, text to show, entry): the object of that name, then the contents of the folder of that name."""
    from lakefs.names import parse_name

    wanted = parse_name(name)
    for found in _stat_either(lake, name):
        if found.kind == 1:
            yield from _in_folder(lake, wanted, recursive, folders=folders)
        else:
            yield wanted.key, wanted.key.rpartition("/")[2], _entry_of(found)


def _matched(lake: Lake, pattern: str) -> Iterator[tuple[str, str, ListEntry]]:
    """Yield what a pattern matches, shown below the folder that it begins with."""
    found = matches(lake, pattern)
    common = folder_of(pattern)
    driver = driver_of(lake)
    for start in range(0, len(found), STATS_MAX):
        batch = found[start : start + STATS_MAX]
        for name, stat_ in zip(batch, driver.run(driver.steps.stat_many(batch)), strict=True):
            if not isinstance(stat_, LakeError):  # else it was removed since
                yield name.key, str(name).removeprefix(common), _entry_of(stat_)


def _in_folder(
    lake: Lake, wanted: Name, recursive: bool, *, folders: bool = False
) -> Iterator[tuple[str, str, ListEntry]]:
    prefix = wanted.key if wanted.is_folder else wanted.key + "/"
    delimiter = "" if recursive else "/"
    for entry in lake.ls(f"{wanted.bucket}/{prefix}", delimiter=delimiter, folders=folders or not recursive):
        if entry.key != prefix:
            yield entry.key, entry.key[len(prefix) :], entry


def _stats(target: Target, names: tuple[str, ...]) -> list[ObjectStat]:
    """Return the stats of names, each the object's, else the folder's; one request."""
    from lakefs.names import parse_name
    from lakefs.wire.messages import NameResults, StatNames

    parsed = [parse_name(name) for name in names]
    # For a name without a slash ask for both; for a folder ask for its own key twice.
    keys = [(n.bucket, k) for n in parsed for k in (n.key, n.key if n.is_folder else n.key + "/")]
    reply = target.ask(StatNames(keys)).message
    assert isinstance(reply, NameResults)
    found: list[ObjectStat] = []
    for as_object, as_folder in zip(reply.results[::2], reply.results[1::2], strict=True):
        stat_ = as_object.stat or as_folder.stat
        if stat_ is None:
            failure = as_object.failure
            assert failure is not None
            raise failure.as_error()
        found.append(stat_)
    return found


def _stat_either(lake: Lake, name: str) -> list[ObjectStat]:
    """Return the stats of the object and of the folder of that name, as far as they exist.

    Raises KeyNotFound, BucketNotFound.
    """
    from lakefs.names import Name, parse_name

    wanted = parse_name(name)
    keys = [wanted.key] if wanted.is_folder else [wanted.key, wanted.key + "/"]
    found: list[ObjectStat] = []
    first_error: LakeError | None = None
    driver = driver_of(lake)
    for result in driver.run(driver.steps.stat_many([Name(wanted.bucket, key) for key in keys])):
        if isinstance(result, LakeError):
            if not isinstance(result, KeyNotFound):
                raise result
            first_error = first_error or result
        else:
            found.append(result)
    if not found:
        assert first_error is not None
        raise first_error
    return found


def _usage(lake: Lake, name: str, depth: int) -> list[tuple[str, int, int]]:
    """Return (name, bytes, objects) of the folders down to `depth`, the name's own last."""
    from lakefs.names import parse_name

    wanted = parse_name(name)
    sums: dict[str, list[int]] = {}
    own = [0, 0]
    for _, text, entry in _entries(lake, name, recursive=True):
        parts = text.split("/")[:-1][:depth]
        for level in range(len(parts)):
            total = sums.setdefault("/".join(parts[: level + 1]) + "/", [0, 0])
            total[0] += entry.size_bytes
            total[1] += 1
        own[0] += entry.size_bytes
        own[1] += 1
    base = f"{wanted.bucket}/{wanted.key}".rstrip("/") + "/"
    below = [(base + folder, size, count) for folder, (size, count) in sorted(sums.items())]
    return [*below, (name, own[0], own[1])]


def long_line(text: str, entry: ListEntry) -> str:
    """Return mode, size, time and name, as `ls -l` shows them."""
    if entry.is_prefix or text.endswith("/"):
        return f"{'-':>10} {'-':>15} {'-':>20}  {shown(text)}"
    mode = stat_module.filemode(stat_module.S_IFREG | entry.mode)
    return f"{mode:>10} {entry.size_bytes:>15} {iso_time(entry.mtime_ns):>20}  {shown(text)}"


def entry_document(key: str, entry: ListEntry) -> dict[str, Any]:
    """Return an entry of a listing as one JSON object."""
    if entry.is_prefix:
        return {"key": key, "kind": "folder"}
    return {
        "key": key,
        "kind": KINDS.get(entry.kind, str(entry.kind)),
        "size_bytes": entry.size_bytes,
        "etag": entry.etag,
        "mtime": iso_time(entry.mtime_ns),
        "mtime_ns": entry.mtime_ns,
        "mode": f"{entry.mode:04o}",
    }


def _entry_of(found: ObjectStat) -> ListEntry:
    from lakefs.wire.messages import ListEntry

    return ListEntry(
        found.key,
        size_bytes=found.size_bytes,
        etag=found.etag,
        mtime_ns=found.mtime_ns,
        kind=found.kind,
        node=found.node,
        blob=found.blob,
        mode=found.mode,
    )


def _stat_document(found: ObjectStat) -> dict[str, Any]:
    from lakefs.ids import id_text

    return {
        "name": f"{found.bucket}/{found.key}",
        "kind": KINDS.get(found.kind, str(found.kind)),
        "size_bytes": found.size_bytes,
        "etag": found.etag,
        "content_type": found.content_type,
        "mtime": iso_time(found.mtime_ns),
        "mtime_ns": found.mtime_ns,
        "mode": f"{found.mode:04o}",
        "uid": found.uid,
        "gid": found.gid,
        "blob": id_text(found.blob) if found.blob else "",
        "chunk_count": found.chunk_count,
        "node": found.node,
        "user_metadata": found.user_metadata,
        "headers": found.headers,
        "checksums": {kind: digest.hex() for kind, digest in found.checksums.items()},
    }
