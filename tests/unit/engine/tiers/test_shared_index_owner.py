"""The shared index's owner: filled after start-up, right after every durable group, kept only over clean stops."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio

from engine.format.extents import Extent
from engine.format.layouts import Mutation
from engine.memory.backing import open_backing
from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_shared_index
from engine.store.store import Store
from engine.tiers.shared_index import WATCHED, SharedIndex
from lakefs.errors import ChunkDamaged, ConfigError, StoreLocked
from lakefs.host.memory_limits import memory_bytes
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.shared_index.table import SharedIndexReader
from lakefs.shared_index.table_format import HEADER_PAGE_BYTES, table_bytes, unpack_header
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_NONE, MEDIUM_SEGMENT
from tests.descriptors import descriptor_count
from tests.shared_index_check import check_shared_index, entries_of
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, delete, gc, put, records, run, simulated_store


@asynccontextmanager
async def indexed_store(
    disk: SimDisk | None = None, setting: str = "memory", entries: int = 800
) -> AsyncIterator[tuple[Store, SharedIndex, EmbeddedEngine]]:
    """Start a store with a shared index whose filling has begun."""
    async with simulated_store(disk) as store, trio.open_nursery() as nursery:
        await nursery.start(run_shared_index, store, setting, entries)
        assert store.shared_index is not None
        yield store, store.shared_index, client_of(store)
        nursery.cancel_scope.cancel()


async def _filled(index: SharedIndex) -> None:
    while index.state == "filling":  # noqa: ASYNC110 (time is simulated)
        await trio.sleep(0.01)


def _payloads(count: int, kind: bytes = b"n") -> list[bytes]:
    return [kind + b"%06d" % number * 4 for number in range(count)]


def test_what_is_put_is_in_it_once_it_is_durable_and_locate_answers_from_it() -> None:
    async def main() -> None:
        async with indexed_store() as (store, index, client):
            for payload in (*_payloads(3), b"large" * 40_000):
                await put(client, f"k{payload[:7].hex()}", payload)
            check_shared_index(store)
            assert index.table.count == 4
            chunks = [bytes(data_chunk_id(payload)) for payload in (*_payloads(3), b"large" * 40_000)]
            located = await ask(client, m.Locate(chunks), m.Located)
            assert index.statistics()["found"] == 4
            held = records(store)
            for chunk, grant in zip(chunks, located.grants, strict=True):
                record = held[ChunkId(chunk)]
                assert (grant.medium, grant.segment, grant.offset) == (MEDIUM_SEGMENT, record.segment, record.offset)
                assert (grant.stored_bytes, grant.logical_bytes) == (record.stored_bytes, record.logical_bytes)
                assert grant.crc == record.crc
            unknown = bytes(data_chunk_id(b"nobody put this"))
            mixed = await ask(client, m.Locate([unknown, chunks[0]]), m.Located)
            assert [grant.medium for grant in mixed.grants] == [MEDIUM_NONE, MEDIUM_SEGMENT]

    run(main)


def test_an_entry_comes_when_its_group_is_durable_and_not_before() -> None:
    async def main() -> None:
        async with indexed_store() as (store, index, client):
            seen: list[int] = []

            def observe(mutations: list[Mutation]) -> None:
                seen.append(index.table.count)
                index.records_durable(mutations)

            store.metadata.off_durable_records(index.records_durable)
            store.metadata.on_durable_records(WATCHED, observe)
            await put(client, "a", b"first")
            await put(client, "b", b"second")
            assert seen == [0, 1]
            assert index.table.count == 2

    run(main)


def test_a_store_that_was_there_before_is_walked_behind_the_start() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            for payload in _payloads(700):
                await put(client_of(store), payload.decode()[:7], payload)
        async with indexed_store(disk) as (store, index, client):
            assert index.state == "filling"
            assert index.table.count < 700
            await put(client, "beside", b"put beside the walk")
            await delete(client, "n000650")
            await gc(client)
            await _filled(index)
            assert index.state == "ready"
            assert index.table.count == 700
            check_shared_index(store)

    run(main)


def test_freed_chunks_are_gone_from_it_before_their_places_are_punched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with indexed_store() as (store, index, client):
            for payload in (b"stays", b"goes" * 30_000, b"one too"):
                await put(client, payload[:5].decode(), payload)
            await _filled(index)
            punch = store.segments.room.punch
            punched: list[int] = []

            async def looked_at(extents: list[Extent]) -> None:
                places = {(place[1], place[2]) for place in entries_of(store.shared_index).values()}
                assert not places & {(segment, offset) for segment, offset, _ in extents}
                punched.append(len(extents))
                await punch(extents)

            monkeypatch.setattr(store.segments.room, "punch", looked_at)
            await delete(client, "goesg", "one t")
            await gc(client)
            assert sum(punched) == 2
            assert list(entries_of(store.shared_index)) == [data_chunk_id(b"stays")]
            check_shared_index(store)

    run(main)


def test_a_quarantined_chunk_is_not_in_it_until_it_is_stored_anew() -> None:
    async def main() -> None:
        async with indexed_store() as (store, index, client):
            await put(client, "k", b"payload")
            chunk = data_chunk_id(b"payload")
            assert index.table.find(chunk) is not None
            await store.quarantine.note(chunk, records(store)[chunk], ChunkDamaged("rot"))
            assert index.table.find(chunk) is None
            check_shared_index(store)
            await put(client, "k", b"payload")
            found = index.table.find(chunk)
            assert found is not None
            assert found[2] == records(store)[chunk].offset
            check_shared_index(store)

    run(main)


def test_moved_chunks_are_found_at_their_new_places() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            for number in range(40):
                await put(client_of(store), f"k{number}", b"%05d" % number * 6_000)
            await delete(client_of(store), *[f"k{number}" for number in range(40) if number % 3])
        async with indexed_store(disk) as (store, index, _):
            await _filled(index)
            before = entries_of(store.shared_index)
            done = await store.collect(0.97)
            assert done.compaction.moved_chunks > 0
            after = entries_of(store.shared_index)
            assert any(after[chunk] != before[chunk] for chunk in after)
            check_shared_index(store)

    run(main)


def test_a_full_table_is_counted_and_everything_goes_on() -> None:
    async def main() -> None:
        async with indexed_store(entries=10) as (_, index, client):
            most = index.statistics()["entries_max"]
            for payload in _payloads(most + 20):
                await put(client, payload.decode()[:7], payload)
            assert index.table.count == most
            assert index.statistics()["refused"] == 20
            assert index.state == "full"
            last = bytes(data_chunk_id(_payloads(most + 20)[-1]))
            located = await ask(client, m.Locate([last]), m.Located)
            assert located.grants[0].medium == MEDIUM_SEGMENT

    run(main)


def test_a_table_that_sizes_itself_grows_and_its_readers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.shared_index_life.HOT_INDEX_ENTRIES_MIN", 10)

    async def main() -> None:
        async with indexed_store(entries=0) as (store, index, client):
            descriptor = index.backing.descriptor
            assert descriptor is not None
            reader = SharedIndexReader(descriptor)
            payloads = _payloads(index.statistics()["entries_max"] + 20)
            for payload in payloads:
                await put(client, payload.decode()[:7], payload)
            await trio.sleep(1)
            assert (index.counts.grown, index.state) == (1, "ready")
            assert index.table.count == len(payloads)
            assert not reader.is_current
            assert reader.find(data_chunk_id(payloads[0])) is None
            assert index.backing.descriptor is not None
            again = SharedIndexReader(index.backing.descriptor)
            assert again.is_current
            assert all(again.find_many([data_chunk_id(payload) for payload in payloads]))
            index.counts.refused = 0
            check_shared_index(store)

    run(main)


def test_memory_that_allows_no_larger_table_leaves_it_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiers.owned_table.memory_bytes", lambda: 16 * table_bytes(1024))

    async def main() -> None:
        async with indexed_store(entries=0) as (_, index, client):
            assert index.statistics()["entries_max"] == 819
            for payload in _payloads(830):
                await put(client, payload.decode()[:7], payload)
            await trio.sleep(1)
            assert (index.state, index.counts.grown) == ("full", 0)
        async with indexed_store(entries=5_000) as (_, index, _):
            assert index.statistics()["note"].startswith("memory allows 819 entries, not 5000")

    run(main)


# --- kept tables ---------------------------------------------------------------------------------------


def _kept(path: Path, change: Callable[[], None] = lambda: None) -> bool:
    """Put three chunks, stop cleanly, call `change`, start again; return whether the kept index is used."""
    told: list[bool] = []

    async def main() -> None:
        disk = SimDisk()
        async with indexed_store(disk, str(path)) as (_, index, client):
            for payload in _payloads(3):
                await put(client, payload.decode()[:7], payload)
            await _filled(index)
        change()
        async with indexed_store(disk, str(path)) as (store, index, _):
            told.append(index.was_kept)
            await _filled(index)
            check_shared_index(store)
            assert index.table.count == 3

    run(main)
    return told[0]


def test_a_kept_table_is_used_again_after_a_clean_stop(tmp_path: Path) -> None:
    assert _kept(tmp_path / "hot-index")


@pytest.mark.parametrize(
    "damage",
    [8, 0, 56, 24, 40, "entry", "cut"],
    ids=["version", "magic", "sequence", "store", "boot", "torn entry", "cut"],
)
def test_a_kept_table_that_is_not_that_of_the_clean_stop_is_made_anew(tmp_path: Path, damage: int | str) -> None:
    path = tmp_path / "hot-index"

    def change() -> None:
        content = bytearray(path.read_bytes())
        slot = next(at for at in range(20_480, len(content), 64) if any(content[at : at + 64]))
        if damage == "cut":
            del content[slot:]
        elif isinstance(damage, int):
            content[damage] ^= 0xFF
        else:
            content[slot + 50] ^= 1
        path.write_bytes(content)

    with structlog.testing.capture_logs() as logs:
        assert not _kept(path, change)
    told = [line["reason"] for line in logs if line["event"] == "the kept shared index is made anew"]
    assert len(told) == 1
    assert told[0]


def test_the_file_says_that_it_is_in_use_so_that_a_crash_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "hot-index"

    async def main() -> None:
        disk = SimDisk()
        async with indexed_store(disk, str(path)) as (_, index, client):
            await put(client, "k", b"payload")
            await _filled(index)
        kept = path.read_bytes()
        header = unpack_header(kept[:HEADER_PAGE_BYTES])
        assert header.entry_count == 1
        with pytest.raises(RuntimeError, match="as a crash"):
            async with indexed_store(disk, str(path)):
                assert path.read_bytes() == b""
                raise RuntimeError("as a crash")
        async with indexed_store(disk, str(path)) as (_, index, _):
            assert not index.was_kept
            await _filled(index)
        # An old copy that somebody puts back is that of another clean stop.
        path.write_bytes(kept)
        async with indexed_store(disk, str(path)) as (store, index, _):
            assert not index.was_kept
            await _filled(index)
            assert index.table.count == 1, "what the old copy held counts"
            check_shared_index(store)
        async with indexed_store(disk, str(path)) as (_, index, _):
            assert index.was_kept

    run(main)


@pytest.mark.parametrize("content", [b"weights of a model", b"LAK", b"LAKESEGM" + bytes(4096)])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is a file of something else"):
        open_backing(str(path), table_bytes(1024))
    assert path.read_bytes() == content


def test_a_device_that_is_not_there_is_refused_and_no_file_made_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.memory.backing._DEVICES", tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        open_backing(str(tmp_path / "dax0.0"), table_bytes(1024))
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_to_its_end_leaves_nothing_of_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot-index"
    path.write_bytes(b"LAKEHOTI" + b"x" * (table_bytes(1024) - 8))
    pread = os.preadv

    def failing(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return pread(file, buffers, offset)

    monkeypatch.setattr("engine.memory.backing._COPY_BYTES", 4096)
    monkeypatch.setattr("engine.memory.backing.os.preadv", failing)
    backing = open_backing(str(path), table_bytes(1024))
    assert not backing.is_old
    assert not any(backing.memory[: table_bytes(1024)])
    backing.close()


def test_readers_are_told_that_the_engine_has_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        for setting in ("memory", str(tmp_path / "hot-index")):
            async with indexed_store(setting=setting) as (_, index, client):
                await put(client, "k", b"payload")
                assert index.backing.descriptor is not None
                reader = SharedIndexReader(index.backing.descriptor)
                assert reader.is_current
            assert not reader.is_current

    run(main)


def test_two_engines_do_not_share_a_file_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hot-index"
    backing = open_backing(str(path), table_bytes(1024))
    with pytest.raises(StoreLocked, match="shared index of another engine"):
        open_backing(str(path), table_bytes(1024))
    backing.close()
    open_backing(str(path), table_bytes(1024)).close()
    for wrong in (tmp_path, tmp_path / "no" / "folder", Path("/dev/null")):
        with pytest.raises(ConfigError):
            open_backing(str(wrong), table_bytes(1024))


def test_a_device_is_refused_without_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a device may change it."""
    link = tmp_path / "hot-index"
    link.symlink_to("/dev/zero")
    monkeypatch.setattr("engine.memory.backing.os.open", None)
    for device in ("/dev/zero", str(link)):
        with pytest.raises(ConfigError, match=f"{device} is a device, .* only a DAX device.*: name a file") as caught:
            open_backing(device, table_bytes(1024))
        assert caught.value.subject == device


