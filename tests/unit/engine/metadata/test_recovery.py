"""Recovery: the contents of a store after stops, crashes and losses of every kind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from engine.format.layouts import NOT_CLEAN, Table
from engine.format.sizes import DEFAULT_SIZES
from engine.journal.reader import DamagedAt, list_journal
from engine.metadata import index_building
from engine.metadata.checkpoint import newest_checkpoint
from engine.metadata.metadata_store import Metadata
from engine.metadata.recovery import rebuild_store
from engine.superblock.superblock import read_superblock, write_superblock
from engine.tables import lmdb_index as index_module
from engine.tables.views import Transaction
from lakefs.errors import DiskFailed, JournalDamaged, LakeError, StoreDamaged, StoreReadOnly
from lakefs.ids import Sequence
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.support.metadata_rig import (
    SMALL,
    TABLES,
    Change,
    apply_changes,
    contents,
    opened,
    put,
    run,
    wait_applied,
)

State = dict[tuple[Table, bytes], bytes]


def name(number: int) -> bytes:
    return b"key-%04d" % number


async def fill(metadata: Metadata, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await put(metadata, (Table.NAMES, name(number), b"value %d" % number))


def test_a_clean_stop_and_start_keeps_everything() -> None:
    async def scenario() -> None:
        disk = SimDisk(1)
        async with opened(disk) as metadata:
            await put(metadata, (Table.NAMES, b"a", b"1"), (Table.NODES, b"n", b"2"))
            await put(metadata, (Table.NAMES, b"b", b"3"))
            before = contents(metadata)
        async with opened(disk) as metadata:
            assert contents(metadata) == before
            assert metadata.applied_sequence == 2
            assert metadata.rebuilt_because == ""
            await put(metadata, (Table.NAMES, b"a", None))
        async with opened(disk) as metadata:
            assert list(contents(metadata)) == [(Table.NODES, b"n"), (Table.NAMES, b"b")]

    run(scenario)


def test_many_starts_without_a_commit_keep_the_journal_short() -> None:
    async def scenario() -> None:
        disk = SimDisk(2)
        for _ in range(5):
            async with opened(disk):
                pass
        store = read_superblock(disk)
        assert len(list_journal(disk, store.store_id)) == 1
        assert store.clean_sequence == 0

    run(scenario)


class History:
    """Commits of random changes, each its own state, and which of them were acknowledged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.states: list[State] = [{}]
        self.acknowledged = 0

    def next_changes(self) -> tuple[Change, ...]:
        changes: list[Change] = []
        state = dict(self.states[-1])
        for _ in range(self.rng.randrange(1, 4)):
            table, key = self.rng.choice(TABLES), name(self.rng.randrange(40))
            size = self.rng.choice((0, 10, 100, 5000))
            value = None if self.rng.randrange(3) == 0 else self.rng.randbytes(size)
            changes.append((table, key, value))
            state.pop((table, key), None)
            if value is not None:
                state[table, key] = value
        self.states.append(state)
        return tuple(changes)

    def check(self, found: State) -> None:
        """Check that the state found is one after some prefix of the commits, with all that was acknowledged."""
        matches = [i for i, state in enumerate(self.states) if state == found]
        assert matches, "no prefix of the commits gives what was found"
        assert matches[-1] >= self.acknowledged, f"acknowledged {self.acknowledged}, found {matches}"
        self.states = self.states[: matches[-1] + 1]
        self.acknowledged = matches[-1]


