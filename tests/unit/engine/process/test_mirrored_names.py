"""Names of a lake on simulated devices: what was acknowledged outlives devices, and copies are kept at their number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from engine.format.layouts import GROUP_HEADER
from engine.mirror.copy_folders import best_folders
from engine.mirror.copy_keeper import RESPREAD_S
from engine.mirror.mirror_opening import make_mirror
from engine.store.names_opening import open_names_store
from engine.store.opening import open_store
from engine.tables.index_folder import remove_index
from engine.tables.lmdb_index import Index
from lakefs.errors import DiskFailed, StoreUnusable
from lakefs.host.offload import InlineOffload
from lakefs.limits import MIB
from tests.contract.engines import LAKE
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.store_rig import SMALL_SIZES, run
from tests.unit.engine.process.names_machine import Machine, SimFolder, bind, good_copies, keys_of, until
from tests.unit.support.metadata_rig import NAMES_OF


async def made(machine: Machine, *keys: str, losses: int = 2) -> None:
    """Make names, bind keys, and stop."""
    async with machine.open(is_new=True, losses=losses) as names:
        await bind(names.store, *keys)


def test_names_are_made_on_m_plus_one_devices_and_found_there_again() -> None:
    async def main() -> None:
        machine = Machine("abcdef")
        await made(machine, "k", losses=1)
        async with machine.open(losses=1) as names:
            assert await keys_of(names.store) == ["k"]
            assert good_copies(names) == "ab"
            state = names.state()
            assert (state["wanted"], state["devices"], state["outlives_devices"]) == (2, 2, 1)
            assert names.store.metadata.stamps is None

    run(main)


def test_folders_of_one_device_have_a_second_copy_only_where_there_is_no_other_device() -> None:
    machine = Machine("abcd", devices={"a": 1, "b": 1, "c": 2, "d": 1})
    folders = [SimFolder(machine, name) for name in "abcd"]

    def best(count: int, taken: str = "", last: str = "") -> str:
        return "".join(folder.name for folder in best_folders(folders, count, taken, last))

    assert (best(2), best(3), best(9)) == ("ac", "acb", "acbd")
    assert (best(1, "a"), best(1, "c"), best(1, "c", "a")) == ("c", "a", "b")
    machine.lose("c")
    assert best(1, "a") == "b"

    async def main() -> None:
        async with machine.open(is_new=True) as names:
            assert good_copies(names) == "abd"
            assert names.state()["outlives_devices"] == 0

    run(main)


def test_a_device_that_is_added_while_names_serve_gets_the_copy_that_is_missing() -> None:
    async def main() -> None:
        machine = Machine("ab")
        async with machine.open(is_new=True) as names:
            await bind(names.store, "k")
            assert (good_copies(names), names.state()["wanted"]) == ("ab", 2)
            machine.disks["c"], machine.devices["c"] = machine.empty_disk(), 7
            for _ in range(2):
                names.add_folder(SimFolder(machine, "c"))
            await until(lambda: good_copies(names) == "abc")
            assert (names.state()["wanted"], names.state()["outlives_devices"]) == (3, 2)
        machine.lose("a")
        async with machine.open() as names:
            assert await keys_of(names.store) == ["k"], "two of three are more than half"

    run(main)


def test_copies_that_share_a_device_are_spread_when_another_device_is_added() -> None:
    async def main() -> None:
        machine = Machine("abc", devices={"a": 1, "b": 1, "c": 1})
        async with machine.open(is_new=True) as names:
            await bind(names.store, "k")
            machine.disks["d"], machine.devices["d"] = machine.empty_disk(), 2
            names.add_folder(SimFolder(machine, "d"))
            await until(lambda: names.state()["outlives_devices"] == 1)
            assert (len(good_copies(names)), good_copies(names)[-1]) == (3, "d")
            index = names.state()["index_in"]
            await trio.sleep(2 * RESPREAD_S)
            assert good_copies(names)[-1] == "d", "two of three are on one device, and there is no third"
            assert names.state()["index_in"] == index, "the index stays where it is"
            await bind(names.store, "l")
        async with machine.open() as names:
            assert await keys_of(names.store) == ["k", "l"]

    run(main)


def test_copies_stay_where_they_are_when_no_copy_can_be_made_on_the_new_device() -> None:
    async def main() -> None:
        machine = Machine("ab", devices={"a": 1, "b": 1})
        async with machine.open(is_new=True, losses=1) as names:
            machine.disks["c"], machine.devices["c"] = SimDisk(machine.rng, capacity_bytes=MIB), 2  # too small
            names.add_folder(SimFolder(machine, "c"))
            await trio.sleep(RESPREAD_S / 2)
            assert good_copies(names) == "ab"
            await bind(names.store, "k")

    run(main)


def test_names_are_not_made_where_an_old_lake_has_none_and_a_second_beginning_opens_the_first() -> None:
    async def main() -> None:
        machine = Machine()
        with pytest.raises(StoreUnusable, match="lie on other devices than these: a, b, c; give all --data folders"):
            async with machine.open():
                pass
        await made(machine, "k")
        async with machine.open(is_new=True) as names:
            assert await keys_of(names.store) == ["k"]
        with pytest.raises(StoreUnusable, match="holds the names of another lake"):
            async with machine.open(is_new=True, lake=b"another lake too"):
                pass

    run(main)


def test_folders_that_were_prepared_and_never_filled_are_no_names_of_an_old_lake() -> None:
    async def main() -> None:
        machine = Machine("ab")
        make_mirror(machine.disks)
        with pytest.raises(StoreUnusable, match="no store here"):
            async with machine.open():
                pass
        await made(machine, "k")

    run(main)


def test_folders_of_two_lakes_are_refused() -> None:
    async def main() -> None:
        machine, other = Machine("abc"), Machine("abc")
        await made(machine, "k")
        await made(other, "k")
        machine.disks["c"] = other.disks["c"]
        with pytest.raises(StoreUnusable, match="belong to different lakes"):
            async with machine.open():
                pass

    run(main)


@pytest.mark.parametrize("copied", [False, True])
def test_no_store_is_opened_in_the_role_of_another(copied: bool) -> None:
    """`copied`: the folder is one of a mirror's, whose lock file has another number than its superblock says."""

    async def opened(disk: SimDisk, *, has_names: bool, cluster_id: bytes) -> None:
        if has_names:
            names = open_names_store(disk, SimClock(), InlineOffload(), cluster_id=cluster_id, create=True)
            async with names:
                pass
        else:
            async with open_store(disk, SimClock(), InlineOffload(), sizes=SMALL_SIZES, cluster_id=cluster_id):
                pass

    async def refused(disk: SimDisk, match: str, *, has_names: bool, cluster_id: bytes) -> None:
        with pytest.raises(StoreUnusable, match=match):
            await opened(disk, has_names=has_names, cluster_id=cluster_id)

    async def main() -> None:
        machine = Machine("a")
        if copied:
            await made(machine, losses=0)
        else:
            await opened(machine.disks["a"], has_names=True, cluster_id=NAMES_OF)
        of_names = "copies of the names of the lake" if copied else "holds the names of the lake"
        await refused(machine.disks["a"], of_names, has_names=False, cluster_id=bytes(16))
        await refused(machine.disks["a"], of_names, has_names=False, cluster_id=NAMES_OF)
        other = "copies of the names" if copied else "names of another lake"
        await refused(machine.disks["a"], other, has_names=True, cluster_id=LAKE)
        for cluster_id, match in ((bytes(16), "store of one engine"), (NAMES_OF, "is a member of the lake")):
            disk = SimDisk()
            await opened(disk, has_names=False, cluster_id=cluster_id)
            if copied:
                machine = Machine("a")
                machine.disks["a"] = disk
                with pytest.raises(StoreUnusable, match="a is not empty"):
                    await made(machine)
            else:
                await refused(disk, match, has_names=True, cluster_id=NAMES_OF)

    run(main)


