"""The contract of `GroupLog`: groups are durable in order, and kept on the disk; an append that failed is the last.

Both implementations, under the committer of a store: the journal, and the coordinator's log with its leader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

import pytest
import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.format.layouts import Table
from engine.group_log.replica import leading
from engine.host.tasks import plain_errors
from engine.metadata.group_log import ClosedGroup
from engine.metadata.metadata_store import Metadata
from lakefs.errors import DiskFailed, LakeError
from lakefs.ids import Sequence
from tests.memory_coordinator import memory_coordinator
from tests.replica_rig import KEYS, place_of
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import SMALL, contents, opened, put, run

NAMES = Table.NAMES
KINDS = ("journal", "coordinator")


class HeldDisk:
    """Threads of a store; those of the journal wait while they are held."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()

    async def run(self, call: Callable[..., object], *args: object) -> object:
        await trio.lowlevel.checkpoint()
        if "_append_blocking" in getattr(call, "__name__", ""):
            await self.gate.wait()
        return call(*args)


class Log:
    """A store whose groups go to one kind of log, on one disk; opened as often as wanted."""

    def __init__(self, kind: str, coordinator: Coordinator) -> None:
        self.kind = kind
        self.coordinator = coordinator
        self.disk = SimDisk(1)
        self.threads = HeldDisk()

    @asynccontextmanager
    async def opened(self, *, clean: bool = False) -> AsyncIterator[Metadata]:
        place = place_of(self.coordinator, 1)
        async with AsyncExitStack() as stack:
            offload = self.threads
            store = opened(self.disk, clean=clean, has_names=True, sizes=SMALL, offload=offload)  # type: ignore[arg-type]
            metadata = await stack.enter_async_context(store)
            if self.kind == "coordinator":
                await self.coordinator.transact([], [Put(KEYS.origin, place.replica)])
                await stack.enter_async_context(leading(metadata, place))
            yield metadata

    def crash(self) -> None:
        """Let the power fail."""
        self.disk = self.disk.crash()


def judged(kind: str, scenario: Callable[[Log], Awaitable[None]]) -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator:
            with trio.fail_after(600):
                await scenario(Log(kind, coordinator))

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_durable_is_there_after_the_power_failed_and_goes_on_behind_it(kind: str) -> None:
    async def scenario(log: Log) -> None:
        expected: dict[bytes, bytes] = {}
        for life in range(4):
            async with log.opened() as metadata:
                assert {key: value for (_, key), value in contents(metadata).items()} == expected
                for number in range(5):
                    key = b"%d %d" % (life, number)
                    sequence = await put(metadata, (NAMES, key, b"v"))
                    assert sequence == metadata.durable_sequence
                    expected[key] = b"v"
            log.crash()

    judged(kind, scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_stop_leaves_every_durable_group_in_the_journal(kind: str) -> None:
    async def scenario(log: Log) -> None:
        async with log.opened() as metadata:
            for number in range(20):
                await put(metadata, (NAMES, b"%d" % number, b"v"))
            assert await metadata.close() == metadata.durable_sequence == metadata.kept_sequence == 20

    judged(kind, scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_waits_for_the_journal(kind: str) -> None:
    async def scenario(log: Log) -> None:
        async with log.opened() as metadata:
            await put(metadata, (NAMES, b"a", b"v"))
            log.threads.gate = trio.Event()
            try:
                with trio.move_on_after(5):
                    await put(metadata, (NAMES, b"b", b"v"))
                assert metadata.durable_sequence == (1 if kind == "journal" else 2), "only there the journal is the log"
                await trio.sleep(5)
                assert metadata.kept_sequence <= 1
                assert metadata.applied_sequence <= 1
            finally:
                log.threads.gate.set()
            await trio.sleep(5)
            assert metadata.kept_sequence == metadata.applied_sequence == metadata.durable_sequence == 2

    judged(kind, scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_that_fails_ends_every_later_append(kind: str) -> None:
    async def scenario(log: Log) -> None:
        ends = pytest.raises(LakeError) if kind == "coordinator" else nullcontext()
        with ends, plain_errors():
            async with log.opened() as metadata:
                await put(metadata, (NAMES, b"a", b"v"))
                log.disk.fail_next("sync_data", DiskFailed("planted"), path="journal")
                with pytest.raises(LakeError):
                    for number in range(600):
                        await put(metadata, (NAMES, b"%d" % number, b"v"))
                        await trio.sleep(0.1)
                with pytest.raises(LakeError):
                    await put(metadata, (NAMES, b"b", b"v"))
                with pytest.raises(LakeError):
                    await metadata.journal_log.append(ClosedGroup(Sequence(99), [b""], 0, 0), None)
                if kind == "coordinator":  # such a replica does not lead any more
                    await trio.sleep_forever()

    judged(kind, scenario)
