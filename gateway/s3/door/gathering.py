"""PUTs that the door holds, on their way to the store: many with one request, and the next gather while it commits.

    native code   proves a PUT, and holds its connection     ->  a Put waits in the repeater
    after_turn    --  puts wait, and a place is free          ->  a task takes them and has them stored
    the owner     --  decides, stores, and says what to answer (`gateway.s3.operations.gathered`)

Rules kept here:
- Each Put that is taken is answered or given back, however its storing ends.  One that was not tried goes to its
  connection's task, which treats it like any other request.
- One request is under way at a time, so that puts gather meanwhile.
- Clients that were answered together ask again together.  So a request with many puts is followed by a short pause, up
  to when as many have come: else the first of them would have a commit of its own, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from lakefs.limits import S3_PUTS_GATHERED_MAX

if TYPE_CHECKING:
    from gateway.s3.door._repeater import Put, Repeater

Store = Callable[[Sequence["Put"]], Awaitable[None]]
"""Stores puts, and answers each of them, or gives it back."""
_MANY: Final = 4
"""Puts in a request after which there is a pause."""
_PAUSE_S: Final = 0.0005
"""The longest pause; a commit takes longer."""


class Gathering:
    """The puts of one door.  `run` has them stored, in a task of its owner."""

    def __init__(self, repeater: Repeater) -> None:
        self.store: Store
        """Set by its owner before the first put comes."""
        self._repeater = repeater
        self._is_storing = False
        self._awaited = 0
        """Puts that end the pause."""
        self._has_awaited = trio.Event()
        self._nursery: trio.Nursery | None = None

    def after_turn(self) -> None:
        """Begin to store what waits, if no request is under way; end the pause if enough have come."""
        count = self._repeater.gathered
        if not count or self._nursery is None:
            return
        if not self._is_storing:
            self._is_storing = True
            self._nursery.start_soon(self._store_all)
        elif self._awaited and count >= self._awaited:
            self._has_awaited.set()

    async def run(self) -> None:
        """Have puts stored until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # a turn may come before the door ends

    async def _store_all(self) -> None:
        try:
            while puts := self._repeater.take_puts(S3_PUTS_GATHERED_MAX):
                await self.store(puts)
                if len(puts) >= _MANY:
                    await self._pause(len(puts))
        finally:
            self._is_storing = False

    async def _pause(self, count: int) -> None:
        """Wait until so many puts have come, for a moment at most."""
        if self._repeater.gathered >= count:
            return
        self._awaited, self._has_awaited = count, trio.Event()
        with trio.move_on_after(_PAUSE_S):
            await self._has_awaited.wait()
        self._awaited = 0
