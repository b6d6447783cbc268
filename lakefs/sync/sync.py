"""Sync: make the target have what the source has, as steps that any client can run.

Both sides are listed once, in one order, and compared name by name; what differs is copied while the listing goes on.
With `delete`, the names that only the target has are removed at the end.

Rules kept here:
- Nothing is removed unless the source was listed whole and has a file, is still in its place, and everything that was
  to be copied was.
- A name that fails, or that a side cannot have, is reported by itself, and the others go on.
- Each file is whole or absent at the target, so a sync that was killed can be begun again: what was copied is the same
  on both sides by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lakefs.errors import InvalidArgument, LakeError
from lakefs.lake.lake_steps import LakeSteps
from lakefs.steps.steps import Steps
from lakefs.sync.contents import is_same_content
from lakefs.sync.entries import Comparison, Entry, Need, Pair, Pairing, needed
from lakefs.sync.movers import Download, Mover, NameCopies, Upload, failed
from lakefs.sync.relay import Relay
from lakefs.sync.removals import FolderRemover, LakeRemover, Removals, Remover
from lakefs.sync.report import Done, SyncObserver, SyncOutcome, SyncTotals
from lakefs.sync.sides import BucketSide, FolderSide, Side
from lakefs.trees.get_file import GetOptions
from lakefs.trees.put_tree import PutOptions


@dataclass(frozen=True)
class SyncOptions:
    """`delete`: remove what only the target has.  `dry_run`: report what would be done, and do nothing.

    `jobs`: frames of small files in flight.  `create_bucket`: make the target's bucket if it does not exist.
    `follow`: write through symbolic links to folders below a local target.
    """

    comparison: Comparison = field(default_factory=Comparison)
    delete: bool = False
    dry_run: bool = False
    create_bucket: bool = False
    follow: bool = False
    jobs: int = 4


def sync(
    lake: LakeSteps, source: Side, target: Side, options: SyncOptions, observer: SyncObserver
) -> Steps[SyncTotals]:
    """Make the target have what the source has; return the totals.

    One side at least is in the lake; a source at another engine has its own runner.  Raises InvalidArgument if one
    side is inside the other, and the errors that end everything: a source that does not exist, an engine that is gone.
    """
    refuse_nested(source, target)
    run = _Sync(lake, source, target, options, observer)
    try:
        pairing = Pairing()
        while (side := pairing.wants) is not None:
            page = yield from (source if side == 0 else target).next_page()
            pairing.add(side, page)
            yield from run.take(list(pairing.pairs()))
        yield from run.finish()
    finally:
        run.removals.close()
    return run.totals


def refuse_nested(source: Side, target: Side) -> None:
    """Raise InvalidArgument if two sides of one lake are the same, or one is inside the other."""
    if not (isinstance(source, BucketSide) and isinstance(target, BucketSide)) or source.runner is not target.runner:
        return
    if source.name == target.name:
        raise InvalidArgument(f"source and target are the same: {source.name}", subject=str(source.name))
    for outer, inner in ((source.name, target.name), (target.name, source.name)):
        if outer.bucket == inner.bucket and inner.key.startswith(outer.key):
            raise InvalidArgument(f"{inner} is inside {outer}; choose sides beside each other", subject=str(inner))


class _Sync:
    """One sync and its counts."""

    def __init__(
        self, lake: LakeSteps, source: Side, target: Side, options: SyncOptions, observer: SyncObserver
    ) -> None:
        self.totals = SyncTotals()
        self.removals = Removals()
        self._source = source
        self._target = target
        # Folders that a get makes have the mode that the umask leaves them.
        self._comparison = replace(options.comparison, makes_folders=isinstance(target, FolderSide))
        self._options = options
        self._observer = observer
        counting = SyncObserver(self._count, observer.planned, observer.progress)
        self._mover = _mover(lake, source, target, options, counting)
        self._remover = _remover(target, counting)
        self._source_is_whole = True
        self._source_files = 0

    def take(self, pairs: Sequence[Pair]) -> Steps[None]:
        """Act upon pairs; copies may still be under way on return."""
        copies: list[Entry] = []
        for pair in pairs:
            self._look_at(pair)
            need, reason = needed(pair, self._comparison)
            if need is Need.COMPARE:
                need = yield from self._compared(pair)
            self._act(pair, need, reason, copies)
        if copies:
            files = [entry for entry in copies if not entry.is_folder]
            self._observer.planned(len(files), sum(entry.size_bytes for entry in files))
            yield from self._mover.take(copies)

    def _act(self, pair: Pair, need: Need, reason: str, copies: list[Entry]) -> None:
        """Note the change that a pair needs, or report it."""
        entry = pair.source or pair.target
        assert entry is not None
        if need is Need.REMOVE:
            if self._options.delete:
                self.removals.add(entry)
        elif need is Need.REFUSE:
            self._count(SyncOutcome(entry.path, Done.SKIPPED, reason, entry.size_bytes))
        elif need is Need.NEWER:
            self.totals.newer += 1
        elif need in (Need.COPY, Need.FOLDER):
            if not self._options.dry_run:
                copies.append(entry)
            elif need is Need.COPY:
                self._count(SyncOutcome(entry.path, Done.COPIED, reason, entry.size_bytes))
        elif need is Need.NOTHING and pair.source is not None and not entry.is_folder:
            self.totals.unchanged += 1

    def finish(self) -> Steps[None]:
        """End the copies, then remove."""
        yield from self._mover.finish()
        if not (self.removals.count or self.removals.folders):
            return
        self.totals.withheld = self._reason_to_withhold()
        if not self.totals.withheld and not (yield from self._source.is_in_place()):
            self.totals.withheld = f"{self._source.shown} was moved or removed meanwhile"
        if self.totals.withheld:
            return
        for batch in self.removals.batches():
            if not self._options.dry_run:
                yield from self._remover.remove(batch)
                continue
            for noted in batch:
                self._count(SyncOutcome(noted.path, Done.REMOVED, "not at the source", noted.size_bytes))
        if not self._options.dry_run:
            yield from self._remover.remove_folders(self.removals.folders)

    def _reason_to_withhold(self) -> str:
        """Return the reason why nothing may be removed; "" if there is none."""
        if not self._source_is_whole:
            return f"{self._source.shown} could not be read whole"
        if not self._source_files:
            return f"{self._source.shown} has no file"
        if self.totals.names[Done.FAILED]:
            return "not everything could be copied"
        return ""

    def _look_at(self, pair: Pair) -> None:
        source, target = pair.source, pair.target
        if source is not None:
            self._source_is_whole = self._source_is_whole and source.is_whole
            self._source_files += not source.is_folder and not source.refusal
        if target is not None and not target.is_whole:
            self._count(SyncOutcome(target.path, Done.SKIPPED, f"at the target: {target.refusal}"))

    def _compared(self, pair: Pair) -> Steps[Need]:
        """Return the change that a pair of files of one size needs; COMPARE if they could not be compared."""
        try:
            equal = yield from is_same_content(self._source, self._target, pair)
        except LakeError as error:
            self._count(failed(pair.path, error))
            return Need.COMPARE
        return Need.NOTHING if equal else Need.COPY

    def _count(self, outcome: SyncOutcome) -> None:
        self.totals.count(outcome)
        self._observer.outcome(outcome)


def _mover(lake: LakeSteps, source: Side, target: Side, options: SyncOptions, observer: SyncObserver) -> Mover:
    if isinstance(source, FolderSide) and isinstance(target, BucketSide):
        put_options = PutOptions(
            compare=False, create_bucket=options.create_bucket, jobs=options.jobs, follow=source.follow
        )
        return Upload(lake, source, target, put_options, observer)
    if isinstance(source, BucketSide) and isinstance(target, FolderSide):
        # Below links that are followed the target was not listed, so what is newer there is known only now.
        get_options = GetOptions(follow=options.follow, keep_newer=options.comparison.update)
        return Download(lake, source, target, get_options, observer)
    if isinstance(source, BucketSide) and isinstance(target, BucketSide):
        if source.runner is not None:
            return Relay(lake, source, target, observer, create_bucket=options.create_bucket)
        return NameCopies(lake, source, target, observer, create_bucket=options.create_bucket)
    raise InvalidArgument("both sides are local folders, and one at least must be in the lake")


def _remover(target: Side, observer: SyncObserver) -> Remover:
    if isinstance(target, FolderSide):
        return FolderRemover(target.root, observer)
    assert isinstance(target, BucketSide)
    return LakeRemover(target.name, observer)
