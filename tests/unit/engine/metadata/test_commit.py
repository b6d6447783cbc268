"""The commit: one order, whole decisions, answers that wait, and a failure that is final."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import trio

from engine.format.layouts import Table
from engine.host.local_disk import LocalDisk
from engine.metadata.metadata_store import Metadata
from engine.tables.lmdb_index import Index
from engine.tables.overlay import Layer
from engine.tables.views import Transaction
from lakefs.errors import (
    AlreadyExists,
    DiskFailed,
    IndexDamaged,
    KeyNotFound,
    LakeError,
    RequestTooLarge,
    StoreFull,
    StoreReadOnly,
)
from lakefs.host.offload import ThreadOffload
from lakefs.ids import Sequence
from lakefs.limits import GROUP_BYTES_MAX
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import SMALL, contents, opened, put, run, wait_applied

NAMES = Table.NAMES


def insert(key: bytes, value: bytes = b"v") -> Callable[[Transaction], None]:
    return lambda txn: txn.insert(NAMES, key, value)


class HeldOffload:
    """Runs calls inline, but holds back those of the journal until the test lets them go."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()
        self.calls = 0

    def hold(self) -> None:
        self.gate = trio.Event()

    async def run(self, call: Callable[..., object], *args: object) -> object:
        if "_append_blocking" in getattr(call, "__name__", ""):
            self.calls += 1
            await self.gate.wait()
        else:
            await trio.lowlevel.checkpoint()
        return call(*args)


def test_many_decisions_share_a_group_and_the_next_waits_for_it() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        async with opened(SimDisk(1), offload=offload) as metadata:  # type: ignore[arg-type]
            offload.hold()
            sequences = [(await metadata.commit(insert(b"first")))[1]]
            await trio.testing.wait_all_tasks_blocked()
            sequences += [(await metadata.commit(insert(b"%d" % n)))[1] for n in range(50)]
            await trio.testing.wait_all_tasks_blocked()
            assert sequences == [1] + [2] * 50
            assert (metadata.durable_sequence, offload.calls) == (0, 1)
            offload.gate.set()
            await metadata.wait_durable(Sequence(2))
            assert offload.calls == 2

    run(scenario)


def test_nothing_is_answered_before_its_group_is_durable() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        answered: list[str] = []
        async with opened(SimDisk(2), offload=offload) as metadata:  # type: ignore[arg-type]
            offload.hold()
            _, sequence = await metadata.commit(insert(b"k"))
            with metadata.view() as view:
                assert view.get(NAMES, b"k") == b"v"
                seen = view.sequence
            assert seen == sequence

            def refuse(txn: Transaction) -> str:
                return "taken" if txn.get(NAMES, b"k") else "free"

            answer, refused = await metadata.commit(refuse)
            assert (answer, refused) == ("taken", sequence)

            async def wait(what: str, until: Sequence) -> None:
                await metadata.wait_durable(until)
                answered.append(what)

            async with trio.open_nursery() as nursery:
                for what, until in (("write", sequence), ("read", seen), ("refusal", refused)):
                    nursery.start_soon(wait, what, until)
                await trio.testing.wait_all_tasks_blocked()
                assert answered == []
                offload.gate.set()
            assert sorted(answered) == ["read", "refusal", "write"]

    run(scenario)


def test_a_refusal_that_is_raised_waits_for_what_it_rests_on() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        refused: list[LakeError] = []
        async with opened(SimDisk(2), offload=offload) as metadata:  # type: ignore[arg-type]
            offload.hold()
            await metadata.commit(insert(b"k"))

            def refuse(txn: Transaction) -> None:
                if txn.get(NAMES, b"k") is not None:
                    raise AlreadyExists("taken")

            async def ask() -> None:
                with pytest.raises(AlreadyExists) as caught:
                    await metadata.commit(refuse)
                refused.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                assert refused == []
                offload.gate.set()
            assert len(refused) == 1

    run(scenario)


def test_a_decision_that_raises_changes_nothing() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(3)) as metadata:
            await put(metadata, (NAMES, b"a", b"1"))

            def decide(txn: Transaction) -> None:
                txn.put(NAMES, b"a", b"2")
                txn.insert(NAMES, b"b", b"3")
                txn.note("never")
                raise KeyNotFound("no such thing")

            metadata.on_joined(lambda sequence, notes: pytest.fail("it never happened"))
            with pytest.raises(KeyNotFound):
                await metadata.commit(decide)
            assert contents(metadata) == {(NAMES, b"a"): b"1"}
            assert metadata.durable_sequence == 1

    run(scenario)


