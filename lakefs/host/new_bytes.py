"""`bytes` that are filled after allocation: the result of a get, without a second copy.

`io.BytesIO` writes into the object it was created from while it holds the only reference, and returns that very
object.  Outside CPython it copies, which is slower and just as correct.  The zeroed memory is not touched before it
is filled.
"""

from __future__ import annotations

import io


class NewBytes:
    """Memory for `length` bytes: fill `view`, then `take` them once."""

    def __init__(self, length: int) -> None:
        self._file = io.BytesIO(bytes(length))
        self.view = self._file.getbuffer()

    def take(self) -> bytes:
        """Return the bytes and release `view`; nothing may write to any part of it afterwards."""
        self.view.release()
        return self._file.getvalue()
