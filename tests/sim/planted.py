"""Bugs put into the engine on purpose, to see that the simulator would notice them.

`python -m tests.sim.planted` runs all of them and writes the table in `docs/simulator.md`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import structlog
import trio

from engine.chunks import hashing
from engine.chunks.manifests import HeldBlob, HeldBlobs
from engine.format.extents import Place
from engine.format.layouts import GROUP_HEADER, Table, node_key
from engine.journal.writer import Journal
from engine.metadata.group_log import JournalLog, PayloadBatch
from engine.metadata.metadata_store import Metadata
from engine.namespace.buckets import BucketRef
from engine.namespace.tree import NameEvent
from engine.namespace.versions import release_old
from engine.namespace.watch import Watchers
from engine.segments.maker import OpenSegment
from engine.sessions.references import Session
from engine.tables.views import Transaction
from lakefs.errors import ChunkNotFound
from lakefs.ids import BlobId, Sequence
from lakefs.ports import DiskFile
from tests.sim import planted_stamps as stamps, planted_upkeep as upkeep
from tests.sim.__main__ import say
from tests.sim.world.disk import SimDisk
from tests.sim.world.file import SimFile
from tests.sim.world.world import ORDEALS, causes_of, run_seed

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Bug:
    """A bug, and the number of seeds within which it must be noticed.

    `rots`: it shows only on disks that lie or rot, so every seed ends with one.
    """

    what: str
    plant: Plant
    seeds: int
    rots: bool = False


def _skip_large_sync() -> AbstractContextManager[Any]:
    return _file_sync_without(".large")


def _skip_small_sync() -> AbstractContextManager[Any]:
    return _file_sync_without(".small")


def _file_sync_without(suffix: str) -> AbstractContextManager[Any]:
    original = SimFile.sync_data

    def sync_data(self: SimFile) -> None:
        if not self._path.endswith(suffix):
            original(self)

    return mock.patch.object(SimFile, "sync_data", sync_data)


def _skip_journal_sync() -> AbstractContextManager[Any]:
    return _file_sync_without(".journal.new")


def _skip_journal_folder_sync() -> AbstractContextManager[Any]:
    return _folder_sync_without("journal")


@contextmanager
def _skip_payload_checksums() -> Iterator[None]:
    """Skip the checks of the engine that reads, and of the client that gets the answer: one of them would be enough."""
    with (
        mock.patch("engine.segments.reader.check_payload", return_value=True),
        mock.patch("lakefs.get.objects.matches_id", return_value=True),
        mock.patch("lakefs.get.fetch.matches_id", return_value=True),
        mock.patch("lakefs.get.fetch.granule_crcs", return_value=mock.ANY),
    ):
        yield


def _skip_group_checksums() -> AbstractContextManager[Any]:
    def try_body(file: DiskFile, header: Any) -> bytes:
        buffer = bytearray(header.body_bytes)
        file.pread_into(memoryview(buffer), header.offset + GROUP_HEADER.size)
        return bytes(buffer)

    return mock.patch("engine.journal.reader._try_body", try_body)


def _believe_what_a_blob_is() -> AbstractContextManager[Any]:
    original = HeldBlobs.hold

    async def hold(self: HeldBlobs[Session], session: Session, blob: bytes) -> HeldBlob:
        try:
            return await original(self, session, blob)
        except ChunkNotFound:
            return HeldBlob(BlobId(blob), 40, 1)

    return mock.patch.object(HeldBlobs, "hold", hold)


def _name_chunks_as_told() -> AbstractContextManager[Any]:
    """Give a chunk, now and then, the id of another, as if the engine trusted a client's ids."""
    original = hashing.hash_all

    def hash_as_told(payloads: Any) -> Any:
        hashed = original(payloads)
        if len(hashed) > 2:
            hashed[0] = msgspec.structs.replace(hashed[0], chunk=hashed[1].chunk)
        return hashed

    return mock.patch("engine.chunks.ingest.hash_all", hash_as_told)


def _payload_behind_its_group() -> AbstractContextManager[Any]:
    original = JournalLog._append_blocking

    def append(self: JournalLog, group: Any, batch: PayloadBatch | None) -> None:
        original(self, group, None)
        if batch is not None:
            batch.write()

    return mock.patch.object(JournalLog, "_append_blocking", append)


