"""The stamps of a head: memory that repeats the counters of the names that lead, for the head's clients.

    follow      OpenTurns  --  FollowTurns ...: make the turns of an answer, then take its right     one connection
    join        --  let a client's connection to the names have stamps of these turns
    learn       in the step in which an answer with stamps arrives: raise the counters to them

Clients on the head's machine map the memory, and use it as that of an engine, while the right in its header lasts
(`lakefs/stamps/stamps.h`).  `engine.metadata.head_turns` is the other side.

Where names are in several shards, each counter is the sum of the parts that repeat theirs, and the right lasts as long
as the shortest.  Stamps of an answer are translated to sums: so they stand as long as no shard has turned the slot,
which is more than is needed, and never less.

Rules kept here:
- A turn is said only behind the step that has made it.  A right is taken behind the turns that came with it.
- A right counts from the moment before its request was sent, by CLOCK_BOOTTIME, which goes on while the machine is
  suspended.  It is later than the one before, or nothing changes.
- When the connection is lost the right ends.  The next one begins with a higher base, to which all counters are raised
  before anything is followed: so nothing stands that was sent before, however late it arrives.
- A shard counts from its first right on, before any answer of it has stamps.  When its connection is lost, its part is
  raised to the next base at once, and only then does it count no more: the others' right goes on, and clients learn
  anew what they knew of all of them.
- Counters only grow, so turns and answers may arrive on their connections in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import outcome
import structlog
import trio

from engine.format.group_parts import FIRST_SHARD
from engine.head.names_link import ConnectNames, NamesConnection, NamesLink
from engine.host.tasks import cancel_after, plain_errors
from engine.members.member_link import BeginningClient
from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import EngineBusy, LakeError, SessionLost, UnsupportedVersion
from lakefs.ids import NamesShard
from lakefs.limits import AWAY_PAUSE_S_MIN, STAMP_COUNT
from lakefs.stamps import stamps as shared_stamps
from lakefs.stamps.stamps import StampMemory, memory_bytes
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient, Reply, nothing

_BASE_BITS: Final = 40
"""Turns of one record before a base would be reached: a trillion."""
_WAIT_NS: Final = 300_000_000
"""A right is renewed so often when nothing turns: it lasts for 1 s."""
_PAUSE_S_MAX: Final = 2.0
_NOT_FOLLOWED: Final = "the turns of the names are not followed now"
_log: Final = structlog.get_logger(__name__)


@dataclass
class Followed:
    """A names shard as it is followed: its part of the counters, and its right."""

    part: bytearray | None = None
    """None: it is all there is, and the counters are its own."""
    opened: int = 0
    """Number of times that turns were opened."""
    turns: bytes = b""
    """The id of the turns that are followed, with a right; empty: none are, and the shard does not count."""
    right_end_ns: int = 0
    is_used: bool = True
    """Stamps may have been sent since its part was raised to the base."""

    @property
    def base(self) -> int:
        """The least value of its part of each counter, and of what it is sent."""
        return self.opened << _BASE_BITS


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
        self._shards: dict[NamesShard, Followed] = {}

    @property
    def descriptor(self) -> int:
        """A read-only descriptor of the memory, to send to clients; `close` closes it."""
        return self._memory.descriptor

    def turns(self, shard: NamesShard = FIRST_SHARD) -> bytes:
        """The id of a shard's turns that are followed now; empty: none are."""
        followed = self._shards.get(shard)
        return b"" if followed is None else followed.turns

    def close(self) -> None:
        """Let no stamp stand any more, and release the memory; clients may have it mapped."""
        self._stamps.end()
        self._memory.close()

    async def run(self, connect: ConnectNames, shard: NamesShard = FIRST_SHARD) -> None:
        """Follow the turns of whichever names lead a shard, until cancelled."""
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            try:
                with plain_errors():
                    async with connect() as connection:
                        if connection.hello.features & m.FEATURE_TURNS:
                            pause_s = AWAY_PAUSE_S_MIN
                            await self._follow_connection(connection, shard)
                        else:
                            await connection.wait_ended()
            except LakeError as error:
                _log.debug(_NOT_FOLLOWED, reason=error.message)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _follow_connection(self, connection: NamesConnection, shard: NamesShard) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_after, connection.wait_ended, nursery.cancel_scope)
            try:
                await self.follow(connection, shard)
            except LakeError as error:  # here, so that it leaves no nursery together with a cancellation
                _log.debug(_NOT_FOLLOWED, reason=error.message)
            nursery.cancel_scope.cancel()

    async def follow(self, connection: NamesConnection, shard: NamesShard = FIRST_SHARD) -> None:
        """Follow the turns of one connection, until its names give no rights any more.  Errors of the requests."""
        client, followed = connection.client, self._begin(shard)
        try:
            opened = (await client.call(m.OpenTurns(followed.base))).message
            assert isinstance(opened, m.TurnsOpened), "the answer to OpenTurns"
            make = partial(self.make, shard=shard, turns=opened.turns)
            await _Asking(client, self._now_ns, make).run()
        finally:
            self.withdraw(shard)
        await client.call(m.CloseTurns())

    def _begin(self, shard: NamesShard) -> Followed:
        """Begin to follow a shard with a new base; nothing stands that was sent of it before."""
        followed = self._shards.get(shard)
        if followed is None:
            followed = self._shards[shard] = Followed()
            if len(self._shards) > 1:
                self._divide()
        self._raise_anew(followed)
        return followed

    def _divide(self) -> None:
        """Let the counters be sums: what they are is the part of the shard that was alone."""
        for followed in self._shards.values():
            if followed.part is None:
                followed.part = self._stamps.parts() if followed.opened else bytearray(8 * STAMP_COUNT)

    def _raise_anew(self, followed: Followed) -> None:
        """Raise its part to the next base, unless nothing was sent since it was raised last."""
        if not followed.is_used:
            return
        followed.opened += 1
        followed.is_used = followed.part is None  # it is not raised in the step in which it is withdrawn
        if followed.part is None:
            self._stamps.raise_all(followed.base)
        else:
            self._stamps.raise_whole_part(followed.part, followed.base)

    def make(self, followed: m.TurnsFollowed, sent_ns: int, shard: NamesShard = FIRST_SHARD, turns: bytes = b"") -> int:
        """Make the turns of an answer, then take its right, counted from the sending; returns what may be said then.

        `turns`: the id of the turns; answers may have their stamps once there is a right.
        """
        known = self._shards[shard]
        self._raise(known, followed.stamps)
        if followed.right_ns:
            known.right_end_ns = max(known.right_end_ns, sent_ns + followed.right_ns)
            known.turns = turns or known.turns
            known.is_used = True
            self._take_rights()
        return followed.number

    def _take_rights(self) -> None:
        """Write the end of the right: the earliest of all shards that count."""
        ends = [followed.right_end_ns for followed in self._shards.values() if followed.turns]
        if ends:
            self._stamps.right_end_ns = min(ends)
        else:
            self._stamps.withdraw()

    def withdraw(self, shard: NamesShard = FIRST_SHARD) -> None:
        """End a shard's right, and follow nothing of it."""
        followed = self._shards[shard]
        if followed.part is not None:
            self._raise_anew(followed)  # before the others' right is longer than its own
        followed.turns, followed.right_end_ns = b"", 0
        self._take_rights()

    async def join(self, link: NamesLink) -> bool:
        """Let answers on a client's connection to the names have stamps; False if they can have none now.

        Errors of the connection.
        """
        turns = self.turns(link.shard)
        if turns and link.joined_turns != turns:
            try:
                await link.call(m.JoinTurns(turns))
            except (SessionLost, UnsupportedVersion):
                return False
            link.joined_turns = turns
        return bool(turns)

    def learn(self, message: m.Message, shard: NamesShard = FIRST_SHARD) -> m.Message:
        """Raise the counters to the stamps of an answer, before it goes to a client; returns the answer to send."""
        followed = self._shards[shard]
        if not isinstance(message, m.NameResults | m.OpenResults):
            return message
        if followed.part is None:
            for stamps in _stamps_of(message):
                self._stamps.raise_to(stamps)
            return message
        return _translated(message, partial(self._stamps.raise_part, followed.part))

    def _raise(self, followed: Followed, stamps: bytes) -> None:
        if followed.part is None:
            self._stamps.raise_to(stamps)
        else:
            self._stamps.raise_part(followed.part, stamps)