@pytest.mark.parametrize("crashing", "ab")
def test_a_crash_at_any_step_of_the_first_opening_leaves_names_that_open_or_are_made(crashing: str) -> None:
    steps = 0
    for step in range(1, 400, 7):
        machine = Machine("ab", step)
        machine.disks[crashing].crash_at = step
        crashed = False
        try:
            run(lambda: made(machine, "k", losses=1))  # noqa: B023 - called at once
        except* SimCrashed:
            crashed = True
        machine.crash()

        async def again() -> None:
            async with machine.open(losses=1, is_new=True, verify_index=True) as names:  # noqa: B023
                await bind(names.store, "l")
                assert (await keys_of(names.store))[-1] == "l"
                assert good_copies(names) == "ab"
                await names.store.index_looked_at.wait()
                assert names.store.index_verified

        run(again)
        steps += crashed
        if not crashed:
            break
    assert steps > 5


def test_a_device_that_is_gone_at_the_start_is_replaced_and_is_stale_when_it_returns() -> None:
    async def main() -> None:
        machine = Machine("abcd")
        await made(machine, "1")
        lost = machine.lose("b")
        async with machine.open() as names:
            await until(lambda: good_copies(names) == "acd")
            await bind(names.store, "2")
            assert names.state()["outlives_devices"] == 2
        machine.disks["b"] = lost
        async with machine.open() as names:
            assert good_copies(names) == "acd"
            assert await keys_of(names.store) == ["1", "2"]
        assert not machine.aside
        stale = Machine("b")
        stale.disks["b"] = lost
        with pytest.raises(StoreUnusable, match=re.escape(f"--without {machine.copy_id('a').hex()}")):
            async with stale.open():
                pass

    run(main)


