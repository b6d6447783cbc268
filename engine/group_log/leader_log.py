"""The log of the replica that leads: each group is put at the coordinator, then it goes to the journal on the disk.

    append       compare: this replica leads, the part's key is free  --  put  --  durable
    run          --  groups that are durable go to the journal, one after the other  --  kept

Rules kept here:
- A group is durable when its last part is in the coordinator.  Answers wait for that, and not for the journal here.
- Each part is put by a transaction that compares the leader's key.  So when another leads, nothing is appended.
- A put whose answer was lost is sent again.  If the key has these very bytes, it was done; else another one leads.
  Parts have the term of their leader, and a leader puts a key once: so other bytes are another leader's.
- Tries end with the lease: then the log is lost, and it is unknown if the last group is in it.
- While the coordinator has no room the group that it refused is tried again, and decisions are refused: StoreFull.
- Appends wait while the journal is far behind.  An error of the journal ends the log, too.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Compare, Coordinator, HasRevision, IsAbsent, Put, Transacted
from engine.coordinator.held_lease import HeldLease
from engine.format.group_parts import LogKeys, pack_parts
from engine.group_log.log_bounds import (
    APPEND_PAUSE_S,
    KEEPING_BYTES_MAX,
    KEEPING_GROUPS_MAX,
    LEADER_MARGIN_S,
    ROOM_TRY_S,
)
from engine.group_log.tail import Tail
from engine.metadata.group_log import ClosedGroup, GroupLog, PayloadBatch
from lakefs.errors import CoordinatorLost, EngineBusy, EngineUnreachable, LakeError, StoreFull
from lakefs.ids import Revision, Sequence

_LATER: Final = EngineUnreachable, EngineBusy
_log: Final = structlog.get_logger(__name__)


class LeaderLog:
    """`engine.metadata.group_log.GroupLog` of one term.  `run` is running while groups are appended."""

    def __init__(
        self, coordinator: Coordinator, keys: LogKeys, term: Revision, lease: HeldLease, journal: GroupLog, tail: Tail
    ) -> None:
        """`term`: the revision of the leader's key, which is on the lease.  `journal`: on this replica's disk."""
        self.lost = trio.Event()
        """Set when nothing can be appended any more; `lost_because` says why."""
        self.lost_because: LakeError | None = None
        self.full: StoreFull | None = None
        """The coordinator's refusal for want of room, while the next append is tried again and again."""
        self._coordinator = coordinator
        self._keys = keys
        self._term = term
        self._lease = lease
        self._journal = journal
        self._tail = tail
        self._keeping: deque[ClosedGroup] = deque()
        self._keeping_bytes = 0
        self._arrived = trio.Event()
        self._moved = trio.lowlevel.ParkingLot()
        """Tasks that wait for the journal."""

    @property
    def kept(self) -> Sequence:
        """See the port."""
        return self._journal.kept

    def rights_s(self) -> float:
        """Return the longest right that heads may be given now: to the lease's end, less the margin; 0 when lost."""
        return 0.0 if self.lost_because is not None else max(0.0, self._lease.left_s() - LEADER_MARGIN_S)

    def check(self) -> None:
        """Raise CoordinatorLost unless this replica may read and decide now; called in the step that does so."""
        if self.lost_because is not None:
            raise CoordinatorLost(self.lost_because.message)
        if self._lease.left_s() < LEADER_MARGIN_S:
            raise CoordinatorLost("this replica may not lead the names any more: its lease was not kept alive")

    def check_decision(self) -> None:
        """Raise as `check`, and StoreFull while the coordinator has no room; called in the step that decides."""
        self.check()
        if self.full is not None:
            raise StoreFull(f"the coordinator has no room for more names: {self.full.message}")

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        """See the port.  CoordinatorLost when another replica leads, or this one's lease is over."""
        assert group is not None, "names have no payload"
        assert payload is None, "names have no payload"
        while self._keeping_bytes >= KEEPING_BYTES_MAX or len(self._keeping) >= KEEPING_GROUPS_MAX:
            if self.lost_because is not None:
                break
            await self._moved.park()
        try:
            if self.lost_because is not None:
                raise CoordinatorLost(self.lost_because.message)
            values = pack_parts(self._term, group.sequence, group.record_count, group.body())
            for number, value in enumerate(values):
                await self._put(self._keys.part(group.sequence, number), value)
        except LakeError as error:
            self.lose(error)
            raise
        self._tail.add(group.sequence, group.body_bytes, len(values))
        self._keeping.append(group)
        self._keeping_bytes += group.body_bytes
        self._arrived.set()

    async def wait_kept(self, sequence: Sequence) -> None:
        """See the port."""
        while self.kept < sequence and self.lost_because is None:
            await self._moved.park()

    async def run(self) -> None:
        """Bring what is durable to the journal, until cancelled or the journal fails."""
        while True:
            while not self._keeping:
                self._arrived = trio.Event()
                await self._arrived.wait()
            group = self._keeping[0]
            try:
                await self._journal.append(group, None)
            except LakeError as error:
                self.lose(error)
                return
            self._keeping.popleft()
            self._keeping_bytes -= group.body_bytes
            self._moved.unpark_all()

    def lose(self, error: LakeError) -> None:
        """Append nothing any more."""
        if self.lost_because is None:
            self.lost_because = error
            self.lost.set()
            self._moved.unpark_all()

    async def _put(self, key: bytes, value: bytes) -> None:
        """Put a part; durable on return.  CoordinatorLost."""
        while True:
            done = await self._tried(key, value)
            if done is None:
                await trio.sleep(APPEND_PAUSE_S if self.full is None else ROOM_TRY_S)
                continue
            if done.succeeded:
                return
            leader, there = done.seen
            if leader is None or leader.revision != self._term:
                raise CoordinatorLost("another replica leads the names now")
            if there is None or there.value != value:
                raise CoordinatorLost(f"the log of the names has another group in the place of {key.decode()}")
            return

    async def _tried(self, key: bytes, value: bytes) -> Transacted | None:
        """Put a part if it may be put; None when the coordinator cannot do it now.  CoordinatorLost."""
        left_s = self._lease.left_s()
        if left_s <= 0:
            raise CoordinatorLost("the coordinator of the lake could not be asked for as long as the lease lasted")
        with trio.move_on_after(left_s):
            try:
                compares: list[Compare] = [HasRevision(self._keys.leader, self._term), IsAbsent(key)]
                done = await self._coordinator.transact(compares, [Put(key, value)], is_repeatable=True)
            except StoreFull as error:
                self.full = error
            except _LATER as error:
                _log.warning("a group could not be appended; it is tried again", error=error.message)
            else:
                self.full = None
                return done
        return None
