"""`FencedCoordinator`: the coordinator of a lake for as long as it is in charge of that lake.

A process that asks an etcd may outlive what makes it the lake's: the lake moves to another coordinator
(`engine.coordinator.moving`), or the etcd comes back empty, or from a backup.  So each transaction compares the
coordinator's own record (`ChargeRecord`), which was looked at when the process began.

Rules kept here:
- Where the record is another one, nothing is changed, and each call raises EngineUnreachable with the reason, until the
  record is right again.
- A revision that is lower than one that was read before the call was sent is refused alike: something was lost.
- A read waits at most READ_S: the greeting of a member reads the generation, and must not be held up by more than that.
  While the coordinator is known to be away, reads are refused at once, and a task asks until it is back.  All else has
  the coordinator's own patience.
- A record that is another one, and right, is compared from then on: nothing was done, so it is tried once more.
- A transaction has one comparison less than the port allows, and no `else_ops`: these would be done behind the fence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import trio

from engine.coordinator.coordinator import Compare, Coordinator, Found, HasValue, Operation, Page, Transacted, Watch
from engine.coordinator.moving import refuse_unless_in_charge
from engine.coordinator.records import CHARGE_KEY, Charge, ChargeRecord, decode
from engine.host.tasks import plain_errors
from lakefs.errors import EngineUnreachable, LakeError, StoreUnusable
from lakefs.ids import LeaseId, Revision
from lakefs.limits import AWAY_PAUSE_S_MIN, NAMES_PAUSE_S_MAX

T = TypeVar("T")
READ_S: Final = 4.0
"""Etcd has another leader after 1 to 3 s; and a member's greeting has MEMBER_CONNECT_S, with 0.5 s for what is
cancelled."""
_NONE: Final = Revision(0)
_ATTEMPTS_MAX: Final = 2


@asynccontextmanager
async def open_fenced_coordinator(
    coordinator: Coordinator, lake: bytes, place: str, incarnation: bytes = b""
) -> AsyncIterator[FencedCoordinator]:
    """Yield the coordinator of a lake, behind a fence until the block ends; `check` it at the start.

    `place`: words for where it is.  `incarnation`: the one that it must be; empty: the one that is found.
    """
    fenced = FencedCoordinator(coordinator, lake, place, incarnation)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fenced.look_while_away)
            yield fenced
            nursery.cancel_scope.cancel()


class FencedCoordinator:
    """`Coordinator` over another one.  Made by `open_fenced_coordinator`; used on the loop."""

    def __init__(self, coordinator: Coordinator, lake: bytes, place: str, incarnation: bytes) -> None:
        self._coordinator = coordinator
        self._lake = lake
        self._place = place
        self._incarnation = incarnation
        self._fence: HasValue | None = None
        self._revision = _NONE
        """The highest revision that was read."""
        self._reason = "it was not asked yet"
        self._went_away = trio.Event()
        """Set while the coordinator is known to be away."""

    @property
    def failure(self) -> str:
        """The reason for which the last call was not answered; empty if it was."""
        return self._reason

    @property
    def incarnation(self) -> bytes:
        """The incarnation of the lake's coordinator, when it was checked."""
        return self._incarnation

    async def check(self) -> None:
        """Look at the coordinator's record.

        StoreUnusable unless it is this lake's, in charge, and the known incarnation; EngineUnreachable.
        """
        before = self._revision
        found = await self._read(lambda: self._coordinator.get(CHARGE_KEY))
        record = None if found.entry is None else decode(ChargeRecord, found.entry.value)
        try:
            self._follow(before, found.revision)
            refuse_unless_in_charge(record, self._lake, self._place, self._incarnation)
        except (StoreUnusable, EngineUnreachable) as error:
            self._reason = error.message
            self._fence = None
            raise
        assert found.entry is not None, "it is in charge"
        assert record is not None, "it is in charge"
        if record.state is Charge.LEAVING:
            self._fence = None
            self._reason = f"the lake's coordinator is being moved away from {self._place}"
            raise EngineUnreachable(self._reason, subject=self._place)
        self._fence, self._incarnation = HasValue(CHARGE_KEY, found.entry.value), record.incarnation

    # --- keys --------------------------------------------------------------------------------------------

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        await self._checked()
        before = self._revision
        found = await self._read(lambda: self._coordinator.get(key))
        self._follow(before, found.revision)
        return found

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port."""
        await self._checked()
        before = self._revision
        page = await self._read(lambda: self._coordinator.range(begin, end, limit=limit, after=after))
        self._follow(before, page.revision)
        return page

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Compare and change keys at one revision; see the port, and the head of the module."""
        assert not else_ops, "behind a fence nothing is done when a comparison fails"
        for _ in range(_ATTEMPTS_MAX):
            fence = await self._checked()
            ask = partial(self._coordinator.transact, [fence, *compares], then_ops, is_repeatable=is_repeatable)
            done = await self._answered(ask)
            fenced, *seen = done.seen
            if fenced is not None and fenced.value == fence.value:
                self._revision = max(self._revision, done.revision)
                return Transacted(done.outcome, done.revision, tuple(seen))
            self._fence = None
            await self._checked()
        raise EngineUnreachable(f"{self._place} was in other hands in the meantime", subject=self._place)

    async def compact(self, revision: Revision) -> None:
        """Forget changes before a revision; see the port."""
        await self._checked()
        await self._answered(lambda: self._coordinator.compact(revision))

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AbstractAsyncContextManager[Watch]:
        """Watch a range; see the port."""
        return self._watch(begin, end, from_revision)

    @asynccontextmanager
    async def _watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AsyncIterator[Watch]:
        await self._checked()
        async with self._coordinator.watch(begin, end, from_revision) as watch:
            yield watch

    # --- leases ------------------------------------------------------------------------------------------

    async def lease(self, ttl_s: int) -> LeaseId:
        """Grant a lease; see the port."""
        await self._checked()
        return await self._answered(lambda: self._coordinator.lease(ttl_s))

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Let a lease run for its whole time again; see the port."""
        await self._checked()
        return await self._answered(lambda: self._coordinator.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see the port."""
        await self._answered(lambda: self._coordinator.revoke(lease))

    # --- the fence ---------------------------------------------------------------------------------------

    async def _checked(self) -> HasValue:
        """Return the comparison with the record, looked at anew if it was not right.  EngineUnreachable."""
        if self._fence is None:
            try:
                await self.check()
            except StoreUnusable as error:
                raise EngineUnreachable(error.message, subject=self._place) from error
        assert self._fence is not None, "it was checked"
        return self._fence

    async def look_while_away(self) -> None:
        """Ask until there is an answer, whenever the coordinator has gone away; until cancelled."""
        while True:
            await self._went_away.wait()
            pause_s = AWAY_PAUSE_S_MIN
            while self._went_away.is_set():
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, NAMES_PAUSE_S_MAX)
                with suppress(LakeError):
                    await self._answered(lambda: self._coordinator.get(CHARGE_KEY))

    async def _read(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a read: within READ_S, and at once if the coordinator is away.  EngineUnreachable."""
        if self._went_away.is_set():
            await trio.lowlevel.checkpoint()
            raise EngineUnreachable(self._reason, subject=self._place)
        with trio.move_on_after(READ_S):
            return await self._answered(ask)
        self._reason = f"{self._place} does not answer"
        self._went_away.set()
        raise EngineUnreachable(self._reason, subject=self._place)

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return an answer, and note whether there was one."""
        try:
            answer = await ask()
        except EngineUnreachable as error:
            self._reason = error.message
            self._went_away.set()
            raise
        self._reason = ""
        if self._went_away.is_set():
            self._went_away = trio.Event()
        return answer

    def _follow(self, before: Revision, revision: Revision) -> None:
        """Note the revision of an answer.  EngineUnreachable if it is lower than one known before it was asked for."""
        if revision < before:
            self._fence = None
            self._reason = f"{self._place} went back from revision {before} to {revision}: bring the right one back"
            raise EngineUnreachable(self._reason, subject=self._place)
        self._revision = max(self._revision, revision)
