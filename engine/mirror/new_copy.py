"""Makes a new copy of a mirrored disk on an empty folder, while the store works.

    begin     each change that begins from now on is made on the new copy, too: it has new files from their first byte
    copy      file after file: open a handle for each writer of the file, then copy it piece by piece  --  sync
    finish    all names are there: sync the folders  --  a list with the new copy, durable on all

Rules kept here:
- A piece is read and written while no content changes.  So a file that is being appended needs no special treatment: a
  piece has what was written before, and the writer's new handle gets what is written after.
- The new copy is read by nobody until a list names it.  It is complete and synced when that list is written.
- Its failure ends the making, and nothing else.  The folder can be given again: the rest of a copy that no list names
  is removed.

A caller that writes a checkpoint first, and begins a new journal file, has less copied.  Nothing depends on that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from engine.mirror.copy import Copy
from engine.mirror.copy_list import COPY_FILE, LIST_FILE, LOCK_FILE, new_id, read_copy_file, write_copy_file
from engine.mirror.equal_names import tree
from engine.mirror.mirror_bounds import COPIES_MAX, PIECE_BYTES
from engine.mirror.mirror_opening import refuse_used
from engine.mirror.mirrored_disk import MirroredDisk, is_mirrored
from lakefs.errors import DiskFailed, StoreDamaged, StoreUnusable
from lakefs.ids import CopyId
from lakefs.ports import Disk, DiskFile


def add_copy(mirror: MirroredDisk, name: str, disk: Disk, paced: Callable[[int], object] = bool) -> CopyId:
    """Make one more copy in an empty folder; it is good on return.  Blocks for as long as the copying takes.

    `paced` is called with the bytes of each piece, at most `PIECE_BYTES`: it may wait, or raise to give up.
    Errors: StoreUnusable (folder not empty, too many copies, another one is being made), StoreLocked, DiskFailed,
    StoreFull.  After an error the mirror is as before.
    """
    copies = mirror.copies
    if len(copies.good) >= COPIES_MAX:
        raise StoreUnusable(f"the mirror has {COPIES_MAX} copies already", subject=name)
    disk.make_folder("")
    with ExitStack() as undone:
        lock = disk.lock(LOCK_FILE)
        undone.callback(lock.close)
        _remove_rest(mirror, disk)
        refuse_used(name, disk)
        copy_id = CopyId(new_id())
        copy = Copy(copy_id, name, disk, lock, write_copy_file(disk, copies.listed.mirror_id, copy_id))
        copy.is_good = False
        with copies.names:
            if copies.joining is not None:
                raise StoreUnusable(f"a copy is being made already: {copies.joining}", subject=name)
            mirror.present_on_new.clear()
            for folder in _folders(mirror):
                disk.make_folder(folder)
                mirror.present_on_new.add(folder)
            copies.joining = copy
        undone.callback(_give_up, mirror, copy)
        copies.wait_for_earlier()
        _NewCopy(mirror, copy, paced).make()
        undone.pop_all()
    return copy_id


class _NewCopy:
    """The copy while it is made."""

    def __init__(self, mirror: MirroredDisk, copy: Copy, paced: Callable[[int], object]) -> None:
        self._mirror = mirror
        self._copy = copy
        self._disk = copy.disk
        self._paced = paced
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def make(self) -> None:
        """Copy until nothing is missing, and finish."""
        while not self._is_finished():
            for path in self._missing():
                source = self._begin(path)
                if source is not None:
                    with closing(source):
                        self._copy_content(path, source)

    def _missing(self) -> dict[str, int | None]:
        present = self._mirror.present_on_new
        return {path: size for path, size in _tree(self._mirror).items() if path not in present}

    def _begin(self, path: str) -> DiskFile | None:
        """Create the path on the new copy, for all changes from now on; returns the file to copy, None if gone."""
        mirror = self._mirror
        with mirror.copies.names:
            self._check()
            if path in mirror.present_on_new or not mirror.exists(path):
                return None
            mirror.present_on_new.add(path)
            assert not mirror.is_folder(path), "folders are made at the beginning, and with each change"
            self._disk.open(path, create=True).close()
            for file in mirror.writers:
                if file.path == path:
                    file.join(self._copy, self._disk.open(path))
            with ExitStack() as opened:
                self._target = self._disk.open(path)
                opened.callback(self._target.close)
                source = mirror.open(path, read_only=True)
                opened.pop_all()
            return source

    def _copy_content(self, path: str, source: DiskFile) -> None:
        with closing(self._target) as target:
            offset = 0
            while True:
                with self._mirror.copies.copying_content():
                    count = source.pread_into(self._buffer, offset)
                    target.pwrite(self._buffer[:count], offset)
                if not count:
                    break
                offset += count
                self._paced(count)
                self._check()
            target.sync_data()

    def _is_finished(self) -> bool:
        """Make the copy good, if no name is missing."""
        mirror, copies = self._mirror, self._mirror.copies
        with copies.names:
            self._check()
            if self._missing():
                return False
            for folder in ("", *_folders(mirror)):
                self._disk.sync_folder(folder)
            copies.install([*copies.good, self._copy], {})
            if self._copy not in copies.good:
                raise DiskFailed(f"the new copy on {self._copy.name} could not be put into the list")
            mirror.note_admitted(self._copy)
            return True

    def _check(self) -> None:
        """Raise DiskFailed if a change on the new copy has failed."""
        if self._mirror.copies.joining is not self._copy:
            raise DiskFailed(f"the new copy on {self._copy.name} failed: {self._copy.suspect}", subject=self._copy.name)


def _tree(mirror: MirroredDisk) -> dict[str, int | None]:
    return mirror.copies.read(lambda copy: tree(copy.disk, is_mirrored))


def _folders(mirror: MirroredDisk) -> list[str]:
    return [path for path, size in _tree(mirror).items() if size is None]


def _give_up(mirror: MirroredDisk, copy: Copy) -> None:
    with mirror.copies.names:
        if mirror.copies.joining is copy:
            mirror.copies.end_joining("its making was ended")
        mirror.present_on_new.clear()
        for file in mirror.writers:
            file.leave(copy)


def _remove_rest(mirror: MirroredDisk, disk: Disk) -> None:
    """Remove what an earlier making has left: a copy of this mirror that has no list, and that no list names."""
    if disk.exists(LIST_FILE) or not disk.exists(COPY_FILE):
        return
    try:
        own = read_copy_file(disk)
    except StoreDamaged:
        return  # it was being written: nothing else can be there
    listed = mirror.copies.listed
    if own.mirror_id != listed.mirror_id or own.copy_id in listed.members:
        return
    for path, size in tree(disk, is_mirrored).items():
        if size is not None:
            disk.unlink(path)
