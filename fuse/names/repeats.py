"""The kernel's repeats: an operation refused with ESTALE comes once more, its path looked up anew.

It comes once.  If what the program works in has gone away again by then, the program would get ESTALE, which it meets
on no local file system.  Something was gone while the call was under way, so the second time it gets ENOENT.

The kernel does not say that it repeats.  A repeat begins with look-ups by the same thread.  Behind one that finds
nothing come, at most, the same look-up (the first was of an entry in the kernel's cache) and an operation that makes
this name; all else is another call.  Attributes and symlinks are read in between.  Look-ups of a repeat ask the store,
also for what is fresh: an open may rest on what they find (`fuse.names.opening`).

What is done by a descriptor is not repeated: the program has its ESTALE.  So an operation behind no look-up is a repeat
only if it is the refused one, as of the folder that a program works in; else the thread has gone on.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio
from pyfuse3 import FUSEError

T = TypeVar("T")

_REFUSED_MAX: Final = 1024
"""Most threads remembered as refused."""
_REPEATED_WITHIN_S: Final = 1.0
"""Longest from a refused look to the operation that repeats its call."""


@dataclass(slots=True)
class _Refusal:
    begun_at: float
    """When the refused operation began, or later."""
    operation: tuple[object, ...] = ()
    """The refused operation, and its inode."""
    looked_at: float | None = None
    """When the thread's last look-up behind it began."""
    reads: bool = False
    """True for a look-up, or a look at attributes: a call that only reads may have ended well since."""
    looked_up: object = None
    """The name, if it was a look-up."""
    absent: tuple[object, ...] = ()
    """Folder and name that a look-up behind it has not found."""


class Repeats:
    """Knows which threads' last operation was refused with ESTALE.  Thread 0 is of another PID namespace: unknown."""

    def __init__(self) -> None:
        self._refused: OrderedDict[int, _Refusal] = OrderedDict()

    def refuse(
        self,
        thread: int,
        begun_at: float,
        *,
        operation: tuple[object, ...] = (),
        reads: bool = False,
        looked_up: object = None,
    ) -> None:
        """Note that an operation was refused; it began at this time, or before.  What is noted stays."""
        if not thread:
            return
        self._refused.setdefault(thread, _Refusal(begun_at, operation, reads=reads, looked_up=looked_up))
        while len(self._refused) > _REFUSED_MAX:
            self._refused.popitem(last=False)

    def begin(
        self, thread: int, arguments: tuple[object, ...] = (), operation: tuple[object, ...] = ()
    ) -> float | None:
        """Begin an operation: return None unless it repeats a refused one, else when the last look-up before it began,
        or without any the refused one.

        `arguments` are the operation's: first folder and name, for a rename then the new folder and name.
        """
        refusal = self._refused.get(thread)
        if refusal is None:
            return None
        is_other = bool(refusal.absent) and refusal.absent not in (arguments[:2], arguments[2:4])
        is_other |= bool(operation) and refusal.looked_at is None and operation != refusal.operation
        if refusal.reads:
            is_other |= not _is_of_name(arguments) or trio.current_time() > refusal.begun_at + _REPEATED_WITHIN_S
        if is_other:
            self.end(thread)
            return None
        return refusal.begun_at if refusal.looked_at is None else refusal.looked_at

    def end(self, thread: int) -> None:
        """Note that a thread's operation was not refused."""
        self._refused.pop(thread, None)

    def is_repeating(self, thread: int) -> bool:
        """Return True if a look-up may be a step of a repeat: then it asks the store."""
        return thread in self._refused

    async def reading(self, thread: int, look: Awaitable[T]) -> T:
        """Await a look at attributes or a symlink, which may be a step of a repeat."""
        try:
            return await look
        except FUSEError as error:
            if error.errno != errno.ESTALE:
                raise
            if self.is_repeating(thread):
                raise FUSEError(errno.ENOENT) from error
            self.refuse(thread, trio.current_time(), reads=True)
            raise

    def begin_look_up(self, thread: int, folder: object, name: object) -> bool:
        """Begin a look-up: return True if it may be a step of a repeat."""
        refusal = self._refused.get(thread)
        if refusal is None:
            return False
        if refusal.absent and refusal.absent != (folder, name):
            self.end(thread)
            return False
        refusal.looked_at = trio.current_time()
        return True

    def end_look_up(self, thread: int, name: object) -> None:
        """Note that a look-up was not refused: if one of this name was, that call went on."""
        refusal = self._refused.get(thread)
        if refusal is not None and refusal.looked_up == name:
            self.end(thread)

    def note_absent(self, thread: int, folder: object, name: object) -> None:
        """Note that a look-up found nothing."""
        refusal = self._refused.get(thread)
        if refusal is not None:
            refusal.absent = (folder, name)


def _is_of_name(arguments: tuple[object, ...]) -> bool:
    return len(arguments) > 1 and isinstance(arguments[1], bytes)
