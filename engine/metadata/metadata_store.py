"""The metadata of one open store: the interface through which the rest of the engine reads, decides and waits.

    with metadata.view() as view:                          read at one instant, without await
        ...
    answer, sequence = await metadata.commit(decide)       decide(transaction) runs once, without await
    await metadata.wait_durable(sequence)                  before an answer that depends on it is sent

Where names have replicas, all but one follow: `take` instead of `commit`.  `lead` ends that.

Rules kept here:
- `run` is running from the opening to the end of `close`; a cancelled `run` leaves the store as a crash would.
- At most one long reader of the index (checkpoint, verification, rebuild) at a time.
- A checkpoint is due when the journal since the last one is longer than 64 MiB and than half of that checkpoint.  At a
  clean stop it is due when the journal is at least a quarter as long as it, or in many files: a large store stops fast.

It does not hold the store's lock or superblock: `engine.store.store` writes `clean_sequence` after `close` returned it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import trio

from engine.format.layouts import StoreIdentity, Table
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.metadata.applier import Applier
from engine.metadata.checkpoint import Checkpoint, forget_upto, remove_superseded, write_checkpoint
from engine.metadata.group_commit import Committer
from engine.metadata.group_log import GroupLog, JournalLog
from engine.metadata.head_turns import HeadTurns
from engine.metadata.index_building import build_while_open, compact, new_path
from engine.metadata.owed_room import JournalRoom, owed_bytes
from engine.metadata.recovery import INDEX_FOLDER, Recovered, verify_journal
from engine.metadata.stamps import Stamps
from engine.tables.index_check import IndexProgress, walk
from engine.tables.index_folder import remove_index, replace_index
from engine.tables.lmdb_index import Index, IndexPages
from engine.tables.merged_tables import Tables, TableView
from engine.tables.recorded_view import RecordedView, StampsOf
from engine.tables.views import Transaction, View
from lakefs.errors import CoordinatorLost, DiskFailed, IndexDamaged, LakeError, StoreFull
from lakefs.ids import Birth, Sequence
from lakefs.limits import KIB, OVERLAY_BYTES_APPLY
from lakefs.ports import Disk, Offload

T = TypeVar("T")
_log: Final = structlog.get_logger(__name__)
_ROOM_KNOWN_FOR_BYTES: Final = 128 * KIB
"""The disk's free room is asked again after this many bytes of journal."""
_JOURNAL_FILES_MAX: Final = 64
"""Journal files kept over a clean stop; each costs an open at the next start."""


