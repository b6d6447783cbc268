"""Removals: the names that only the target has, noted while the sides are compared, and removed at the end.

Rules kept here:
- What was noted is removed only if it is still what was compared: the same node with the same content in a lake (a
  mount writes into the node that is there), the same size and time in a folder.
- Folders are removed when they are empty, and left when they are not.
- A symbolic link is neither followed nor removed.
- Memory: the names of files are in a file once they take more than SPOOL_BYTES.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from lakefs.errors import FolderNotEmpty, KeyNotFound, LakeError, LocalFileError, NotAFolder, PreconditionFailed
from lakefs.names import Name
from lakefs.put.upload import result_of
from lakefs.steps.steps import Steps, send, work
from lakefs.sync.entries import Entry
from lakefs.sync.movers import failed
from lakefs.sync.report import Done, SyncObserver, SyncOutcome
from lakefs.trees.local_folders import LocalTarget
from lakefs.wire.messages import Condition, DeleteNames, NameResults, RemoveFolder

SPOOL_BYTES: Final = 8 << 20
BATCH: Final = 1000
_CHANGED: Final = "it changed since it was compared, and was left"


class Noted(NamedTuple):
    """A file or object that is to be removed, as it was compared."""

    path: str
    node: int
    size_bytes: int
    mtime_ns: int
    blob: str = ""
    """Id of the content in hex."""


class Removals:
    """The names that are to be removed, in the order in which they were noted."""

    def __init__(self) -> None:
        self._spool: tempfile.SpooledTemporaryFile[str] | None = None
        """Made for the first name, and closed by `close`."""
        self.folders: list[str] = []
        self.count = 0
        """Files and objects."""

    def add(self, entry: Entry) -> None:
        """Note an entry of the target."""
        if entry.is_folder:
            self.folders.append(entry.path)
            return
        noted = Noted(entry.path, entry.node, entry.size_bytes, entry.mtime_ns, entry.blob.hex())
        if self._spool is None:
            self._spool = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by `close`
                max_size=SPOOL_BYTES, mode="w+", encoding="utf-8"
            )
        self._spool.write(json.dumps(noted) + "\n")
        self.count += 1

    def batches(self) -> Iterator[list[Noted]]:
        """Yield the files and objects; called once."""
        if self._spool is None:
            return
        self._spool.seek(0)
        while batch := [Noted(*json.loads(line)) for line in islice(self._spool, BATCH)]:
            yield batch

    def close(self) -> None:
        """Forget all."""
        if self._spool is not None:
            self._spool.close()


class Remover(Protocol):
    """Removes names of the target."""

    def remove(self, batch: Sequence[Noted]) -> Steps[None]: ...

    def remove_folders(self, paths: Sequence[str]) -> Steps[None]: ...


class LakeRemover:
    """Removes names of a lake."""

    def __init__(self, target: Name, observer: SyncObserver) -> None:
        self._target = target
        self._observer = observer

    def remove(self, batch: Sequence[Noted]) -> Steps[None]:
        names = [(self._target.bucket, self._target.key + noted.path) for noted in batch]
        conditions = [Condition(node=noted.node, blob=bytes.fromhex(noted.blob)) for noted in batch]
        reply = yield from send(DeleteNames(names, conditions=conditions))
        assert isinstance(reply.message, NameResults)
        for noted, item in zip(batch, reply.message.results, strict=True):
            outcome = SyncOutcome(noted.path, Done.REMOVED, size_bytes=noted.size_bytes)
            try:
                if item.failure is not None:
                    result_of(item)
            except (PreconditionFailed, KeyNotFound):
                outcome = SyncOutcome(noted.path, Done.SKIPPED, _CHANGED, noted.size_bytes)
            except LakeError as error:
                outcome = failed(noted.path, error)
            self._observer.outcome(outcome)

    def remove_folders(self, paths: Sequence[str]) -> Steps[None]:
        for path in reversed(paths):
            try:
                yield from send(RemoveFolder(self._target.bucket, self._target.key + path))
            except (FolderNotEmpty, KeyNotFound, NotAFolder):
                continue
            except LakeError as error:
                self._observer.outcome(failed(path, error))


class FolderRemover:
    """Removes files of a local folder."""

    def __init__(self, root: str, observer: SyncObserver) -> None:
        self._root = root
        self._observer = observer

    def remove(self, batch: Sequence[Noted]) -> Steps[None]:
        for outcome in (yield from work(self._unlink_all, batch)):
            self._observer.outcome(outcome)

    def remove_folders(self, paths: Sequence[str]) -> Steps[None]:
        yield from work(self._remove_empty, paths)

    def _unlink_all(self, batch: Sequence[Noted]) -> list[SyncOutcome]:
        return [self._unlink(noted) for noted in batch]

    def _unlink(self, noted: Noted) -> SyncOutcome:
        *below, name = noted.path.split("/")
        target = LocalTarget(self._root, tuple(below), name)
        try:
            with target.folder() as folder:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if (found.st_size, found.st_mtime_ns) != (noted.size_bytes, noted.mtime_ns):
                    return SyncOutcome(noted.path, Done.SKIPPED, _CHANGED, noted.size_bytes)
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return SyncOutcome(noted.path, Done.SKIPPED, _CHANGED, noted.size_bytes)
        except OSError as error:
            failure = LocalFileError(f"{target.path}: {error.strerror}", subject=target.path)
            return SyncOutcome(noted.path, Done.FAILED, failure.message, error=failure)
        except LocalFileError as error:
            return SyncOutcome(noted.path, Done.FAILED, error.message, error=error)
        return SyncOutcome(noted.path, Done.REMOVED, size_bytes=noted.size_bytes)

    def _remove_empty(self, paths: Sequence[str]) -> None:
        for path in reversed(paths):
            *below, name = path.removesuffix("/").split("/")
            try:
                with LocalTarget(self._root, tuple(below), name).folder() as folder:
                    os.rmdir(name, dir_fd=folder)
            except (OSError, LocalFileError):
                continue  # it holds something, or is no folder any more
