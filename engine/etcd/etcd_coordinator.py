"""`EtcdCoordinator`: the port `Coordinator` on an etcd, below a prefix of the lake's own.

    async with open_etcd_coordinator(EtcdAccess(("http://HOST:2379", ...)), "NAME") as coordinator:
        await coordinator.connect()         at a start: wrong user, wrong certificate, nothing there
        LakeState(coordinator), open_lake_view(coordinator), hold_lease(coordinator, ...)

    /lake/NAME/keys/KEY                     a key of the port
    /lake/NAME/sent/SESSION/SLOT            markers of transactions (`engine.etcd.etcd_session`)

Rules kept here:
- Revisions are etcd's, of all that it holds.  So they have gaps where others have changed their keys, and a
  transaction with operations that change nothing has one too.
- Every request may be repeated, at another endpoint: reads are linearizable, a lease has a number of ours, and a
  transaction finds its marker.  If it was done before, its result is that of the first time: `seen` is read as the
  revision before it was.  One that its caller says may be repeated (`is_repeatable`) is sent without a marker, so of
  its tries each may be done.
- A lease counts as kept when the member that answered has the same leader before and after.  A leader that was cut off
  or stopped, and does not know of its successor yet, keeps leases alive for which nobody waits any more.
- Calls raise EngineUnreachable for whatever keeps this process from etcd; only `connect` says PermissionDenied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final

import trio

from engine.coordinator.coordinator import Compare, Entry, Found, Operation, Outcome, Page, Transacted
from engine.coordinator.coordinator_bounds import check_key, check_page, check_range, check_transaction, check_ttl
from engine.etcd import etcd_messages as e
from engine.etcd.etcd_bounds import ETCD_DEFRAGMENT_S, ETCD_LAKE_NAME_BYTES_MAX
from engine.etcd.etcd_link import (
    ALARM,
    COMPACT,
    DEFRAGMENT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TXN,
    EtcdAccess,
    EtcdLink,
    Method,
)
from engine.etcd.etcd_session import EtcdSessions, Slot, granted
from engine.etcd.etcd_status import Status, error_of
from engine.etcd.etcd_transaction import EtcdTransaction, Marked, entry_of, marked
from engine.etcd.etcd_watch import EtcdWatch, open_watch
from engine.host.tasks import plain_errors
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument, LakeError, RequestTooLarge, StoreFull
from lakefs.ids import LeaseId, Revision
from lakefs.limits import COORDINATOR_PAGE_BYTES_MAX, WATCHES_PER_CONNECTION_MAX

_OF_THE_PORT: Final = EngineUnreachable, EngineBusy, StoreFull, InvalidArgument, RequestTooLarge
_KEPT_TRIES: Final = 4
"""Times that a lease is kept alive until the leader was the same throughout; it changes twice at most while one is
chosen."""
_SESSIONS: Final = 3
"""Sessions that a transaction begins in, before it says that etcd ends them at once."""
_LEASES: Final = 16
"""Times that a transaction begins which names a lease that has ended in a branch, while others change the branch."""


@asynccontextmanager
async def open_etcd_coordinator(access: EtcdAccess, lake: str) -> AsyncIterator[EtcdCoordinator]:
    """Yield the coordinator of the lake with this name; it connects when it is first used.

    Calls and watches that outlive the block end with EngineUnreachable.  ConfigError for an endpoint that is none;
    InvalidArgument for a name that is empty, too long, or not printable ASCII without a slash.
    """
    if not 0 < len(lake) <= ETCD_LAKE_NAME_BYTES_MAX or not lake.isascii() or not lake.isprintable() or "/" in lake:
        raise InvalidArgument(
            f"a lake's name at etcd has 1 to {ETCD_LAKE_NAME_BYTES_MAX} printable letters of ASCII and no slash",
            subject=lake,
        )
    async with coordinator_over(EtcdLink(access), lake) as coordinator:
        yield coordinator


@asynccontextmanager
async def coordinator_over(link: EtcdLink, lake: str) -> AsyncIterator[EtcdCoordinator]:
    """Yield the coordinator of a lake over a link, which is closed at the end."""
    sessions = EtcdSessions(link, b"/lake/%s/sent/" % lake.encode())
    prefix = b"/lake/%s/keys/" % lake.encode()
    try:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sessions.keep)
                sign = e.RangeRequest(key=prefix, count_only=True, serializable=True)
                nursery.start_soon(link.look_around, sign)
                yield EtcdCoordinator(link, sessions, prefix)
                nursery.cancel_scope.cancel()
    finally:
        await sessions.close()
        link.close()


class EtcdCoordinator:
    """`Coordinator` at an etcd.  Made by `open_etcd_coordinator`; used on the loop."""

    def __init__(self, link: EtcdLink, sessions: EtcdSessions, prefix: bytes) -> None:
        self._link = link
        self._sessions = sessions
        self._prefix = prefix
        self._watches = 0

    @property
    def cluster(self) -> int:
        """The id of the etcd that answered last; 0 before that."""
        return self._link.cluster

    async def connect(self) -> None:
        """Ask etcd for nothing: for a start, which shall say why it cannot.

        EngineUnreachable while nothing answers, or with a certificate that is not trusted: try again.
        PermissionDenied for a wrong user, UnsupportedVersion where something else than etcd answers; EngineBusy.
        """
        answer = await self._link.ask(RANGE, e.RangeRequest(key=self._prefix, count_only=True))
        if isinstance(answer, Status):
            raise error_of(answer, self._link.endpoint.address)

    async def make_room(self) -> None:
        """Let an etcd at its quota take what grows again: for the one process that has compacted what it needs not.

        Each node in turn writes its file anew, and answers nothing while it does; then the alarm ends.  A node that is
        away, or as full as before, raises it again.  With users, this one needs the role root.  EngineUnreachable:
        no node has done it, or the user may not.  Does nothing without an alarm.
        """
        await trio.lowlevel.checkpoint()
        alarms = [alarm for alarm in (await self._ask(ALARM, e.AlarmRequest())).alarms if alarm.alarm == e.NO_SPACE]
        if not alarms:
            return
        answers = await self._link.ask_all(DEFRAGMENT, e.DefragmentRequest(), ETCD_DEFRAGMENT_S)
        refusals = [answer for answer in answers if isinstance(answer, Status)]
        if len(refusals) == len(answers):
            raise self._refused(refusals[0])
        for alarm in alarms:
            await self._ask(ALARM, e.AlarmRequest(action=e.DISARM, member_id=alarm.member_id, alarm=e.NO_SPACE))

    # --- keys --------------------------------------------------------------------------------------------

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        check_key(key)
        answer = await self._ask(RANGE, e.RangeRequest(key=self._prefix + key))
        entry = entry_of(answer.kvs[0], self._prefix) if answer.kvs else None
        return Found(entry, Revision(answer.header.revision))

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port.  It ends early behind COORDINATOR_PAGE_BYTES_MAX."""
        check_page(begin, end, limit, after)
        first = max(begin, after + b"\0") if after else begin
        request = e.RangeRequest(key=self._prefix + first, range_end=self._prefix + end, limit=limit)
        if first >= end:
            request = e.RangeRequest(key=self._prefix + end, count_only=True)
        answer = await self._ask(RANGE, request)
        entries: list[Entry] = []
        page_bytes = 0
        for kept in answer.kvs:
            if page_bytes >= COORDINATOR_PAGE_BYTES_MAX:
                break
            entries.append(entry_of(kept, self._prefix))
            page_bytes += len(kept.key) + len(kept.value)
        return Page(tuple(entries), Revision(answer.header.revision), answer.more or len(entries) < len(answer.kvs))

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Compare and change keys at one revision; see the port."""
        check_transaction(compares, then_ops, else_ops)
        await trio.lowlevel.checkpoint()
        wanted = EtcdTransaction(self._prefix, compares, then_ops, else_ops)
        if wanted.is_read or is_repeatable:
            async with self._sessions.in_flight:
                return await self._transact_unmarked(wanted)
        for _ in range(_SESSIONS):
            async with self._slot() as slot:
                done = await self._transact(wanted, slot)
            if done is not None:
                return done
        raise EngineUnreachable(f"etcd at {self._link.endpoint.address} ends each session at once: look at its clock")

    async def compact(self, revision: Revision) -> None:
        """Forget the changes before a revision, of all that etcd holds; see the port."""
        await trio.lowlevel.checkpoint()
        if revision <= 1:
            return
        answer = await self._link.ask(COMPACT, e.CompactRequest(revision=revision - 1))
        if not isinstance(answer, Status) or answer.is_compacted:
            return
        if answer.is_to_come:
            raise InvalidArgument(f"no answer of etcd had revision {revision - 1} yet: nothing is forgotten")
        raise self._refused(answer)

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AbstractAsyncContextManager[EtcdWatch]:
        """Watch a range; see the port.  EngineBusy: this process has too many.  Nothing is asked at its beginning."""
        check_range(begin, end)
        return self._watch(begin, end, from_revision)

    @asynccontextmanager
    async def _watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AsyncIterator[EtcdWatch]:
        await trio.lowlevel.checkpoint()
        if self._watches >= WATCHES_PER_CONNECTION_MAX:
            raise EngineBusy(f"this process has {self._watches} watches of the coordinator, the most that it may have")
        self._watches += 1
        try:
            async with open_watch(self._link, self._prefix, begin, end, from_revision) as watch:
                yield watch
        finally:
            self._watches -= 1

    # --- leases ------------------------------------------------------------------------------------------

    async def lease(self, ttl_s: int) -> LeaseId:
        """Grant a lease; see the port."""
        check_ttl(ttl_s)
        return await granted(self._link, ttl_s)

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Let a lease run for its whole time again; see the port, and the head of the module."""
        for _ in range(_KEPT_TRIES):
            kept = await self._ask(KEEP_ALIVE, e.KeepAliveRequest(id=lease))
            read = await self._ask(RANGE, e.RangeRequest(key=self._prefix, count_only=True))
            if _leader(kept) == _leader(read):
                return bool(kept.ttl > 0)
        raise EngineUnreachable(f"etcd at {self._link.endpoint.address} has a new leader each time that it is asked")

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see the port."""
        answer = await self._link.ask(REVOKE, e.RevokeRequest(id=lease))
        if isinstance(answer, Status) and not answer.is_lease_gone:
            raise self._refused(answer)

    # --- transactions ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[Slot]:
        try:
            async with self._sessions.slot() as slot:
                yield slot
        except _OF_THE_PORT:
            raise
        except LakeError as error:
            raise EngineUnreachable(error.message, subject=error.subject) from error

    async def _transact(self, wanted: EtcdTransaction, slot: Slot) -> Transacted | None:
        """Return the result; None if nothing was done, and it shall begin anew, with the slot of another session."""
        answer, is_repeat = await self._link.ask_each(TXN, lambda repeat: wanted.request(slot, is_repeat=repeat))
        is_probe = isinstance(answer, Status) and answer.is_lease_gone
        if is_probe:
            probe = partial(wanted.request, slot, is_repeat=True, is_probe=True)
            answer, is_repeat = await self._link.ask_each(TXN, lambda _: probe(), is_repeat=is_repeat)
        if isinstance(answer, Status):
            if answer.is_lease_gone:
                self._end_session(slot, is_repeat)
                return None
            if not is_repeat:
                slot.settle(slot.version)  # refused for its form: nothing was done
            raise self._refused(answer)
        if not answer.succeeded:
            before = marked(answer)
            if before is None:
                self._end_session(slot, is_repeat)
                return None
            slot.settle(before.version)
            return await self._as_found(wanted, before)
        done = wanted.result(answer)
        is_put = is_probe or wanted.puts_marker(done.succeeded, is_repeat=is_repeat)
        slot.settle(slot.version + is_put)
        return self._as_probed(wanted, done) if is_probe else done

    async def _transact_unmarked(self, wanted: EtcdTransaction) -> Transacted:
        """Return the result of a transaction of which each try may be done."""
        for _ in range(_LEASES):
            answer = await self._link.ask(TXN, wanted.request(None))
            if not isinstance(answer, Status):
                return wanted.result(answer)
            if not answer.is_lease_gone:
                raise self._refused(answer)
            probed = wanted.result(await self._ask(TXN, wanted.request(None, is_probe=True)))
            found = self._as_probed(wanted, probed)
            if found is not None:
                return found
        raise EngineUnreachable("others change what a transaction compares each time that it is asked for")

    def _end_session(self, slot: Slot, is_repeat: bool) -> None:
        """Note that the slot's session has ended.  EngineUnreachable if a try before may have been done in it."""
        self._sessions.end(slot.lease)
        if is_repeat:
            raise EngineUnreachable(
                "the session at etcd ended while a transaction was under way; it may have been done"
            )

    def _as_probed(self, wanted: EtcdTransaction, probed: Transacted) -> Transacted | None:
        """Return LEASE_GONE if the branch that a probe found names a lease; else it shall begin anew."""
        if not wanted.names_lease(probed.succeeded):
            return None
        return Transacted(Outcome.LEASE_GONE, probed.revision, probed.seen)

    async def _as_found(self, wanted: EtcdTransaction, before: Marked) -> Transacted | None:
        """Return the result of a try that was done before, whose answer was lost."""
        answer = await self._link.ask(TXN, wanted.reads_at(Revision(before.revision - 1)))
        if isinstance(answer, Status):
            raise EngineUnreachable(f"a transaction was done, but {self._refused(answer).message}")
        found = wanted.result_of(before.is_held, before.revision, wanted.seen(answer))
        return self._as_probed(wanted, found) if before.is_probe else found

    # --- asking etcd -------------------------------------------------------------------------------------

    async def _ask(self, method: Method, request: e.Message) -> e.Message:
        answer = await self._link.ask(method, request)
        if isinstance(answer, Status):
            raise self._refused(answer)
        return answer

    def _refused(self, status: Status) -> LakeError:
        """Return the error of the port for a refusal."""
        error = error_of(status, self._link.endpoint.address)
        return error if isinstance(error, _OF_THE_PORT) else EngineUnreachable(error.message, subject=error.subject)


def _leader(answer: e.Message) -> tuple[int, int]:
    """Return the member that answered, and the term of its leader."""
    return answer.header.member_id, answer.header.raft_term
