"""PUTs that the door holds, on their way to the store: many with one request, and the next gather while it commits.

    native code   proves a PUT, and holds its connection     ->  a Put waits in the repeater
    after_turn    --  puts wait, and a place is free          ->  a task takes them and has them stored
    the owner     --  decides, stores, and says what to answer (`gateway.s3.operations.gathered`)

Rules kept here:
- Each Put that is taken is answered or given back, however its storing ends.  One that was not tried goes to its
  connection's task, which treats it like any other request.
- At most `_UNDER_WAY_MAX` requests are under way, so that puts gather meanwhile.
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
_UNDER_WAY_MAX: Final = 1
"""Requests that store puts at a time."""


class Gathering:
    """The puts of one door.  `run` has them stored, in a task of its owner."""

    def __init__(self, repeater: Repeater) -> None:
        self.store: Store
        """Set by its owner before the first put comes."""
        self._repeater = repeater
        self._under_way = 0
        self._nursery: trio.Nursery | None = None

    def after_turn(self) -> None:
        """Begin to store what waits, if a place is free."""
        nursery = self._nursery
        if nursery is not None and self._under_way < _UNDER_WAY_MAX and self._repeater.gathered:
            self._under_way += 1
            nursery.start_soon(self._store_all)

    async def run(self) -> None:
        """Have puts stored until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    async def _store_all(self) -> None:
        try:
            while puts := self._repeater.take_puts(S3_PUTS_GATHERED_MAX):
                await self.store(puts)
        finally:
            self._under_way -= 1
