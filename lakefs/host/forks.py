"""Objects that reset themselves in a child of `os.fork`.

The child has no other threads, and what another thread was doing stays half done: a lock that it held is held
forever, a module that it was importing is never complete.  So a reset waits for no lock, and a fork waits until no
thread imports a module lazily (`NO_FORK`).  A child whose fork Python does not see, by a library in C, is not reset.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet


class BeginsAnew(Protocol):
    """An object that a forked child inherits and must reset."""

    def begin_anew(self) -> None:
        """In a newly forked child: leave the parent's resources alone, and wait for no lock.

        OSError: the object remains the parent's.
        """
        ...


NO_FORK: Final = threading.RLock()
"""Held while a module is imported lazily: a child would wait forever for the thread that was importing it."""
_followers: Final[WeakSet[BeginsAnew]] = WeakSet()


def follow_forks(follower: BeginsAnew) -> None:
    """Call `begin_anew` of the object in each child, for as long as the object lives."""
    _followers.add(follower)


def _begin_all_anew() -> None:
    NO_FORK.release()
    for follower in list(_followers):
        with suppress(OSError):  # for example, a descriptor that was closed elsewhere
            follower.begin_anew()


os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_begin_all_anew)
