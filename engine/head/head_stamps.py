"""The stamps of a head: memory that repeats the counters of the names that lead, for the head's clients.

    follow      OpenTurns  --  FollowTurns ...: make the turns of an answer, then take its right     one connection
    join        --  let a client's connection to the names have stamps of these turns
    learn       in the step in which an answer with stamps arrives: raise the counters to them

Clients on the head's machine map the memory, and use it as that of an engine, while the right in its header lasts
(`lakefs/stamps/stamps.h`).  `engine.metadata.head_turns` is the other side.

Rules kept here:
- A turn is said only behind the step that has made it.  A right is taken behind the turns that came with it.
- A right counts from the moment before its request was sent, by CLOCK_BOOTTIME, which goes on while the machine is
  suspended.  It is later than the one before, or nothing changes.
- When the connection is lost the right ends.  The next one begins with a higher base, to which all counters are raised
  before anything is followed: so nothing stands that was sent before, however late it arrives.
- Counters only grow, so turns and answers may arrive on their connections in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import trio

from engine.head.names_link import ConnectNames, NamesConnection, NamesLink
from engine.host.tasks import plain_errors
from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import EngineBusy, LakeError, SessionLost, UnsupportedVersion
from lakefs.limits import AWAY_PAUSE_S_MIN, STAMP_COUNT
from lakefs.stamps import stamps as shared_stamps
from lakefs.stamps.stamps import StampMemory, memory_bytes
from lakefs.wire import messages as m

NO_RIGHT_NS: Final = 1
_BASE_BITS: Final = 40
"""Turns of one record before a base would be reached: a trillion."""
_WAIT_NS: Final = 300_000_000
"""A right is renewed so often when nothing turns: it lasts for 1 s."""
_PAUSE_S_MAX: Final = 2.0
_NOT_FOLLOWED: Final = "the turns of the names are not followed now"
_log: Final = structlog.get_logger(__name__)


class HeadStamps:
    """The stamps of one head, used in its thread only.  `run` it.  The constructor blocks for a few milliseconds."""

    def __init__(self, boottime_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME)) -> None:
        """Allocate the memory.  EngineBusy: memory is short, or the machine has no robust mutex."""
        self._now_ns = boottime_ns
        self._memory = SealedMemory("lake-head-stamps", memory_bytes(STAMP_COUNT))
        self._stamps = StampMemory(self._memory.view)
        try:
            self._stamps.begin(has_end=True)
        except OSError as error:
            self._memory.close()
            raise EngineBusy(f"stamps need a robust mutex, which this machine does not have: {error}") from error
        self._opened = 0
        """Number of times that turns were opened."""
        self._turns = b""
        """The id of the turns that are followed; empty: none are."""

    @property
    def descriptor(self) -> int:
        """A read-only descriptor of the memory, to send to clients; `close` closes it."""
        return self._memory.descriptor

    @property
    def turns(self) -> bytes:
        """The id of the turns that are followed now; empty: none are."""
        return self._turns

    def close(self) -> None:
        """Let no stamp stand any more, and release the memory; clients may have it mapped."""
        self._stamps.end()
        self._memory.close()

    async def run(self, connect: ConnectNames) -> None:
        """Follow the turns of whichever names lead, until cancelled."""
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            try:
                with plain_errors():
                    async with connect() as connection:
                        if connection.hello.features & m.FEATURE_TURNS:
                            pause_s = AWAY_PAUSE_S_MIN
                            await self._follow_connection(connection)
                        else:
                            await connection.wait_ended()
            except LakeError as error:
                _log.debug(_NOT_FOLLOWED, reason=error.message)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _follow_connection(self, connection: NamesConnection) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after_end, connection, nursery.cancel_scope)
            try:
                await self.follow(connection)
            except LakeError as error:  # here, so that it leaves no nursery together with a cancellation
                _log.debug(_NOT_FOLLOWED, reason=error.message)
            nursery.cancel_scope.cancel()

    async def follow(self, connection: NamesConnection) -> None:
        """Follow the turns of one connection, until its names give no rights any more.  Errors of the requests."""
        client = connection.client
        self._opened += 1
        base = self._opened << _BASE_BITS
        self._stamps.raise_all(base)
        try:
            opened = (await client.call(m.OpenTurns(base))).message
            assert isinstance(opened, m.TurnsOpened), "the answer to OpenTurns"
            self._turns = opened.turns
            said = wait_ns = 0  # the first right is given at once
            while True:
                sent_ns = self._now_ns()
                followed = (await client.call(m.FollowTurns(said, wait_ns))).message
                assert isinstance(followed, m.TurnsFollowed), "the answer to FollowTurns"
                said, wait_ns = self.make(followed, sent_ns), _WAIT_NS
                if followed.over:
                    break
        finally:
            self.withdraw()
        await client.call(m.CloseTurns())

    def make(self, followed: m.TurnsFollowed, sent_ns: int) -> int:
        """Make the turns of an answer, then take its right, counted from the sending; returns what may be said then."""
        self._stamps.raise_to(followed.stamps)
        if followed.right_ns:
            self._stamps.right_end_ns = max(self._stamps.right_end_ns, sent_ns + followed.right_ns)
        return followed.number

    def withdraw(self) -> None:
        """End the right, and follow nothing."""
        self._turns = b""
        self._stamps.right_end_ns = NO_RIGHT_NS

    async def join(self, link: NamesLink) -> bool:
        """Let answers on a client's connection to the names have stamps; False if they can have none now.

        Errors of the connection.
        """
        turns = self._turns
        if turns and link.joined_turns != turns:
            try:
                await link.call(m.JoinTurns(turns))
            except (SessionLost, UnsupportedVersion):
                return False
            link.joined_turns = turns
        return bool(turns)

    def learn(self, message: m.Message) -> None:
        """Raise the counters to the stamps of an answer, before it goes to a client."""
        if isinstance(message, m.NameResults | m.OpenResults):
            for result in message.results:
                if result.stamps:
                    self._stamps.raise_to(result.stamps)
                if isinstance(result, m.NameResult):
                    for folder in (result.folder, result.from_folder):
                        if folder is not None:
                            self._stamps.raise_to(folder.stamps)


async def _cancel_after_end(connection: NamesConnection, scope: trio.CancelScope) -> None:
    await connection.wait_ended()
    scope.cancel()


@contextmanager
def open_head_stamps() -> Iterator[HeadStamps | None]:
    """Yield stamps for a head, which end with the block; None, and a warning in the log, if there are none."""
    try:
        if not shared_stamps.IS_BUILT:
            raise UnsupportedVersion("the native module lakefs.stamps._stamps is not built")
        stamps = HeadStamps()
    except LakeError as error:
        _log.warning("a head has no stamps: its clients ask for every answer", reason=error.message)
        yield None
        return
    try:
        yield stamps
    finally:
        stamps.close()
