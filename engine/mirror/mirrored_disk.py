"""A disk of several copies: the port `Disk` over folders on several devices, of which all but one may be lost.

The names' journal, checkpoints and superblock lie on such a disk.  `engine.mirror.mirror_opening` makes and opens one.

Rules kept here:
- Changes are made on all good copies, reads on one (`engine.mirror.good_copies`).  Copies that do not agree if a name
  exists differ: one that has done the change is right, and the others are thrown out.
- A new name that finds no room on one copy is taken back on the others: the caller may try again.
- LMDB lies on one copy, the *home*, and is not mirrored: neither are the names that belong to it, the index and the
  note of a crash.  The home stays the same until `move_home`, also when its copy is thrown out.
- Inode numbers are the mirror's own: a file keeps its number whichever copy answers, and gets another one when it was
  replaced on the copy that answers.  That of the locked file is stored in the list, and survives all copies.
- The folders are locked by the opening.  `lock` is that of the store: exclusive among users of this object.

A reader that finds wrong bytes in a file calls `distrust`, and reads the file again from another copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from engine.mirror.copy import Copy
from engine.mirror.copy_list import OWN_PREFIX
from engine.mirror.good_copies import CopyState, GoodCopies
from engine.mirror.mirrored_file import MirroredFile
from lakefs.errors import DiskFailed, EngineBusy, LakeError, StoreFull, StoreLocked, StoreReadOnly
from lakefs.ids import CopyId
from lakefs.ports import Disk, DiskFile, FileStat

T = TypeVar("T")
_OF_THE_HOME: Final = frozenset({"index", "crash"})
"""First words of names that lie on the home alone: LMDB's folders, and the note of a crash in it."""


def is_mirrored(path: str) -> bool:
    """Return True for a path that is the same on all copies."""
    return path.split("/")[0].split(".")[0] not in _OF_THE_HOME