async def commit_until_crash(disk: SimDisk, history: History, limit: int) -> None:
    """Commit random changes in several tasks, with checkpoints in between, until the disk's power fails."""

    async def one(metadata: Metadata) -> None:
        decided = 0

        def decide(txn: Transaction) -> None:
            nonlocal decided
            if apply_changes(txn, history.next_changes()):
                decided = len(history.states) - 1
            else:
                history.states.pop()  # it changed nothing, so its answer proves no earlier commit durable

        _, sequence = await metadata.commit(decide)
        await metadata.wait_durable(sequence)
        history.acknowledged = max(history.acknowledged, decided)

    sizes = SMALL if history.rng.randrange(3) else DEFAULT_SIZES
    async with opened(disk, clean=history.rng.randrange(4) == 0, sizes=sizes) as metadata:
        history.check(contents(metadata))
        for _ in range(limit):
            async with trio.open_nursery() as nursery:
                for _ in range(history.rng.choice((1, 2, 5, 12))):
                    nursery.start_soon(one, metadata)
            match history.rng.randrange(8):
                case 0:
                    await wait_applied(metadata)
                case 1:
                    await wait_applied(metadata)
                    await metadata.checkpoint()


def crash_again_and_again(seed: int, rounds: int) -> None:
    """Open, commit, lose power at a random operation, check; the same disk over and over."""
    history = History(seed)
    disk = SimDisk(seed)
    for _ in range(rounds):
        disk.crash_at = history.rng.randrange(1, 120)
        try:
            run(partial(commit_until_crash, disk, history, 12), seed)
        except* (SimCrashed, StoreReadOnly):
            pass
        disk = disk.crash() if history.rng.randrange(5) else disk.kill()

    async def last_look() -> None:
        async with opened(disk) as metadata:
            history.check(contents(metadata))
            await metadata.verify_index()

    run(last_look)


@pytest.mark.parametrize("seed", range(25))
def test_a_crash_at_any_operation_loses_only_a_suffix_of_what_was_not_acknowledged(seed: int) -> None:
    crash_again_and_again(seed, rounds=12)


# --- the index lost, old, foreign or damaged -------------------------------------------------------------


async def filled_store(disk: SimDisk, *, clean: bool = True) -> State:
    """Make a store with a checkpoint in the middle of its history; return what it holds."""
    async with opened(disk, clean=clean) as metadata:
        await fill(metadata, 30)
        await wait_applied(metadata)
        await metadata.checkpoint()
        await fill(metadata, 10, first=20)
        await put(metadata, (Table.NAMES, name(3), None))
        return contents(metadata)


def index_file(disk: SimDisk) -> Path:
    return Path(disk.local_path("index/data.mdb"))


def lose_index(disk: SimDisk) -> None:
    shutil.rmtree(disk.local_path("index"))


def spoil_index(disk: SimDisk) -> None:
    index_file(disk).write_bytes(b"not an LMDB file" * 512)


def cut_index(disk: SimDisk) -> None:
    index_file(disk).write_bytes(index_file(disk).read_bytes()[:8192])


def empty_index(disk: SimDisk) -> None:
    index_file(disk).write_bytes(b"")


@pytest.mark.parametrize("harm", [lose_index, spoil_index, cut_index, empty_index])
@pytest.mark.parametrize("clean", [True, False])
def test_an_index_that_cannot_be_used_is_rebuilt_from_checkpoint_and_journal(
    harm: Callable[[SimDisk], None], clean: bool
) -> None:
    async def scenario() -> None:
        disk = SimDisk(3)
        before = await filled_store(disk, clean=clean)
        harm(disk)
        async with opened(disk) as metadata:
            assert metadata.rebuilt_because
            assert contents(metadata) == before
            assert await metadata.verify_index() == len(before)

    run(scenario)


def test_an_index_that_a_process_died_in_is_rebuilt_once() -> None:
    async def scenario() -> None:
        disk = SimDisk(20)
        before = await filled_store(disk)
        note = disk.open("crash", create=True)
        note.pwrite(b'Fatal Python error: Aborted\n  File "engine/tables/lmdb_index.py", line 1 in get\n', 0)
        note.close()
        async with opened(disk) as metadata:
            assert "died" in metadata.rebuilt_because
            assert contents(metadata) == before
        async with opened(disk) as metadata:
            assert metadata.rebuilt_because == ""
        assert disk.exists("crash.last")

    run(scenario)


