"""Who begins anew in a child of `os.fork`.

There no other thread is, and what another one was at stays as it was: a lock that it had is held for ever, a module
that it imported is never there.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet


class BeginsAnew(Protocol):
    """An object that a child has, too."""

    def begin_anew(self) -> None:
        """In a child that was forked just now: leave what is the parent's alone, and wait for no lock.

        OSError: it stays the parent's.
        """
        ...


NO_FORK: Final = threading.RLock()
"""Held while a module is imported on the way: a child would wait for ever for the thread that was at it."""
_followers: Final[WeakSet[BeginsAnew]] = WeakSet()


def follow_forks(follower: BeginsAnew) -> None:
    """Have it begin anew in each child, for as long as somebody has it."""
    _followers.add(follower)


def _begin_all_anew() -> None:
    NO_FORK.release()
    for follower in list(_followers):
        with suppress(OSError):  # as of a descriptor that somebody else has closed
            follower.begin_anew()


os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_begin_all_anew)
