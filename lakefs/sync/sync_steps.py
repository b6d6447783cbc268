"""`sync` as users of the clients call it: a name of the lake is text, a local folder is a path.

`lakefs.client` makes a method of it, as of `lakefs.trees.tree_steps`.  Two engines are for the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from lakefs.errors import LakeError
from lakefs.lake.lake_steps import LakeSteps
from lakefs.lake.uploads import Progress
from lakefs.names import Name, check_path, parse_name
from lakefs.steps.steps import Steps
from lakefs.sync.entries import Comparison
from lakefs.sync.filters import Rules, rules_of
from lakefs.sync.report import SyncObserver, SyncOutcome, SyncTotals
from lakefs.sync.sides import BucketSide, FolderSide, Side
from lakefs.sync.sync import SyncOptions, sync as sync_sides
from lakefs.trees.tree_steps import data_folders

Outcome = Callable[[SyncOutcome], None]
"""Called with the end of each name that was acted upon."""
Place = str | os.PathLike[str]
"""A side: text is a name in the lake, BUCKET or BUCKET/PREFIX; a path (`pathlib.Path`) is a local folder."""


def sync(
    lake: LakeSteps,
    source: Place,
    target: Place,
    *,
    delete: bool = False,
    dry_run: bool = False,
    checksum: bool = False,
    update: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    follow: bool = False,
    create_bucket: bool = False,
    outcome: Outcome | None = None,
    progress: Progress | None = None,
) -> Steps[SyncTotals]:
    """Make the target have what the source has; return counts.  Text is a name in the lake, a path a local folder.

    Files of the same size, time and mode are taken to be the same; `checksum`: those of the same size and content.
    `update`: leave files that are newer at the target.  `delete`: remove what only the target has; nothing is removed
    if the source has no file or was not read whole, or if a file was not copied.  `dry_run`: do nothing; `outcome`
    gets what would be done.  `include` and `exclude`: patterns as rclone has them.  `follow`: symbolic links.
    `outcome(outcome)` gets each name that was acted upon, `progress(bytes_done, bytes_already_there)` increments.

    All names are tried, then the first failure is raised.  `is_in_step` of the counts is false if names were skipped,
    or not removed.  LocalFileError, BucketNotFound, KeyNotFound, InvalidArgument, InvalidName, StoreFull.
    """
    rules = rules_of(include, exclude)
    names = _lake_name(source), _lake_name(target)
    if names[1] is not None:
        check_path(names[1])
    refused = frozenset() if None not in names else (yield from data_folders(lake))
    sides = (
        _side(lake, source, names, 0, rules, follow, refused),
        _side(lake, target, names, 1, rules, follow, refused),
    )
    failures: list[LakeError] = []

    def note(ended: SyncOutcome) -> None:
        if ended.error is not None:
            failures.append(ended.error)
        if outcome is not None:
            outcome(ended)

    options = SyncOptions(
        Comparison(contents=checksum, update=update),
        delete=delete,
        dry_run=dry_run,
        create_bucket=create_bucket,
        follow=follow,
    )
    observer = SyncObserver(note, progress=progress or (lambda done, present: None))
    totals = yield from sync_sides(lake, *sides, options, observer)
    if failures:
        failures[0].add_note(f"{len(failures)} names failed")
        raise failures[0]
    return totals


def _lake_name(place: Place) -> Name | None:
    """Return the name of a side as a folder; None for a local one.  InvalidName."""
    if isinstance(place, os.PathLike):
        return None
    name = parse_name(place)
    return name if name.is_folder else Name(name.bucket, name.key + "/")


def _side(
    lake: LakeSteps,
    place: Place,
    names: tuple[Name | None, Name | None],
    index: int,
    rules: Rules,
    follow: bool,
    refused: frozenset[tuple[int, int]],
) -> Side:
    name, other = names[index], names[1 - index]
    may_miss = index == 1
    if name is not None:
        return BucketSide(lake, name, rules, other is None, may_miss)
    prefix_bytes = 0 if other is None else len(other.key.encode())
    # Below a target no link is followed when it is listed, so nothing behind one is removed.
    return FolderSide(os.fspath(place), rules, follow and not may_miss, prefix_bytes, refused, may_miss)