def test_an_index_older_than_the_checkpoint_is_rebuilt() -> None:
    async def scenario() -> None:
        disk = SimDisk(4)
        async with opened(disk) as metadata:
            await fill(metadata, 5)
        old = index_file(disk).read_bytes()
        before = await filled_store(disk)
        index_file(disk).write_bytes(old)
        async with opened(disk) as metadata:
            assert "before the checkpoint" in metadata.rebuilt_because
            assert contents(metadata) == before

    run(scenario)


def test_an_index_ahead_of_the_journal_is_damage_and_not_a_silent_loss() -> None:
    async def scenario() -> None:
        disk = SimDisk(5)
        async with opened(disk, clean=False) as metadata:
            await fill(metadata, 6)
            await wait_applied(metadata)
        (file,) = list_journal(disk, read_superblock(disk).store_id)
        zero_group(disk, file.path, 6)
        with pytest.raises(JournalDamaged, match="group 6 was durable"):
            async with opened(disk):
                pass
        identity = read_superblock(disk).identity
        with pytest.raises(JournalDamaged, match="group 6 was durable"):
            rebuild_store(disk, SimClock(), identity, None, accept_loss=False)
        report = rebuild_store(disk, SimClock(), identity, None, accept_loss=True)
        assert (report.lost_from, report.end_sequence) == (6, 5)
        async with opened(disk) as metadata:
            assert len(contents(metadata)) == 5

    run(scenario)


def test_without_its_journal_a_store_is_damaged() -> None:
    async def scenario() -> None:
        disk = SimDisk(6)
        await filled_store(disk, clean=False)
        for file in list_journal(disk, read_superblock(disk).store_id):
            disk.unlink(file.path)
        with pytest.raises(JournalDamaged, match="no journal file"):
            async with opened(disk):
                pass

    run(scenario)


def test_a_missing_journal_file_in_the_middle_is_damage() -> None:
    async def scenario() -> None:
        disk = SimDisk(7)
        for round_number in range(3):
            async with opened(disk, clean=False) as metadata:
                await fill(metadata, 4, first=4 * round_number)
        files = list_journal(disk, read_superblock(disk).store_id)
        assert len(files) == 3
        disk.unlink(files[1].path)
        lose_index(disk)
        with pytest.raises(JournalDamaged):
            async with opened(disk):
                pass

    run(scenario)


# --- damage in journal and checkpoint --------------------------------------------------------------------


def group_offset(disk: SimDisk, path: str, sequence: int) -> int:
    """Return the offset of a group in a file, by its sequence."""
    file = disk.open(path, read_only=True)
    page = bytearray(4096)
    for offset in range(4096, file.size(), 4096):
        file.pread_into(memoryview(page), offset)
        if page[:4] == b"LGRP" and int.from_bytes(page[8:16], "little") == sequence:
            return offset
    raise AssertionError("no such group")


def zero_group(disk: SimDisk, path: str, sequence: int) -> None:
    file = disk.open(path)
    file.pwrite(bytes(4096), group_offset(disk, path, sequence))
    file.sync_data()
    file.close()


@pytest.mark.parametrize("at", [0, 2, 8, 40, 48, 60])
def test_a_bit_flip_in_a_group_before_the_last_is_damage_that_names_the_group(at: int) -> None:
    async def scenario() -> None:
        disk = SimDisk(8)
        async with opened(disk, clean=False) as metadata:
            await fill(metadata, 9)
        (file,) = list_journal(disk, read_superblock(disk).store_id)
        offset = group_offset(disk, file.path, 4)
        disk.flip_bit(file.path, offset + at, 3)
        for _ in range(2):
            with pytest.raises(DamagedAt) as caught:
                async with opened(disk):
                    pass
            place = caught.value.damage
            assert (place.path, place.offset, place.sequence) == (file.path, offset, 4)

    run(scenario)


