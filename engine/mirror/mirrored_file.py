"""An open file of a mirrored disk: one handle on each copy.

Rules kept here:
- A change is made through all handles of good copies (`engine.mirror.good_copies`); a read through one of them.
- A file opened for reading is opened on all good copies at once, as its name may lead elsewhere later.
- A copy that gets good while the file is open has a handle if the file has a name; else it needs none.
- A handle of a copy that hangs is not closed: closing would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from engine.mirror.copy import Copy
from engine.mirror.good_copies import GoodCopies
from lakefs.errors import LakeError
from lakefs.ids import Buffer
from lakefs.ports import DiskFile

T = TypeVar("T")


class MirroredFile:
    """An open file (`lakefs.ports.DiskFile`).  Reads and writes may come from several threads at once."""

    def __init__(
        self, copies: GoodCopies, path: str, handles: dict[Copy, DiskFile], closed: Callable[[MirroredFile], None]
    ) -> None:
        """Own these handles; `closed` is called once, when the file is closed."""
        self.path = path
        """The file's name now; empty if it was removed."""
        self._name = path
        self._copies = copies
        self._handles = handles
        self._closed: Callable[[MirroredFile], None] | None = closed
        self.direct = any(handle.direct for handle in handles.values())

    @property
    def in_memory(self) -> bool:
        """True if all copies are in memory."""
        return all(handle.in_memory for handle in self._handles.values())

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` of one copy; short only at the file's end."""
        return self._read(lambda handle: handle.pread_into(buffer, offset))

    def preadv_cached_into(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fill the buffers from memory; True if all of it was there."""
        return self._read(lambda handle: handle.preadv_cached_into(buffers, offset))

    def pwrite(self, payload: Buffer, offset: int) -> None:
        """Write all of `payload` on all copies."""
        self._change(lambda handle: handle.pwrite(payload, offset))

    def pwritev(self, payloads: Sequence[Buffer], offset: int) -> None:
        """Write the payloads on all copies, one behind the other."""
        self._change(lambda handle: handle.pwritev(payloads, offset))

    def sync_data(self) -> None:
        """Make content and length durable on all copies, at once where calls run in threads."""
        self._everywhere(lambda handle: handle.sync_data(), slow=True, repeatable=False)

    def allocate(self, offset: int, length: int) -> None:
        """Reserve blocks on all copies."""
        self._change(lambda handle: handle.allocate(offset, length))

    def punch(self, offset: int, length: int) -> None:
        """Free whole pages on all copies."""
        self._change(lambda handle: handle.punch(offset, length))

    def truncate(self, size: int) -> None:
        """Set the length on all copies."""
        self._change(lambda handle: handle.truncate(size))

    def size(self) -> int:
        """Length in bytes."""
        return self._read(lambda handle: handle.size())

    def allocated_bytes(self) -> int:
        """Least space taken on any copy."""
        handles = self._handles
        return min(self._copies.read_all(lambda copy: handles[copy].allocated_bytes(), handles))

    def fileno(self) -> int:
        """Descriptor of the first copy's file."""
        return self._read(lambda handle: handle.fileno())

    def close(self) -> None:
        """Close all handles; a second call does nothing."""
        closed, self._closed = self._closed, None
        if closed is None:
            return
        closed(self)
        for copy, handle in self._handles.items():
            if not copy.is_silent:
                with suppress(LakeError):  # nothing is made durable by it; a copy that is gone may say so
                    handle.close()

    def join(self, copy: Copy, handle: DiskFile) -> None:
        """Have changes made on one more copy from now on."""
        self._handles = {**self._handles, copy: handle}

    def leave(self, copy: Copy) -> None:
        """Close and forget the handle of a copy that was given up."""
        handle = self._handles.get(copy)
        self._handles = {other: kept for other, kept in self._handles.items() if other is not copy}
        if handle is not None and not copy.is_silent:
            with suppress(LakeError):
                handle.close()

    def _read(self, ask: Callable[[DiskFile], T]) -> T:
        handles = self._handles
        return self._copies.read(lambda copy: ask(handles[copy]), self._name, handles)

    def _change(self, change: Callable[[DiskFile], None]) -> None:
        with self._copies.changing_content():
            self._everywhere(change, slow=self.direct, repeatable=True)

    def _everywhere(self, change: Callable[[DiskFile], None], *, slow: bool, repeatable: bool) -> None:
        handles = self._handles

        def change_copy(copy: Copy) -> None:
            handle = handles.get(copy)
            if handle is not None:
                change(handle)

        self._copies.change(change_copy, slow=slow, repeatable=repeatable)
