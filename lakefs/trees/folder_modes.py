"""Modes of folders: sent behind a folder's files when a tree is put, and set behind them when one is fetched.

Rules kept here:
- A folder gets its mode after all that is below it is there: one that may not be written to is filled nevertheless.
- Nothing is sent, and nothing set, for a folder that has its mode already; a new one has FOLDER_MODE.
- Memory: FRAME_FILES folders of a put; of a get those that the listing is in.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lakefs.errors import BucketNotFound, KeyNotFound, LakeError, LocalFileError
from lakefs.limits import COPY_WINDOW
from lakefs.names import FOLDER_MODE
from lakefs.steps.steps import Pipeline, Send, Steps
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.part_files import MODE_MASK
from lakefs.wire.messages import ObjectStat, SetAttributes


def sent_mode(mode: int, present: ObjectStat | None) -> int | None:
    """Return the mode to set on a folder of the lake; None if it has it, or will have it when it is made."""
    found = FOLDER_MODE if present is None else present.mode
    return mode & MODE_MASK if (found ^ mode) & MODE_MASK else None


def set_modes(bucket: str, modes: Sequence[tuple[str, int]]) -> Steps[list[LakeError | None]]:
    """Set the modes of folders, given by their keys; return for each its error.  A folder that is gone is no error."""
    failures: list[LakeError | None] = [None] * len(modes)
    pipeline = Pipeline(COPY_WINDOW)
    for index, (key, mode) in enumerate(modes):

        def failed(error: Exception, index: int = index) -> None:
            if not isinstance(error, LakeError):
                raise error
            failures[index] = None if isinstance(error, (KeyNotFound, BucketNotFound)) else error

        request = SetAttributes(bucket, key, mode=mode)
        yield from pipeline.submit(Send(request), lambda reply: None, failed)
    yield from pipeline.drain()
    return failures


@dataclass(frozen=True)
class _Fetched:
    """A local folder whose mode is not yet set."""

    key: str
    path: str
    target: LocalTarget
    mode: int


class FetchedFolders:
    """The folders of a get that wait for their modes, outermost first: each is below the one before it."""

    def __init__(self) -> None:
        self._waiting: list[_Fetched] = []

    def note(self, key: str, target: LocalTarget, descriptor: int, mode: int) -> None:
        """Note a folder, whose key ends in `/`, if the open one has another mode.  Blocks."""
        if (os.fstat(descriptor).st_mode ^ mode) & MODE_MASK:
            self._waiting.append(_Fetched(key, target.path.rstrip("/"), target, mode & MODE_MASK))

    def are_behind(self, key: str) -> bool:
        """Return True if some folder is complete when the listing has come to `key`."""
        return bool(self._waiting) and not key.startswith(self._waiting[-1].key)

    def leave(self, key: str) -> list[tuple[str, str, LocalFileError]]:
        """Set the modes of the folders that `key` is not below; return key, path and error of those that failed.

        Blocks.  An empty key leaves all.
        """
        failures: list[tuple[str, str, LocalFileError]] = []
        for folder in self._left(key):
            try:
                with folder.target.folder() as descriptor:
                    _change_mode(descriptor, folder.mode)
            except OSError as error:
                failures.append((folder.key, folder.path, LocalFileError(f"{folder.path}: {error.strerror}")))
            except LocalFileError as error:
                failures.append((folder.key, folder.path, error))
        return failures

    def _left(self, key: str) -> Iterator[_Fetched]:
        while self._waiting and not (key and key.startswith(self._waiting[-1].key)):
            yield self._waiting.pop()


def _change_mode(descriptor: int, mode: int) -> None:
    """Set the mode of a folder that is open by O_PATH, with which fchmod does nothing."""
    assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
    os.chmod(f"/proc/self/fd/{descriptor}", mode)
