"""`Changes`: names of the lake changed as those of a file system: folders made, names removed, moved, copied, touched.

Each change of a name is atomic and durable when its method returns.  Moving a folder is one change, whatever is below
it, and copying an object copies no byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from fsspec.utils import other_paths

from lakefs.client.facade import driver_of
from lakefs.errors import AlreadyExists, BucketNotFound, KeyNotFound
from lakefs.names import Name, parse_name
from lakefs.plugins.fsspec.look_ups import LookUps
from lakefs.plugins.fsspec.os_errors import exists_already, is_a_folder, missing, os_call
from lakefs.steps.steps import send
from lakefs.wire.messages import RemoveFolder, SetAttributes

REMOVED_AT_ONCE = 1000
"""Names in one request to remove names."""


class Changes(LookUps):
    """Changes of names; errors are OSError, such as FileExistsError."""

    # --- folders and buckets -----------------------------------------------------------------------

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a folder, which stays when it is empty, or a bucket.

        `create_parents`: make the bucket, and the folders above, as needed; else FileNotFoundError.  FileExistsError.
        """
        path = self._strip_protocol(path)
        if not create_parents and "/" in path and not self.isdir(self._parent(path)):
            raise missing(self._parent(path))
        os_call(self._make, path, create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder or bucket, and what is missing above it.  FileExistsError, also if an object has the name."""
        path = self._strip_protocol(path)
        try:
            os_call(self._make, path, True)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def _make(self, path: str, create_bucket: bool) -> None:
        if not path:
            raise exists_already("lake://")
        try:
            if "/" not in path:
                self.lake.create_bucket(path)
            elif self.isfile(path):
                raise exists_already(path)
            else:
                self.lake.make_folder(path, exclusive=True, create_bucket=create_bucket)
        except AlreadyExists as error:
            raise exists_already(path) from error

    def rmdir(self, path: str) -> None:
        """Remove an empty folder or bucket.  FileNotFoundError, NotADirectoryError, OSError (not empty)."""
        path = self._strip_protocol(path)
        os_call(self._remove_empty, path)

    def _remove_empty(self, path: str) -> None:
        bucket, key = parse_name(path)
        if key:
            driver_of(self.lake).run(send(RemoveFolder(bucket, key + "/")))
        else:
            self.lake.remove_bucket(bucket)

    # --- removing ----------------------------------------------------------------------------------

    def rm_file(self, path: str) -> None:
        """Remove an object.  FileNotFoundError, IsADirectoryError."""
        path = self._strip_protocol(path)
        if "/" not in path or not os_call(self.lake.remove, path):
            raise is_a_folder(path) if self.isdir(path) else missing(path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove objects, 1000 with one request; with `recursive` folders and buckets, too, with all that is below.

        A path that exists as it is written is removed, and is not taken for a pattern.  `maxdepth`: only names down to
        that level; folders that still have names stay.  FileNotFoundError, IsADirectoryError (a folder without
        `recursive`).
        """
        literal, patterns = self.literal_and_patterns(path)
        if recursive and maxdepth is None:
            for one in _tops({*literal, *(self.expand_path(patterns) if patterns else ())}):
                os_call(self._remove_tree, one)
            return
        if len(literal) == 1 and not patterns and not recursive:
            self.rm_file(literal[0])
            return
        paths = list(literal)
        for one in literal if recursive else ():
            paths += self.find(one, maxdepth=maxdepth, withdirs=True)
        if patterns:
            paths += self.expand_path(patterns, recursive=recursive, maxdepth=maxdepth)
        found = {one: self._found(one) for one in paths}
        for one in literal:
            if found[one] is None:
                raise missing(one)
        folders = [one for one, entry in found.items() if entry is not None and entry["type"] == "directory"]
        if folders and not recursive:
            raise is_a_folder(folders[0])
        os_call(self._remove_all, [parse_name(one) for one in found.keys() - set(folders)])
        for folder in sorted(folders, reverse=True):
            if self.isdir(folder) and not self.ls(folder):
                self.rmdir(folder)

    def _remove_tree(self, path: str) -> None:
        bucket, key = parse_name(path)
        is_found = self._found(path) is not None
        if not is_found:
            raise missing(path)
        self._remove_all(parse_name(name) for name, _ in self.below(path))
        if not key:
            self.lake.remove_bucket(bucket)
            return
        self._remove_all([Name(bucket, key)])
        try:
            self._remove_empty(path)
        except (KeyNotFound, BucketNotFound):  # it was there by the names below it
            return

    def _remove_all(self, names: Iterable[Name]) -> None:
        driver = driver_of(self.lake)
        rest = iter(names)
        while batch := list(islice(rest, REMOVED_AT_ONCE)):
            driver.run(driver.steps.remove_many(batch))

    # --- moving and copying ------------------------------------------------------------------------

    def mv(
        self,
        path1: str | list[str],
        path2: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Move an object or a folder with all that is below it, atomically: readers see it at one name or the other.

        A target that ends in `/` or is a folder is moved into.  An object at the target is replaced.  Lists, patterns
        (that no object has as its name) and whole buckets are copied (no byte is), then removed.  FileNotFoundError,
        and errors about the target.
        """
        is_one = not isinstance(path1, list) and not isinstance(path2, list)
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        is_one = is_one and not self.literal_and_patterns(source)[1]
        if not is_one or "/" not in source or maxdepth is not None:
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        if source == target:
            return
        if str(path2).endswith("/") or self.isdir(target):
            (target,) = other_paths([source], target, exists=True)
        if source != target:
            os_call(self._move, source, target)

    def _move(self, source: str, target: str) -> None:
        lake = self.lake
        try:
            lake.move(source, target)
        except KeyNotFound:
            if not self.isdir(source):
                raise
            if self.isfile(target):
                raise exists_already(target) from None
            lake.move(source + "/", target + "/")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Give the content of an object a second name, or make a folder as there is one.  No byte is copied."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        try:
            if "/" not in source:
                raise KeyNotFound(source)
            if "/" not in target:
                raise is_a_folder(target)
            os_call(self.lake.copy, source, target)
        except (KeyNotFound, FileNotFoundError):
            if not self.isdir(source):
                raise missing(source) from None
            self.makedirs(target, exist_ok=True)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty object; with `truncate=False` only set the time of modification of one that exists."""
        path = self._strip_protocol(path)
        if "/" not in path and self.isdir(path):
            raise is_a_folder(path)
        if truncate or not os_call(self._touched, path):
            os_call(self.lake.put, path, b"")

    def _touched(self, path: str) -> bool:
        """Set the modification time of an object to now; return False if it does not exist."""
        bucket, key = parse_name(path)
        try:
            driver_of(self.lake).run(send(SetAttributes(bucket, key, mtime_ns=time.time_ns())))
        except KeyNotFound:
            return False
        return True


def _tops(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not below another of them."""
    tops: list[str] = []
    for path in sorted(paths, key=lambda path: path.split("/")):
        if not tops or not path.startswith(f"{tops[-1]}/"):
            tops.append(path)
    return tops