def _skip_segment_folder_sync() -> AbstractContextManager[Any]:
    return _folder_sync_without("segments")


def _folder_sync_without(folder: str) -> AbstractContextManager[Any]:
    original = SimDisk.sync_folder

    def sync_folder(self: SimDisk, path: str) -> None:
        if path != folder:
            original(self, path)

    return mock.patch.object(SimDisk, "sync_folder", sync_folder)


def _acknowledge_before_durable() -> AbstractContextManager[Any]:
    """Do not wait for durability; Sync still does: without that it would be another bug."""

    async def wait_durable(self: Metadata, sequence: Sequence) -> None:
        await trio.lowlevel.checkpoint()

    return mock.patch.object(Metadata, "wait_durable", wait_durable)


def _reuse_an_offset() -> AbstractContextManager[Any]:
    """Now and then, let the next small payload begin in the middle of the last one."""
    original = OpenSegment.take

    def take(self: OpenSegment, length: int) -> Place:
        place = original(self, length)
        if place.offset % 7 == 0:
            self.cursor = place.offset + length // 2
        return place

    return mock.patch.object(OpenSegment, "take", take)


def _answer_sync_at_once() -> AbstractContextManager[Any]:
    async def sync(self: Metadata) -> None:
        await trio.lowlevel.checkpoint()

    return mock.patch.object(Metadata, "sync", sync)


def _lose_the_carried_group() -> AbstractContextManager[Any]:
    original = Journal.begin_file

    def begin_file(self: Journal, first_sequence: Sequence, carried: Any = None) -> None:
        original(self, first_sequence if carried is None else Sequence(first_sequence + 1))

    return mock.patch.object(Journal, "begin_file", begin_file)


def _tell_nobody_of_moves() -> AbstractContextManager[Any]:
    original = Watchers._tell

    def tell(self: Watchers, sequence: Sequence, note: NameEvent, client: object | None) -> None:
        if note.kind != "rename":
            original(self, sequence, note, client)

    return mock.patch.object(Watchers, "_tell", tell)


def _keep_completed_uploads() -> AbstractContextManager[Any]:
    return mock.patch("engine.uploads.lifecycle._remove", return_value=None)


def _drop_what_is_overwritten() -> AbstractContextManager[Any]:
    def make_room(txn: Transaction, bucket: BucketRef, path: bytes, old: Any, *, is_kept: bool = False) -> None:
        if old is not None and not is_kept:
            txn.delete(Table.NODES, node_key(old.node_id))

    return mock.patch("engine.namespace.binding.make_room", make_room)


def _leave_the_node_of_a_removed_version() -> AbstractContextManager[Any]:
    return mock.patch("engine.namespace.removal.remove_old", release_old)


def _bind_nothing_newest() -> AbstractContextManager[Any]:
    return mock.patch("engine.namespace.removal._bind_newest", return_value=None)


