"""The homes of keys: which member keeps a key, and the lake's spaces as this head and the homes know them.

    names    decide on spaces: numbers, names, settings (SpaceOpen, SpaceRemove); SpaceList has a version
    head     keeps the last list, HEAD_SPACES_FRESH_S at most, and refuses keys of spaces that are not in it
    homes    are given that list, each with its share of the quotas (SetSpaces), before they are asked about keys

Rules kept here:
- A home is asked only when it was given the list that this head has, and its share by the newest table.
- A home that does not know a space is given a list that was read afterwards, and asked once more.
- A removed space is not found by a head that knows of it; each other head knows of it HEAD_SPACES_FRESH_S later, also
  where a home could not be reached and still has the values.
- Members answer a list of an earlier version with the later one's: then the names are asked again.
- Clients that look keys up by themselves (`engine.head.local_keys`) do so by the ring that is used here, and are sent
  back to the head in the step in which it uses another.
- A home that has a newer table refuses to store and to remove (StaleEpoch): the keys are divided anew, by that table.
- Kept is nothing that another head would need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import trio
from msgspec.structs import replace

from engine.head.head_clients import HeadClient
from engine.head.local_keys import KeyHomesMemory, LocalKeys
from engine.host.tasks import run_all
from engine.members.ports import BeginningMembers, Members
from lakefs.cluster.key_ring import KeyRing
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, OperationalError, SpaceNotFound, StaleEpoch
from lakefs.ids import Buffer, MemberId, RingEpoch
from lakefs.limits import HEAD_SPACES_FRESH_S
from lakefs.ports import Clock
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

GIVE_ATTEMPTS: Final = 4
"""Times that a home is given the lake's spaces for one request, as spaces and tables change."""
_CHANGES: Final = m.KeyedPut, m.KeyedCommit, m.KeyedRemove
_OfKeys = m.NoteReads | m.KeyedMatch | m.KeyedRead | m.KeyedPut | m.KeyedCommit | m.KeyedRemove


class Told(NamedTuple):
    """The last list that a home was given: its number at this head, and the ring epoch of its shares."""

    listing: int
    epoch: RingEpoch