def test_a_decision_larger_than_a_group_is_refused_whole() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(4)) as metadata:

            def decide(txn: Transaction) -> None:
                for n in range(GROUP_BYTES_MAX // 65_000 + 1):
                    txn.insert(NAMES, b"%d" % n, bytes(65_000))

            with pytest.raises(RequestTooLarge):
                await metadata.commit(decide)
            assert contents(metadata) == {}
            await put(metadata, (NAMES, b"a", b"1"))

    run(scenario)


def test_full_groups_follow_each_other_and_committers_wait_for_room() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        joined = 0

        async def one(metadata: Metadata, n: int) -> None:
            nonlocal joined
            _, sequence = await metadata.commit(insert(b"%04d" % n, bytes(4000)))
            joined += 1
            await metadata.wait_durable(sequence)

        async with opened(SimDisk(5), offload=offload, sizes=SMALL) as metadata:  # type: ignore[arg-type]
            offload.hold()
            async with trio.open_nursery() as nursery:
                for n in range(60):
                    nursery.start_soon(one, metadata, n)
                await trio.testing.wait_all_tasks_blocked()
                assert 0 < joined < 24
                assert metadata.stats()["overlay_entries"] == joined
                offload.gate.set()
            assert len(contents(metadata)) == 60
            assert metadata.durable_sequence >= 60 * 4000 // SMALL.group_bytes

    run(scenario)


def test_notes_are_handed_on_when_they_join_and_again_in_order_when_durable() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        joined: list[tuple[int, object]] = []
        durable: list[tuple[int, object]] = []
        async with opened(SimDisk(6), offload=offload) as metadata:  # type: ignore[arg-type]
            metadata.on_joined(lambda sequence, notes: joined.extend((sequence, note) for note in notes))
            metadata.on_durable(lambda sequence, notes: durable.extend((sequence, note) for note in notes))
            offload.hold()
            for n in range(4):

                def decide(txn: Transaction, n: int = n) -> None:
                    txn.insert(NAMES, b"%d" % n, b"")
                    txn.note(n)

                await metadata.commit(decide)
                await trio.testing.wait_all_tasks_blocked()
            assert joined == [(1, 0), (2, 1), (2, 2), (2, 3)]
            assert durable == []
            offload.gate.set()
            await metadata.wait_durable(Sequence(2))
            assert durable == joined

    run(scenario)


@pytest.mark.parametrize("operation", ["sync_data", "pwrite"])
def test_a_failed_append_is_final_for_writers_waiters_and_readers_of_what_is_not_durable(operation: str) -> None:
    async def scenario() -> None:
        disk = SimDisk(7)
        outcomes: list[str] = []

        async def waiter(metadata: Metadata, sequence: Sequence) -> None:
            try:
                await metadata.wait_durable(sequence)
                outcomes.append("durable")
            except StoreReadOnly as error:
                outcomes.append(str(error))

        async with opened(disk) as metadata:
            await put(metadata, (NAMES, b"safe", b"1"))
            disk.fail_next(operation, DiskFailed("the device failed"), path="journal")
            _, sequence = await metadata.commit(insert(b"lost"))
            with structlog.testing.capture_logs() as logged:
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(waiter, metadata, sequence)
            assert len(outcomes) == 3
            assert [(line["log_level"], line["reason"]) for line in logged] == [("error", "the device failed")]
            assert all("the device failed" in outcome for outcome in outcomes)
            assert isinstance(metadata.failed, DiskFailed)
            with pytest.raises(StoreReadOnly):
                await metadata.commit(insert(b"later"))
            with metadata.view() as view:
                assert view.get(NAMES, b"safe") == b"1"
                await_safe = view.sequence
                view.get(NAMES, b"lost")
                await_lost = view.sequence
            await metadata.wait_durable(await_safe)
            with pytest.raises(StoreReadOnly):
                await metadata.wait_durable(await_lost)
            assert await metadata.close() is None
        async with opened(disk.kill()) as metadata:
            assert (NAMES, b"safe") in contents(metadata)

    run(scenario)


def test_the_index_never_knows_more_than_the_journal() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        async with opened(SimDisk(8), offload=offload, sizes=SMALL) as metadata:  # type: ignore[arg-type]
            offload.hold()
            for n in range(12):  # far past the bound at which the overlay is applied
                await metadata.commit(insert(b"%d" % n))
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(10)
            assert metadata.applied_sequence == metadata.durable_sequence == 0
            offload.gate.set()
            await metadata.wait_durable(Sequence(2))
            await wait_applied(metadata)
            assert metadata.applied_sequence == 2
            assert metadata.stats()["overlay_entries"] == 0

    run(scenario)


def test_an_index_without_room_is_tried_again_and_refuses_only_when_the_overlay_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_apply = Index.apply
    full = True

    def apply(self: Index, layer: Layer, applied: Sequence) -> None:
        if full:
            raise StoreFull("no room")
        real_apply(self, layer, applied)

    monkeypatch.setattr(Index, "apply", apply)

    async def scenario() -> None:
        nonlocal full
        full = False
        disk = SimDisk(9)
        async with opened(disk, sizes=SMALL) as metadata:
            full = True
            count = 0
            with pytest.raises(StoreFull, match="takes no more"):
                for n in range(100):
                    await put(metadata, (NAMES, b"%d" % n, b"v"))
                    count += 1
            assert count == SMALL.overlay_entries_max
            assert metadata.failed is None
            full = False
            await wait_applied(metadata)
            await put(metadata, (NAMES, b"again", b"v"))
            assert len(contents(metadata)) == count + 1

    run(scenario)


def test_an_index_that_cannot_be_written_stops_writing_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        disk = SimDisk(10)
        async with opened(disk) as metadata:
            await put(metadata, (NAMES, b"a", b"1"))

            def apply(self: Index, layer: Layer, applied: Sequence) -> None:
                raise IndexDamaged("a page is not what it should be")

            with monkeypatch.context() as patch:
                patch.setattr(Index, "apply", apply)
                await trio.sleep(5)
            with pytest.raises(StoreReadOnly, match="a page is not"):
                await put(metadata, (NAMES, b"b", b"1"))
            assert contents(metadata) == {(NAMES, b"a"): b"1"}
        async with opened(disk) as metadata:
            assert contents(metadata) == {(NAMES, b"a"): b"1"}

    run(scenario)


def test_a_cancelled_waiter_leaves_the_group_to_its_fate() -> None:
    async def scenario() -> None:
        offload = HeldOffload()
        async with opened(SimDisk(11), offload=offload) as metadata:  # type: ignore[arg-type]
            offload.hold()
            _, sequence = await metadata.commit(insert(b"k"))
            with trio.move_on_after(1) as scope:
                await metadata.wait_durable(sequence)
            assert scope.cancelled_caught
            offload.gate.set()
            await metadata.wait_durable(sequence)
            assert contents(metadata) == {(NAMES, b"k"): b"v"}

    run(scenario)


def test_a_run_that_is_cancelled_answers_every_waiter() -> None:
    async def scenario() -> None:
        errors: list[LakeError] = []

        async def write(metadata: Metadata) -> None:
            with trio.CancelScope(shield=True):
                try:
                    while True:
                        _, sequence = await metadata.commit(insert(b"k%d" % metadata.durable_sequence))
                        await metadata.wait_durable(sequence)
                except StoreReadOnly as error:
                    errors.append(error)

        async with opened(SimDisk(12), clean=False) as metadata, trio.open_nursery() as nursery:
            nursery.start_soon(write, metadata)
            await metadata.wait_durable(Sequence(0))
            await metadata.close(clean=False)
        assert len(errors) == 1

    run(scenario)


def test_the_index_is_rebuilt_while_commits_go_on() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(13), sizes=SMALL) as metadata:
            for n in range(30):
                await put(metadata, (NAMES, b"%03d" % n, b"v"))
            await wait_applied(metadata)
            await metadata.checkpoint()
            await put(metadata, (NAMES, b"after the checkpoint", b"v"))
            await wait_applied(metadata)
            written = 0

            async def write() -> None:
                nonlocal written
                for n in range(10):
                    await put(metadata, (NAMES, b"during %03d" % n, b"v"))
                    written += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await metadata.rebuild_online()
            assert written == 10
            assert len(contents(metadata)) == 41
            await wait_applied(metadata)
            assert await metadata.verify_index() == 41

    run(scenario)