def test_a_file_that_takes_no_writes_is_refused_at_the_start_and_not_noticed_at_the_stop() -> None:
    """Files on hugetlbfs are like this: they can only be mapped."""
    descriptor = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    path = f"/proc/self/fd/{descriptor}"
    with pytest.raises(ConfigError, match=f"hot_index: {path}: Invalid argument"):
        open_backing(path, table_bytes(1024))
    os.close(descriptor)


def test_a_path_that_cannot_be_used_after_all_is_an_error_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot-index"
    monkeypatch.setattr("engine.memory.backing._may_be_ours", lambda _: os.ftruncate(-1, 0))
    before = descriptor_count()
    with pytest.raises(ConfigError, match=f"hot_index: {path}: Bad file descriptor"):
        open_backing(str(path), table_bytes(1024))
    with pytest.raises(ConfigError, match="null"):
        open_backing("with\0null", table_bytes(1024))
    assert descriptor_count() == before


def test_without_huge_pages_others_serve_and_that_is_said() -> None:
    backing = open_backing("memory", table_bytes(1024))
    assert backing.kind == "huge pages" or "no huge pages" in backing.note
    assert len(backing.memory) % (2 << 20) == 0
    backing.close()


def test_the_limits_of_control_groups_count_at_every_level(tmp_path: Path) -> None:
    inner = tmp_path / "system.slice" / "lake.service"
    inner.mkdir(parents=True)
    own = tmp_path / "self" / "cgroup"
    own.parent.mkdir()
    own.write_text("0::/system.slice/lake.service\n")
    machine = memory_bytes(tmp_path / "absent", tmp_path)
    assert memory_bytes(tmp_path, tmp_path) == machine
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path, tmp_path) == 1048576
    (inner / "memory.max").write_text("4096\n")
    assert memory_bytes(tmp_path, tmp_path) == 4096
    own.write_text("12:memory:/old\n")
    assert memory_bytes(tmp_path, tmp_path) == machine
