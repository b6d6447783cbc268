"""The etcd of a lake as a process of the lake has it open: fenced, and looked at before it is used.

    async with open_lake_etcd(place, lake_id) as etcd:
        await etcd.wait()                   reached, the right cluster, and in charge of this lake
        LakeState(etcd.coordinator)

Rules kept here:
- An etcd that cannot be reached is waited for, with a line in the log; one that is wrong (user, cluster, incarnation,
  another lake's, one that was left) ends the start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.fenced_coordinator import FencedCoordinator, open_fenced_coordinator
from engine.coordinator.moving import Side, charge_of, refuse_other_lake
from engine.lake.etcd_place import EtcdPlace, access_of
from lakefs.errors import EngineBusy, EngineUnreachable, StoreUnusable

if TYPE_CHECKING:
    from engine.etcd.etcd_coordinator import EtcdCoordinator

T = TypeVar("T")
ETCD_PAUSE_S: Final = 1.0
WAITING_FOR_ETCD: Final = "waiting for the etcd of the lake"
_log: Final = structlog.get_logger(__name__)


class LakeEtcd:
    """An etcd of a lake.  Made by `open_lake_etcd`; used on the loop."""

    def __init__(self, place: EtcdPlace, etcd: EtcdCoordinator, fenced: FencedCoordinator) -> None:
        self.place: Final = place
        self._etcd = etcd
        self._fenced = fenced

    @property
    def coordinator(self) -> Coordinator:
        """The lake's coordinator; nothing is changed by it unless this etcd is in charge."""
        return self._fenced

    @property
    def side(self) -> Side:
        """This etcd as a side of a move, without the fence."""
        return Side(self._etcd, self.place.words)

    @property
    def cluster(self) -> str:
        """The id of the etcd that answered last, in hex; empty before that."""
        return f"{self._etcd.cluster:x}" if self._etcd.cluster else ""

    @property
    def failure(self) -> str:
        """The reason for which the last call was not answered; empty if it was."""
        return self._fenced.failure

    async def reach(self) -> None:
        """Ask the etcd for nothing.

        EngineUnreachable, EngineBusy: try again.  PermissionDenied, UnsupportedVersion; StoreUnusable for another
        cluster than the recorded one.
        """
        try:
            await self._etcd.connect()
        except EngineUnreachable as error:
            if self.place.cluster and self.cluster not in ("", self.place.cluster):
                raise StoreUnusable(error.message, subject=error.subject) from error
            raise

    async def ready(self) -> None:
        """Look if the etcd can be reached, and serves this lake.  StoreUnusable, and errors of `reach`."""
        await self.reach()
        await self._fenced.check()

    async def wait(self) -> None:
        """Wait until the etcd can be reached, and serves this lake.  StoreUnusable, and errors of `reach`."""
        await when_reached(self.ready)

    async def make_room(self) -> None:
        """Give the etcd room again when it is at its quota; see `EtcdCoordinator.make_room`."""
        await self._etcd.make_room()

    def state(self) -> dict[str, Any]:
        """Return where it is, and how it is, for people and scripts; JSON-able."""
        return {
            "endpoints": list(self.place.endpoints),
            "name": self.place.name,
            "cluster": self.cluster or self.place.cluster,
            "reachable": not self._fenced.failure,
            "reason": self._fenced.failure,
        }


async def when_reached(ask: Callable[[], Awaitable[T]]) -> T:
    """Return what is asked of an etcd, as soon as it can be reached; its other errors are raised."""
    while True:
        try:
            return await ask()
        except (EngineUnreachable, EngineBusy) as error:
            _log.warning(WAITING_FOR_ETCD, reason=error.message)
            await trio.sleep(ETCD_PAUSE_S)


@asynccontextmanager
async def open_lake_etcd(place: EtcdPlace, lake: bytes) -> AsyncIterator[LakeEtcd]:
    """Open the etcd of a lake until the block ends; nothing is asked at its beginning.  Errors of `access_of`."""
    access = access_of(place)
    from engine.etcd.etcd_coordinator import open_etcd_coordinator  # noqa: PLC0415 - optional, and large

    async with (
        open_etcd_coordinator(access, place.name) as etcd,
        open_fenced_coordinator(etcd, lake, place.words, bytes.fromhex(place.incarnation)) as fenced,
    ):
        yield LakeEtcd(place, etcd, fenced)


async def check_etcd(place: EtcdPlace, lake: bytes) -> None:
    """Look if an etcd answers with what a place has.

    PreconditionFailed for the name of another lake; errors of `access_of` and `LakeEtcd.reach`.
    """
    async with open_lake_etcd(place, lake) as etcd:
        await etcd.reach()
        found = await charge_of(etcd.side.coordinator)
        if found is not None:
            refuse_other_lake(found, lake, place.words)