def test_a_stale_folder_is_set_aside_for_a_new_copy_where_there_is_no_other() -> None:
    async def main() -> None:
        machine = Machine("abc")
        await made(machine, "1")
        stale = machine.lose("b")
        async with machine.open() as names:
            await bind(names.store, "2")
        machine.disks["b"] = stale
        async with machine.open() as names:
            await until(lambda: good_copies(names) == "abc")
            await bind(names.store, "3")
        assert machine.aside == {"b": stale}
        machine.lose("a")
        async with machine.open() as names:
            assert await keys_of(names.store) == ["1", "2", "3"]

    run(main)


def test_a_copy_that_fails_while_names_serve_is_made_anew_elsewhere_then_in_its_own_folder() -> None:
    async def main() -> None:
        machine = Machine("abcd")
        async with machine.open(is_new=True) as names:
            machine.disks["b"].fail_next("sync_data", DiskFailed("planted"))
            await bind(names.store, "1")
            assert good_copies(names) == "ac"
            await until(lambda: good_copies(names) == "acd")
            assert not machine.aside
            machine.disks["c"].fail_next("sync_data", DiskFailed("planted"))
            await bind(names.store, "2")
            await until(lambda: good_copies(names) in ("abd", "acd"))
            await bind(names.store, "3")
            assert len(machine.aside) == 1
        machine.crash()
        machine.lose("d")
        async with machine.open() as names:
            assert await keys_of(names.store) == ["1", "2", "3"]

    run(main)


@pytest.mark.parametrize("error", [DiskFailed("planted"), FileNotFoundError("planted"), FileExistsError("planted")])
def test_a_folder_where_no_copy_can_be_made_gives_way_to_another_and_is_tried_again_later(error: Exception) -> None:
    async def main() -> None:
        machine = Machine("abcd")
        await made(machine, "1")
        machine.disks["d"].fail_next("open", error)
        machine.disks["c"].fail_next("sync_data", DiskFailed("planted"), skip=1)
        async with machine.open() as names:
            await until(lambda: len(good_copies(names)) == 3)
            assert good_copies(names) == "abc"  # its own folder again, as d has failed
            machine.lose("c").fail_next("sync_data", DiskFailed("planted"))
            await bind(names.store, "2")
            assert good_copies(names) == "ab"
            await until(lambda: good_copies(names) == "abd")

    run(main)


