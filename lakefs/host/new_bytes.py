"""`bytes` that are filled after they were made: what a get returns, without a second copy of it.

`io.BytesIO` writes into the object it was made of while nobody else has it, and gives that very object away; elsewhere
than in CPython it copies, which is slower and just as right.  Room of zeros is not touched before it is filled.
"""

from __future__ import annotations

import io


class NewBytes:
    """Room for `length` bytes: fill `view`, then `take` them once."""

    def __init__(self, length: int) -> None:
        self._file = io.BytesIO(bytes(length))
        self.view = self._file.getbuffer()

    def take(self) -> bytes:
        """The bytes.  `view` is released; nobody may write to a part of it from now on."""
        self.view.release()
        return self._file.getvalue()
