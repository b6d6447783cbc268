"""The native layer of this process's mount, as Python sees it; `layer.h` says how it works.

    arm                before the mount is made: it gets the layer
    why_not            after it was made: empty, or the reason why there is none
    NativeAppend       a file that is written on at its end: native threads answer the writes of one handle
    NativeContent      where the bytes of an open object are: native threads answer the reads of its handles
    answer_open        the next answer to OPEN or CREATE of a handle gets flags and a backing file that pyfuse3 lacks
    open_backing       makes a file known to the kernel, which then reads it for handles without asking the mount
    end                before the session is closed: threads end, the device is closed

Without the native module everything here says no: `arm` does nothing, and `why_not` says why.

Rules kept here:
- The module is loaded with its symbols global, and before pyfuse3 (`fuse/__init__.py` sees to that): the dynamic linker
  then takes `fuse_session_mount` from it.
- All is called in the loop's thread.
- Native code answers what Python would answer: whoever changes what a handle's reads return, or gives back what keeps
  the bytes in place, ends the content first.  `NativeContent.end` returns when no native read of it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fuse.native import _layer

    IS_BUILT: bool
else:
    _flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        from fuse.native import _layer
    except ImportError:
        _layer = None
    finally:
        sys.setdlopenflags(_flags)
    IS_BUILT = _layer is not None

THREADS_MIN: Final = 2
THREADS_MAX: Final = 4
"""Most threads that read the kernel's device; `layer.h` has room for so many."""
CONTENT_PIECES_MAX: Final = 16_384
"""Most pieces of an object that is read natively: 64 GiB of large chunks."""
FOPEN_DIRECT_IO: Final = 1 << 0
FOPEN_KEEP_CACHE: Final = 1 << 1
FOPEN_NOFLUSH: Final = 1 << 5
FOPEN_PASSTHROUGH: Final = 1 << 7


def arm(*, reads: bool, passthrough: bool) -> None:
    """Have the next mount of this process get the layer; with `reads` its threads answer reads.

    `passthrough`: it is taken, if the kernel offers it.  The mount then counts as one more layer of file systems, of
    which the kernel allows two.
    """
    if IS_BUILT:
        cores = len(os.sched_getaffinity(0))
        _layer.arm(min(max(cores, THREADS_MIN), THREADS_MAX) if reads else 0, passthrough)


def why_not() -> str:
    """Return why the mount has no layer; empty if it has one."""
    return _layer.why_not() if IS_BUILT else "the native module is not built"


def answers_reads() -> bool:
    """Return True if there is a layer, and its threads answer reads."""
    return IS_BUILT and _layer.answers_reads()


def answers_writes() -> bool:
    """Return True if there is a layer, and its threads write what is appended."""
    return answers_reads()


def write_is_mapped() -> bool | None:
    """Return True if the WRITE under way brings pages of a mapping; None if there is no layer to tell.

    Called before the first checkpoint of `write`.  The kernel sends such pages through any handle that writes.
    """
    return None if why_not() else _layer.write_is_mapped()


def end() -> None:
    """End the layer's threads and close the device.  Waits for native reads under way; idempotent."""
    if IS_BUILT:
        _layer.end()


def counters() -> dict[str, int]:
    """Return counts since the process began: reads answered, bytes, requests passed on, failed checks."""
    return _layer.counters() if IS_BUILT else {}


# --- passthrough ---------------------------------------------------------------------------------------


def has_passthrough() -> bool:
    """Return True if the kernel offered passthrough and the mount took it; False before the mount serves."""
    return IS_BUILT and _layer.has_passthrough()


def open_backing(descriptor: int) -> int:
    """Register an open file with the kernel, return its backing id.  OSError: EPERM without CAP_SYS_ADMIN.

    The kernel keeps the file; the descriptor may be closed.
    """
    return _layer.open_backing(descriptor)


def close_backing(backing: int) -> None:
    """Take a backing id back; handles opened with it keep the file.  OSError: ENOENT if there is none."""
    if IS_BUILT:
        _layer.close_backing(backing)


def answer_open(handle: int, *, backing: int = 0, flags: int = 0, without: int = 0) -> None:
    """Have the answer to the OPEN or CREATE under way that returns `handle` get `backing` and `flags`.

    Flags in `without` are removed.  Call it just before `open` or `create` returns the handle's FileInfo, without a
    checkpoint between.  OSError: ENOSPC when too many wait for their answers.
    """
    _layer.answer_open(handle, backing, flags, without)


def leave_out_flush(handle: int) -> None:
    """Have the kernel close this handle, whose OPEN is under way, without asking: it has nothing to store.

    Called as `answer_open`.  Does nothing where that cannot be.
    """
    if answers_reads():
        with suppress(OSError):  # too many wait for their answers: the kernel asks
            answer_open(handle, flags=FOPEN_NOFLUSH)


def take_back_open(handle: int) -> bool:
    """Forget what `answer_open` wanted; return False if the answer has been sent with it, or nothing was wanted."""
    return IS_BUILT and _layer.take_back_open(handle)


# --- reads ---------------------------------------------------------------------------------------------


class NativeContent:
    """The layout of one opened object, and those of its pieces that native threads may read.

    Made of at most `CONTENT_PIECES_MAX` pieces of these lengths; `size` bytes of them are shown.  Ended when freed.
    """

    def __init__(self, size: int, lengths: Sequence[int]) -> None:
        self._content = _layer.Content(size, lengths)

    def knows(self, index: int) -> bool:
        """Return True if a piece was taught, and no check of it failed since."""
        return self._content.knows(index)

    def teach(self, index: int, descriptor: int, place: int, nowait: int, crcs: bytes) -> bool:
        """Have a piece read natively; return False if too many are.

        It lies at `place` of the file, and `crcs` are the CRC32C of its granules, 4 bytes each.  `nowait`: the flags
        of preadv2 that keep a read from waiting for a disk.  The descriptor stays open until the content has ended.
        """
        try:
            self._content.teach(index, descriptor, place, nowait, crcs)
        except OSError:
            return False
        return True

    def teach_memory(self, index: int, memory: memoryview, crcs: bytes) -> bool:
        """Like `teach`, for a piece in memory that another process may change: a copy of it is checked."""
        try:
            self._content.teach_memory(index, memory, crcs)
        except OSError:
            return False
        return True

    def add(self, handle: int) -> bool:
        """Have the reads of a handle answered from this content; return False if too many handles are."""
        try:
            self._content.add(handle)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """End native reads of this content; none runs on return.  Idempotent."""
        self._content.end()


# --- writes --------------------------------------------------------------------------------------------


class NativeAppend:
    """A file whose next bytes native threads write, in order, when they are written through one handle.

    What they wrote is in the file when the write is answered, and so before any later request arrives.  OSError if too
    many files are written so, or this handle's is.  The descriptor stays open until the append has ended, which it has
    when it is freed.
    """

    def __init__(self, handle: int, descriptor: int, end: int, limit: int) -> None:
        self._append = _layer.Append(handle, descriptor, end, limit)

    def found(self) -> tuple[int, int]:
        """Return the end of the bytes that are written, and the time of the last write in ns since 1970, or 0."""
        return self._append.found()

    def end(self) -> None:
        """End native writes of this file; none runs on return.  Idempotent."""
        self._append.end()


def remove(handle: int) -> None:
    """Have Python answer the reads of a handle; when the kernel has released it."""
    if IS_BUILT:
        _layer.remove(handle)
