"""A simulated machine with devices on which the names of a lake lie: they fail, crash, go, and come back stale."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from engine.mirror.copy_calls import InTurn
from engine.mirror.copy_list import read_copy_file
from engine.process.embedded import EmbeddedEngine
from engine.process.mirrored_names import LocalNames, NamesHost, open_names_in
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from lakefs.host.offload import InlineOffload
from lakefs.ids import EMPTY_BLOB, CopyId
from lakefs.limits import MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import SMALL_SIZES, ask, change, good, session_of
from tests.unit.support.metadata_rig import NAMES_OF

CAPACITY_BYTES = 128 * MIB
"""The reserve, which a new copy has too, is 1/32 of it."""


class SimFolder:
    """A folder on a simulated device (`engine.mirror.copy_folders.CopyFolder`)."""

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self.name = name

    def device(self) -> int | None:
        return self._machine.devices[self.name] if self.name in self._machine.disks else None

    def disk(self) -> SimDisk:
        return self._machine.disks.get(self.name) or SimDisk(self._machine.rng)

    def set_aside(self) -> None:
        self._machine.aside[self.name] = self._machine.disks[self.name]
        self._machine.disks[self.name] = self._machine.empty_disk()


class Machine:
    """The devices by name, a letter each; several names may be folders of one device."""

    def __init__(self, names: str = "abc", seed: int = 0, *, devices: dict[str, int] | None = None) -> None:
        self.rng = random.Random(seed)
        self.disks = {name: self.empty_disk() for name in names}
        self.devices = devices or {name: number for number, name in enumerate(names)}
        self.aside: dict[str, SimDisk] = {}
        """Folders that were set aside."""

    def empty_disk(self) -> SimDisk:
        return SimDisk(self.rng, capacity_bytes=CAPACITY_BYTES)

    def lose(self, name: str) -> SimDisk:
        """Take a device out; returns it."""
        return self.disks.pop(name)

    def crash(self) -> None:
        """Fail the power."""
        self._succeed({name: disk.crash() for name, disk in self.disks.items()})

    def kill(self) -> None:
        """Kill the process."""
        self._succeed({name: disk.kill() for name, disk in self.disks.items()})

    def _succeed(self, disks: dict[str, SimDisk]) -> None:
        self.disks = disks

    def copy_id(self, name: str) -> CopyId:
        return read_copy_file(self.disks[name]).copy_id

    def open(
        self,
        *,
        losses: int = 2,
        is_new: bool = False,
        lake: bytes = NAMES_OF,
        without: Sequence[CopyId] = (),
        verify_index: bool = False,
    ) -> AbstractAsyncContextManager[LocalNames]:
        """Open the names on all devices."""
        host = NamesHost(
            SimClock(),
            InlineOffload(),
            InlineOffload(),
            InTurn(),
            index_committed=self._note_index,
            copy_bytes_per_s=float("inf"),
        )
        return open_names_in(
            [SimFolder(self, name) for name in sorted(self.devices)],
            host,
            lake_id=lake,
            protection_losses=losses,
            is_new=is_new,
            without=frozenset(without),
            verify_index=verify_index,
            sizes=SMALL_SIZES,
        )

    def _note_index(self) -> None:
        for disk in self.disks.values():
            if os.path.exists(disk.local_path("index/data.mdb")):
                disk.note_index_sync()


def good_copies(names: LocalNames) -> str:
    """Return the folders of the good copies."""
    return "".join(sorted(copy["folder"] for copy in names.state()["copies"] if copy["state"] == "good"))


@asynccontextmanager
async def client_of(store: KeyedStore) -> AsyncIterator[EngineClient]:
    """Connect a client to the names."""
    client = EmbeddedEngine(NamesService(store), descriptors=False)
    yield client
    await client.aclose()


async def bind(store: KeyedStore, *keys: str) -> None:
    """Bind keys to the empty blob; durable on return."""
    async with client_of(store) as client:
        changes = [change(key, EMPTY_BLOB) for key in keys]
        commit = m.Commit(await session_of(client), changes, end_session=True)
        good(await ask(client, commit, m.NameResults))


async def keys_of(store: KeyedStore) -> list[str]:
    """Return all keys."""
    keys: list[str] = []
    async with client_of(store) as client:
        while True:
            page = await ask(client, m.ListNames("bkt", after=keys[-1] if keys else ""), m.Listed)
            keys += [entry.key for entry in page.entries]
            if not page.next_after:
                return keys


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the simulated clock jumps."""
    with trio.fail_after(300):
        while not condition():  # noqa: ASYNC110 - on a clock that jumps
            await trio.sleep(0.5)
