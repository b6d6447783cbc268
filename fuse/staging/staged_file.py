"""The content of one open file: bytes written through a mount and not stored yet, over stored content.

The written bytes lie in a sparse staging file at their own offsets.  Each byte of the content is one of three kinds:
STAGED in that file, BASE of the stored content, or HOLE, a zero.

Rules kept here:
- Only bytes in the ranges of a file are ever read; other bytes of its staging file mean nothing.  So a write that
  failed half way has changed nothing, and base bytes that a truncation hid never come back.
- Base bytes show below `base_bytes` only, which never grows except by `mark_stored`.
- The staging file ends where the last range does, and the sidecar has the rest (`fuse.staging.sidecar`): from both,
  every byte that was written is known after a kill -9.
- Bounds: staged bytes, and `RANGES_MAX` ranges, over all files of a folder.
- One task changes a file at a time; threads may read it during that.  `revision` shows a change.
- Native threads may append to it (`fuse.staging.appending`): what they wrote is taken over before a method uses it.
  `spans` and `read` do not, as threads call them: those who need all of the content have asked for `size`.

All calls block, for as long as a write into the page cache does.  Only `sync` syncs: content that must survive power
loss has to be stored.
"""

from __future__ import annotations

import os
import time
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fuse.staging.appending import Appending, Noted
from fuse.staging.byte_ranges import RangeSet
from fuse.staging.room import Room, Slot, Slots
from fuse.staging.sidecar import Base, SidecarState, closing_line, name_line, ranges_line, size_line, whole_line
from lakefs.errors import LocalFileError
from lakefs.ids import Buffer


class Kind(Enum):
    """The place of a byte of a file."""

    STAGED = auto()
    BASE = auto()
    HOLE = auto()


class Span(NamedTuple):
    """A run of bytes of one kind."""

    kind: Kind
    offset: int
    length: int


