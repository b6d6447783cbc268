"""Makes the names in one copy's folder those of another's, behind a crash; and copies files between them.

Rules kept here:
- Nothing is removed: what the copy has besides is moved into `mirror.aside`, where it replaces what was left there
  by an earlier time.
- No content is replaced.  A file that both have may differ in what was never synced, its length included; but one of
  them may also be damaged, and the other must not be lost by that.
- A file appears whole: it is copied beside its place, synced, and renamed.
- The mirror's own files, and names that are not mirrored, are left alone.

A crash on the way is mended by the next time.  Both folders are locked, and nothing else uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress

from engine.mirror.copy_list import ASIDE_FOLDER, OWN_PREFIX
from engine.mirror.mirror_bounds import PIECE_BYTES
from lakefs.ports import Disk

_BEING_COPIED = f"{OWN_PREFIX}copied"


def make_equal(right: Disk, disk: Disk, is_mirrored: Callable[[str], bool]) -> None:
    """Give `disk` the names of `right`, durable on return.  LakeError, FileNotFoundError, FileExistsError."""
    wanted, present = tree(right, is_mirrored), tree(disk, is_mirrored)
    folders = {""}
    for path, size in present.items():
        if size is not None and path not in wanted:
            _set_aside(disk, path)
            folders.add(path.rpartition("/")[0])
    for path, size in wanted.items():
        if size is None:
            disk.make_folder(path)
            folders.add(path)
        elif path not in present:
            _copy_file(right, disk, path)
            folders.add(path.rpartition("/")[0])
    for folder in sorted(folders):
        if not folder or disk.exists(folder):
            disk.sync_folder(folder)


def tree(disk: Disk, is_mirrored: Callable[[str], bool], folder: str = "") -> dict[str, int | None]:
    """Return the mirrored paths, folders before what is in them: a file's length, None for a folder."""
    found: dict[str, int | None] = {}
    for name in disk.list_folder(folder):
        path = f"{folder}/{name}" if folder else name
        if not folder and (name.startswith(OWN_PREFIX) or not is_mirrored(name)):
            continue
        if disk.is_folder(path):
            found[path] = None
            found |= tree(disk, is_mirrored, path)
        else:
            with suppress(FileNotFoundError):  # removed just now, where the disk is in use
                found[path] = disk.stat(path).size_bytes
    return found


def _set_aside(disk: Disk, path: str) -> None:
    disk.make_folder(ASIDE_FOLDER)
    disk.rename(path, f"{ASIDE_FOLDER}/{path.replace('/', '-')}")


def _copy_file(source: Disk, target: Disk, path: str) -> None:
    with suppress(FileNotFoundError):
        target.unlink(_BEING_COPIED)
    with closing(source.open(path, read_only=True)) as old, closing(target.open(_BEING_COPIED, create=True)) as new:
        buffer = memoryview(bytearray(PIECE_BYTES))
        offset = 0
        while count := old.pread_into(buffer, offset):
            new.pwrite(buffer[:count], offset)
            offset += count
        new.sync_data()
    target.rename(_BEING_COPIED, path)