def test_checkpoints_are_written_when_the_journal_is_long_and_shorten_it() -> None:
    async def scenario() -> None:
        disk = SimDisk(14)
        async with opened(disk, sizes=SMALL) as metadata:
            for n in range(120):
                await put(metadata, (NAMES, b"%03d" % (n % 40), bytes(3000)))
            await wait_applied(metadata)
            await trio.sleep(5)
            stats = metadata.stats()
            assert stats["checkpoint_sequence"] > 0
            assert stats["journal_bytes_since_checkpoint"] < 2 * SMALL.checkpoint_journal
            assert len(disk.list_folder("checkpoints")) == 1
            assert len(disk.list_folder("journal")) < 6

    run(scenario)


def test_with_threads_and_a_real_disk_every_acknowledged_commit_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = LocalDisk(tmp_path)

        async def write(metadata: Metadata, task: int) -> None:
            for n in range(30):
                await put(metadata, (NAMES, b"%d/%d" % (task, n), b"v"))

        async with ThreadOffload(2, "test") as offload:
            async with opened(disk, offload=offload, sizes=SMALL, clean=False) as metadata:
                async with trio.open_nursery() as nursery:
                    for task in range(20):
                        nursery.start_soon(write, metadata, task)
                assert metadata.durable_sequence < 600
            async with opened(disk, offload=offload) as metadata:
                assert len(contents(metadata)) == 600
                assert await metadata.verify_index() <= 600

    trio.run(scenario)
