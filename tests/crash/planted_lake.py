"""`lake` with small files and one bug: `python -m tests.crash.planted_lake BUG serve ...`.

For the tests that show that a check can fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence as Seq
from typing import Any, Final

from lakefs.ids import Sequence
from tests.crash import small_lake


def _no_folder_sync() -> None:
    from engine.host.local_disk import LocalDisk

    LocalDisk.sync_folder = _does_nothing  # type: ignore[method-assign]


def _no_token_sync() -> None:
    """Leave out the sync of the data folder, after the rename of a file in it."""
    from engine.host.local_disk import LocalDisk

    sync_folder = LocalDisk.sync_folder

    def forgetful(disk: LocalDisk, path: str) -> None:
        if path:
            sync_folder(disk, path)

    LocalDisk.sync_folder = forgetful  # type: ignore[method-assign,assignment]


def _no_data_sync() -> None:
    from engine.host.local_disk import LocalFile

    LocalFile.sync_data = _does_nothing  # type: ignore[method-assign]


def _no_journal_sync() -> None:
    """Leave out the sync of groups; a new journal file is still synced."""
    from engine.journal.writer import Journal

    append = Journal._append

    def unsynced(journal: Journal, sequence: Sequence, parts: list[bytes]) -> None:
        file = journal._file
        journal._file = None if file is None else _Unsynced(file)
        append(journal, sequence, parts)
        if isinstance(journal._file, _Unsynced):
            journal._file = journal._file.file

    Journal._append = unsynced  # type: ignore[method-assign,assignment]


def _answer_before_the_journal() -> None:
    from engine.metadata.group_commit import Committer

    async def at_once(committer: Committer, sequence: int) -> None:
        committer._hurry.set()

    Committer.wait_durable = at_once  # type: ignore[method-assign,assignment]


def _reuse_freed_room() -> None:
    """Write large payloads to room that was freed, where there is enough of it."""
    from engine.format.extents import Extent, Place, large_extent_bytes, page_up
    from engine.format.layouts import SegmentKind
    from engine.segments.files import segment_path
    from engine.segments.large import Coming, IsLast, LargeWriter, not_last
    from engine.segments.room import SegmentRoom

    freed: list[Extent] = []
    punch, write = SegmentRoom.punch, LargeWriter.write

    async def noted(room: SegmentRoom, extents: Iterable[Extent]) -> None:
        given_back = list(extents)
        await punch(room, given_back)
        freed.extend(
            e for e in given_back if e[0] in room._register.kinds and room._register.kinds[e[0]] is SegmentKind.LARGE
        )

    async def reusing(
        writer: LargeWriter, run: Seq[tuple[memoryview, int]], coming: Coming | None = None, is_last: IsLast = not_last
    ) -> list[Place]:
        if len(run) > 1:
            return await write(writer, run, coming, is_last)
        ((buffer, stored_bytes),) = run
        need, maker = large_extent_bytes(stored_bytes), writer._maker
        for number, (segment, offset, length) in enumerate(freed):
            if segment in maker.register.kinds and page_up(length) >= need:
                del freed[number]
                place = Place(segment, offset)
                maker.in_flight.begin(place)
                file = maker.disk.open(segment_path(segment, SegmentKind.LARGE), direct=True)
                for _ in coming() if coming else ():
                    continue
                file.pwrite(buffer[:need], offset)
                file.sync_data()
                file.close()
                return [place]
        return await write(writer, run, coming, is_last)

    SegmentRoom.punch = noted  # type: ignore[method-assign,assignment]
    LargeWriter.write = reusing  # type: ignore[method-assign,assignment]


def _forget_leases() -> None:
    """Let gc free what is open for reading."""
    from engine.sessions.references import References

    References.leased_blobs = lambda _: iter(())  # type: ignore[method-assign,assignment]


def _free_before_move() -> None:
    """Let compaction free the old places when the copies are written, before a record names them."""
    from engine.upkeep.compaction import Compactor

    record = Compactor._record

    async def freed_first(compactor: Compactor, copies: Any, report: Any) -> int:
        items = [item for item, _ in copies.values()]
        await compactor._segments.room.punch(
            [(item.record.segment, item.record.offset, item.record.extent_bytes) for item in items]
        )
        return await record(compactor, copies, report)

    Compactor._record = freed_first  # type: ignore[method-assign,assignment]


def _rename_before_it_is_durable() -> None:
    """Answer changes of names when they are visible, on a mount with the option `sync`."""
    from fuse.state.kept import Changed
    from fuse.state.mount import Change, Mount, stat_or_error
    from lakefs.errors import LakeError
    from lakefs.wire.messages import NameResults

    async def early(mount: Mount, request: Change) -> Changed:
        reply = await mount.engine.call(request)
        assert isinstance(reply.message, NameResults)
        (result,) = reply.message.results
        stat = stat_or_error(result)
        if isinstance(stat, LakeError):
            raise stat
        return Changed(stat, stat.ctime_ns, result.folder, result.from_folder, result.stamps, reply.epoch)

    Mount.change = early  # type: ignore[method-assign,assignment]


def _sync_forgets_engines() -> None:
    """Let fsync of a folder, on a mount, trust an engine that knows nothing of what the last one had."""
    from fuse.state.inodes import Inode
    from fuse.state.mount import Mount
    from lakefs.wire.messages import Done, Sync

    async def forgetful(mount: Mount, inode: Inode) -> None:
        await mount.ask(Sync(), Done)

    Mount.sync = forgetful  # type: ignore[method-assign,assignment]


class _Unsynced:
    """A file whose syncs do nothing."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def sync_data(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _does_nothing(*_: object, **__: object) -> None:
    return None


BUGS: Final[dict[str, Callable[[], None]]] = {
    "no-folder-sync": _no_folder_sync,
    "no-token-sync": _no_token_sync,
    "no-data-sync": _no_data_sync,
    "no-journal-sync": _no_journal_sync,
    "early-rename": _rename_before_it_is_durable,
    "sync-forgets-engines": _sync_forgets_engines,
    "answer-first": _answer_before_the_journal,
    "reuse-freed": _reuse_freed_room,
    "forget-leases": _forget_leases,
    "free-before-move": _free_before_move,
}


if __name__ == "__main__":
    small_lake.make_small()
    BUGS[sys.argv.pop(1)]()
    small_lake.be_lake()