def test_a_spoilt_last_group_is_damage_after_a_clean_stop_and_torn_after_a_crash() -> None:
    async def scenario(clean: bool) -> None:
        disk = SimDisk(9)
        async with opened(disk, clean=clean) as metadata:
            await fill(metadata, 5)
        lose_index(disk)
        for path in disk.list_folder("checkpoints"):
            disk.unlink(f"checkpoints/{path}")
        (file,) = list_journal(disk, read_superblock(disk).store_id)
        for bit in (0, 3, 6):
            disk.flip_bit(file.path, group_offset(disk, file.path, 5) + 60, bit)
        async with opened(disk) as metadata:
            assert metadata.durable_sequence == 4

    run(lambda: scenario(clean=False))
    with pytest.raises(JournalDamaged, match="group 5 was durable"):
        run(lambda: scenario(clean=True))


def test_a_damaged_file_header_is_damage() -> None:
    async def scenario() -> None:
        disk = SimDisk(10)
        await filled_store(disk)
        file = list_journal(disk, read_superblock(disk).store_id)[-1]
        disk.flip_bit(file.path, 20, 1)
        with pytest.raises(JournalDamaged, match="header"):
            async with opened(disk):
                pass

    run(scenario)


def test_accepting_loss_gives_up_the_damaged_group_and_all_behind_it() -> None:
    async def scenario() -> None:
        disk = SimDisk(11)
        async with opened(disk, clean=False) as metadata:
            await fill(metadata, 6)
        async with opened(disk, clean=False) as metadata:
            await fill(metadata, 6, first=6)
        files = list_journal(disk, read_superblock(disk).store_id)
        disk.flip_bit(files[0].path, group_offset(disk, files[0].path, 4) + 60, 0)
        superblock = read_superblock(disk)
        identity = superblock.identity
        with pytest.raises(JournalDamaged):
            rebuild_store(disk, SimClock(), identity, superblock.clean_sequence, accept_loss=False)
        report = rebuild_store(disk, SimClock(), identity, superblock.clean_sequence, accept_loss=True)
        assert (report.lost_from, report.end_sequence, report.record_count) == (4, 3, 3)
        async with opened(disk) as metadata:
            assert sorted(key for _, key in contents(metadata)) == [name(0), name(1), name(2)]
            await fill(metadata, 3, first=50)
        async with opened(disk) as metadata:
            assert len(contents(metadata)) == 6

    run(scenario)


def test_a_rebuild_of_a_good_store_loses_nothing() -> None:
    async def scenario() -> None:
        disk = SimDisk(12)
        before = await filled_store(disk)
        superblock = read_superblock(disk)
        report = rebuild_store(disk, SimClock(), superblock.identity, superblock.clean_sequence, accept_loss=True)
        assert (report.lost_from, report.record_count) == (0, len(before))
        assert report.as_dict()["records"] == len(before)
        async with opened(disk) as metadata:
            assert metadata.rebuilt_because == ""
            assert contents(metadata) == before

    run(scenario)


def test_a_damaged_file_that_the_checkpoint_supersedes_is_set_aside_without_loss() -> None:
    async def scenario() -> None:
        disk = SimDisk(13)
        async with opened(disk, clean=False) as metadata:
            await fill(metadata, 3)
        (old,) = list_journal(disk, read_superblock(disk).store_id)
        file = disk.open(old.path, read_only=True)
        kept = bytearray(file.size())
        file.pread_into(memoryview(kept), 0)
        before = await filled_store(disk)
        file = disk.open(old.path, create=True)  # like a removal that was not durable
        file.pwrite(kept, 0)
        file.close()
        disk.flip_bit(old.path, 17, 1)
        superblock = read_superblock(disk)
        report = rebuild_store(disk, SimClock(), superblock.identity, superblock.clean_sequence, accept_loss=True)
        assert report.lost_from == 0
        async with opened(disk) as metadata:
            assert contents(metadata) == before

    run(scenario)


