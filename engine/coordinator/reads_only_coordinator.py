"""`ReadsOnlyCoordinator`: what the names of a lake with etcd answer to those who ask them for the lake's coordinator.

A machine that joins learns from it which lake this is, and where its etcd is.  A process that began before the lake
moved there is refused everything else: its watches have revisions of the earlier coordinator, which mean nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from engine.coordinator.coordinator import Compare, Coordinator, Found, Operation, Page, Transacted
from lakefs.errors import EngineUnreachable
from lakefs.ids import LeaseId, Revision

MOVED: Final = "the lake's coordinator is an etcd now: restart lake serve on this machine"


class RefusesChanges:
    """Refuses all in the port `Coordinator` that is no read: EngineUnreachable.  Its heirs have reads and `watch`."""

    def __init__(self, because: str) -> None:
        self._because = because

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Refuse."""
        self._refuse()

    async def compact(self, revision: Revision) -> None:
        """Refuse."""
        self._refuse()

    async def lease(self, ttl_s: int) -> LeaseId:
        """Refuse."""
        self._refuse()

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Refuse."""
        self._refuse()

    async def revoke(self, lease: LeaseId) -> None:
        """Refuse."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EngineUnreachable(self._because)


class ReadsOnlyCoordinator(RefusesChanges):
    """`Coordinator` over another one, for reads alone; all else raises EngineUnreachable."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(MOVED)
        self._coordinator = coordinator

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        return await self._coordinator.get(key)

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port."""
        return await self._coordinator.range(begin, end, limit=limit, after=after)

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> NoReturn:
        """Refuse."""
        self._refuse()
