"""Multipart uploads and access keys beside gc, over crashes, lost indexes and time, and fsck's findings about them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

import pytest
import trio

from engine.chunks.manifests import HeldBlob
from engine.format.features import ReadOnlyFeature
from engine.format.layouts import Table, chunk_key
from engine.namespace.buckets import find_bucket
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from engine.superblock import superblock as superblock_module
from engine.tables.views import Transaction
from engine.uploads.keys import object_parts_key, part_key, upload_key
from engine.uploads.lifecycle import UploadRef, put_part as decide_part
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import ChunkNotFound, StoreReadOnly, UploadNotFound
from lakefs.host.offload import InlineOffload
from lakefs.ids import BlobId, ChunkId, data_chunk_id
from lakefs.lake.multipart import UploadName
from lakefs.limits import MANIFEST_FANOUT, PART_NUMBER_MAX
from lakefs.wire import messages as m
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.store_rig import (
    SMALL_SIZES,
    ask,
    client_of,
    delete,
    fsck,
    gc,
    put,
    read,
    records,
    run,
    session_of,
    simulated_store,
    store_chunks,
    tamper,
)
from tests.unit.engine.upkeep.test_gc import race

SHORT_PARTS: Final = replace(SMALL_SIZES, part_bytes_min=1)
PAYLOAD: Final = b"p" * 70_000
DAY_NS: Final = 86_400 * 1_000_000_000


def lake_of(store: Store) -> TrioLake:
    return TrioLake(client_of(store), InlineOffload())


async def begin(lake: TrioLake, name: str = "bkt/k") -> UploadName:
    if not await lake.exists("bkt/"):
        await lake.create_bucket("bkt")
    return await lake.create_upload(name)


def md5(payload: bytes) -> bytes:
    return hashlib.md5(payload).digest()


@asynccontextmanager
async def crashing_store(disk: SimDisk) -> AsyncIterator[Store]:
    """Leave the store as it is at the end of the block, for `disk.crash` to make a power loss of that."""
    with suppress(SimCrashed):
        async with simulated_store(disk, sizes=SHORT_PARTS) as store:
            yield store
            raise SimCrashed


# --- over crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("ending", ["kill", "kill without index", "power loss"])
def test_uploads_and_access_keys_survive_a_crash_and_a_lost_index(checkpoint: bool, ending: str) -> None:
    async def main() -> None:
        disk = SimDisk(7)
        async with crashing_store(disk) as store:
            lake = lake_of(store)
            upload = await begin(lake)
            key = await lake.create_access_key(buckets=["bkt"], read_only=True)
            gone = await lake.create_access_key()
            first = await lake.put_part(upload, 1, PAYLOAD)
            await lake.set_bucket("bkt", anonymous_read=True)
            if checkpoint:
                await store.metadata.checkpoint()
            second = await lake.put_part(upload, 2, b"tail")
            await lake.remove_access_key(gone.access_key)
        crashed = disk.crash() if ending == "power loss" else disk.kill()
        if ending == "kill without index":
            shutil.rmtree(crashed.local_path("index"))
        async with crashing_store(crashed) as store:
            assert bool(store.metadata.rebuilt_because) == (ending != "kill")
            lake = lake_of(store)
            assert [part async for part in lake.parts(upload)] == [first, second]
            assert await lake.find_access_key(key.access_key) == key
            assert [found.access_key for found in await lake.access_keys()] == [key.access_key]
            assert (await lake.bucket("bkt")).anonymous_read
            await lake.gc()
            report = await lake.fsck(full=True)
            assert (report["damage"], report["notes"]) == (0, 0)
            assert {name: report["checked"][name] for name in ("uploads", "parts", "access_keys")} == {
                "uploads": 1,
                "parts": 2,
                "access_keys": 1,
            }
            done = await lake.complete_upload(upload, [(1, first.etag), (2, second.etag)])
        crashed = crashed.crash()
        async with simulated_store(crashed, sizes=SHORT_PARTS) as store:
            lake = lake_of(store)
            assert await lake.complete_upload(upload, [(1, first.etag), (2, second.etag)]) == done
            assert await lake.get("bkt/k") == PAYLOAD + b"tail"
            with pytest.raises(UploadNotFound):
                await lake.abort_upload(upload)

    run(main)


def test_a_release_that_does_not_know_uploads_does_not_write_to_a_store_that_has_had_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def opens(disk: SimDisk) -> None:
        async with simulated_store(disk):
            pass

    async def main() -> None:
        disk = SimDisk(8)
        async with simulated_store(disk) as store:
            await put(client_of(store), "k", PAYLOAD)
        assert superblock_module.read_superblock(disk).read_only_features == 0
        async with simulated_store(disk) as store:
            await begin(lake_of(store))
            assert superblock_module.read_superblock(disk).read_only_features == ReadOnlyFeature.UPLOADS
        assert superblock_module.read_superblock(disk).read_only_features == ReadOnlyFeature.UPLOADS
        await opens(disk)
        monkeypatch.setattr(superblock_module, "KNOWN_READ_ONLY", 0)
        with pytest.raises(StoreReadOnly, match="multipart uploads"):
            await opens(disk)

    run(main)


# --- beside gc -----------------------------------------------------------------------------------------


async def names_and_uploads(store: Store, client: EmbeddedEngine) -> None:
    """Make enough of both that much happens between their turns."""
    for number in range(8):
        await put(client, f"filler-{number}", b"filler %d" % number)
    await put(client, "source", PAYLOAD)


def test_a_part_that_comes_beside_gc_is_kept_though_its_session_ends_and_its_source_goes() -> None:
    async def act(store: Store, client: EmbeddedEngine) -> None:
        begun = await ask(client, m.UploadCreate("bkt", "k", m.ObjectAttributes()), m.UploadStat)
        session = await session_of(client)
        assert (await ask(client, m.Offer(session, [data_chunk_id(PAYLOAD)]), m.Offered)).present == [True]
        await delete(client, "source")
        part = m.UploadPut(session, "bkt", "k", begun.upload, 1, data_chunk_id(PAYLOAD), md5(PAYLOAD), end_session=True)
        await ask(client, part, m.PartStat)

    async def check(store: Store, client: EmbeddedEngine) -> None:
        assert await read(client, data_chunk_id(PAYLOAD)) == PAYLOAD

    race(names_and_uploads, act, check)


def test_a_completion_beside_gc_keeps_the_parts() -> None:
    uploads: list[UploadName] = []

    async def prepare(store: Store, client: EmbeddedEngine) -> None:
        await names_and_uploads(store, client)
        uploads[:] = [await begin(TrioLake(client, InlineOffload()))]
        for number, payload in ((1, b"a" * (5 << 20)), (2, b"tail")):
            await TrioLake(client, InlineOffload()).put_part(uploads[0], number, payload)

    async def act(store: Store, client: EmbeddedEngine) -> None:
        listed = [(1, md5(b"a" * (5 << 20))), (2, md5(b"tail"))]
        await TrioLake(client, InlineOffload()).complete_upload(uploads[0], listed)

    async def check(store: Store, client: EmbeddedEngine) -> None:
        assert await TrioLake(client, InlineOffload()).get("bkt/k") == b"a" * (5 << 20) + b"tail"

    race(prepare, act, check, stride=17)


# --- time ----------------------------------------------------------------------------------------------


def test_unfinished_uploads_are_removed_at_their_age_by_gc() -> None:
    async def main() -> None:
        disk, clock = SimDisk(9), SimClock()
        async with simulated_store(disk, clock=clock, upload_expiry_s=2 * 86_400) as store:
            lake = lake_of(store)
            old = await begin(lake, "bkt/old")
            await lake.put_part(old, 1, PAYLOAD)
            clock.jump_wall(DAY_NS)
            young = await begin(lake, "bkt/young")
            await lake.put_part(young, 1, b"young")
            assert (await lake.gc())["expired_uploads"] == 0
        clock.jump_wall(DAY_NS)
        async with simulated_store(disk, clock=clock) as store:
            assert (await lake_of(store).gc())["expired_uploads"] == 0, "without a configured age none goes"
        async with simulated_store(disk, clock=clock, upload_expiry_s=2 * 86_400) as store:
            lake = lake_of(store)
            report = await lake.gc()
            assert (report["expired_uploads"], report["freed_chunks"]) == (1, 1)
            assert [entry.key async for entry in lake.uploads("bkt/")] == ["young"]
            assert set(records(store)) == {data_chunk_id(b"young")}
            with pytest.raises(UploadNotFound):
                await lake.put_part(old, 2, b"too late")
            clock.jump_wall(-30 * DAY_NS)
            assert (await lake.gc())["expired_uploads"] == 0

    run(main)


# --- fsck ----------------------------------------------------------------------------------------------


async def findings(client: EmbeddedEngine) -> list[tuple[str, str]]:
    report = await fsck(client)
    assert report["damage"] == len(report["findings"]) - report["notes"]
    return [(found["object"], found["message"]) for found in report["findings"] if found["severity"] == "damage"]


def test_fsck_names_a_damaged_part_and_a_leaked_one() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            lake, client = lake_of(store), client_of(store)
            damaged, leaked = await begin(lake, "bkt/f/damaged"), await begin(lake, "bkt/leaked")
            await lake.put_part(damaged, 12, PAYLOAD)
            await lake.put_part(leaked, 3, b"leaked")
            with store.metadata.view() as view:
                bucket = find_bucket(view, "bkt")
            key = upload_key(bucket.node, b"leaked", leaked.upload)

            def harm(txn: Transaction) -> None:
                txn.delete(Table.CHUNKS, chunk_key(ChunkId(data_chunk_id(PAYLOAD))))
                txn.delete(Table.UPLOADS, key)

            await tamper(store, harm)
            found = dict(await findings(client))
            assert set(found) == {
                f"bkt/f/damaged, upload {damaged.upload.hex()}, part 12",
                f"upload {leaked.upload.hex()}, part 3",
            }
            assert "is missing" in found[f"bkt/f/damaged, upload {damaged.upload.hex()}, part 12"]
            assert "no upload" in found[f"upload {leaked.upload.hex()}, part 3"]

    run(main)


def test_fsck_names_the_parts_of_a_chunk_that_turns_out_bad_and_records_it_cannot_read() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            lake = lake_of(store)
            upload = await begin(lake)
            await lake.put_part(upload, 1, PAYLOAD)
            other = await begin(lake, "bkt/other")
        async with simulated_store(disk) as store:
            client = client_of(store)
            record = records(store)[ChunkId(data_chunk_id(PAYLOAD))]
            disk.flip_bit(f"segments/{record.segment:016x}.large", record.offset + 9, 1)

            def harm(txn: Transaction) -> None:
                txn.put(Table.UPLOADS, part_key(other.upload, 5), b"\xc1")
                txn.put(Table.ACCESS_KEYS, b"A" * 20, b"\xc1")

            await tamper(store, harm)
            subjects = [subject for subject, _ in await findings(client)]
            assert f"bkt/k, upload {upload.upload.hex()}, part 1" in subjects
            assert f"upload {other.upload.hex()}, part 5" in subjects
            assert f"access key {'A' * 20}" in subjects

    run(main)


# --- bounds --------------------------------------------------------------------------------------------


def test_ten_thousand_parts_are_completed_in_one_group() -> None:
    async def main() -> None:
        async with simulated_store(sizes=SHORT_PARTS) as store:
            lake, client = lake_of(store), client_of(store)
            upload = await begin(lake)
            session = await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"part"])
            held = HeldBlob(BlobId(chunk), 4, 1)

            def fill(first: int, txn: Transaction) -> None:
                ref = UploadRef(find_bucket(txn, "bkt"), "k", upload.upload)
                for number in range(first, first + 1000):
                    decide_part(txn, ref, number, held, md5(b"part"), {}, 1)

            for first in range(1, PART_NUMBER_MAX, 1000):
                await tamper(store, lambda txn, first=first: fill(first, txn))  # type: ignore[misc]
            await ask(client, m.SessionEnd(session), m.Done)
            listed = [(number, md5(b"part")) for number in range(1, PART_NUMBER_MAX + 1)]
            done = await lake.complete_upload(upload, listed)
            assert (done.size_bytes, done.chunk_count) == (4 * PART_NUMBER_MAX, PART_NUMBER_MAX)
            assert done.etag.endswith(f"-{PART_NUMBER_MAX}")
            assert PART_NUMBER_MAX > MANIFEST_FANOUT, "so the manifest has two levels"
            async with await lake.open("bkt/k") as opened:
                assert await opened.read(4 * PART_NUMBER_MAX - 6, 6) == b"rtpart"
            await lake.gc()
            report = await lake.fsck()
            assert (report["damage"], report["notes"]) == (0, 0)
            assert report["checked"].get("parts") == 0

    run(main)


def test_of_two_that_complete_at_once_one_is_first_and_both_are_answered() -> None:
    async def main() -> None:
        async with simulated_store(sizes=SHORT_PARTS) as store:
            lakes = [lake_of(store) for _ in range(3)]
            upload = await begin(lakes[0])
            parts = [await lakes[0].put_part(upload, number, b"%d" % number) for number in (1, 2)]
            listed = [(part.number, part.etag) for part in parts]
            answers: list[m.ObjectStat] = []
            refused: list[UploadNotFound] = []

            async def complete(lake: TrioLake, chosen: list[tuple[int, bytes]]) -> None:
                try:
                    answers.append(await lake.complete_upload(upload, chosen))
                except UploadNotFound as error:
                    refused.append(error)

            async with trio.open_nursery() as nursery:
                for lake, chosen in zip(lakes, (listed, listed, listed[:1]), strict=True):
                    nursery.start_soon(complete, lake, chosen)
            assert len(answers) + len(refused) == 3
            assert len({stat.node for stat in answers}) == 1
            assert await lakes[0].stat("bkt/k") in answers

    run(main)


def test_parts_of_an_upload_that_ended_are_garbage() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            lake, client = lake_of(store), client_of(store)
            upload = await begin(lake)
            await lake.put_part(upload, 1, PAYLOAD)
            await lake.abort_upload(upload)
            assert (await gc(client))["freed_chunks"] == 1
            with pytest.raises(ChunkNotFound):
                await read(client, data_chunk_id(PAYLOAD))

    run(main)


# --- the parts of what was completed -------------------------------------------------------------------


async def fill_upload(store: Store, upload: UploadName, numbers: list[int]) -> None:
    """Put parts of four bytes with these numbers; the odd ones have a checksum."""
    client = client_of(store)
    session = await session_of(client)
    (chunk,) = await store_chunks(client, session, [b"part"])
    held = HeldBlob(BlobId(chunk), 4, 1)

    def fill(chosen: list[int], txn: Transaction) -> None:
        ref = UploadRef(find_bucket(txn, "bkt"), upload.key, upload.upload)
        for number in chosen:
            sums = {"CRC32": number.to_bytes(4, "big")} if number % 2 else {}
            decide_part(txn, ref, number, held, md5(b"part"), sums, 1)

    for first in range(0, len(numbers), 1000):
        chosen = numbers[first : first + 1000]
        await tamper(store, lambda txn, chosen=chosen: fill(chosen, txn))  # type: ignore[misc]
    listed = [(number, md5(b"part")) for number in numbers]
    await lake_of(store).complete_upload(upload, listed)
    await ask(client, m.SessionEnd(session), m.Done)


async def known_parts(store: Store, upload: bytes, after: int = 0, limit: int = 1000) -> m.ObjectParts:
    return await ask(client_of(store), m.UploadedParts(upload, after, limit), m.ObjectParts)


@pytest.mark.parametrize(
    "numbers",
    [
        [7],
        list(range(1, 129)),
        list(range(1, 130)),
        [1, 2, 500, *range(600, 900), 9_999, 10_000],
        list(range(1, PART_NUMBER_MAX + 1)),
    ],
)
def test_each_part_of_an_object_is_found_and_all_of_them_in_pages(numbers: list[int]) -> None:
    async def main() -> None:
        async with simulated_store(sizes=SHORT_PARTS) as store:
            upload = await begin(lake_of(store))
            await fill_upload(store, upload, numbers)
            assert (await lake_of(store).stat("bkt/k")).upload == upload.upload
            found: list[m.ObjectPart] = []
            page = await known_parts(store, upload.upload)
            while True:
                found += page.parts
                if not page.next_after:
                    break
                page = await known_parts(store, upload.upload, page.next_after)
            assert page.part_count == len(numbers)
            assert [(part.number, part.offset, part.size_bytes) for part in found] == [
                (number, 4 * place, 4) for place, number in enumerate(numbers)
            ]
            for part in (found[0], found[len(found) // 2], found[-1]):
                assert (await known_parts(store, upload.upload, part.number - 1, 1)).parts == [part]
                assert part.checksums == ({"CRC32": part.number.to_bytes(4, "big")} if part.number % 2 else {})
            assert (await known_parts(store, upload.upload, numbers[-1])).parts == []
            assert (await findings(client_of(store))) == []

    run(main)


def test_parts_are_known_after_a_crash_and_a_move_and_forgotten_with_the_object() -> None:
    async def main() -> None:
        disk = SimDisk(11)
        async with crashing_store(disk) as store:
            moved, copied = await begin(lake_of(store)), await begin(lake_of(store), "bkt/other")
            await fill_upload(store, moved, [1, 2])
            await fill_upload(store, copied, list(range(1, 200)))
            await lake_of(store).move("bkt/k", "bkt/m")
            await lake_of(store).copy("bkt/other", "bkt/copy")
            assert (await lake_of(store).stat("bkt/copy")).upload == b""
        async with simulated_store(disk.crash(), sizes=SHORT_PARTS) as store:
            lake = lake_of(store)
            await lake.gc()
            assert (await known_parts(store, moved.upload)).part_count == 2
            assert (await known_parts(store, copied.upload)).part_count == 199
            await put(client_of(store), "m", b"over it")
            await delete(client_of(store), "other")
            await lake.gc()
            for gone in (moved, copied):
                assert await known_parts(store, gone.upload) == m.ObjectParts(0, [])
            with store.metadata.view() as view:
                assert list(view.scan(Table.UPLOADS, b"", b"\xff")) == []

    run(main)


def test_fsck_says_when_the_parts_of_an_object_are_not_its_content() -> None:
    async def main() -> None:
        async with simulated_store(sizes=SHORT_PARTS) as store:
            upload = await begin(lake_of(store))
            await fill_upload(store, upload, list(range(1, 200)))
            await tamper(store, lambda txn: txn.delete(Table.UPLOADS, object_parts_key(upload.upload, 2)))
            [(subject, _)] = await findings(client_of(store))
            assert subject == f"the parts of the object of upload {upload.upload.hex()}"

    run(main)