@pytest.mark.parametrize("folder", ["journal", "checkpoints"])
def test_a_damaged_journal_or_checkpoint_is_read_from_another_copy(folder: str) -> None:
    async def main() -> None:
        machine = Machine("ab")
        with trio.CancelScope() as killed:
            async with machine.open(is_new=True, losses=1) as names:
                metadata = names.store.metadata
                for number in range(10):
                    await bind(names.store, f"{number}")
                await until(lambda: metadata.applied_sequence == metadata.durable_sequence)
                if folder == "checkpoints":
                    await metadata.checkpoint()
                killed.cancel()
                await trio.lowlevel.checkpoint()
        remove_index(Path(machine.disks["a"].local_path("index")))
        path = f"{folder}/{machine.disks['a'].list_folder(folder)[0]}"
        machine.disks["a"].flip_bit(path, 4096 + GROUP_HEADER.size + 9 if folder == "journal" else 100, 3)
        async with machine.open(losses=1) as names:
            assert len(await keys_of(names.store)) == 10
            assert {copy["state"] for copy in names.state()["copies"]} == {"good", "suspect"}

    run(main)


def test_the_index_moves_when_its_device_is_lost_and_commits_go_on() -> None:
    async def main() -> None:
        machine = Machine("abc")
        async with machine.open(is_new=True) as names:
            await bind(names.store, *[f"a{number:03}" for number in range(30)])
            assert names.state()["index_in"] == "a"
            machine.disks["a"].fail_next("sync_data", DiskFailed("planted"))
            await bind(names.store, "b")
            await until(lambda: len(good_copies(names)) == 3)
            assert names.state()["index_in"] != "a"
            await bind(names.store, "c")
            metadata = names.store.metadata
            await until(lambda: metadata.applied_sequence == metadata.durable_sequence)
            assert len(await keys_of(names.store)) == 32
            await metadata.verify_index()
            assert metadata.failed is None
        async with machine.open() as names:
            assert len(await keys_of(names.store)) == 32

    run(main)


def test_an_index_that_cannot_be_written_is_rebuilt_on_another_copy_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        machine = Machine("abcdef")

        def cannot(*_: object) -> None:
            raise DiskFailed("planted")

        async with machine.open(is_new=True) as names:
            metadata = names.store.metadata
            for number, then in enumerate("bcc"):
                await until(lambda: metadata.applied_sequence == metadata.durable_sequence)
                monkeypatch.setattr(metadata._tables.index, "apply", cannot)
                await bind(names.store, f"{number}")
                await until(
                    lambda: metadata.failed is not None or metadata.applied_sequence == metadata.durable_sequence
                )
                assert names.state()["index_in"] == then
                assert (metadata.failed is None) == (number < 2)
                await until(lambda: len(good_copies(names)) == 3)
        async with machine.open() as names:
            assert await keys_of(names.store) == ["0", "1", "2"]

    run(main)


@pytest.mark.parametrize("seconds", [0, 1.05, 1.2, 2.5])
def test_names_stop_while_the_index_cannot_be_written(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the index, if it has begun to move or not."""

    async def main() -> None:
        machine = Machine("abc")

        def cannot(*_: object) -> None:
            raise DiskFailed("planted")

        with trio.fail_after(100):
            async with machine.open(is_new=True) as names:
                await bind(names.store, "1")
                monkeypatch.setattr(Index, "apply", cannot)
                await bind(names.store, "2")
                await trio.sleep(seconds)
        monkeypatch.undo()
        async with machine.open() as names:
            assert await keys_of(names.store) == ["1", "2"]

    run(main)
