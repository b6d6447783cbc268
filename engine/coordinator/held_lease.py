"""A lease of the coordinator that is kept alive while a block runs, and counted by its holder.

    async with hold_lease(coordinator, clock, ttl_s) as lease:      granted, and kept alive by a task of the block
        lease.id                                                    for `Put`
        lease.left_s()                                              how long it certainly lasts yet

Rules kept here:
- The holder counts from the moment at which it sent what was answered, on a clock that measures spans.  So the end that
  it counts is never later than the coordinator's.
- A lease that ended, or that could not be kept alive in time, does not return: `ended` is set, and the holder begins
  anew with another.  Errors on the way are tried again until the lease is over.
- It is revoked at the end of the block, if the coordinator answers soon; else it ends by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.host.tasks import plain_errors
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import LeaseId
from lakefs.ports import Clock

_log: Final = structlog.get_logger(__name__)
_KEPT_EVERY: Final = 4
"""A lease is kept alive when a quarter of its time has passed."""
_TRIED_EVERY: Final = 16
"""After an error it is tried again when another sixteenth has passed, or `_TRIED_AGAIN_S`."""
_TRIED_AGAIN_S: Final = 1.0
"""A coordinator that was away is back as soon for long leases: members take shards by them."""
_REVOKED_WITHIN_S: Final = 2.0


@asynccontextmanager
async def hold_lease(coordinator: Coordinator, clock: Clock, ttl_s: int) -> AsyncIterator[HeldLease]:
    """Grant a lease, keep it alive during the block, and revoke it.  Errors of `Coordinator.lease`.

    The end of the lease does not end the block: wait for `ended`.
    """
    sent = clock.monotonic()
    held = HeldLease(await coordinator.lease(ttl_s), coordinator, clock, ttl_s, sent)
    try:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(held.keep)
                yield held
                nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(_REVOKED_WITHIN_S, shield=True), suppress(LakeError):
            await coordinator.revoke(held.id)


@asynccontextmanager
async def hold_key(coordinator: Coordinator, clock: Clock, ttl_s: int, key: bytes, value: bytes) -> AsyncIterator[None]:
    """Keep a key on a lease of its own during the block, in the place of what it was.  Errors of `Coordinator`.

    EngineUnreachable, too, if the lease has ended before it was used.
    """
    async with hold_lease(coordinator, clock, ttl_s) as lease:
        if not (await coordinator.transact([], [Put(key, value, lease.id)])).succeeded:
            raise EngineUnreachable("the coordinator has ended a lease before it was used")
        yield


class HeldLease:
    """A lease and its holder's count of it.  Made by `hold_lease`."""

    def __init__(self, lease: LeaseId, coordinator: Coordinator, clock: Clock, ttl_s: int, sent: float) -> None:
        self.id: Final = lease
        self.ttl_s: Final = ttl_s
        self.ended: Final = trio.Event()
        """Set when the lease has ended, or may have."""
        self._coordinator = coordinator
        self._clock = clock
        self._until = sent + ttl_s

    def left_s(self) -> float:
        """Return for how many seconds the lease lasts at least; 0 when it may have ended."""
        return 0.0 if self.ended.is_set() else max(0.0, self._until - self._clock.monotonic())

    async def keep(self) -> None:
        """Keep the lease alive until it has ended or this is cancelled."""
        pause_s = self.ttl_s / _KEPT_EVERY
        try:
            while (left_s := self.left_s()) > 0:
                await trio.sleep(min(left_s, pause_s))
                pause_s = min(self.ttl_s / _TRIED_EVERY, _TRIED_AGAIN_S)
                try:
                    with trio.move_on_after(self.left_s()):
                        if not await self._is_kept():
                            break
                        pause_s = self.ttl_s / _KEPT_EVERY
                except LakeError as error:
                    _log.warning("a lease could not be kept alive; it is tried again", error=error.message)
        finally:
            self.ended.set()

    async def _is_kept(self) -> bool:
        """Keep the lease alive once; False if it has ended."""
        sent = self._clock.monotonic()
        is_kept = await self._coordinator.keep_alive(self.id)
        if is_kept:
            self._until = sent + self.ttl_s
        return is_kept
