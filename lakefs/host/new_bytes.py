"""`bytes` that are filled after allocation: the result of a get, without a second copy.

`io.BytesIO` writes into the object it was created from while it holds the only reference, and returns that very
object.  Outside CPython it copies, which is slower and just as correct.  The zeroed memory is not touched before it
is filled.

Memory of `HUGE_FROM_BYTES` and more asks the kernel for huge pages: to fill 256 MiB then takes 0.4 times the CPU,
most of which went into single pages.
"""

from __future__ import annotations

import io
from typing import Final

from lakefs.host.memory_advice import want_huge_pages
from lakefs.limits import MIB

HUGE_FROM_BYTES: Final = 32 * MIB
"""The C library's greatest threshold for a mapping of its own: the advice ends with the memory, none is left behind."""


class NewBytes:
    """Memory for `length` bytes: fill `view`, then `take` them once."""

    def __init__(self, length: int) -> None:
        self._file = io.BytesIO(bytes(length))
        self.view = self._file.getbuffer()
        if length >= HUGE_FROM_BYTES:
            want_huge_pages(self.view)

    def take(self) -> bytes:
        """Return the bytes and release `view`; nothing may write to any part of it afterwards."""
        self.view.release()
        return self._file.getvalue()