class MirroredDisk:
    """The folder of a store, on several devices (`lakefs.ports.Disk`).  Use `open_mirror`, and `close` it."""

    def __init__(self, copies: GoodCopies) -> None:
        self.copies = copies
        self.home = copies.good[0]
        """The copy that LMDB lies on."""
        self.writers: set[MirroredFile] = set()
        """Files that are open for writing; changed under `copies.names`."""
        self.present_on_new: set[str] = set()
        """Files and folders that the copy being made has, or gets with each change; changed under `copies.names`."""
        self._unsynced = {""}
        self._inodes: dict[str, tuple[int, dict[Copy, int]]] = {}
        self._inode_numbers = itertools.count(1)
        self._lock: MirrorLock | None = None

    # --- for the owner -----------------------------------------------------------------------------------

    def state(self) -> list[CopyState]:
        """Return the copies, with their state, for people."""
        return self.copies.state()

    def distrust(self, path: str) -> bool:
        """Read this file from another copy from now on, since its bytes are wrong; False if all have been tried.

        For recovery: when it raises JournalDamaged or StoreDamaged, call this with the error's `subject`; if it
        returns True, recover again.
        """
        with self.copies.names:
            first = self.copies.in_reading_order(path)[0]
            if path in first.distrusted:
                return False
            first.distrusted.add(path)
            following = self.copies.in_reading_order(path)[0]
            if path in following.distrusted or not following.disk.exists(path):
                return False
            self.copies.suspect(first, f"{path} is damaged")
            return True

    def throw_out(self, copy_id: CopyId, reason: str) -> None:
        """Take a copy out of the list: an operator's wish.  DiskFailed if it is the last."""
        self.copies.throw_out({copy: reason for copy in self.copies.good if copy.id == copy_id})

    @property
    def is_home_lost(self) -> bool:
        """True if the copy that LMDB lies on is not good any more."""
        return self.home not in self.copies.good

    def move_home(self) -> None:
        """Let LMDB lie on a good copy from now on: rebuild the index, or nothing of it is found."""
        if self.copies.good and self.is_home_lost:
            self.home = self.copies.good[0]

    def close(self) -> None:
        """Make all names durable, note that the copies are equal, and release them.  Never raises."""
        with suppress(LakeError, FileNotFoundError):
            for folder in sorted(self._unsynced):
                if folder == "" or self.exists(folder):
                    self.sync_folder(folder)
        self.copies.close()

    # --- files -------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False) -> DiskFile:
        """Open a file on all copies; with `create` it must be new."""
        self._check_path(path)
        if not is_mirrored(path):
            return self.home.disk.open(path, create=create, direct=direct, read_only=read_only)
        if read_only and not create:
            return self._open_to_read(path, direct)
        with self.copies.names:
            self._check_store_lock(create)
            handles: dict[Copy, DiskFile] = {}

            def open_on(copy: Copy) -> None:
                if create or copy.is_good or path in self.present_on_new:
                    handles[copy] = copy.disk.open(path, create=create, direct=direct, read_only=read_only)

            try:
                self._named(open_on, path, repeatable=True)
            except BaseException as error:
                self._take_back(path, handles, is_new=create and isinstance(error, (StoreFull, EngineBusy)))
                raise
            if create:
                self._inodes.pop(path, None)
                self._note_on_new(path)
            file = MirroredFile(self.copies, path, handles, self._closed)
            self.writers.add(file)
            return file

    def _open_to_read(self, path: str, direct: bool) -> DiskFile:
        handles: dict[Copy, DiskFile] = {}
        missing: list[FileNotFoundError] = []

        def open_on(copy: Copy) -> None:
            try:
                handles[copy] = copy.disk.open(path, direct=direct, read_only=True)
            except FileNotFoundError as error:
                missing.append(error)

        self.copies.read_all(open_on)
        if missing and not handles:
            raise missing[0]
        return MirroredFile(self.copies, path, handles, lambda _: None)

    def _take_back(self, path: str, handles: dict[Copy, DiskFile], *, is_new: bool) -> None:
        """Close the handles of a failed opening; remove the file if it is new, so that it can be made again."""
        for copy, handle in handles.items():
            if copy.is_silent:
                continue
            handle.close()
            if is_new:
                try:
                    copy.disk.unlink(path)
                except (LakeError, FileNotFoundError) as error:
                    self.copies.throw_out({copy: f"a new file could not be removed: {error}"})

    # --- names -------------------------------------------------------------------------------------------

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted, without the mirror's own."""
        folder = "" if path == "." else path
        if not is_mirrored(folder):
            return self.home.disk.list_folder(path)
        names = self._asked(lambda disk: disk.list_folder(path), path)
        return names if folder else [name for name in names if not name.startswith(OWN_PREFIX)]

    def make_folder(self, path: str) -> None:
        """Create a folder on all copies, unless it exists."""
        if path not in ("", "."):
            self._check_path(path)
        if not is_mirrored(path):
            self.home.disk.make_folder(path)
            return
        with self.copies.names:
            self._check_store_lock(is_change=True)
            self._named(lambda copy: copy.disk.make_folder(path), path, repeatable=True)
            self._note_on_new(path)

    def exists(self, path: str) -> bool:
        """Return whether one copy has the name."""
        if not is_mirrored(path):
            return self.home.disk.exists(path)
        return self._asked(lambda disk: disk.exists(path), path)

    def is_folder(self, path: str) -> bool:
        """Return whether the name is a folder's."""
        if not is_mirrored(path):
            return self.home.disk.is_folder(path)
        return self._asked(lambda disk: disk.is_folder(path), path)

    def rename(self, source: str, target: str) -> None:
        """Replace `target` by `source` on all copies; each has the one or the other at every moment."""
        self._check_path(target)
        if not is_mirrored(source):
            self.home.disk.rename(source, target)
            return

        def rename_on(copy: Copy) -> None:
            if copy.is_good or source in self.present_on_new:
                copy.disk.rename(source, target)
            elif target in self.present_on_new:
                copy.disk.unlink(target)

        with self.copies.names:
            self._check_store_lock(is_change=True)
            self._named(rename_on, target)
            self._unsynced.add(_folder_of(source))
            if source != target:
                self._moved(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file's name on all copies."""
        self._check_path(path)
        if not is_mirrored(path):
            self.home.disk.unlink(path)
            return

        def unlink_on(copy: Copy) -> None:
            if copy.is_good or path in self.present_on_new:
                copy.disk.unlink(path)

        with self.copies.names:
            self._check_store_lock(is_change=True)
            self._named(unlink_on, path)
            self._moved(path, "")

    def sync_folder(self, path: str) -> None:
        """Make names in the folder durable on all copies."""
        folder = "" if path == "." else path
        if not is_mirrored(folder):
            self.home.disk.sync_folder(path)
            return

        def sync_on(copy: Copy) -> None:
            if copy.is_good or not folder or folder in self.present_on_new:
                copy.disk.sync_folder(path)

        self._unsynced.discard(folder)  # first: a name that is changed meanwhile is noted again
        try:
            self.copies.change(sync_on, slow=True)
        except BaseException:
            self._unsynced.add(folder)
            raise

    def stat(self, path: str) -> FileStat:
        """Return a file's status; its number is the mirror's, and stays whichever copy answers."""
        if not is_mirrored(path):
            return self.home.disk.stat(path)
        copy, found = self._asked_copy(lambda disk: disk.stat(path), path)
        with self.copies.names:
            number, inodes = self._inodes.get(path, (0, {}))
            if inodes.get(copy) != found.inode:
                inodes = dict(self.copies.read_all(lambda copy: (copy, copy.disk.stat(path).inode)))
                number = next(self._inode_numbers)
                self._inodes[path] = number, inodes
        return found._replace(inode=number)

    # --- room --------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return the bytes that can still be written on the fullest copy."""
        return min(self.copies.read_all(lambda copy: copy.disk.free_bytes()))

    def free_inodes(self) -> int | None:
        """Return the files that can still be created on the fullest copy; None where none counts them."""
        counts = self.copies.read_all(lambda copy: copy.disk.free_inodes())
        return min((count for count in counts if count is not None), default=None)

    def total_bytes(self) -> int:
        """Return the size of the smallest copy's file system."""
        return min(self.copies.read_all(lambda copy: copy.disk.total_bytes()))

    # --- the store's lock --------------------------------------------------------------------------------

    def lock(self, path: str) -> MirrorLock:
        """Take the store's lock: one user of this object at a time.  StoreLocked."""
        self._check_path(path)
        with self.copies.names:
            if self._lock is not None and self._lock.is_held:
                raise StoreLocked(f"the mirrored store in {self.local_path('')} is open already", subject=path)
            self.copies.change(lambda copy: copy.disk.check_lock())
            if not self.exists(path):
                self.open(path, create=True).close()
            inodes = dict(self.copies.read_all(lambda copy: (copy, copy.disk.stat(path).inode)))
            self._inodes[path] = self.copies.listed.identity, inodes
            self._lock = MirrorLock(path)
        return self._lock

    def check_lock(self) -> None:
        """Raise StoreReadOnly unless folders and lock files are those that were locked.

        A copy whose folder was moved or replaced is thrown out, unless it is the last.
        """
        self.copies.change(lambda copy: copy.disk.check_lock())
        self._check_store_lock(is_change=True)

    def local_path(self, path: str) -> str:
        """Return the path on the home, for LMDB."""
        return self.home.disk.local_path(path)

    def _check_store_lock(self, is_change: bool) -> None:
        lock = self._lock
        if not is_change or lock is None or not lock.is_held:
            return
        with suppress(FileNotFoundError):
            if self.stat(lock.path).inode == self.copies.listed.identity:
                return
        raise StoreReadOnly(
            f"{lock.path} was removed or replaced under the engine, which writes nothing more: restart it, and leave "
            "that file alone",
            subject=lock.path,
        )

    def _asked(self, ask: Callable[[Disk], T], path: str) -> T:
        return self._asked_copy(ask, path)[1]

    def _asked_copy(self, ask: Callable[[Disk], T], path: str) -> tuple[Copy, T]:
        """Ask one copy; that there is nothing counts only if its folder is still where it was locked."""

        def ask_copy(copy: Copy) -> tuple[Copy, T]:
            try:
                answer = ask(copy.disk)
            except FileNotFoundError:
                copy.disk.check_lock()
                raise
            if not answer:
                copy.disk.check_lock()
            return copy, answer

        return self.copies.read(ask_copy, path)

    # --- what was changed --------------------------------------------------------------------------------

    def _named(self, change: Callable[[Copy], None], path: str, *, repeatable: bool = False) -> None:
        self._unsynced.add(_folder_of(path))
        self.copies.change(change, repeatable=repeatable)

    def _moved(self, source: str, target: str) -> None:
        """Note that a file has another name, or none; `target` has lost its own."""
        self._inodes.pop(target, None)
        inodes = self._inodes.pop(source, None)
        if target and inodes is not None:
            self._inodes[target] = inodes
        for file in self.writers:
            if file.path == target:
                file.path = ""
        for file in self.writers:
            if file.path == source:
                file.path = target
        for copy in self.copies.good:
            copy.distrusted.discard(target or source)
        self.present_on_new.discard(target)
        if source in self.present_on_new:
            self.present_on_new.discard(source)
            self._note_on_new(target)

    def _closed(self, file: MirroredFile) -> None:
        with self.copies.names:
            self.writers.discard(file)

    def note_admitted(self, copy: Copy) -> None:
        """Note the inodes of a copy that has become good; called under `copies.names`."""
        for path, (_, inodes) in self._inodes.items():
            inodes[copy] = copy.disk.stat(path).inode
        self.present_on_new.clear()

    def _note_on_new(self, path: str) -> None:
        if self.copies.joining is not None and path:
            self.present_on_new.add(path)

    def _check_path(self, path: str) -> None:
        if path.startswith(OWN_PREFIX):
            raise DiskFailed(f"{path} is the mirror's own", subject=path)
        if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
            raise DiskFailed(f"{path!r} is not a path inside the store", subject=path)


class MirrorLock:
    """The store's lock on a mirrored disk (`lakefs.ports.DiskLock`)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_held = True

    def close(self) -> None:
        """Release it; a second call does nothing."""
        self.is_held = False


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]
