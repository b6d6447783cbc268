"""The codes of findings: a closed table, all of it in use; and the code that each kind of harm gets."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from engine.format.layouts import (
    ChunkRecord,
    Node,
    NodeKind,
    SegmentKind,
    StoreIdentity,
    Table,
    chunk_key,
    node_key,
    unpack_chunk_record,
    unpack_node,
)
from engine.fsck.repair import find_bad_files
from engine.journal.writer import start_journal
from engine.metadata.checkpoint import newest_checkpoint
from engine.segments.files import segment_path
from engine.store.store import Store
from engine.superblock.superblock import read_superblock
from engine.tables.views import Transaction
from engine.uploads.keys import object_parts_key, part_key, upload_key
from lakefs import findings
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import DiskFailed, StoreDamaged
from lakefs.findings import Finding
from lakefs.host.offload import InlineOffload
from lakefs.ids import ChunkId, NodeId, Sequence, data_chunk_id
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import SMALL_SIZES, client_of, put, records, run, simulated_store, tamper
from tests.style.source_tree import ROOT

PRODUCT: Final = [
    path for room in ("lakefs", "engine", "cli", "gateway", "fuse") for path in (ROOT / room).rglob("*.py")
]
TABLE: Final = Path(findings.__file__)
SHORT_PARTS: Final = replace(SMALL_SIZES, part_bytes_min=1)
SMALL: Final = b"s" * 5000
OTHER: Final = b"o" * 5000
PARTS: Final = (b"p" * 70_000, b"q" * 50)
UNREADABLE: Final = b"\xc1"


# --- the table -----------------------------------------------------------------------------------------


def test_codes_are_lower_case_words_and_every_kind_says_what_it_means() -> None:
    assert len(Finding) == len(Finding.__members__), "two kinds with one meaning are one kind"
    for finding in Finding:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+|garbage", finding.code), finding
        assert re.fullmatch(r"[A-Z].*\.", finding.value), finding
        assert finding.severity in ("damage", "note")


def test_every_kind_is_reported_somewhere_and_findings_are_made_of_the_table_only() -> None:
    sources = {path: path.read_text() for path in PRODUCT if path != TABLE}
    used = {name for source in sources.values() for name in re.findall(r"\bFinding\.([A-Z_]+)", source)}
    assert used == set(Finding.__members__)
    by_hand = [path for path, source in sources.items() if "severity" in _keys_of_literals(source)]
    assert by_hand == [], "use Finding.as_json"


def _keys_of_literals(source: str) -> set[object]:
    literals = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    return {key.value for literal in literals for key in literal.keys if isinstance(key, ast.Constant)}


# --- what fsck calls each kind of harm to a record -----------------------------------------------------


@dataclass
class World:
    """A store's records, for a test to change."""

    txn: Transaction
    bucket: NodeId
    small: NodeId
    large: NodeId
    manifest: ChunkId
    upload: bytes
    completed: bytes

    def node(self, node_id: NodeId, **changes: Any) -> None:
        value = self.txn.get(Table.NODES, node_key(node_id))
        assert value is not None
        node = msgspec.structs.replace(unpack_node(value), **changes)
        self.txn.put(Table.NODES, node_key(node_id), node.pack())

    def record(self, chunk: ChunkId) -> ChunkRecord:
        value = self.txn.get(Table.CHUNKS, chunk_key(chunk))
        assert value is not None
        return unpack_chunk_record(value)

    def chunk(self, chunk: ChunkId, **changes: Any) -> None:
        record = msgspec.structs.replace(self.record(chunk), **changes)
        self.txn.put(Table.CHUNKS, chunk_key(chunk), record.pack())

    def only(self, table: Table, begin: bytes, end: bytes = b"\xff") -> tuple[bytes, bytes]:
        (entry, *_) = self.txn.scan(table, begin, end)
        return entry

    def name_of(self, node_id: NodeId) -> bytes:
        own = node_id.to_bytes(8, "little")
        entries = self.txn.scan(Table.NAMES, node_key(self.bucket), node_key(NodeId(self.bucket + 1)))
        (key,) = [key for key, value in entries if value[2:10] == own]
        return key

    def version(self, **changes: Any) -> None:
        """Change the node of the only old version."""
        _, value = self.only(Table.VERSIONS, b"\0")
        self.node(NodeId(msgspec.msgpack.decode(value)[1]), **changes)

    def misfile_version(self) -> None:
        key, value = self.only(Table.VERSIONS, b"\0")
        self.txn.put(Table.VERSIONS, key[:-1] + bytes([key[-1] ^ 1]), value)

    def refile_upload(self, bucket: NodeId, path: bytes) -> None:
        _, value = self.only(Table.UPLOADS, b"\1", b"\2")
        self.txn.put(Table.UPLOADS, upload_key(bucket, path, self.upload), value)


