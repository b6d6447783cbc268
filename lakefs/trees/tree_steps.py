"""`put_tree`, `get_tree`, `remove_tree` as users of the clients call them: names as text, one result, one error.

`lakefs.client` makes methods of these, as it does of `LakeSteps`, which stands below this room.

Rules kept here:
- All files are tried.  The first failure is raised at the end, so that no caller takes a part for the whole; the
  callback `outcome` gets the end of each file.
- An error that all files would meet ends everything at once (`lakefs.trees.walk.is_fatal`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lakefs.errors import InvalidName, KeyNotFound, LocalFileError
from lakefs.lake.lake_steps import LakeSteps
from lakefs.lake.uploads import Progress
from lakefs.names import Name, check_path, parse_name
from lakefs.steps.steps import Steps, work
from lakefs.trees.get_file import GetOptions
from lakefs.trees.get_tree import get_tree as get_all
from lakefs.trees.put_tree import PutOptions, put_tree as put_all
from lakefs.trees.remove_tree import RemovedNames, remove_below
from lakefs.trees.walk import Fate, FileOutcome, Observer, Totals, Walk, WalkOptions

Outcome = Callable[[FileOutcome], None]
"""Called with the end of each file."""


def put_tree(
    lake: LakeSteps,
    name: str,
    folder: os.PathLike[str] | str,
    *,
    compare: bool = True,
    if_absent: bool = False,
    follow: bool = False,
    create_bucket: bool = False,
    outcome: Outcome | None = None,
    progress: Progress | None = None,
) -> Steps[Totals]:
    """Store what is in a local folder under NAME/ (or in the bucket, if the name is one); return counts of files.

    Each file is durable when its outcome is reported.  Files that are stored already, with the same content and mode,
    are left alone (`compare=False` stores all).  `if_absent`: a name that exists fails.  `follow`: symbolic links are
    followed, else skipped.  `create_bucket`: make the bucket if it does not exist.  `outcome(outcome)` gets the end of
    each file, `progress(bytes_done, bytes_already_there)` increments.  All files are tried, then the first failure is
    raised.  Names in the lake that the folder does not have stay.

    LocalFileError (also if the folder does not exist), BucketNotFound, InvalidName, StoreFull.
    """
    target = _folder(check_path(parse_name(name)))
    source = os.fspath(folder)
    yield from work(_check_folder, source)
    refused = yield from data_folders(lake)
    walk = Walk(source, target.key, WalkOptions(follow, refused=refused))
    options = PutOptions(compare=compare, if_absent=if_absent, create_bucket=create_bucket, follow=follow)
    totals = yield from put_all(lake, [walk], target.bucket, options, _observer(outcome, progress))
    return _whole(totals)


def get_tree(
    lake: LakeSteps,
    name: str,
    folder: os.PathLike[str] | str,
    *,
    compare: bool = True,
    replace: bool = True,
    keep_newer: bool = False,
    follow: bool = False,
    outcome: Outcome | None = None,
    progress: Progress | None = None,
) -> Steps[Totals]:
    """Fetch all objects under NAME/ (or in the bucket) into a local folder, made if missing; return counts of files.

    Each file is complete or absent, with the object's mode and modification time.  Files that have the right content
    already are left alone (`compare=False` fetches all); `replace=False` skips every file that exists, and
    `keep_newer=True` those that differ and were changed later than the object, as `lake get -r` does.  `follow`:
    folders inside the target may be symbolic links.  `outcome` and `progress`: see `put_tree`.  All objects are tried,
    then the first failure is raised; InvalidName if there were names that no local path can say.

    KeyNotFound, BucketNotFound, LocalFileError, ChunkDamaged.
    """
    source = _folder(parse_name(name))
    options = GetOptions(compare=compare, replace=replace, keep_newer=keep_newer, follow=follow)
    totals = yield from get_all(lake, source, os.fspath(folder), options, _observer(outcome, progress))
    if totals.missing and totals.first_error is None:
        raise InvalidName(
            f"{source}: {totals.missing} names in it can be no path below {os.fspath(folder)}; get each by itself",
            subject=str(source),
        )
    return _whole(totals)


def remove_tree(lake: LakeSteps, name: str) -> Steps[int]:
    """Remove all objects and folders under NAME/, and that folder; return how many names were removed.

    A bucket is emptied, and stays.  An object that has the very name stays.  Each name is removed atomically; a removal
    that was interrupted leaves the rest.  KeyNotFound if there is no such folder; BucketNotFound.
    """
    folder = _folder(parse_name(name))
    removed = RemovedNames()
    yield from remove_below(lake, folder, removed)
    if not removed.count and folder.key:
        raise KeyNotFound(f"{folder} does not exist", subject=str(folder))
    return removed.count


def _folder(name: Name) -> Name:
    return name if name.is_folder else Name(name.bucket, name.key + "/")


def _check_folder(path: str) -> None:
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise LocalFileError(f"{path}: {error.strerror}", subject=path) from error
    if not is_folder:
        raise LocalFileError(f"{path}: is not a folder; store a file with put", subject=path)


def data_folders(lake: LakeSteps) -> Steps[frozenset[tuple[int, int]]]:
    """Return device and inode of the store's data folders on this machine: a lake cannot store itself."""
    if lake.network:
        return frozenset()
    status = yield from lake.status()
    paths = [status.get("data"), *[each["folder"] for each in status.get("folders", ())]]
    return (yield from work(_identities, paths))


def _identities(paths: Sequence[Any]) -> frozenset[tuple[int, int]]:
    found = set()
    for path in paths:
        with suppress(OSError):
            status = os.stat(path) if isinstance(path, str) else None
            if status is not None:
                found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _observer(outcome: Outcome | None, progress: Progress | None) -> Observer:
    return Observer(outcome or (lambda ended: None), progress or (lambda done, present: None))


def _whole(totals: Totals) -> Totals:
    """Return the counts if nothing failed; else raise the first failure, with a note of how many there were."""
    error = totals.first_error
    if error is None:
        return totals
    done = sum(totals.files[fate] for fate in (Fate.STORED, Fate.FETCHED, Fate.UNCHANGED))
    error.add_note(f"{totals.files[Fate.FAILED]} files failed; {done} are in place")
    raise error
