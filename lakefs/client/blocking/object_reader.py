"""`ObjectReader`: an opened object of the blocking client as a raw binary file.

What is in memory is copied and checked in the caller's thread, without a request and without the connection
(`lakefs.get.cached`).  Everything else is an operation of the driver, which reads and checks in its threads.

A reader that jumps is taken for one that reads at random: it gets the bytes up to the next granule, and twice as many
with each read that continues, so that a buffer in front of it is filled only for a reader in order.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any, Final

from lakefs.errors import EngineUnreachable
from lakefs.get.cached import FILLED_BYTES_MAX, fill_cached
from lakefs.get.opened import Opened
from lakefs.host.new_bytes import NewBytes
from lakefs.host.plain_bytes import plain_bytes
from lakefs.limits import GRANULE_BYTES, MIB

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver
    from lakefs.wire.messages import ObjectStat

BUFFER_BYTES: Final = 1 * MIB
"""The buffer in front of an `ObjectReader`.  Longer reads are never cut short."""


class ObjectFile(io.BufferedReader):
    """An opened object as a buffered binary file.  Python's own would fill any memory, also an array of objects."""

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, in part only at the end; return the count of its bytes.  TypeError: it is no plain memory."""
        return super().readinto(plain_bytes(buffer))

    def readinto1(self, buffer: Any, /) -> int:
        """Like `readinto`, with at most one read of the object."""
        return super().readinto1(plain_bytes(buffer))


class ObjectReader(io.RawIOBase):
    """An opened object as a raw binary file; wrap it in `ObjectFile`, as `Lake.open` does."""

    def __init__(self, driver: BlockingDriver, opened: Opened) -> None:
        self._driver = driver
        self._opened = opened
        self._position = 0
        self._end = 0
        """End of the last read: a read that begins here continues it."""
        self._window_bytes = 2 * GRANULE_BYTES
        """Bytes that the next read into a buffer brings in, if it continues the last one."""

    @property
    def stat(self) -> ObjectStat:
        """Stat of the name when it was opened."""
        return self._opened.stat

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._opened.stat.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}: before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return their count, 0 only at the end.

        A buffer of at most `BUFFER_BYTES` is filled in part if the reader has jumped.
        """
        view = plain_bytes(buffer)
        if len(view) <= BUFFER_BYTES:
            view = view[: self._worth_reading()]
        view = view[: self._rest()]
        if view and not self._filled(view):
            self._driver.run(self._driver.steps.read_into(self._opened, self._position, view))
        self._advance(len(view))
        return len(view)

    def readall(self) -> bytes:
        return self.read_next(self._rest())

    def read_next(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer only at the end; they are not copied once more."""
        length = min(length, self._rest())
        content = self._filled_bytes(length) if length <= FILLED_BYTES_MAX else None
        if content is None:
            content = self._driver.run(self._driver.steps.read(self._opened, self._position, length))
        self._advance(length)
        return content

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(EngineUnreachable):  # the lease ended with the connection
                self._driver.run(self._driver.steps.close(self._opened))
        super().close()

    def _rest(self) -> int:
        return max(0, self._opened.stat.size_bytes - self._position)

    def _worth_reading(self) -> int:
        """Return how many bytes a read from here into a buffer brings in."""
        if self._position == self._end:
            wanted = self._window_bytes
            self._window_bytes = min(2 * wanted, BUFFER_BYTES)
        else:
            wanted = GRANULE_BYTES
            self._window_bytes = 2 * GRANULE_BYTES
        # To a granule's end, so that the read that continues begins with a whole one.
        return wanted + -(self._position + wanted) % GRANULE_BYTES

    def _advance(self, length: int) -> None:
        self._position += length
        self._end = self._position

    def _filled_bytes(self, length: int) -> bytes | None:
        if not length:
            return b""
        target = NewBytes(length)
        return target.take() if self._filled(target.view) else None

    def _filled(self, view: memoryview) -> bool:
        """Fill memory with the next bytes if they are in memory, and predict the reader's next bytes."""
        driver, opened, position = self._driver, self._opened, self._position
        steps = driver.steps
        if len(view) > FILLED_BYTES_MAX or not steps.offers.places or driver.is_closed or not driver.is_own:
            return False  # the driver raises the error, if it is one
        if not fill_cached(steps.descriptors, steps.check, opened, position, view):
            return False
        begin, wanted = opened.window.after(position, len(view), opened.stat.size_bytes)
        if wanted:
            driver.run(steps.bring_in(opened, begin, wanted))
        return True