SMALL_CHUNK: Final = ChunkId(data_chunk_id(SMALL))
OTHER_CHUNK: Final = ChunkId(data_chunk_id(OTHER))
HARM: Final[dict[Finding, Callable[[World], object]]] = {
    Finding.CHUNK_DAMAGED: lambda w: w.chunk(SMALL_CHUNK, crc=7),
    Finding.CHUNK_HASH_WRONG: lambda w: w.chunk(
        SMALL_CHUNK, offset=w.record(OTHER_CHUNK).offset, crc=w.record(OTHER_CHUNK).crc
    ),
    Finding.CHUNKS_OVERLAP: lambda w: w.chunk(SMALL_CHUNK, offset=w.record(OTHER_CHUNK).offset + 64),
    Finding.CHUNK_PAST_END: lambda w: w.chunk(SMALL_CHUNK, offset=1 << 40),
    Finding.SEGMENT_MISSING: lambda w: w.chunk(SMALL_CHUNK, segment=999),
    Finding.CONTENT_CHUNK_DAMAGED: lambda w: w.chunk(SMALL_CHUNK, crc=7),
    Finding.CONTENT_CHUNK_MISSING: lambda w: w.txn.delete(Table.CHUNKS, chunk_key(SMALL_CHUNK)),
    Finding.CONTENT_CHUNK_SIZE_WRONG: lambda w: w.node(w.small, size_bytes=7),
    Finding.CONTENT_MANIFEST_DAMAGED: lambda w: w.chunk(w.manifest, crc=7),
    Finding.CONTENT_MANIFEST_MISSING: lambda w: w.txn.delete(Table.CHUNKS, chunk_key(w.manifest)),
    Finding.CONTENT_SIZE_WRONG: lambda w: w.node(w.large, size_bytes=7),
    Finding.GARBAGE: lambda w: w.node(w.small, blob=OTHER_CHUNK),
    Finding.ACCESS_KEY_UNREADABLE: lambda w: w.txn.put(Table.ACCESS_KEYS, b"A" * 20, UNREADABLE),
    Finding.NAME_KIND_WRONG: lambda w: w.node(w.small, kind=NodeKind.FOLDER, blob=None),
    Finding.NAME_NODE_MISSING: lambda w: w.txn.delete(Table.NODES, node_key(w.small)),
    Finding.NODE_UNNAMED: lambda w: w.txn.delete(Table.NAMES, w.name_of(w.small)),
    Finding.SYMLINK_DAMAGED: lambda w: w.txn.put(
        Table.NODES, node_key(w.small), Node(kind=NodeKind.SYMLINK, size_bytes=3).pack()
    ),
    Finding.OBJECT_PARTS_UNREADABLE: lambda w: w.txn.delete(Table.UPLOADS, object_parts_key(w.completed, 1)),
    Finding.OBJECT_PARTS_WRONG: lambda w: w.node(w.large, size_bytes=7),
    Finding.PART_UNREADABLE: lambda w: w.txn.put(Table.UPLOADS, part_key(w.upload, 5), UNREADABLE),
    Finding.PART_WITHOUT_UPLOAD: lambda w: w.txn.delete(Table.UPLOADS, upload_key(w.bucket, b"unfinished", w.upload)),
    Finding.UPLOAD_MISFILED: lambda w: w.refile_upload(w.bucket, b"other"),
    Finding.UPLOAD_UNREADABLE: lambda w: w.txn.put(Table.UPLOADS, upload_key(w.bucket, b"other", w.upload), UNREADABLE),
    Finding.UPLOADS_ORPHANED: lambda w: w.refile_upload(NodeId(999), b"unfinished"),
    Finding.VERSION_BUCKET_MISSING: lambda w: w.txn.delete(Table.BUCKETS, node_key(w.bucket)),
    Finding.VERSION_KIND_WRONG: lambda w: w.version(kind=NodeKind.FOLDER, blob=None),
    Finding.VERSION_MISFILED: lambda w: w.misfile_version(),
    Finding.VERSION_NODE_MISSING: lambda w: w.txn.delete(
        Table.NODES, node_key(NodeId(msgspec.msgpack.decode(w.only(Table.VERSIONS, b"\0")[1])[1]))
    ),
    Finding.VERSION_UNREADABLE: lambda w: w.txn.put(Table.VERSIONS, w.only(Table.VERSIONS, b"\0")[0], UNREADABLE),
}


