"""`ObjectWriter`: an object opened for writing.  It becomes visible when it is closed: whole, durable, at once.

Until then a reader of the name gets what it had before.  The object is dropped, and the name is left as it is, when

- `discard()` is called,
- an error leaves a `with` block whose end closes the file: the file's own, or that of a file that wraps it,
- the file is never closed, or the process ends.

Short content is kept in memory and stored by one request.  Longer content is stored 16 MiB at a time, so memory is
bounded; what is stored already, of this object or any other, is not written again.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal

from lakefs.errors import AlreadyExists, InvalidArgument, KeyNotFound, LakeError, PreconditionFailed
from lakefs.get.objects import close_object, open_object, read_range
from lakefs.host.plain_bytes import plain_bytes
from lakefs.limits import CHUNK_BYTES
from lakefs.names import Name
from lakefs.put.objects import put
from lakefs.put.pieces import PiecewisePut
from lakefs.put.sources import BufferSource
from lakefs.steps.steps import Steps
from lakefs.wire.messages import Condition, NameChange, ObjectAttributes, ObjectStat

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver
    from lakefs.get.opened import Opened

STORED_AT_ONCE_BYTES: Final = 4 * CHUNK_BYTES
"""Bytes gathered in memory before they are stored: two requests, one received while one is written."""
_FRAMES_LOOKED_AT: Final = 12

WriteMode = Literal["wb", "xb", "ab"]
WRITE_MODES: Final = ("wb", "xb", "ab")


class ObjectWriter(io.BufferedIOBase):
    """An object opened by `Lake.open(name, "wb")`, `"xb"` (it must not exist) or `"ab"` (append).

    Not seekable.  Errors are those of `lakefs.errors`; AlreadyExists for "xb".  Used by one thread at a time.
    """

    def __init__(self, driver: BlockingDriver, name: Name, mode: WriteMode, *, create_bucket: bool = False) -> None:
        self.mode = mode
        self._driver = driver
        self._name = name
        self._create_bucket = create_bucket
        self._gathered = bytearray()
        self._put = PiecewisePut(self._driver.steps.transfer(None))
        self._is_stored = False
        self._position = 0
        self._condition = Condition(absent=mode == "xb")
        self._attributes = ObjectAttributes()
        self._old: Opened | None = None
        self._process = os.getpid()
        self._handled = sys.exception()
        """The error that was being handled when the file was opened: it does not concern the file."""
        self._is_done = False
        if mode == "ab":
            self._run(self._begin_behind_old())

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._position

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        raise io.UnsupportedOperation(f"{self._name} is being written: it cannot be sought in")

    def write(self, data: Any) -> int:
        """Add bytes; they are stored when 16 MiB have come together.  Returns how many these were."""
        if self.closed:
            raise ValueError(f"{self._name} is closed")
        view = plain_bytes(data)
        length = len(view)
        while view:
            if not self._gathered and len(view) >= STORED_AT_ONCE_BYTES:  # from the caller's memory, without a copy
                count = len(view) - len(view) % STORED_AT_ONCE_BYTES
                self._store(view[:count])
            else:
                count = min(len(view), STORED_AT_ONCE_BYTES - len(self._gathered))
                self._gathered += view[:count]
                if len(self._gathered) == STORED_AT_ONCE_BYTES:
                    self._store_gathered()
            view = view[count:]
        self._position += length
        return length

    def flush(self) -> None:
        """Do nothing: what is written so far is not an object yet."""
        if self.closed:
            raise ValueError(f"{self._name} is closed")

    def close(self) -> None:
        """Store the rest and make the object visible; drop it if an error ends the `with` block that closes it."""
        if self.closed:
            return
        if _is_left_by_an_error(self._handled):
            self.discard()
            return
        try:
            self._finish()
        except BaseException:
            self.discard()
            raise
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_done", True) and not self.closed:
            warnings.warn(f"{self._name} was never closed: nothing was stored", ResourceWarning, stacklevel=2)
            self.discard()

    def discard(self) -> None:
        """Close the file and drop what was written; the name is left as it is."""
        self._gathered = bytearray()
        if not self._is_done:
            self._is_done = True
            self._end()
        super().close()

    # --- storing -----------------------------------------------------------------------------------

    def _store_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._store(memoryview(gathered))

    def _store(self, piece: memoryview) -> None:
        self._is_stored = True
        self._run(self._put.store(piece))

    def _finish(self) -> None:
        """End the file that is being closed."""
        self._commit()

    def _commit(self) -> None:
        change = NameChange(*self._name, b"", self._attributes, self._condition, self._create_bucket)
        if self._is_stored:
            self._store_gathered()
            self._run(self._put.commit(change))
        else:
            source = BufferSource(memoryview(self._gathered))
            self._run(put(self._driver.steps.transfer(None), change, source))
            self._gathered = bytearray()
        self._is_done = True
        self._end()

    def _end(self) -> None:
        """Give up what the engine holds for the put; a lost connection has given it up already."""
        old, self._old = self._old, None
        self._handled = None
        if os.getpid() != self._process:  # a forked child: put and lease are its parent's
            return
        try:
            self._driver.run(self._put.abandon())
            if old is not None:
                self._driver.run(close_object(old))
        except LakeError:
            return

    def _run(self, steps: Steps[Any]) -> Any:
        if os.getpid() != self._process:
            steps.close()
            raise InvalidArgument(f"{self._name} was opened for writing by another process", subject=str(self._name))
        try:
            return self._driver.run(steps)
        except PreconditionFailed as error:
            if self._condition.absent:
                raise AlreadyExists(f"{self._name} exists already", subject=str(self._name)) from error
            raise

    # --- appending ---------------------------------------------------------------------------------

    def _begin_behind_old(self) -> Steps[None]:
        """Take over the chunks of the present object; only the bytes behind its last full chunk are read.

        The commit fails if the name has another object by then.
        """
        access = self._driver.steps.access(None)
        try:
            opened = yield from open_object(access, self._name, inline_bytes=0)
        except KeyNotFound:
            self._condition = Condition(absent=True)
            return
        self._old = opened
        self._condition = Condition(etags=[opened.stat.etag])
        self._attributes = _kept_by_appending(opened.stat)
        pieces = list(opened.pieces)
        rest = pieces.pop() if pieces and pieces[-1].length < CHUNK_BYTES else None
        if pieces:
            self._is_stored = True
            yield from self._put.take_over([(piece.chunk, piece.length) for piece in pieces])
        if rest is not None:
            self._gathered += yield from read_range(access, opened, rest.offset, rest.length)
        self._position = opened.stat.size_bytes


def _kept_by_appending(old: ObjectStat) -> ObjectAttributes:
    """Return the attributes that do not depend on content or time; an S3 client's metadata may hold the old time."""
    return ObjectAttributes(
        mode=old.mode,
        uid=old.uid,
        gid=old.gid,
        content_type=old.content_type,
        user_metadata={name: value for name, value in old.user_metadata.items() if name != "mtime"},
        headers=old.headers,
        xattrs=old.xattrs,
        tags=old.tags,
    )


def _is_left_by_an_error(handled: BaseException | None) -> bool:
    """Return True if an error, other than `handled`, is on its way out of the `with` block whose end closes the file.

    `fsspec.open`, pandas and others close their files without saying why.  So the nearest `__exit__` among the callers
    decides: it got the error that leaves its block, or none.
    """
    error = sys.exception()
    if error is None or error is handled:
        return False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_LOOKED_AT):
        if frame is None:
            return False
        if frame.f_code.co_name == "__exit__":
            return _is_among(error, frame.f_locals)
        frame = frame.f_back
    return False


def _is_among(error: BaseException, values: dict[str, Any]) -> bool:
    """Return True if the error is one of a function's arguments, or in a tuple of them."""
    return any(
        value is error or (isinstance(value, tuple) and any(item is error for item in value))
        for value in values.values()
    )