class Metadata:
    """Tables, committer, applier and checkpoints of one store.  Made by `open_metadata`; used on the loop."""

    def __init__(
        self,
        disk: Disk,
        offload: Offload,
        identity: StoreIdentity,
        recovered: Recovered,
        release_reserve: Callable[[], bool],
        journal_offload: Offload,
        sizes: MetadataSizes = DEFAULT_SIZES,
        headroom_bytes: int = 0,
    ) -> None:
        self.rebuilt_because = recovered.rebuilt_because
        """The reason why the index was rebuilt at the opening; empty when it was not."""
        self.index_progress = IndexProgress()
        self.index_suspect = trio.Event()
        """Set when a read met damage in the index."""
        self._disk = disk
        self._offload = offload
        self._identity = identity
        self._sizes = sizes
        self._tables, self._journal = Tables(recovered.index, recovered.overlay), recovered.journal
        self.journal_log: Final = JournalLog(self._journal, journal_offload, recovered.end)
        self._committer = Committer(self._tables, self.journal_log, recovered.end, sizes)
        self.check_leader: Callable[[], None] | None = None  # for each step that reads; see `lead`
        self._check_decision: Callable[[], None] | None = None
        self._applier = Applier(self._tables, self._committer, offload, release_reserve, self._after_apply)
        self._committer.after_group = self._after_group
        self.outlive_index: Final = self._applier.outlive_index
        self.stamps: Stamps | None = None
        """The stamps of the records of names; None if this engine has none."""
        self.turns: HeadTurns | None = None
        """The same for heads that repeat them, at the names of a lake."""
        self.use_bucket_rule: Final = self._tables.use_bucket_rule
        self.write_first: Final = self._committer.write_first
        self.noted_at: Final = self._committer.noted_at
        self.on_joined: Final = self._committer.on_joined
        self.on_durable: Final = self._committer.on_durable
        self.on_durable_records: Final = self._committer.on_durable_records
        self.off_durable_records: Final = self._committer.off_durable_records
        self.applied_sequence = recovered.index.applied
        """The last group that is in the index."""
        self._pages = IndexPages()
        self._count_pages()
        self._headroom_bytes = headroom_bytes
        self._is_without_room, self._room_known_at = False, -_ROOM_KNOWN_FOR_BYTES
        self._checkpoint = recovered.checkpoint
        self._journal_bytes_before = recovered.journal_bytes
        self._journal_files_before = recovered.file_count
        self._long_reader = trio.Lock()
        self._checkpoint_wanted = trio.Event()
        self._scope = trio.CancelScope()
        self._ended: trio.Event | None = None
        self._draining = trio.Lock()

    # --- reading and deciding ----------------------------------------------------------------------------

    def view(self) -> AbstractContextManager[View]:
        """Return a view of all tables at this instant; use it before the next `await`.  CoordinatorLost."""
        if self.check_leader is not None:
            self.check_leader()
        return TableView(self._tables)

    def recorded_view(self, of_head: StampsOf | None = None, *, durable: bool = True) -> AbstractContextManager[View]:
        """Return a view for answers with stamps: a `RecordedView`, or a plain one if there are none (`stamps_of`)."""
        stamps_of = self.stamps_of(of_head, durable=durable)
        if self.check_leader is not None:
            self.check_leader()
        return TableView(self._tables) if stamps_of is None else RecordedView(self._tables, stamps_of)

    def stamps_of(self, of_head: StampsOf | None, *, durable: bool) -> StampsOf | None:
        """Return what gives an answer of this step its stamps; None: it has none.  `of_head`: of its client's head.

        What is only visible has none there: another leader may not have it.
        """
        is_lasting = durable or self._committer.last_sequence == self.durable_sequence
        return self.stamps.of if self.stamps is not None else of_head if is_lasting else None

    async def commit(
        self, decide: Callable[[Transaction], T], *, durable: bool = True, grows: bool = False
    ) -> tuple[T, Sequence]:
        """Run `decide` on a transaction, once and uninterrupted; returns its result and the sequence to wait for.

        Waits first while group or overlay is full.  An error of `decide` changes nothing; it is raised when the state
        it was decided on is durable, with `durable=False` at once.  `grows` is for decisions that add lasting records:
        they are refused before the room that removals need is used up.
        Errors: RequestTooLarge, StoreFull, StoreReadOnly, CoordinatorLost.  The change need not be durable on return.
        """
        if self._check_decision is not None:
            self._check_decision()
        if grows and self._committer.failed is None:
            self._refuse_without_room()
        return await self._committer.commit_when_room(decide, durable=durable)

    async def wait_durable(self, sequence: Sequence) -> None:
        """Return when group `sequence` is durable; at once, without a checkpoint, when it is.  StoreReadOnly."""
        await self._committer.wait_durable(sequence)
        if self.turns is not None:
            await self.turns.wait_all_turned()

    async def wait_visible(self) -> None:
        """Return when an answer that is not to be durable may leave: no head repeats what was before."""
        await self._committer.turns.wait_settled(self._committer.turns.last)

    async def sync(self) -> None:
        """Return when everything decided until now is durable.  StoreReadOnly when it will not be."""
        await self._committer.wait_durable(self._committer.last_sequence)

    def owed_bytes(self) -> int:
        """Return an upper bound of the disk room that the present records still need.  From any thread."""
        journal = JournalRoom(self._journal_bytes(), self._checkpoint_due_bytes())
        return owed_bytes(self._pages, self._tables.overlay, self._checkpoint, self._sizes, journal)

    def has_room(self, *, to_begin: bool = False) -> bool:
        """Return False while decisions that need more room are refused; `to_begin`: or nearly.  Asks the disk."""
        return self._disk.free_bytes() - self.owed_bytes() >= self._headroom_bytes // (1 if to_begin else 2)

    def _refuse_without_room(self) -> None:
        """Raise StoreFull when the room left on the disk is needed for journal, index and checkpoint of removals."""
        written = self._journal.bytes_written
        if self._is_without_room or written - self._room_known_at >= _ROOM_KNOWN_FOR_BYTES:
            self._is_without_room, self._room_known_at = not self.has_room(), written
        if self._is_without_room:
            raise StoreFull("no room for more records on the disk; remove objects, then run: lake gc")

    @property
    def durable_sequence(self) -> Sequence:
        """The last durable group."""
        return self._committer.durable_sequence

    @property
    def kept_sequence(self) -> Sequence:
        """The last durable group that is in the journal on this disk."""
        return self._committer.log.kept

    @property
    def failed(self) -> LakeError | None:
        """The error that stopped all writing; None while the store writes."""
        return self._committer.failed

    @property
    def next_birth(self) -> Birth:
        """The birth that the next new chunk gets; all existing chunks have smaller ones."""
        return Birth(self._tables.counters.birth.next)

    def stop_writing(self, reason: str) -> None:
        """Stop all commits until the engine is restarted, because another part of the store failed."""
        self._committer.fail(DiskFailed(reason))

    def record_count(self, table: Table) -> int:
        """Return the number of a table's records in the index, without those only in the overlay.  IndexDamaged."""
        with closing(self._tables.index.snapshot()) as snapshot:
            return snapshot.stats(table)[0]

    def stats(self) -> dict[str, Any]:
        """Counts for people and scripts; JSON-able."""
        overlay = self._tables.overlay
        return {
            "durable_sequence": self.durable_sequence,
            "applied_sequence": self.applied_sequence,
            "checkpoint_sequence": 0 if self._checkpoint is None else self._checkpoint.sequence,
            "overlay_entries": overlay.entry_count,
            "overlay_bytes": overlay.nbytes,
            "applied_records": self._applier.applied_records,
            "journal_bytes_since_checkpoint": self._journal_bytes(),
            "index_full": self._committer.index_full is not None,
            "rebuilt_because": self.rebuilt_because,
        }

    def use_stamps(self, stamps: Stamps | None) -> None:
        """Turn these stamps with every change from now on; called before anything is served."""
        self.stamps = stamps
        if stamps is not None:
            self._committer.turn_stamps = stamps.turn

    def use_turns(self, turns: HeadTurns | None) -> None:
        """Let heads repeat stamps from now on; called before anything is served."""
        self.turns = turns
        if turns is not None:
            self._committer.turns, self._committer.turn_stamps = turns, turns.turn

    # --- following and leading ---------------------------------------------------------------------------

    async def take(self, sequence: Sequence, body: bytes, record_count: int) -> None:
        """Take the next group of a log that another replica appends to, when there is room for it.

        Nothing may be committed before `lead`.  JournalDamaged for a body that is none; StoreReadOnly.
        """
        await self._committer.take(sequence, body, record_count)

    async def lead(self, log: GroupLog, check: Callable[[], None], check_decision: Callable[[], None]) -> None:
        """Append to this log from now on; all that was taken is in the journal on return, and commits may begin.

        `check` is called in each step that reads, `check_decision` in each that decides.  StoreReadOnly; their errors.
        """
        await self.sync()
        self._tables.restore_counters()
        self._committer.log, self.check_leader, self._check_decision = log, check, check_decision

    def stop_leading(self, error: CoordinatorLost) -> None:
        """Refuse everything from now on: another replica leads, or may lead.  The store is to be opened anew."""
        self._committer.fail(error)

    # --- life --------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit, apply and checkpoint, until `close` or cancellation.

        When cancelled before `close`, waiters get StoreReadOnly, and files are released as a crash leaves them.
        """
        self._ended = trio.Event()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._committer.run)
                    await nursery.start(self._applier.run)
                    nursery.start_soon(self._checkpoint_when_wanted)
                    task_status.started()
        finally:
            try:
                with trio.CancelScope(shield=True):
                    async with self._draining:  # a `close` that began before is still at the files
                        await self._offload.run(self._release_blocking)
            finally:
                self._ended.set()

    async def close(self, *, clean: bool = True) -> Sequence | None:
        """Make all changes durable, apply them to the index, write a checkpoint when due, and release the files.

        Returns the sequence for the superblock, None when the stop is not clean: `clean` is False, or writing failed.
        No commit may follow.  Ends `run`, which should be running.  Not interrupted by cancellation.
        """
        with trio.CancelScope(shield=True):
            if self._ended is None:
                await self._offload.run(self._release_blocking)
                return None
            if clean and self.failed is None:
                async with self._draining:
                    await self._drain()
            durable = self.durable_sequence
            is_clean = clean and self.failed is None and self._committer.last_sequence == durable == self.kept_sequence
            self._scope.cancel()
            await self._ended.wait()
        return durable if is_clean else None

    async def _drain(self) -> None:
        try:
            await self.sync()
            await self._committer.log.wait_kept(self.durable_sequence)
            await self._applier.drain()
            if self._is_checkpoint_due_at_stop():
                await self.checkpoint()
            await self._compact()
        except LakeError as error:
            # Every acknowledged change is in the journal; the next start adds to the index what it lacks.
            _log.warning("the index or its checkpoint is not complete at the stop", error=error.message)

    def _release_blocking(self) -> None:
        try:
            self._journal.close()
        finally:
            self._tables.index.close()

    # --- checkpoints -------------------------------------------------------------------------------------

    async def checkpoint(self) -> Sequence:
        """Write a checkpoint of the index, and remove the files it supersedes; returns its sequence.

        Does nothing when that exists.  IndexDamaged (use `rebuild_online`), StoreFull, DiskFailed: the store goes on.
        """
        async with self._long_reader:
            written = self._journal.bytes_written
            if self._checkpoint is not None and self._checkpoint.sequence == self.applied_sequence:
                return self._checkpoint.sequence
            with trio.CancelScope(shield=True):
                checkpoint = await self._offload.run(self._checkpoint_blocking, self._tables.index)
            assert self._checkpoint is None or checkpoint.sequence >= self._checkpoint.sequence
            self._checkpoint = checkpoint
            self._journal_bytes_before = -written
            self._journal_files_before = 0
            return checkpoint.sequence

    async def forget_upto(self, sequence: Sequence) -> bool:
        """Return True if no file has the group or an earlier state, if need be after a checkpoint.  Errors as there."""
        if self._journal.first_sequence <= sequence or self.applied_sequence < sequence:
            return False  # ask again when another file is written, and the index has the group
        await self.checkpoint()
        async with self._long_reader:
            return await self._offload.run(forget_upto, self._disk, self._identity.store_id, sequence)

    def _checkpoint_blocking(self, index: Index) -> Checkpoint:
        with closing(index.snapshot()) as snapshot:
            checkpoint = write_checkpoint(self._disk, self._identity, snapshot)
        remove_superseded(self._disk, self._identity.store_id, checkpoint)
        return checkpoint

    async def _checkpoint_when_wanted(self) -> None:
        while True:
            await self._checkpoint_wanted.wait()
            self._checkpoint_wanted = trio.Event()
            try:
                await self.checkpoint()
            except LakeError as error:
                if isinstance(error, IndexDamaged):
                    self.index_suspect.set()
                _log.error("no checkpoint could be written; it is tried again later", error=error.message)
                # A quarter of the bound from now.
                late = self._sizes.checkpoint_journal * 3 // 4
                self._journal_bytes_before = late - self._journal.bytes_written

    def _after_group(self) -> None:
        self._applier.filled()
        is_full = self._tables.overlay.has_reached(self._sizes.overlay_entries_apply, OVERLAY_BYTES_APPLY)
        is_due = self._journal_bytes() > self._checkpoint_due_bytes()  # the checkpoint follows the round
        if is_full or (is_due and not self._checkpoint_wanted.is_set() and not self._long_reader.locked()):
            self._applier.hurry()

    def _after_apply(self) -> None:
        self.applied_sequence = self._tables.index.applied
        self._count_pages()
        if self._journal_bytes() > self._checkpoint_due_bytes():
            self._checkpoint_wanted.set()

    def _count_pages(self) -> None:
        with suppress(IndexDamaged):  # keep the last count: a reader of the records finds the damage
            self._pages = self._tables.index.pages()

    def _checkpoint_due_bytes(self) -> int:
        """Return the length of the journal at which a checkpoint is due."""
        least = self._sizes.checkpoint_journal
        return least if self._checkpoint is None else max(least, self._checkpoint.file_bytes // 2)

    def _journal_bytes(self) -> int:
        """Return the length of the journal since the last checkpoint."""
        return self._journal_bytes_before + self._journal.bytes_written

    def _is_checkpoint_due_at_stop(self) -> bool:
        last, applied = self._checkpoint, self.applied_sequence
        if self._tables.overlay.entry_count or not applied:
            return False
        if last is None or last.sequence == applied:
            return last is None
        is_short = self._journal_bytes() * 4 < last.file_bytes
        return not is_short or self._journal_files_before >= _JOURNAL_FILES_MAX

    # --- the index as a whole ----------------------------------------------------------------------------

    async def verify_index(self) -> int:
        """Check every record of the index and each table's sums while the store serves; returns the number of records.

        IndexDamaged at the first mismatch: call `rebuild_online`.
        """
        async with self._long_reader:
            return await walk(self._tables.index, self._offload, self.index_progress)

    async def verify_journal(self) -> int:
        """Read the newest checkpoint and every durable group behind it; returns the number of their records.

        StoreDamaged, JournalDamaged name the unreadable file: a rebuild of the index would fail there.
        """
        async with self._long_reader:
            return await self._offload.run(verify_journal, self._disk, self._identity.store_id, self.kept_sequence)

    async def rebuild_online(self) -> None:
        """Rebuild the index from checkpoint and journal and switch to it; commits continue during the rebuild.

        A failure changes nothing: StoreDamaged, JournalDamaged, StoreFull, DiskFailed.
        """
        async with self._long_reader, self._applier.paused:
            path = Path(self._disk.local_path(INDEX_FOLDER))
            with trio.CancelScope(shield=True):
                build = partial(build_while_open, self._disk, self._identity, new_path(path), self.index_progress)
                index = await self._offload.run(build, self.applied_sequence)
                index.committed = self._tables.index.committed
                # One step: files and readers switch together.
                old_path = replace_index(new_path(path), path)
                index.path = path
                if self.stamps is not None:
                    self.stamps.turn_all()  # the damaged index may have hidden records
                if self.turns is not None:
                    self.turns.turn_all()
                self._tables.replace_index(index).close()
                await self._offload.run(remove_index, old_path)

    async def _compact(self) -> None:
        """Return free pages of the index to the file system, when they are most of it."""
        if self._tables.index.is_mostly_free():
            async with self._long_reader, self._applier.paused:
                await compact(self._disk, self._offload, self._tables.index)