async def fill(store: Store) -> Callable[[Transaction], World]:
    """Store one of everything; return what makes a `World` of a transaction."""
    client = client_of(store)
    lake = TrioLake(client, InlineOffload())
    await lake.create_bucket("bkt")
    await lake.set_bucket("bkt", versioning="enabled")
    await put(client, "old", b"first")
    await put(client, "old", b"second")
    small = await put(client, "small", SMALL)
    await put(client, "other", OTHER)
    done = await lake.create_upload("bkt/large")
    parts = [await lake.put_part(done, number, part) for number, part in enumerate(PARTS, 1)]
    large = await lake.complete_upload(done, [(part.number, part.etag) for part in parts])
    unfinished = await lake.create_upload("bkt/unfinished")
    await lake.put_part(unfinished, 1, b"part")
    await lake.create_access_key()
    bucket = (await lake.bucket("bkt")).node
    return lambda txn: World(
        txn, NodeId(bucket), NodeId(small.node), NodeId(large.node), ChunkId(large.blob), unfinished.upload, done.upload
    )


def codes_of(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return the severity by code."""
    return {finding["code"]: finding["severity"] for finding in found}


@pytest.mark.parametrize("finding", HARM, ids=lambda finding: finding.code)
def test_fsck_calls_each_kind_of_harm_by_its_code(finding: Finding) -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, sizes=SHORT_PARTS) as store:
            world = await fill(store)
            assert (await store.check(full=True))["findings"] == []
        async with simulated_store(disk, sizes=SHORT_PARTS) as store:  # started again, so that nothing is in memory
            await tamper(store, lambda txn: HARM[finding](world(txn)))
            codes = codes_of((await store.check(full=True))["findings"])
            assert codes.get(finding.code) == finding.severity, codes

    run(main)


# --- what depends on more than a record ----------------------------------------------------------------


def test_an_error_of_the_disk_is_not_taken_for_wrong_bytes() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            await put(client_of(store), "small", SMALL)
        async with simulated_store(disk) as store:
            path = segment_path(records(store)[SMALL_CHUNK].segment, SegmentKind.SMALL)
            for _ in range(2):
                disk.fail_next("pread_into", DiskFailed("planted"), path=path, skip=1)
            codes = codes_of((await store.check(full=True))["findings"])
            assert codes == {"read-failed": "damage", "content-chunk-damaged": "damage"}

    run(main)


def test_a_chunk_that_is_never_in_one_place_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await put(client_of(store), "small", SMALL)
            monkeypatch.setattr("engine.fsck.check._LOOKS_AT_PAYLOAD", 0)
            report = await store.check(full=True)
            assert codes_of(report["findings"]) == {"chunk-unchecked": "note"}
            assert (report["damage"], report["notes"]) == (0, 1)

    run(main)


@pytest.mark.parametrize(
    ("changes", "code", "told_by_fsck"),
    [
        ({"crc": 7}, "chunk-damaged", "chunk-quarantined"),
        ({"segment": 999}, "segment-missing", "segment-missing"),
        ({"offset": 1 << 40}, "chunk-past-end", "chunk-past-end"),
        ({"stored_bytes": 1 << 30}, "chunk-record-wrong", "chunk-past-end"),
    ],
)
def test_scrub_lists_each_damaged_chunk_with_a_code_that_a_restart_keeps(
    changes: dict[str, int], code: str, told_by_fsck: str
) -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, sizes=SHORT_PARTS) as store:
            world = await fill(store)
        async with simulated_store(disk) as store:
            await tamper(store, lambda txn: world(txn).chunk(SMALL_CHUNK, **changes))
            await store.scrubber.advance(1e6, rate_bytes_per_s=0)
        async with simulated_store(disk) as store:
            assert [(item["code"], item["objects"]) for item in await store.damaged()] == [(code, ["bkt/small"])]
            codes = codes_of((await store.check(full=False))["findings"])
            assert told_by_fsck in codes

    run(main)


def test_a_note_of_an_earlier_release_has_a_code_too() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await put(client_of(store), "small", SMALL)
            note = msgspec.msgpack.encode({"reason": "rot", "time_ns": 1})
            await tamper(store, lambda txn: txn.put(Table.QUARANTINE, chunk_key(SMALL_CHUNK), note))
            (noted,) = store.quarantine.noted(10)
            assert (noted.code, noted.reason) == ("chunk-damaged", "rot")

    run(main)


# --- files of a closed store ---------------------------------------------------------------------------


def _leave_crash_note(disk: SimDisk, _: StoreIdentity) -> None:
    note = disk.open("crash", create=True)
    note.pwrite(b'Fatal Python error: Aborted\n  File "engine/tables/lmdb_index.py", line 1 in get\n', 0)
    note.close()


def _begin_journal_early(disk: SimDisk, identity: StoreIdentity) -> None:
    start_journal(disk, identity, SimClock(), end_sequence=Sequence(2), carried=None, files=()).close()


def _rename_checkpoint(disk: SimDisk, _: StoreIdentity) -> None:
    checkpoint = newest_checkpoint(disk)
    assert checkpoint is not None
    disk.rename(checkpoint.path, "checkpoints/00000000000000ff.checkpoint")


@pytest.mark.parametrize(
    ("harm", "finding"),
    [
        (_leave_crash_note, Finding.INDEX_READER_DIED),
        (_begin_journal_early, Finding.JOURNAL_GROUPS_VOID),
        (_rename_checkpoint, Finding.CHECKPOINT_FOREIGN),
    ],
)
def test_a_look_at_the_files_calls_each_kind_of_harm_by_its_code(
    harm: Callable[[SimDisk, StoreIdentity], None], finding: Finding
) -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            for name in ("a", "b", "c", "d"):
                await put(client_of(store), name, SMALL)
        assert find_bad_files(disk, SimClock()).found == []
        harm(disk, read_superblock(disk).identity)
        codes = codes_of(find_bad_files(disk, SimClock()).as_dict()["findings"])
        assert codes.get(finding.code) == finding.severity, codes

    run(main)


def test_an_index_older_than_the_checkpoint_is_called_so() -> None:
    async def main() -> None:
        disk = SimDisk()
        index = Path(disk.local_path("index")) / "data.mdb"
        async with simulated_store(disk) as store:
            await put(client_of(store), "a", SMALL)
        old = index.read_bytes()
        async with simulated_store(disk) as store:
            await put(client_of(store), "b", SMALL)
        index.write_bytes(old)
        codes = codes_of(find_bad_files(disk, SimClock()).as_dict()["findings"])
        assert codes == {"index-behind": "damage"}

    run(main)


def test_two_files_of_one_segment_are_called_so() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            await put(client_of(store), "a", SMALL)
            segment = records(store)[SMALL_CHUNK].segment
        disk.open(segment_path(segment, SegmentKind.LARGE), create=True).close()
        with pytest.raises(StoreDamaged, match="two files claim") as refused:
            async with simulated_store(disk):
                pass
        assert refused.value.finding is Finding.SEGMENT_DUPLICATE

    run(main)