class _Asking:
    """The requests for turns over one connection, each sent behind what the answer to the one before made.

    Where the connection can, that is in the step in which an answer arrives: a change waits for it.
    """

    def __init__(
        self, client: EngineClient, now_ns: Callable[[], int], make: Callable[[m.TurnsFollowed, int], int]
    ) -> None:
        """`make` is called with an answer and the moment of its request; returns what may be said then."""
        self._client = client
        self._now_ns = now_ns
        self._make = make
        self._give_up: Callable[[], None] = nothing
        self._ended = trio.Event()
        self._error: LakeError | None = None

    async def run(self) -> None:
        """Ask until the names give no rights any more, or the connection takes no request.  Errors of the requests."""
        if not isinstance(self._client, BeginningClient):
            await self._call()
            return
        self._begin(self._client, 0, 0)
        try:
            await self._ended.wait()
        finally:
            self._give_up()
        if self._error is not None:
            raise self._error

    def _begin(self, client: BeginningClient, said: int, wait_ns: int) -> None:
        answered = partial(self._answered, client, self._now_ns())
        give_up = client.begin(m.FollowTurns(said, wait_ns), (), answered)
        if give_up is None:
            self._ended.set()
        else:
            self._give_up = give_up

    def _answered(self, client: BeginningClient, sent_ns: int, result: outcome.Outcome[Reply]) -> None:
        self._give_up = nothing
        if isinstance(result, outcome.Error):
            assert isinstance(result.error, LakeError), "connections answer with replies or LakeErrors"
            self._error = result.error
            self._ended.set()
            return
        assert isinstance(result, outcome.Value), "there is nothing else"
        made = result.value.message
        assert isinstance(made, m.TurnsFollowed), "the answer to FollowTurns"
        said = self._make(made, sent_ns)
        if made.over:
            self._ended.set()
        else:
            self._begin(client, said, _WAIT_NS)

    async def _call(self) -> None:
        said = wait_ns = 0  # the first right is given at once
        while True:
            sent_ns = self._now_ns()
            made = (await self._client.call(m.FollowTurns(said, wait_ns))).message
            assert isinstance(made, m.TurnsFollowed), "the answer to FollowTurns"
            said, wait_ns = self._make(made, sent_ns), _WAIT_NS
            if made.over:
                return


def _stamps_of(message: m.NameResults | m.OpenResults) -> Iterator[bytes]:
    """Yield the sets of stamps of an answer."""
    for result in message.results:
        if result.stamps:
            yield result.stamps
        if isinstance(result, m.NameResult):
            for folder in (result.folder, result.from_folder):
                if folder is not None:
                    yield folder.stamps


def _translated(message: m.NameResults | m.OpenResults, translate: Callable[[bytes], bytes]) -> m.Message:
    """Return an answer with other sets of stamps."""
    if isinstance(message, m.OpenResults):
        opened = [
            msgspec.structs.replace(result, stamps=translate(result.stamps)) if result.stamps else result
            for result in message.results
        ]
        return m.OpenResults(opened)
    results: list[m.NameResult] = []
    for result in message.results:
        folders = {
            name: msgspec.structs.replace(folder, stamps=translate(folder.stamps))
            for name in ("folder", "from_folder")
            if (folder := getattr(result, name)) is not None
        }
        if result.stamps or folders:
            result = msgspec.structs.replace(result, stamps=translate(result.stamps), **folders)
        results.append(result)
    return m.NameResults(results)


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
