"""Native appends of staged files: what native threads may write to a staging file, and how the rest learns of it.

A file that is written on at its end needs no line in its sidecar, and changes nothing but its length.  So such writes
are let to native threads, some MiB at a time: the write after those is the loop's, which stores complete chunks behind
(`fuse.staging.write_behind`), and lets the next.

Rules kept here:
- What may be written is lent from the room of the folder, and given back where it was not used: `Room.reserve` ends
  all appends before it refuses anything.
- Whoever looks at the file sees all writes that were answered: `StagedFile` takes over what was written in each of its
  methods, and the operations of the mount do it before they begin.
- All is called in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from fuse.native import layer
from fuse.staging.room import AppendedFile, Room

APPEND_BYTES: Final = 8 << 20
"""Most bytes that are written before the loop sees a write again: two chunks, which it then stores behind."""


class Appending:
    """The native append of one staged file, which has begun."""

    def __init__(self, room: Room, file: AppendedFile, native: layer.NativeAppend, begin: int, byte_count: int) -> None:
        self._room = room
        self._file = file
        self._native = native
        self._known_end = begin
        self._left = byte_count
        room.lent_bytes += byte_count
        room.appended.append(file)

    @classmethod
    def begun(
        cls, room: Room, file: AppendedFile, handle: int, descriptor: int, begin: int, size_max: int
    ) -> Self | None:
        """Let the bytes from `begin` on be written through a handle; None if they cannot be, or there is no room."""
        byte_count = min(APPEND_BYTES, room.left_bytes, size_max - begin)
        if byte_count <= 0 or not layer.answers_writes():
            return None
        try:
            native = layer.NativeAppend(handle, descriptor, begin, begin + byte_count)
        except OSError:
            return None
        return cls(room, file, native, begin, byte_count)

    def found(self) -> tuple[int, int, int] | None:
        """Return begin and end of what was written since the last call, and when, in ns since 1970; None: nothing."""
        begin = self._known_end
        end, time_ns = self._native.found()
        if end == begin:
            return None
        self._known_end = end
        self._left -= end - begin
        self._room.lent_bytes -= end - begin
        return begin, end, time_ns

    def end(self) -> None:
        """Let nothing more be written; none of it runs on return.  What was written is still to be asked for."""
        self._native.end()

    def give_back(self) -> None:
        """Give the room back that was not used."""
        self._room.lent_bytes -= self._left
        self._left = 0
        self._room.appended.remove(self._file)


Noted = Callable[[int], None]
"""Gets the time of what native threads wrote, in ns since 1970, when it was taken over."""
