"""The content of one open file: what was written through a mount and is not stored yet, over stored content.

The written bytes lie in a sparse staging file at their own offsets.  Each byte of the content is one of three kinds:
STAGED there, BASE of the stored content, or HOLE, a zero.

Rules kept here:
- Only bytes in the ranges of a file are ever looked at; what else its staging file holds means nothing.  So a write
  that failed half way has changed nothing, and base bytes that a truncation hid never come back.
- Base bytes show below `base_bytes` only, which never grows but by `mark_stored`.
- The staging file ends where the last range does, and the sidecar says the rest (`fuse.staging.sidecar`): whoever
  finds them after a kill -9 knows every byte that was written.
- Bounds: staged bytes, and `RANGES_MAX` ranges, over all files of a folder.
- One task changes a file at a time; threads may read it meanwhile.  `revision` tells whether it was changed.

All calls block, for as long as a write into the page cache does.  Nothing is synced but by `sync`: what must survive
power loss has to be stored.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final, NamedTuple

from fuse.staging.byte_ranges import RangeSet
from fuse.staging.sidecar import (
    Base,
    SidecarFile,
    SidecarState,
    closing_line,
    name_line,
    ranges_line,
    size_line,
    whole_line,
)
from lakefs.errors import InvalidArgument, LakeError, LocalFileError, StoreFull
from lakefs.ids import Buffer

RANGES_MAX: Final = 1 << 20
"""Ranges over all files of a folder, 16 bytes each: 16 MiB; random 4 KiB writes reach it at 4 GiB at the least."""


class Kind(Enum):
    """Where a byte of a file is."""

    STAGED = auto()
    BASE = auto()
    HOLE = auto()


class Span(NamedTuple):
    """Bytes of one kind."""

    kind: Kind
    offset: int
    length: int


@dataclass(frozen=True)
class Slot:
    """A staging file and its sidecar, both open."""

    stem: str
    descriptor: int
    sidecar: SidecarFile


class Room:
    """What the files of one folder share: how much they may stage, and have staged, together."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.range_count = 0

    def reserve(self, name: str, byte_count: int, range_count: int) -> None:
        """StoreFull unless so much more may be staged."""
        if self.used_bytes + byte_count > self.limit_bytes:
            raise StoreFull(
                f"{name}: the staging folder {self.path} is at its limit of {self.limit_bytes} bytes for what is not "
                "stored yet; close or sync files that are being written, or mount with a larger limit",
                subject=name,
            )
        if range_count > 0 and self.range_count + range_count > RANGES_MAX:
            raise StoreFull(
                f"{name}: bytes were written at more than {RANGES_MAX} places that the store does not have yet "
                f"(staging folder {self.path}); sync or close files that are being written",
                subject=name,
            )

    def failure(self, error: OSError, name: str) -> LakeError:
        """What an error of the folder's file system is to whoever writes."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(
                f"{name}: the disk of the staging folder {self.path} is full; make room there, or mount with a staging "
                "folder elsewhere",
                subject=name,
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return LocalFileError(
                f"{name}: the mount has no descriptors left ({error.strerror}); close files, or raise"
                " the limit of open files of its process",
                subject=name,
            )
        if error.errno == errno.EFBIG:
            return InvalidArgument(
                f"{name}: longer than a file in the staging folder {self.path} may be", subject=name
            )
        return LocalFileError(f"{name}: staging folder {self.path}: {error.strerror}", subject=name)


class StagedFile:
    """The content of one open file as the mount sees it.  Made by `StagingFolder.new`."""

    def __init__(
        self, room: Room, slot: Slot, name: str, base: Base | None, ended: Callable[[Slot, bool], None]
    ) -> None:
        size = base.size_bytes if base else 0
        self._take_up(room, slot, SidecarState(name, time.time_ns(), size, base, size), ended)
        slot.sidecar.append(whole_line(self._state()))

    @classmethod
    def found(
        cls, room: Room, slot: Slot, state: SidecarState, ended: Callable[[Slot, bool], None]
    ) -> StagedFile:
        """What an earlier mount has left, to be read and stored; it must not be changed, nor its sidecar."""
        file = cls.__new__(cls)
        file._take_up(room, slot, state, ended)
        return file

    def _take_up(
        self, room: Room, slot: Slot, state: SidecarState, ended: Callable[[Slot, bool], None]
    ) -> None:
        self.name = state.name
        self.size = state.size
        """Length of the content."""
        self.revision = 0
        """Goes up with every change of the content."""
        self.changed = state.is_changed
        """Whether there is anything that the store does not have: since it was made new, or since `mark_stored`."""
        self._room = room
        self._ended = ended
        self._slot = slot
        self._base = state.base
        self._base_bytes = state.base_bytes
        self._time_ns = state.time_ns
        self._staged = state.ranges
        self._filled = RangeSet()  # staged, and the same as the base
        self._storing: int | None = None  # revision that is being stored
        self._is_open = True
        self._sidecar_is_stale = False
        self._sidecar_is_closed = True  # nothing behind the last range counts

    @property
    def descriptor(self) -> int:
        """The staging file; bytes of STAGED spans are at their own offsets."""
        return self._slot.descriptor

    @property
    def base_bytes(self) -> int:
        """Bytes from 0 that are the base's where nothing is staged; behind them are zeros."""
        return self._base_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes in the staging file."""
        return self._staged.byte_count

    # --- content -------------------------------------------------------------------------------------

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes.  StoreFull, LocalFileError; then the content is as it was (bytes staged before may be torn)."""
        view = memoryview(data).cast("B")
        if not len(view):
            return
        end = offset + len(view)
        self._room.reserve(
            self.name, self._staged.bytes_added(offset, end), self._staged.ranges_added(offset, end)
        )
        self.revision += 1
        self._put(offset, view)
        self._filled.remove(offset, end)
        self.size = max(self.size, end)
        self.changed = True

    def fill(self, offset: int, data: Buffer) -> None:
        """Keep bytes of the base here, too; those that were written or hidden meanwhile are left out.  StoreFull."""
        view = memoryview(data).cast("B")
        gaps = list(self._staged.gaps(offset, min(offset + len(view), self._base_bytes)))
        self._room.reserve(self.name, sum(end - begin for begin, end in gaps), len(gaps))
        for begin, end in gaps:
            self._put(begin, view[begin - offset : end - offset])
            self._filled.add(begin, end)

    def truncate(self, size: int) -> None:
        """Give the content another length.  StoreFull, LocalFileError.

        Bytes behind a new end are gone for ever; a growing file gets zeros.
        """
        if size == self.size:
            return
        kept_end = self._staged.end_below(size)
        try:
            self._append(size_line(size, min(size, self._base_bytes), kept_end))
        except OSError as error:
            raise self._room.failure(error, self.name) from error
        self._sidecar_is_closed = True
        self.revision += 1
        self.changed = True
        self.size = size
        self._base_bytes = min(size, self._base_bytes)
        shrinks = self._staged.end > size
        with _Counted(self._room, self._staged):
            self._staged.cut(size)
        self._filled.cut(size)
        if shrinks:
            self._set_length(kept_end)
        self._compact()

    def spans(self, offset: int, length: int) -> list[Span]:
        """Where the bytes [offset, min(offset + length, size)) are, in order, without gaps."""
        end = min(offset + length, self.size)
        found: list[Span] = []
        at = offset
        for begin, behind in self._staged.within(offset, end):
            found += self._unstaged(at, begin)
            found.append(Span(Kind.STAGED, begin, behind - begin))
            at = behind
        return found + self._unstaged(at, end)

    def is_all(self, kind: Kind, offset: int, length: int) -> bool:
        """Whether all bytes of a range, which must not be empty or pass the end, are of one kind."""
        end = offset + length
        if kind is Kind.STAGED:
            return self._staged.contains(offset, end)
        if self._staged.overlaps(offset, end):
            return False
        return end <= self._base_bytes if kind is Kind.BASE else offset >= self._base_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Bytes that are STAGED or HOLE, cut at the end.  LocalFileError."""
        spans = self.spans(offset, length)
        assert all(span.kind is not Kind.BASE for span in spans), "bytes of the base are not here"
        return b"".join(
            bytes(span.length) if span.kind is Kind.HOLE else self._pread(span.offset, span.length)
            for span in spans
        )

    def overlay(self, offset: int, target: memoryview) -> None:
        """Put what is STAGED or HOLE of the bytes from `offset` on into `target`; leave those of the base."""
        for kind, begin, length in self.spans(offset, len(target)):
            part = target[begin - offset : begin - offset + length]
            if kind is Kind.HOLE:
                part[:] = bytes(length)
            elif kind is Kind.STAGED:
                self._pread_into(begin, part)

    def written(self) -> RangeSet:
        """The bytes that differ from the base's, or may: staged, and not by `fill`."""
        written = self._staged.copy()
        for begin, end in self._filled:
            written.remove(begin, end)
        return written

    # --- its life ------------------------------------------------------------------------------------

    def rename(self, name: str) -> None:
        """The file has another name now."""
        self.name = name
        self._note(name_line(name))

    def begin_storing(self) -> int:
        """Note that the content is being stored as it is now; its revision."""
        self._storing = self.revision
        return self.revision

    def mark_stored(self, base: Base) -> bool:
        """All is in the store as `base`: the staging file is emptied, every byte is BASE.

        False when the content was changed since `begin_storing`: then nothing happens, and what is staged still counts.
        """
        if self._storing is not None and self._storing != self.revision:
            return False
        assert base.size_bytes == self.size, "what was stored has another length"
        self._base = base
        self._base_bytes = self.size
        self._storing = None
        self.changed = False
        with _Counted(self._room, self._staged):
            self._staged.clear()
        self._filled.clear()
        self._note(whole_line(self._state()))  # first: bytes that it does not name are nobody's
        self._sidecar_is_closed = True
        self._set_length(0)
        self._compact()
        return True

    def sync(self) -> None:
        """Make staged bytes and sidecar durable.  LocalFileError."""
        try:
            os.fdatasync(self._slot.descriptor)
            if self._sidecar_is_stale:
                self._rewrite()
            self._slot.sidecar.sync()
        except OSError as error:
            raise self._room.failure(error, self.name) from error

    def keep_for_recovery(self) -> None:
        """Close the file and leave it to `StagingFolder.leftovers`, durable on return.

        LocalFileError when it could not be synced: it is left there all the same.
        """
        if not self._is_open:
            return
        try:
            self.sync()
            _sync_folder(self._room.path)
        except OSError as error:
            raise self._room.failure(error, self.name) from error
        finally:
            self._end(keep=True)

    def discard(self) -> None:
        """Close the file and forget what is staged.  Harmless a second time."""
        if self._is_open:
            self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        self._is_open = False
        with _Counted(self._room, self._staged):
            self._staged.clear()
        self._ended(self._slot, keep)

    # --- bytes ---------------------------------------------------------------------------------------

    def _put(self, offset: int, view: memoryview) -> None:
        """Stage bytes: first the bytes, then their range in the sidecar, then ours."""
        end_before = self._staged.end
        end = offset + len(view)
        try:
            if self._sidecar_is_stale:
                self._rewrite()  # else it would claim bytes of the file that mean something else by then
            if offset > end_before and not self._sidecar_is_closed:
                # The last range goes on to the end of the file; now the file gets a gap.
                self._append(closing_line(self._staged.last_begin, end_before))
                self._sidecar_is_closed = True
            _pwrite(self._slot.descriptor, view, offset)
            if not self._is_known(offset, end):
                self._append(ranges_line(offset, end))
                self._sidecar_is_closed = False
        except OSError as error:
            if end > end_before:
                self._set_length(end_before)
            raise self._room.failure(error, self.name) from error
        with _Counted(self._room, self._staged):
            self._staged.add(offset, end)
        self._compact()

    def _is_known(self, offset: int, end: int) -> bool:
        """Whether the sidecar already says that these bytes are staged, once they are in the file."""
        if end <= self._staged.end:
            return self._staged.contains(offset, end)
        return not self._sidecar_is_closed and self._staged.last_begin <= offset <= self._staged.end

    def _unstaged(self, begin: int, end: int) -> list[Span]:
        middle = max(begin, min(end, self._base_bytes))
        spans = (Span(Kind.BASE, begin, middle - begin), Span(Kind.HOLE, middle, end - middle))
        return [span for span in spans if span.length > 0]

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            found = os.pread(self._slot.descriptor, length, offset)
        except OSError as error:
            raise self._room.failure(error, self.name) from error
        if len(found) == length:
            return found
        whole = bytearray(length)
        self._pread_into(offset, memoryview(whole))
        return bytes(whole)

    def _pread_into(self, offset: int, target: memoryview) -> None:
        while len(target):
            try:
                count = os.preadv(self._slot.descriptor, [target], offset)
            except OSError as error:
                raise self._room.failure(error, self.name) from error
            if not count:
                raise LocalFileError(
                    f"{self.name}: somebody shortened its file in the staging folder {self._room.path}",
                    subject=self.name,
                )
            target = target[count:]
            offset += count

    def _set_length(self, length: int) -> None:
        """Give disk space back.  LocalFileError: then no byte that counts is concerned."""
        try:
            os.ftruncate(self._slot.descriptor, length)
        except OSError as error:
            self._sidecar_is_stale = True  # it relies on the file's length
            raise self._room.failure(error, self.name) from error

    # --- sidecar -------------------------------------------------------------------------------------

    def _state(self) -> SidecarState:
        return SidecarState(self.name, self._time_ns, self.size, self._base, self._base_bytes, self._staged)

    def _append(self, line: bytes) -> None:
        if self._sidecar_is_stale:
            self._rewrite()
        self._slot.sidecar.append(line)

    def _note(self, line: bytes) -> None:
        """Append what must not fail; it is made up for before the next line."""
        try:
            self._append(line)
        except OSError:
            self._sidecar_is_stale = True

    def _rewrite(self) -> None:
        self._slot.sidecar.rewrite(whole_line(self._state()))
        self._sidecar_is_stale = False
        self._sidecar_is_closed = True

    def _compact(self) -> None:
        """Keep the sidecar short.  On a full disk it stays long, and right."""
        if not self._slot.sidecar.is_long:
            return
        try:
            self._rewrite()
        except OSError:
            return


class _Counted:
    """Keeps the folder's sums while a file's ranges change."""

    def __init__(self, room: Room, ranges: RangeSet) -> None:
        self._room = room
        self._ranges = ranges

    def __enter__(self) -> None:
        self._room.used_bytes -= self._ranges.byte_count
        self._room.range_count -= len(self._ranges)

    def __exit__(self, *_: object) -> None:
        self._room.used_bytes += self._ranges.byte_count
        self._room.range_count += len(self._ranges)


def _pwrite(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