class KeyHomes:
    """The homes of keys, as one head asks them.  Used on the loop."""

    def __init__(self, members: Members, clock: Clock, machine: str = "") -> None:
        """`machine`: the id of this one, "" if it is not known."""
        self._members = members
        self._begins = members if isinstance(members, BeginningMembers) else None
        self.local: Final = LocalKeys(members, clock, machine)
        """Memory in which clients look keys up."""
        self._clock = clock
        self._ring: KeyRing | None = None
        self._ring_epoch = RingEpoch(0)
        self._spaces: dict[int, m.SpaceStat] = {}
        self._version = 0
        self._listing = 0
        """Number of the list; it grows when another one is read."""
        self._read_at = -math.inf
        self._reading = trio.Lock()
        self._told: dict[MemberId, Told] = {}

    @property
    def ring(self) -> KeyRing:
        """The ring of the newest table."""
        table = self._members.tables[0]
        if self._ring is None or self._ring_epoch != table.ring_epoch:
            self._ring, self._ring_epoch = table.key_ring(), table.ring_epoch
            self._told.clear()  # shares are others now
            self.local.use_ring()
        return self._ring

    @property
    def epoch(self) -> RingEpoch:
        """The ring epoch of the newest table, by which `by_home` divides keys."""
        return self._members.tables[0].ring_epoch

    def by_home(self, space: int, keys: Sequence[bytes], indexes: Iterable[int]) -> dict[MemberId, list[int]]:
        """Return the indexes of the keys of each home, in their order."""
        found: dict[MemberId, list[int]] = {}
        home = self.ring.home
        for index in indexes:
            found.setdefault(home(space, keys[index]), []).append(index)
        return found

    def look(self) -> None:
        """Use the newest table from now on; call it when there is one, so that clients do not use an earlier ring."""
        self.by_home(0, (), ())

    async def shared(self) -> KeyHomesMemory:
        """Return what clients look keys up in.  EngineBusy: memory is short, or members change all the time."""
        for _ in range(GIVE_ATTEMPTS):
            ring = self.ring
            memory = await self.local.key_homes(ring, self._members.tables[0])
            if memory is not None and self.ring is ring:
                return memory
        raise members_change()

    # --- the lake's spaces -------------------------------------------------------------------------

    async def check(self, client: HeadClient, space: int) -> None:
        """Raise SpaceNotFound unless the lake has a space of that number.  EngineUnreachable: the names are away."""
        is_fresh = self._clock.monotonic() < self._read_at + HEAD_SPACES_FRESH_S
        if is_fresh and space in self._spaces:
            return
        await self.read(client)
        if space not in self._spaces:
            raise SpaceNotFound(f"space {space} was removed, or never was; open it by its name", subject=str(space))

    async def read(self, client: HeadClient) -> list[m.SpaceStat]:
        """Read the lake's spaces from the names, as they are after this call began; returns them, without usage."""
        began_at = self._clock.monotonic()
        async with self._reading:
            if began_at < self._read_at:  # somebody else has read them while this waited
                return list(self._spaces.values())
            begun_at = self._clock.monotonic()
            for _ in range(GIVE_ATTEMPTS):
                listed = await client.names.ask(m.SpaceList(), m.Spaces)
                if listed.version:
                    break
            else:
                raise EngineBusy("the lake's spaces change all the time; try again")
            self._note(listed, begun_at)
            return listed.spaces

    def _note(self, listed: m.Spaces, read_at: float) -> None:
        spaces = {space.number: space for space in listed.spaces}
        if spaces != self._spaces:
            self._listing += 1
        self._spaces, self._version, self._read_at = spaces, listed.version, read_at

    async def give_all(self, client: HeadClient, *, to_each: bool = False) -> list[m.SpaceStat]:
        """Read the lake's spaces, give them to each home that is up, and return them with the usage at these homes.

        A home that is away gets them before it is asked for a key, and so does one that fails; with `to_each` its error
        is raised.
        """
        await self.read(client)
        usage: dict[int, tuple[int, int]] = {}

        async def give(home: MemberId) -> None:
            try:
                found = await self._give(client, home)
            except OperationalError as error:
                if to_each and not isinstance(error, EngineUnreachable):
                    raise
                return
            for space in found.spaces:
                entries, value_bytes = usage.get(space.number, (0, 0))
                usage[space.number] = entries + space.entries, value_bytes + space.value_bytes

        await run_all(give, self.ring.members)
        return [
            replace(space, entries=entries, value_bytes=value_bytes)
            for space in self._spaces.values()
            for entries, value_bytes in [usage.get(space.number, (0, 0))]
        ]

    async def _give(self, client: HeadClient, home: MemberId) -> m.Spaces:
        """Give a home the lake's spaces; returns its own, with usage.  EngineUnreachable, EngineBusy, StoreFull."""
        for _ in range(GIVE_ATTEMPTS):
            ring, table = self.ring, self._members.tables[0]
            if home not in ring.members:
                raise EngineUnreachable("the member keeps no keys any more", subject=home.hex())
            told = Told(self._listing, table.ring_epoch)
            shares = [replace(space, quota_bytes=ring.share(home, space.quota_bytes)) for space in self._listed()]
            try:
                reply = await self._members.call(home, m.SetSpaces(table.ring_epoch, self._version, shares))
            except StaleEpoch:  # there are newer tables now
                continue
            reply.body.release()
            assert isinstance(reply.message, m.Spaces), "the answer to SetSpaces"
            if reply.message.version <= self._version:
                self._told[home] = told
                return reply.message
            await self.read(client)
        raise EngineBusy("the lake's spaces or its members change all the time; try again")

    def _listed(self) -> list[m.SpaceStat]:
        return list(self._spaces.values())

    # --- requests ----------------------------------------------------------------------------------

    async def ask(self, client: HeadClient, home: MemberId, request: _OfKeys, body: Sequence[Buffer] = ()) -> Reply:
        """Send a request about keys of a space to their home.

        EngineUnreachable while that is away; SpaceNotFound when the lake has no such space; errors of the request.
        StaleEpoch, for a change, when there are newer tables now than that by which its keys were divided.
        """
        for _ in range(GIVE_ATTEMPTS):
            self._check_epoch(request)
            if not self._is_told(home):
                await self._give(client, home)
                self._check_epoch(request)
            try:
                reply = await self._members.call(home, request, body)
            except EngineUnreachable:
                self.local.away(home)
                raise
            except SpaceNotFound:  # the home has started on an older disk, or another head knows of a removal
                self._told.pop(home, None)
                await self.read(client)
                if request.space not in self._spaces:
                    raise
                continue
            self.local.answered(home)
            return reply
        raise EngineBusy("the lake's spaces change all the time; try again")

    def _check_epoch(self, request: _OfKeys) -> None:
        """Raise StaleEpoch for a change of keys that were divided by an earlier table than the newest."""
        if isinstance(request, _CHANGES) and request.epoch != self.epoch:
            raise StaleEpoch("there is a newer table now; look homes up in it", subject=str(self.epoch))

    def begin(
        self,
        home: MemberId,
        request: m.KeyedRead,
        into: Sequence[memoryview],
        done: Callable[[Reply | LakeError], None],
    ) -> bool:
        """Send a request to a home, without a task; see `BeginningMembers.begin`.

        False, and nothing was sent: the home has to be connected first, or given the lake's spaces, as `ask` does.  So
        it has if the answer is SpaceNotFound.
        """
        if self._begins is None or not self._is_told(home):
            return False

        def answered(result: Reply | LakeError) -> None:
            if isinstance(result, Reply):
                self.local.answered(home)
            elif isinstance(result, EngineUnreachable):
                self.local.away(home)
            elif isinstance(result, SpaceNotFound):
                self._told.pop(home, None)
            done(result)

        return self._begins.begin(home, request, into, answered) is not None

    def _is_told(self, home: MemberId) -> bool:
        """Return True if a home was given the list that this head has, and its share by the newest table."""
        return self._told.get(home) == Told(self._listing, self._members.tables[0].ring_epoch)


def members_change() -> EngineBusy:
    """Return the error for keys whose homes were others each time."""
    return EngineBusy("the lake's members change all the time; try again")
