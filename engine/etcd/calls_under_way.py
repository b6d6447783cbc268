"""The tries of one process that wait for etcd's answer, and those among them that were lost with etcd's leader.

A node that follows sends what it is asked on to its leader.  When that has died or stands still, the request is lost,
and the node, which is well, never answers it.  Once another leader is known, whatever was sent before is given up here,
and sent again.

Rules kept here:
- A try that was given up may have been done, or may yet be.
- A call is late from its first try on: later ones may be lost alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio


@dataclass(eq=False)
class TryUnderWay:
    """A try that waits for `done`: set by its answer, or without one when it is given up, or all are ended.

    What `takes_long` itself is not given up.
    """

    takes_long: bool
    done: trio.Event = field(default_factory=trio.Event)
    is_given_up: bool = False


class CallsUnderWay:
    """The calls of one link, and their tries.  Used on the loop."""

    def __init__(self) -> None:
        self._tries: dict[TryUnderWay, None] = {}
        self._begun: dict[object, float] = {}
        """When each call began that ends with its first answer."""

    def __len__(self) -> int:
        return len(self._begun)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call during the block."""
        key = object()
        self._begun[key] = trio.current_time()
        try:
            yield
        finally:
            del self._begun[key]

    def are_late(self, late_s: float) -> bool:
        """Return True if a call has lasted for so long."""
        return any(trio.current_time() - begun >= late_s for begun in self._begun.values())

    # --- tries -------------------------------------------------------------------------------------

    def begin(self, *, takes_long: bool = False) -> TryUnderWay:
        """Note a try that is sent now; `end` it."""
        sent = TryUnderWay(takes_long)
        self._tries[sent] = None
        return sent

    def end(self, sent: TryUnderWay) -> None:
        """Note the end of a try."""
        self._tries.pop(sent, None)

    def end_all(self) -> None:
        """Wake all that wait."""
        for sent in self._tries:
            sent.done.set()

    def give_up(self) -> bool:
        """Give up all tries; returns True if there are any."""
        given_up = [sent for sent in self._tries if not sent.takes_long]
        for sent in given_up:
            sent.is_given_up = True
            sent.done.set()
        return bool(given_up)
