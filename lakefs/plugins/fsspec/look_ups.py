"""`LookUps`: names of the lake as a file system: ls, info, find, du, times and ids.  Nothing here changes the store.

Paths are `BUCKET/KEY`, with or without `lake://`; "" is the list of buckets.  Folders are those that were made, and
those that the names below them imply.  Where an object `a` and a folder `a/` both exist, `info` describes the object,
and `ls` lists the folder.

No listing is cached: each answer is that of the engine at that moment, or of a name that is known to be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from glob import has_magic
from typing import Any, Literal, cast, overload

from fsspec.spec import AbstractFileSystem
from fsspec.utils import stringify_path, tokenize

from lakefs.client.blocking.lake import Lake
from lakefs.errors import BucketNotFound, InvalidName, KeyNotFound
from lakefs.names import SCHEME
from lakefs.plugins.fsspec.connections import Connection, lake_of
from lakefs.plugins.fsspec.entries import Entry, bucket_entry, entry_of, folder_entry
from lakefs.plugins.fsspec.os_errors import missing, os_call
from lakefs.wire.messages import ListEntry

_ABSENT = (KeyNotFound, BucketNotFound)


class LookUps(AbstractFileSystem):  # type: ignore[misc]
    """Questions about names; errors are OSError, such as FileNotFoundError."""

    protocol = "lake"
    root_marker = ""
    _connection: Connection
    _token: str | None

    @property
    def lake(self) -> Lake:
        """The lake that this file system uses: a connection shared with others of this process."""
        return os_call(lake_of, self._connection, self._token)

    @property
    def fsid(self) -> str:
        """The same for all file systems of one engine's address."""
        return f"lake_{self._connection.address}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return `BUCKET/KEY` of a path or URL, or of each in a list; a trailing `/` is dropped."""
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = cast(str, stringify_path(path))
        return text.removeprefix(SCHEME).removeprefix("lake::").strip("/")

    # --- one name ----------------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> Entry:
        """Return the entry of an object, else of a folder or bucket; see `entries`.  FileNotFoundError."""
        path = self._strip_protocol(path)
        found = self._found(path)
        if found is None:
            raise missing(path)
        return found

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return True if an object, folder or bucket exists.  Failures are raised, not taken for absence."""
        return self._found(self._strip_protocol(path)) is not None

    def isdir(self, path: str) -> bool:
        """Return True for a bucket, or for a folder with no object of its name; False if nothing exists."""
        found = self._found(self._strip_protocol(path))
        return found is not None and found["type"] == "directory"

    def isfile(self, path: str) -> bool:
        """Return True for an object; False if nothing exists."""
        found = self._found(self._strip_protocol(path))
        return found is not None and found["type"] == "file"

    def _found(self, path: str) -> Entry | None:
        if not path:
            return folder_entry("")
        try:
            return os_call(self._found_in_lake, path)
        except FileNotFoundError:
            return None

    def _found_in_lake(self, path: str) -> Entry:
        lake = self.lake
        try:
            if "/" not in path:
                return bucket_entry(lake.bucket(path))
            try:
                return entry_of(path, lake.stat(path))
            except KeyNotFound:
                return entry_of(path, lake.stat(path + "/"))
        except InvalidName:  # no bucket can have that name
            raise missing(path) from None

    def checksum(self, path: str) -> int:
        """Return a number that is the same for equal content: from the blob's id."""
        return int(self.ukey(path), 16)

    def ukey(self, path: str) -> str:
        """Return the blob's id in hexadecimal: the same for equal content, another for other content."""
        found = self.info(path)
        return cast(str, found["blob"] if "blob" in found else tokenize(found))

    def created(self, path: str) -> datetime:
        """Return the time of the last change of content, attributes or name (UTC); a bucket's creation."""
        return self._time(path, "created")

    def modified(self, path: str) -> datetime:
        """Return the time of modification (UTC)."""
        return self._time(path, "mtime")

    def _time(self, path: str, field: str) -> datetime:
        seconds = self.info(path)[field]
        if seconds is None:
            raise NotImplementedError("the list of buckets has no times")
        return datetime.fromtimestamp(seconds, UTC)

    # --- many names --------------------------------------------------------------------------------

    @overload
    def ls(self, path: str, detail: Literal[True] = True, **kwargs: Any) -> list[Entry]: ...
    @overload
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Entry] | list[str]: ...
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Entry] | list[str]:
        """List a folder or bucket, or all buckets (""); an object is listed as itself.  FileNotFoundError."""
        path = self._strip_protocol(path)
        entries = os_call(self._listed, path)
        return entries if detail else [entry["name"] for entry in entries]

    def _listed(self, path: str) -> list[Entry]:
        try:
            children = self._children(path)
        except InvalidName:
            raise missing(path) from None
        if children or not path:
            return children
        found = self._found(path)
        if found is None:
            raise missing(path)
        return [] if found["type"] == "directory" else [found]

    def _children(self, path: str) -> list[Entry]:
        if not path:
            return [bucket_entry(bucket) for bucket in self.lake.buckets()]
        bucket, _, key = path.partition("/")
        prefix = f"{key}/" if key else ""
        listed = self.lake.ls(f"{bucket}/{prefix}", delimiter="/", folders=True)
        own = (prefix, f"{prefix}/")  # the folder itself, and the names with an empty part after it
        return [_listed_entry(bucket, entry) for entry in listed if entry.key not in own]

    def below(self, path: str) -> Iterable[tuple[str, ListEntry]]:
        """Iterate over all names below a folder or bucket, with their paths, in byte order; folders' end in `/`.

        The listing goes on page by page while the caller uses it.
        """
        bucket, _, key = path.partition("/")
        prefix = f"{key}/" if key else ""
        for entry in self.lake.ls(f"{bucket}/{prefix}", folders=True):
            yield f"{bucket}/{entry.key}", entry

    @overload
    def find(
        self, path: str, maxdepth: int | None = ..., withdirs: bool = ..., *, detail: Literal[True], **kwargs: Any
    ) -> dict[str, Entry]: ...
    @overload
    def find(
        self, path: str, maxdepth: int | None = ..., withdirs: bool = ..., detail: Literal[False] = ..., **kwargs: Any
    ) -> list[str]: ...
    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> list[str] | dict[str, Entry]:
        """List all objects below a folder, with `withdirs` also the folders; an object is found as itself.

        The names are requested 1000 at a time, whatever folders they are in; with `maxdepth` folder by folder.  A path
        at which nothing exists gives an empty list.
        """
        path = self._strip_protocol(path)
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        found: dict[str, Entry] = {}
        if maxdepth is not None:
            found = os_call(self._found_to_depth, path, maxdepth, withdirs)
        else:
            for top in [path] if path else [bucket["name"] for bucket in self.ls("")]:
                found |= os_call(self._found_below, top, withdirs)
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def _found_below(self, top: str, withdirs: bool) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        try:
            for name, entry in self.below(top):
                if withdirs:
                    _add_parents(found, top, name)
                bare = name.rstrip("/")
                if not name.endswith("/") and name not in found:
                    found[name] = entry_of(name, entry)
                elif withdirs and bare != top:
                    found.setdefault(bare, entry_of(bare, entry))
        except (*_ABSENT, InvalidName):
            return {}
        return self._with_own(top, found, withdirs)

    def _found_to_depth(self, top: str, depth: int, withdirs: bool) -> dict[str, Entry]:
        """List folder by folder.  Where an object has a folder's name, the object is found, as by `_found_below`."""
        found: dict[str, Entry] = {}
        folders = [top]
        try:
            for _ in range(depth):
                entries = [entry for folder in folders for entry in self._children(folder)]
                folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
                for entry in entries:
                    if entry["type"] != "directory":
                        found[entry["name"]] = entry
                    elif withdirs:
                        found.setdefault(entry["name"], entry)
        except (*_ABSENT, InvalidName):
            return {}
        return self._with_own(top, found, withdirs)

    def _with_own(self, top: str, found: dict[str, Entry], withdirs: bool) -> dict[str, Entry]:
        own = self._found(top) if top and (withdirs or not found) else None
        if own is not None and (withdirs or own["type"] != "directory"):
            found[top] = own
        return found

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] = "omit",
        **kwargs: Any,
    ) -> Iterator[tuple[str, Any, Any]]:
        """Iterate over a folder and those below it: path, names of folders, names of objects.

        `on_error`: with "omit" what does not exist (any more) is left out, and other failures are raised.
        """
        if on_error == "omit":
            on_error = _raise_unless_missing
        yield from super().walk(path, maxdepth=maxdepth, topdown=topdown, on_error=on_error, **kwargs)

    def literal_and_patterns(self, path: str | list[str]) -> tuple[list[str], list[str]]:
        """Split paths, as users give them, into those that are names and those that are patterns.

        A path with the signs of a pattern is a name if something has it: `data[1].csv`.
        """
        names: list[str] = self._strip_protocol(path if isinstance(path, list) else [path])
        patterns = {name for name in names if has_magic(name) and not self.exists(name)}
        return [name for name in names if name not in patterns], sorted(patterns)

    def du(
        self, path: str, total: bool = True, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any
    ) -> int | dict[str, int]:
        """Return the bytes of the objects below a path, or (`total=False`) those of each; folders have none."""
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        sizes = {name: entry["size"] for name, entry in found.items()}
        return sum(sizes.values()) if total else sizes


def _listed_entry(bucket: str, entry: ListEntry) -> Entry:
    path = f"{bucket}/{entry.key}"
    return folder_entry(path.rstrip("/")) if entry.is_prefix else entry_of(path.rstrip("/"), entry)


def _add_parents(found: dict[str, Entry], top: str, name: str) -> None:
    """Add the folders between `top` and a name that are not among the found yet."""
    parent = name.rstrip("/").rpartition("/")[0]
    while len(parent) > len(top) and parent not in found:
        found[parent] = folder_entry(parent)
        parent = parent.rpartition("/")[0]


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
