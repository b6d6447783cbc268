"""`Contents`: whole contents, many with one request: cat, pipe, get and put.

Bytes that these methods return were checked, and those of one object are of one version of it.  What they store is
visible whole, and durable, when they return.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.utils import isfilelike

from lakefs.client.facade import driver_of
from lakefs.errors import LakeError, PreconditionFailed
from lakefs.get.ranges import Range
from lakefs.host.plain_bytes import plain_bytes
from lakefs.limits import CHUNK_BYTES, MIB, STREAM_BYTES
from lakefs.names import parse_object_name
from lakefs.plugins.fsspec.changes import Changes
from lakefs.plugins.fsspec.os_errors import exists_already, is_a_folder, os_call, os_error

RANGES_AT_ONCE: Final = 1024
"""Ranges that one operation of the client reads; others may use its connection between two operations."""
AT_ONCE_BYTES: Final = 64 * MIB
"""Cached bytes of short ranges that the caller's thread reads itself: 20 ms, in which only its connection waits."""
Content = bytes | Exception


class Contents(Changes):
    """Reads and writes of whole contents; errors are OSError."""

    # --- reading -----------------------------------------------------------------------------------

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return the content, or its bytes from `start` to `end` as those of a slice.  FileNotFoundError,
        IsADirectoryError."""
        path = self._strip_protocol(path)
        if start is None and end is None:
            try:
                return os_call(self.lake.get, path)
            except OSError as error:
                raise self._clearer(path, error) from error.__cause__
        (content,) = self.cat_ranges([path], [start], [end], on_error="raise")
        assert isinstance(content, bytes)
        return content

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Content]:
        """Return ranges in order, in few requests; with `on_error="return"` the error in the place of one that failed.

        `starts` and `ends`: one for all, or one for each.  `max_gap` changes nothing: ranges are read side by side.
        """
        if not isinstance(paths, list):
            raise TypeError("paths is not a list")
        begins = starts if isinstance(starts, Sequence) else [starts] * len(paths)
        stops = ends if isinstance(ends, Sequence) else [ends] * len(paths)
        if not len(begins) == len(stops) == len(paths):
            raise ValueError(f"{len(paths)} paths, {len(begins)} starts and {len(stops)} ends do not go together")
        names = [self._strip_protocol(path) for path in paths]
        contents: list[Content] = []
        for at in range(0, len(names), RANGES_AT_ONCE):
            part = slice(at, at + RANGES_AT_ONCE)
            contents += self._ranges(names[part], begins[part], stops[part], on_error == "return")
        return contents

    def _ranges(
        self, names: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None], keeps_errors: bool
    ) -> list[Content]:
        driver = driver_of(self.lake)
        try:
            wanted = [
                Range(parse_object_name(name), *range_) for name, *range_ in zip(names, starts, ends, strict=True)
            ]
            answers = driver.run(driver.steps.get_ranges(wanted, AT_ONCE_BYTES))
        except LakeError as error:
            failure = _caused(os_error(error), error)
            if len(names) == 1:
                failure = self._clearer(names[0], failure)
            if not keeps_errors:
                raise failure from failure.__cause__
            if len(names) == 1:
                return [failure]
            return [
                answer
                for name, start, end in zip(names, starts, ends, strict=True)
                for answer in self._ranges([name], [start], [end], keeps_errors)
            ]
        contents: list[Content] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, LakeError):
                failure = self._clearer(name, _caused(os_error(answer), answer))
                if not keeps_errors:
                    raise failure
                contents.append(failure)
            else:
                contents.append(answer)
        return contents

    def cat(
        self, path: str | list[str], recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> bytes | dict[str, Content]:
        """Return the content of an object; of several (a list, a pattern, a folder) a dictionary by path.

        Several are read with few requests.  `on_error`: "raise", "omit", or "return" for the error as the content.
        """
        literal, patterns = self.literal_and_patterns(path)
        if recursive or not literal:
            paths = self.expand_path(path, recursive=recursive)
        else:
            paths = sorted({*literal, *(self.expand_path(patterns) if patterns else ())})
        if len(paths) == 1 and not isinstance(path, list) and paths[0] == self._strip_protocol(path):
            return self.cat_file(paths[0], **kwargs)
        if recursive:
            folders = self.find(path, withdirs=True, detail=True) if isinstance(path, str) else {}
            paths = [one for one in paths if self._is_content(one, folders)]
        if kwargs.get("start") is not None or kwargs.get("end") is not None:
            found = self.cat_ranges(paths, kwargs.get("start"), kwargs.get("end"), on_error=on_error)
        else:
            found = self._whole(paths, on_error)
        return {
            one: content
            for one, content in zip(paths, found, strict=True)
            if on_error != "omit" or isinstance(content, bytes)
        }

    def _is_content(self, path: str, known: Any) -> bool:
        return known[path]["type"] != "directory" if path in known else not self.isdir(path)

    def _whole(self, paths: list[str], on_error: str) -> list[Content]:
        try:
            return [*os_call(self.lake.get_many, paths)]
        except OSError as error:
            if on_error == "raise":
                raise
            if len(paths) == 1:
                return [self._clearer(paths[0], error)]
        middle = len(paths) // 2  # one of them failed: find it
        return self._whole(paths[:middle], on_error) + self._whole(paths[middle:], on_error)

    def _clearer(self, path: str, error: OSError) -> OSError:
        """Return the error of a read that failed; that a folder or bucket is no object if there is one."""
        may_be = isinstance(error, FileNotFoundError) or "/" not in path
        return is_a_folder(path) if may_be and self.isdir(path) else error

    # --- writing -----------------------------------------------------------------------------------

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Store the content of an object; `mode="create"`: FileExistsError if it exists, decided by the engine."""
        path = self._strip_protocol(path)
        try:
            os_call(self._put, path, _bytes_of(value), mode == "create")
        except OSError as error:
            if isinstance(error.__cause__, PreconditionFailed):
                raise exists_already(path) from error.__cause__
            raise

    def _put(self, path: str, value: Any, if_absent: bool) -> None:
        if "/" not in path:
            raise is_a_folder(path)
        self.lake.put(path, value, if_absent=if_absent)

    def pipe(self, path: str | dict[str, Any], value: Any = None, **kwargs: Any) -> None:
        """Store one content, or many (a dictionary by path), short ones many with one request.

        Each object changes atomically by itself.  If one fails the others are stored, and its error is raised.
        """
        if isinstance(path, str):
            self.pipe_file(path, value, **kwargs)
            return
        if kwargs.get("mode", "overwrite") != "overwrite":
            super().pipe(path, **kwargs)
            return
        contents = {self._strip_protocol(name): _bytes_of(content) for name, content in path.items()}
        short = [(name, content) for name, content in contents.items() if content.nbytes <= CHUNK_BYTES]
        if short:
            os_call(self.lake.put_many, short)
        for name, content in contents.items():
            if content.nbytes > CHUNK_BYTES:
                self.pipe_file(name, content)

    # --- local files -------------------------------------------------------------------------------

    def get_file(
        self, rpath: str, lpath: Any, callback: Callback = DEFAULT_CALLBACK, outfile: Any = None, **kwargs: Any
    ) -> None:
        """Fetch an object into a local file, complete or absent; a folder becomes a folder.

        Missing local folders are made.  `lpath` (or `outfile`) may be an open file, which is written to.
        """
        path = self._strip_protocol(rpath)
        if outfile is not None or isfilelike(lpath):
            self._write_to(path, lpath if outfile is None else outfile, callback)
            return
        target = os.fspath(lpath)
        folder = os.path.dirname(target)
        if folder:
            os.makedirs(folder, exist_ok=True)
        if callback is not DEFAULT_CALLBACK:
            callback.set_size(self.info(path)["size"])
        try:
            if "/" not in path:
                raise is_a_folder(path)
            os_call(self.lake.get_file, path, target, progress=lambda done, present: callback.relative_update(done))
        except (FileNotFoundError, IsADirectoryError):
            if not self.isdir(path):
                raise
            os.makedirs(target, exist_ok=True)

    def _write_to(self, path: str, outfile: Any, callback: Callback) -> None:
        with self.open(path, "rb") as source:
            callback.set_size(source.size)
            while content := source.read(STREAM_BYTES):
                outfile.write(content)
                callback.relative_update(len(content))

    def put_file(
        self, lpath: Any, rpath: str, callback: Callback = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Store a local file under a name, with its permission bits and modification time; a folder becomes a folder.

        On the engine's machine the engine reads the file by itself.  `mode="create"`: FileExistsError if it exists.
        """
        path, source = self._strip_protocol(rpath), os.fspath(lpath)
        if os.path.isdir(source):
            self.makedirs(path, exist_ok=True)
            return
        if "/" not in path:
            raise is_a_folder(path)
        if callback is not DEFAULT_CALLBACK:
            callback.set_size(os.path.getsize(source))

        def note(done: int, present: int) -> None:
            callback.relative_update(done)

        try:
            os_call(self.lake.put, path, Path(source), if_absent=mode == "create", progress=note)
        except OSError as error:
            if isinstance(error.__cause__, PreconditionFailed):
                raise exists_already(path) from error.__cause__
            raise


def _bytes_of(value: Any) -> memoryview:
    """Return a content as bytes in memory; TypeError for what is not contiguous bytes."""
    return plain_bytes(value)


def _caused(failure: OSError, cause: LakeError) -> OSError:
    failure.__cause__ = cause
    return failure