def test_a_damaged_checkpoint_matters_only_when_the_index_is_gone() -> None:
    async def scenario() -> None:
        disk = SimDisk(14)
        before = await filled_store(disk)
        checkpoint = newest_checkpoint(disk)
        assert checkpoint is not None
        disk.flip_bit(checkpoint.path, checkpoint.file_bytes // 2, 4)
        async with opened(disk, clean=False) as metadata:
            assert contents(metadata) == before
        lose_index(disk)
        for _ in range(2):  # the refusal leaves nothing open
            with pytest.raises(StoreDamaged, match="does not match its checksum"):
                async with opened(disk):
                    pass

    run(scenario)


# --- what only looked written ------------------------------------------------------------------------------


def test_a_group_seen_after_a_failed_sync_is_written_anew_before_it_counts() -> None:
    async def scenario() -> None:
        disk = SimDisk(15)
        async with opened(disk) as metadata:
            await fill(metadata, 3)
            disk.fail_next("sync_data", DiskFailed("the device failed"), path="journal")
            with pytest.raises(StoreReadOnly):
                await put(metadata, (Table.NAMES, b"doubtful", b"1"))
            assert metadata.failed is not None
        # The kernel shows the group though the medium may never get it.
        disk = disk.kill()
        async with opened(disk, clean=False) as metadata:
            seen = contents(metadata)
            assert (Table.NAMES, b"doubtful") in seen
            await put(metadata, (Table.NAMES, b"later", b"2"))
            seen = contents(metadata)
        disk = disk.crash()
        async with opened(disk) as metadata:
            assert contents(metadata) == seen

    run(scenario)


def test_an_open_that_fails_can_be_tried_again() -> None:
    async def scenario(disk: SimDisk) -> State:
        async with opened(disk) as metadata:
            return contents(metadata)

    disk = SimDisk(16)
    state: list[State] = []

    def step(body: Callable[[], Awaitable[State]]) -> None:
        async def one() -> None:
            state.append(await body())

        run(one)

    step(lambda: filled_store(disk, clean=False))
    for operation in ("open", "pwrite", "sync_data", "rename", "sync_folder"):
        disk.fail_next(operation, DiskFailed("once"), path="journal")
        with pytest.raises((LakeError, ExceptionGroup)):
            step(lambda: scenario(disk))
        step(lambda: scenario(disk))
        assert state[-1] == state[0]


def test_a_rebuild_in_many_batches_uses_pages_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(index_building, "OVERLAY_ENTRIES_MAX", 100)

    async def scenario() -> None:
        disk = SimDisk(18)
        rng = random.Random(18)
        async with opened(disk, clean=False) as metadata:
            for _ in range(60):
                await put(metadata, *[(Table.CHUNKS, rng.randbytes(36), bytes(44)) for _ in range(100)])
        superblock = read_superblock(disk)
        files = list_journal(disk, superblock.store_id)
        index = index_building.build_index(disk, superblock.identity, tmp_path / "index", Sequence(60), files)
        index.copy_to(tmp_path / "compact")
        assert index.file_bytes() < 4 * (tmp_path / "compact" / "data.mdb").stat().st_size
        index.close()

    run(scenario)


def test_a_clean_stop_gives_free_pages_of_the_index_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_COMPACT_BYTES_MIN", 0)

    async def scenario() -> None:
        disk = SimDisk(19)
        async with opened(disk) as metadata:
            for n in range(40):
                await put(metadata, *[(Table.NODES, b"%d/%d" % (n, m), bytes(3000)) for m in range(20)])
            await wait_applied(metadata)
            for n in range(39):
                await put(metadata, *[(Table.NODES, b"%d/%d" % (n, m), None) for m in range(20)])
            await wait_applied(metadata)
            before = contents(metadata)
            size = index_file(disk).stat().st_size
        assert index_file(disk).stat().st_size < size // 4
        async with opened(disk) as metadata:
            assert metadata.rebuilt_because == ""
            assert contents(metadata) == before

    run(scenario)


def test_the_superblock_of_an_open_store_is_not_clean() -> None:
    async def scenario() -> None:
        disk = SimDisk(17)
        async with opened(disk) as metadata:
            assert read_superblock(disk).clean_sequence is None
            assert NOT_CLEAN == 2**64 - 1
            await fill(metadata, 2)
        superblock = read_superblock(disk)
        assert superblock.clean_sequence == Sequence(2)
        write_superblock(disk, superblock)

    run(scenario)
