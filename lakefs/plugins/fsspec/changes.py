"""`Changes`: names of the lake changed as those of a file system: folders made, names removed, moved, copied, touched.

Each change of a name is atomic and durable when its method returns.  Moving a folder is one change, whatever is below
it, and copying an object copies no byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from glob import has_magic
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

        `maxdepth`: only names down to that level; folders that still have names stay.  FileNotFoundError,
        IsADirectoryError (a folder without `recursive`).
        """
        if recursive and maxdepth is None:
            for one in self.expand_path(path):
                os_call(self._remove_tree, one)
            return
        paths = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        if len(paths) == 1 and not recursive:
            self.rm_file(paths[0])
            return
        folders = [one for one in paths if self.isdir(one)]
        if folders and not recursive:
            raise is_a_folder(folders[0])
        os_call(self._remove_all, [parse_name(one) for one in paths if one not in folders])
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
        and whole buckets are copied (no byte is), then removed.  FileNotFoundError, and errors about the target.
        """
        is_one = isinstance(path1, str) and isinstance(path2, str) and not has_magic(path1)
        source = self._strip_protocol(path1)
        if not is_one or "/" not in source or maxdepth is not None:
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        target = self._strip_protocol(path2)
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
            os_call(self.lake.copy, source, target)
        except (KeyNotFound, FileNotFoundError):
            if not self.isdir(source):
                raise missing(source) from None
            self.makedirs(target, exist_ok=True)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty object; with `truncate=False` only set the time of modification of one that exists."""
        path = self._strip_protocol(path)
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