class StagedFile:
    """The content of one open file as the mount sees it.  Made by `StagingFolder.new`."""

    def __init__(self, room: Room, slot: Slot, name: str, base: Base | None, slots: Slots) -> None:
        size = base.size_bytes if base else 0
        self._take_up(room, slot, SidecarState(name, time.time_ns(), size, base, size), slots)
        slot.sidecar.append(whole_line(self._state()))

    @classmethod
    def found(cls, room: Room, slot: Slot, state: SidecarState, slots: Slots) -> StagedFile:
        """A file that an earlier mount left, to be read and stored; neither it nor its sidecar may be changed."""
        file = cls.__new__(cls)
        file._take_up(room, slot, state, slots)
        return file

    def _take_up(self, room: Room, slot: Slot, state: SidecarState, slots: Slots) -> None:
        self.name = state.name
        self._size = state.size
        self.revision = 0
        """Increased by every change of the content."""
        self.changed = state.is_changed
        """True if the store lacks anything: always for a new file, else since the last `mark_stored`."""
        self._room = room
        self._slots = slots
        self._slot = slot
        self._base = state.base
        self._base_bytes = state.base_bytes
        self._time_ns = state.time_ns
        self._staged = state.ranges
        self._storing: int | None = None  # revision that is being stored
        self._is_open = True
        self._sidecar_is_stale = False
        self._sidecar_is_closed = True  # bytes behind the last range do not count
        self._appending: Appending | None = None
        self._noted: Noted = lambda time_ns: None

    @property
    def size(self) -> int:
        """Length of the content."""
        self.take_over()
        return self._size

    @property
    def descriptor(self) -> int:
        """Descriptor of the staging file; bytes of STAGED spans are at their own offsets."""
        return self._slot.descriptor

    @property
    def base_bytes(self) -> int:
        """Length of the part, from 0, whose bytes are the base's where nothing is staged; zeros follow it."""
        return self._base_bytes

    # --- content -------------------------------------------------------------------------------------

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes.  StoreFull, LocalFileError: the content is unchanged then (bytes staged before may be torn)."""
        view = memoryview(data).cast("B")
        if not len(view):
            return
        self.end_appends()
        end = offset + len(view)
        self._room.reserve(self.name, self._staged.bytes_added(offset, end), self._staged.ranges_added(offset, end))
        self.revision += 1
        self._put(offset, view)
        self._size = max(self._size, end)
        self.changed = True

    def truncate(self, size: int) -> None:
        """Change the length of the content.  StoreFull, LocalFileError.

        Bytes behind a new end are lost; a growing file gets zeros.
        """
        self.end_appends()
        if size == self._size:
            return
        kept_end = self._staged.end_below(size)
        try:
            self._room.with_room(partial(self._append, size_line(size, min(size, self._base_bytes), kept_end)))
        except OSError as error:
            raise self._room.failure(error, self.name) from error
        self._sidecar_is_closed = True
        self.revision += 1
        self.changed = True
        self._size = size
        self._base_bytes = min(size, self._base_bytes)
        shrinks = self._staged.end > size
        with _Counted(self._room, self._staged):
            self._staged.cut(size)
        if shrinks:
            self._set_length(kept_end)
        self._compact()

    def spans(self, offset: int, length: int) -> list[Span]:
        """Return the spans of the bytes [offset, min(offset + length, size)), in order, without gaps."""
        end = min(offset + length, self._size)
        found: list[Span] = []
        at = offset
        for begin, behind in self._staged.within(offset, end):
            found += self._unstaged(at, begin)
            found.append(Span(Kind.STAGED, begin, behind - begin))
            at = behind
        return found + self._unstaged(at, end)

    def is_all(self, kind: Kind, offset: int, length: int) -> bool:
        """Return True if all bytes of a range, which must not be empty or pass the end, are of one kind."""
        self.take_over()
        end = offset + length
        if kind is Kind.STAGED:
            return self._staged.contains(offset, end)
        if self._staged.overlaps(offset, end):
            return False
        return end <= self._base_bytes if kind is Kind.BASE else offset >= self._base_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes that are STAGED or HOLE, cut at the end.  LocalFileError."""
        spans = self.spans(offset, length)
        assert all(span.kind is not Kind.BASE for span in spans), "bytes of the base are not here"
        return b"".join(
            bytes(span.length) if span.kind is Kind.HOLE else self._pread(span.offset, span.length) for span in spans
        )

    def overlay(self, offset: int, target: memoryview) -> None:
        """Copy STAGED and HOLE bytes from `offset` on into `target`; leave those of the base."""
        for kind, begin, length in self.spans(offset, len(target)):
            part = target[begin - offset : begin - offset + length]
            if kind is Kind.HOLE:
                part[:] = bytes(length)
            elif kind is Kind.STAGED:
                self._pread_into(begin, part)

    def written(self) -> RangeSet:
        """Return the bytes that differ from the base's, or may; it is this file's own set, not to be changed."""
        self.take_over()
        return self._staged

    # --- native appends ------------------------------------------------------------------------------

    def let_append(self, handle: int, size_max: int, noted: Noted) -> None:
        """Let native threads write what follows through a handle, where that is plain; `noted` is called of it.

        Plain: the file is written on where it ends, and the sidecar counts bytes there without another line.
        """
        end = self._staged.end
        is_plain = not self._sidecar_is_stale and end == self._size and self._is_known(end, end + 1)
        if self._appending is None and is_plain and end >= self._room.append_from_bytes:
            self._noted = noted
            self._appending = Appending.begun(self._room, self, handle, self.descriptor, end, size_max)

    def take_over(self) -> None:
        """Note what native threads have written by now."""
        found = None if self._appending is None else self._appending.found()
        if found is None:
            return
        begin, end, time_ns = found
        self.revision += 1
        with _Counted(self._room, self._staged):
            self._staged.add(begin, end)
        self._size = max(self._size, end)
        self.changed = True
        self._noted(time_ns)

    def end_appends(self) -> None:
        """Let native threads write no more, and note what they have written.  Idempotent."""
        if self._appending is None:
            return
        self._appending.end()
        self.take_over()
        appending, self._appending = self._appending, None
        appending.give_back()

    # --- lifetime ------------------------------------------------------------------------------------

    def rename(self, name: str) -> None:
        """Note the file's new name."""
        self.end_appends()
        self.name = name
        self._note(name_line(name))

    def begin_storing(self) -> int:
        """Note that the present content is being stored; return its revision."""
        self.end_appends()
        self._storing = self.revision
        return self.revision

    def mark_stored(self, base: Base) -> bool:
        """Note that all content is in the store as `base`: empty the staging file; every byte is BASE.

        False, changing nothing, if the content was changed since `begin_storing`.
        """
        self.end_appends()
        if self._storing is not None and self._storing != self.revision:
            return False
        assert base.size_bytes == self._size, "what was stored has another length"
        self._base = base
        self._base_bytes = self._size
        self._storing = None
        self.changed = False
        with _Counted(self._room, self._staged):
            self._staged.clear()
        if self._has_moved():
            return True
        self._note(whole_line(self._state()))  # first: bytes that the sidecar does not name do not count
        self._sidecar_is_closed = True
        self._set_length(0)
        self._compact()
        return True

    def sync(self) -> None:
        """Make staged bytes and sidecar durable.  LocalFileError."""
        self.end_appends()
        try:
            os.fdatasync(self._slot.descriptor)
            if self._sidecar_is_stale:
                self._rewrite()
            self._slot.sidecar.sync()
        except OSError as error:
            raise self._room.failure(error, self.name) from error

    def keep_for_recovery(self) -> None:
        """Close the file and leave it to `StagingFolder.leftovers`, durable on return.

        LocalFileError if it could not be synced; it is left all the same.
        """
        if not self._is_open:
            return
        try:
            self.sync()
            sync_folder(self._room.path)
        except OSError as error:
            raise self._room.failure(error, self.name) from error
        finally:
            self._end(keep=True)

    def discard(self) -> None:
        """Close the file and remove its staged bytes.  Harmless when called twice."""
        if self._is_open:
            self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        self.end_appends()
        self._is_open = False
        with _Counted(self._room, self._staged):
            self._staged.clear()
        self._slots.release(self._slot, keep=keep)

    def _has_moved(self) -> bool:
        """Leave a long slot, none of whose bytes count any more, for an empty one; False if the file stays."""
        slot = self._slots.another(self._slot)
        if slot is None:
            return False
        try:
            slot.sidecar.append(whole_line(self._state()))
        except OSError:
            self._slots.release(slot, keep=False)
            return False
        before, self._slot = self._slot, slot
        self._sidecar_is_stale, self._sidecar_is_closed = False, True
        self._slots.release(before, keep=False)
        return True

    # --- bytes ---------------------------------------------------------------------------------------

    def _put(self, offset: int, view: memoryview) -> None:
        """Stage bytes: first the bytes, then their range in the sidecar, then the range in memory."""
        end_before = self._staged.end
        end = offset + len(view)
        try:
            self._room.with_room(partial(self._put_on_disk, offset, view))
        except OSError as error:
            if end > end_before:
                self._set_length(end_before)
            raise self._room.failure(error, self.name) from error
        with _Counted(self._room, self._staged):
            self._staged.add(offset, end)
        self._compact()

    def _put_on_disk(self, offset: int, view: memoryview) -> None:
        end_before, end = self._staged.end, offset + len(view)
        if self._sidecar_is_stale:
            self._rewrite()  # else it would name bytes whose meaning this write changes
        if offset > end_before and not self._sidecar_is_closed:
            # The last range reaches to the end of the file; this write leaves a gap behind it.
            self._append(closing_line(self._staged.last_begin, end_before))
            self._sidecar_is_closed = True
        _pwrite(self._slot.descriptor, view, offset)
        if not self._is_known(offset, end):
            self._append(ranges_line(offset, end))
            self._sidecar_is_closed = False

    def _is_known(self, offset: int, end: int) -> bool:
        """Return True if the sidecar already counts these bytes as staged, once they are in the file."""
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
                    f"{self.name}: another process shortened its file in the staging folder {self._room.path}",
                    subject=self.name,
                )
            target = target[count:]
            offset += count

    def _set_length(self, length: int) -> None:
        """Set the staging file's length, to free disk space.  If that fails, it is set before the next line."""
        try:
            os.ftruncate(self._slot.descriptor, length)
        except OSError:
            self._sidecar_is_stale = True  # it relies on the file's length

    # --- sidecar -------------------------------------------------------------------------------------

    def _state(self) -> SidecarState:
        return SidecarState(self.name, self._time_ns, self._size, self._base, self._base_bytes, self._staged)

    def _append(self, line: bytes) -> None:
        if self._sidecar_is_stale:
            self._rewrite()
        self._slot.sidecar.append(line)

    def _note(self, line: bytes) -> None:
        """Append a line; a failure is not raised: the sidecar is rewritten before the next line."""
        try:
            self._append(line)
        except OSError:
            self._sidecar_is_stale = True

    def _rewrite(self) -> None:
        self._slot.sidecar.rewrite(whole_line(self._state()))
        self._sidecar_is_closed = True
        if self._sidecar_is_stale:
            os.ftruncate(self._slot.descriptor, self._staged.end)  # else bytes behind would count with the next line
            self._sidecar_is_stale = False

    def _compact(self) -> None:
        """Keep the sidecar short.  On a full disk it stays long, and right."""
        if not self._slot.sidecar.is_long:
            return
        try:
            self._rewrite()
        except OSError:
            return


class _Counted:
    """Keeps the folder's sums right while a file's ranges change."""

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


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable.  OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