BUGS = [
    Bug("a large segment is not synced", _skip_large_sync, 10),
    Bug("a small segment is not synced", _skip_small_sync, 10),
    Bug("a group is appended before the small payload that it names", _payload_behind_its_group, 40),
    Bug("the folder of a new segment is not synced", _skip_segment_folder_sync, 10),
    Bug("the folder of a new journal file is not synced", _skip_journal_folder_sync, 20),
    Bug("checksums of payloads are not looked at", _skip_payload_checksums, 40, rots=True),
    Bug("checksums of groups are not looked at", _skip_group_checksums, 200, rots=True),
    Bug("a commit believes the client that a blob is there", _believe_what_a_blob_is, 10),
    Bug("a chunk has the digest that the client names", _name_chunks_as_told, 10),
    Bug("the journal is not synced", _skip_journal_sync, 10),
    Bug("answers leave before they are durable", _acknowledge_before_durable, 15),
    Bug("Sync is answered before what was visible is durable", _answer_sync_at_once, 10),
    Bug("an offset is given out twice", _reuse_an_offset, 10),
    Bug("gc punches extents that live", upkeep.punch_a_live_extent, 10),
    Bug("gc punches a page too much", upkeep.punch_too_much, 10),
    Bug("gc forgets what sessions hold", upkeep.forget_session_holds, 15),
    Bug("gc forgets what is found present while it runs", upkeep.drop_the_barrier, 40),
    Bug("gc forgets what an ended session held", upkeep.forget_sessions_that_ended, 100),
    Bug("gc forgets what is open for reading", upkeep.forget_leases, 80),
    Bug("what is pinned is punched", upkeep.forget_pins, 20),
    Bug("gc forgets the parts of uploads", upkeep.forget_parts, 20),
    Bug("compaction frees the old place before the new one is durable", upkeep.free_the_old_place_at_once, 100),
    Bug("compaction removes a segment with what stayed in it", upkeep.remove_a_segment_with_what_stayed, 20),
    Bug("compaction does not sync its copies", upkeep.name_the_copy_before_it_is_written, 100),
    Bug("scrub takes what is damaged for good", upkeep.scrub_finds_nothing, 40, rots=True),
    Bug("scrub takes one failed read for damage", upkeep.scrub_believes_one_failed_read, 200),
    Bug("scrub lets out of quarantine what is damaged", upkeep.scrub_releases_what_is_damaged, 40, rots=True),
    Bug("sessions end when the clock is set forward", upkeep.sessions_go_by_the_wall_clock, 60),
    Bug("uploads end when the clock is set back", upkeep.expire_uploads_too_early, 60),
    Bug("uploads that are too old stay", upkeep.keep_uploads_for_ever, 60),
    Bug("an upload stays when it has ended", _keep_completed_uploads, 10),
    Bug("what is overwritten is dropped where versions are kept", _drop_what_is_overwritten, 10),
    Bug("the node of a removed version stays", _leave_the_node_of_a_removed_version, 60),
    Bug("no version takes the place of one that was removed", _bind_nothing_newest, 60),
    Bug("watchers get no events of moves", _tell_nobody_of_moves, 20),
    Bug("stamps turn when a change is durable", stamps.turn_when_durable, 10),
    Bug("an answer has no stamps of its nodes", stamps.leave_nodes_out, 20),
    Bug("answers with stamps leave before they are durable", stamps.answer_before_durable, 40),
    Bug("stamps stand when the engine has stopped", stamps.never_end, 10),
    Bug("the last group is not carried into the new journal file", _lose_the_carried_group, 60),
]


def seeds_to_notice(bug: Bug, *, first: int = 0) -> tuple[int, str] | None:
    """Return how many seeds it takes to notice the bug, and the last one's failure; None when no seed notices it.

    `first` is tried before all others: the one that noticed it when the table was written.
    """
    with bug.plant(), mock.patch("tests.sim.world.world.ORDEALS", 1.0 if bug.rots else ORDEALS):
        for count, seed in enumerate(sorted(range(bug.seeds), key=lambda seed: seed != first), 1):
            try:
                run_seed(seed)
            except Exception as error:  # noqa: BLE001 - a planted bug may break anything
                return count, "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes_of(error))
    return None


# --- the table of the document -----------------------------------------------------------------------

PAGE: Final = Path(__file__).parents[2] / "docs" / "simulator.md"
HEADER: Final = "| bug | noticed by seed | bound |"


def rows() -> list[tuple[str, int, int]]:
    """Return the document's table: bug, number of seeds, bound."""
    lines = PAGE.read_text().splitlines()
    first = lines.index(HEADER) + 2
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:] if line.startswith("|")]
    return [(what, int(seeds), int(bound)) for what, seeds, bound in cells]


def main() -> int:
    """Run every bug until it is noticed and write the table; return 1 when one was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.planted")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    counted: list[int] = []
    with multiprocessing.get_context("fork").Pool(arguments.jobs, _be_quiet) as pool:
        for bug, (count, said) in zip(BUGS, pool.imap(_count, range(len(BUGS))), strict=True):
            say(f"{bug.what}: {count or 'NOT NOTICED'} of {bug.seeds}: {said[:160]}")
            counted.append(count)
    table = [f"| {bug.what} | {count} | {bug.seeds} |" for bug, count in zip(BUGS, counted, strict=True)]
    lines = PAGE.read_text().splitlines()
    first = lines.index(HEADER) + 2
    rest = [line for line in lines[first:] if not line.startswith("|")]
    PAGE.write_text("\n".join([*lines[:first], *table, *rest]) + "\n")
    return 0 if all(counted) else 1


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _count(index: int) -> tuple[int, str]:
    return seeds_to_notice(BUGS[index]) or (0, "")


if __name__ == "__main__":
    raise SystemExit(main())
