"""The end of heads' rights, kept past the end of a process: names that were killed wait for it, and for no more."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from engine.metadata.head_turns import RIGHT_S, RIGHTS_OVER_S, HeadTurns
from engine.metadata.metadata_store import Metadata
from engine.store import given_rights
from engine.store.given_rights import GIVEN_RIGHTS, NOTHING_KEPT, GivenRights, RightsInMemory
from engine.superblock.superblock import Superblock
from lakefs.ids import BootId, EngineId, StoreId
from tests.names_rig import names_store
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import run
from tests.turns_rig import names_with

FIRST = Superblock(
    store_id=StoreId(b"s" * 16),
    engine_id=EngineId(b"e" * 16),
    boot_id=BootId(b"1" * 16),
    identity_inode=1,
    created_ns=0,
    clean_sequence=None,
    domains=(b"d" * 16,),
)
SECOND = replace(FIRST, boot_id=BootId(b"2" * 16), boot_before=FIRST.boot_id)
NAME = f"lake-rights-{FIRST.store_id.hex()}"


@pytest.fixture
def memory() -> Iterator[Path]:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("this machine has no files in memory")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


# --- records -------------------------------------------------------------------------------------------


def test_the_next_process_finds_the_last_end(memory: Path) -> None:
    assert RightsInMemory(memory).last_end(SECOND) is None
    record = RightsInMemory(memory).begin(FIRST, float("-inf"))
    assert RightsInMemory(memory).last_end(SECOND) == 0
    for end in (1.25, 12345678.000000001):
        record.keep(end)
        found = RightsInMemory(memory).last_end(SECOND)
        assert found is not None
        assert end <= found < end + 1e-6
    RightsInMemory(memory).begin(SECOND, 17.0)
    assert RightsInMemory(memory).last_end(replace(SECOND, boot_before=SECOND.boot_id)) == 17
    assert os.listdir(memory) == [NAME]
    assert os.stat(memory / NAME).st_mode & 0o777 == 0o600
    record.remove()
    record.remove()
    assert RightsInMemory(memory).last_end(SECOND) is None
    assert not os.listdir(memory)


def test_a_record_of_another_opening_store_boot_or_time_namespace_is_unknown(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = RightsInMemory(memory)
    kept.begin(FIRST, 5.0)
    assert kept.last_end(SECOND) == 5
    assert kept.last_end(replace(SECOND, boot_before=b"0" * 16)) is None
    assert kept.last_end(replace(SECOND, boot_before=b"")) is None
    assert kept.last_end(replace(SECOND, store_id=StoreId(b"t" * 16))) is None
    other_boot = tmp_path / "boot_id"
    other_boot.write_text("b5a1bb1e-0000-4000-8000-000000000000\n")
    for name, path in (
        ("_MACHINE_BOOT", other_boot),
        ("_MACHINE_BOOT", tmp_path / "none"),
        ("_TIME_NAMESPACE", tmp_path),
        ("_TIME_NAMESPACE", tmp_path / "none"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(given_rights, name, path)
            assert kept.last_end(SECOND) is None
    assert kept.last_end(SECOND) == 5


def test_a_record_that_is_damaged_cut_or_may_be_another_users_is_unknown(memory: Path) -> None:
    kept, path = RightsInMemory(memory), memory / NAME
    kept.begin(FIRST, 5.0)
    whole = path.read_bytes()
    for offset in range(GIVEN_RIGHTS.offset_of("magic"), GIVEN_RIGHTS.size):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert kept.last_end(SECOND) is None, offset
    for odd in (b"", whole[:8], whole[:-1]):
        path.write_bytes(odd)
        assert kept.last_end(SECOND) is None
    path.write_bytes(whole)
    path.chmod(0o620)
    assert kept.last_end(SECOND) is None
    path.chmod(0o600)
    assert kept.last_end(SECOND) == 5
    path.rename(memory / "elsewhere")
    path.symlink_to(memory / "elsewhere")
    assert kept.last_end(SECOND) is None
    path.unlink()
    os.mkfifo(path)
    assert kept.last_end(SECOND) is None


def test_a_record_of_another_user_is_unknown(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RightsInMemory(memory)
    kept.begin(FIRST, 5.0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kept.last_end(SECOND) is None


def test_nothing_is_kept_where_there_is_no_memory_for_files(
    tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (memory / "none", memory):
        with monkeypatch.context() as patched:
            patched.setattr(given_rights, "MEMORY_FILE_SYSTEMS", ())
            record = RightsInMemory(folder).begin(FIRST, 5.0)
        record.keep(6.0)
        record.remove()
        assert RightsInMemory(folder).last_end(SECOND) is None
        assert "will wait a second for rights of heads" in capsys.readouterr().out
    assert not os.listdir(memory)


def test_what_an_earlier_process_left_half_made_is_in_nobodys_way(memory: Path) -> None:
    (memory / f"{NAME}.new").write_bytes(b"half")
    RightsInMemory(memory).begin(FIRST, 5.0)
    assert RightsInMemory(memory).last_end(SECOND) == 5
    assert os.listdir(memory) == [NAME]


# --- names ---------------------------------------------------------------------------------------------


async def killed(disk: SimDisk, kept: GivenRights, before: Callable[[], None] = lambda: None) -> None:
    """Open the names, let a head have a right, and kill them; `before` is called while it has."""
    with trio.CancelScope() as life:
        async with names_store(disk, kept) as store, names_with(store):
            await trio.sleep(10)
            before()
            life.cancel()
            await trio.lowlevel.checkpoint()


def overwrite_end(path: Path) -> None:
    """Let a record have an end that is far ahead."""
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


@asynccontextmanager
async def opened_after(disk: SimDisk, kept: GivenRights) -> AsyncIterator[float]:
    """Open the names; yields how long that took."""
    began = trio.current_time()
    async with names_store(disk, kept):
        yield trio.current_time() - began


def test_killed_names_wait_for_the_last_right_and_for_no_more(memory: Path) -> None:
    async def main() -> None:
        kept = RightsInMemory(memory)
        disk = SimDisk()
        await killed(disk, kept)
        async with opened_after(disk, kept) as waited_s:
            assert RIGHT_S - 0.31 < waited_s <= RIGHTS_OVER_S
        await killed(disk, kept)
        await trio.sleep(0.5)
        async with opened_after(disk, kept) as waited_s:
            assert RIGHT_S - 0.81 < waited_s <= RIGHTS_OVER_S - 0.5
        await killed(disk, kept)
        await trio.sleep(RIGHTS_OVER_S)
        async with opened_after(disk, kept) as waited_s:
            assert waited_s == 0

    run(main)


def test_names_that_gave_no_right_wait_for_nothing_when_they_were_killed(memory: Path) -> None:
    async def main() -> None:
        kept = RightsInMemory(memory)
        disk = SimDisk()
        with trio.CancelScope() as life:
            async with names_store(disk, kept):
                life.cancel()
                await trio.lowlevel.checkpoint()
        async with opened_after(disk, kept) as waited_s:
            assert waited_s == 0
        assert not os.listdir(memory), "a clean stop leaves nothing"

    run(main)


def test_names_that_are_killed_while_they_wait_wait_anew_for_the_same_end(memory: Path) -> None:
    async def main() -> None:
        kept = RightsInMemory(memory)
        disk = SimDisk()
        await killed(disk, kept)
        began = trio.current_time()
        for _ in range(3):
            with trio.move_on_after(0.1):
                async with names_store(disk, kept):
                    raise AssertionError("rights last")
        async with names_store(disk, kept):
            assert RIGHT_S - 0.31 < trio.current_time() - began <= RIGHTS_OVER_S

    run(main)


def test_no_record_lets_names_wait_for_longer_than_the_longest_right(memory: Path) -> None:
    async def main() -> None:
        kept = RightsInMemory(memory)
        disk = SimDisk()
        await killed(disk, kept)
        overwrite_end(memory / os.listdir(memory)[0])
        async with opened_after(disk, kept) as waited_s:
            assert waited_s == pytest.approx(RIGHTS_OVER_S)

    run(main)


@pytest.mark.parametrize("is_kept", [True, False])
def test_names_do_not_lead_and_end_no_lease_before_all_rights_are_over(memory: Path, is_kept: bool) -> None:
    async def main() -> None:
        kept: GivenRights = RightsInMemory(memory) if is_kept else NOTHING_KEPT
        disk = SimDisk()
        entered: list[float] = []

        @asynccontextmanager
        async def leading(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
            entered.append(trio.current_time())
            yield

        await killed(disk, kept)
        began = trio.current_time()
        async with names_store(disk, kept, leading):
            assert entered[0] - began > RIGHT_S - 0.31

    run(main)


def test_the_end_of_a_right_is_kept_before_the_right_is_given() -> None:
    async def main() -> None:
        ends: list[float] = []
        turns = HeadTurns(SimClock(), keep_end=ends.append)
        head = turns.open(0)
        given: list[float] = []
        for _ in range(3):
            turns.follow(head, 0, lambda followed: given.append(max(ends) - trio.current_time() - followed.right_s))
            await trio.sleep(0.3)
        assert len(given) == 3
        assert min(given) > 0.04, "it is kept as the names count it, which is longer"
        assert ends == sorted(ends)

    run(main)
