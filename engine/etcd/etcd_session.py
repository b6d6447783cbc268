"""`EtcdSessions`: the markers by which a transaction whose answer was lost finds what it wrote.

Each transaction that changes something also puts a *marker*, a small key below the lake's prefix, in a *slot* that no
other transaction of any process uses at that time.  It compares that the marker is as the slot's last transaction left
it: how often it was put, etcd's *version* of the key.  So of a transaction that is sent several times one at most is
done, however late the others arrive at etcd, and a repeat finds the marker of the one that was.

    slot:  free --take--> taken --settle(version)--> free       the end of the transaction is known
                               `--otherwise-------> abandoned   a try of it may yet arrive: never used again

Rules kept here:
- All slots of a session are on its lease.  A marker is put with that lease, so when the lease has ended, and the
  markers with it, no try of the session's transactions can be done any more: an absent marker repeats nothing.
- A session is replaced when its lease has ended, or when it has ETCD_SLOTS_ABANDONED_MAX abandoned slots; its lease
  then ends by itself, later than every call that uses it.
- A process has ETCD_IN_FLIGHT slots in use at most, and so as many markers, beside the abandoned ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from engine.etcd import etcd_messages as e
from engine.etcd.etcd_bounds import ETCD_SESSION_S, ETCD_SLOTS_ABANDONED_MAX
from engine.etcd.etcd_link import GRANT, KEEP_ALIVE, REVOKE, EtcdLink
from engine.etcd.etcd_status import Status, error_of
from lakefs.errors import LakeError
from lakefs.ids import LeaseId
from lakefs.limits import ETCD_IN_FLIGHT

_log: Final = structlog.get_logger(__name__)
_KEPT_EVERY_S: Final = ETCD_SESSION_S / 4
_REVOKED_WITHIN_S: Final = 1.0


async def granted(link: EtcdLink, ttl_s: int) -> LeaseId:
    """Grant a lease.  Its number is drawn here, so a repeat finds the one that was granted."""
    lease = LeaseId(link.drawn_number())
    answer, is_repeat = await link.ask_each(GRANT, lambda _: e.GrantRequest(ttl=ttl_s, id=lease))
    if isinstance(answer, Status) and not (is_repeat and answer.is_lease_there):
        raise error_of(answer, link.endpoint.address)
    return lease


@dataclass
class Slot:
    """A place for markers: its key, the lease of its session, and the version of the marker that was put last."""

    key: bytes
    lease: LeaseId
    version: int = 0
    is_settled: bool = True

    def settle(self, version: int) -> None:
        """Note the marker's version, behind which no try of this transaction can be done any more."""
        self.version = version
        self.is_settled = True


@dataclass
class _Session:
    """A lease, and the slots on it."""

    prefix: bytes
    lease: LeaseId
    free: list[Slot] = field(default_factory=list)
    made: int = 0
    abandoned: int = 0

    def take(self) -> Slot:
        if self.free:
            return self.free.pop()
        self.made += 1
        return Slot(b"%s%016x/%d" % (self.prefix, self.lease, self.made), self.lease)


class EtcdSessions:
    """The session of one process, made when it is first needed, and again when it has ended.  Used on the loop."""

    def __init__(self, link: EtcdLink, prefix: bytes) -> None:
        """`prefix` begins the key of each marker."""
        self._link = link
        self._prefix = prefix
        self._session: _Session | None = None
        self._making = trio.Lock()
        self.in_flight = trio.Semaphore(ETCD_IN_FLIGHT)
        """Held by each transaction, those without a slot, too."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Yield a slot for one transaction, which settles it when its end is known."""
        async with self.in_flight:
            session = await self._current()
            slot = session.take()
            slot.is_settled = False
            try:
                yield slot
            finally:
                self._give_back(session, slot)

    def end(self, lease: LeaseId) -> None:
        """Take another session for the next transactions: this one's lease has ended."""
        if self._session is not None and self._session.lease == lease:
            self._session = None

    async def keep(self) -> None:
        """Keep the session's lease alive, until cancelled."""
        while True:
            await trio.sleep(_KEPT_EVERY_S)
            session = self._session
            if session is None:
                continue
            try:
                answer = await self._link.ask(KEEP_ALIVE, e.KeepAliveRequest(id=session.lease))
            except LakeError as error:
                _log.warning("the session at etcd could not be kept alive; it is tried again", error=error.message)
                continue
            if not isinstance(answer, Status) and answer.ttl <= 0:
                self.end(session.lease)

    async def close(self) -> None:
        """Revoke the session's lease, and so remove its markers, if etcd answers soon."""
        session, self._session = self._session, None
        if session is not None:
            with trio.move_on_after(_REVOKED_WITHIN_S, shield=True), suppress(LakeError):
                await self._link.ask(REVOKE, e.RevokeRequest(id=session.lease))

    async def _current(self) -> _Session:
        async with self._making:
            if self._session is None:
                self._session = _Session(self._prefix, await granted(self._link, ETCD_SESSION_S))
            return self._session

    def _give_back(self, session: _Session, slot: Slot) -> None:
        if slot.is_settled:
            session.free.append(slot)
            return
        session.abandoned += 1
        if session.abandoned >= ETCD_SLOTS_ABANDONED_MAX:
            self.end(session.lease)
