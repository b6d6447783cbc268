"""A disk in memory that forgets what was not synced, and fails when asked to (`lakefs.ports.Disk`).

The fault model, by what a store may rely on after a power loss:

- bytes and length of a file: as of its last `sync_data`; each later write is there, absent, or torn at sectors or
  pages, independently of the others (reordering is the same thing here: nobody writes bytes twice);
- names: as of the folder's last `sync_folder`; each later creation, renaming and removal happened or not; a renaming
  happened whole or not at all; content and name are durable independently of each other;
- the folder `index` is real, for LMDB: it is as at one of its last commits, or lost.

After `crash`, or at the operation named by `crash_at`, every use raises `SimCrashed`, which no handler of the product
may catch; the disk that `crash` returns continues.  The only source of chance is the `random.Random` given, so a seed
is a run.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

from lakefs.errors import DiskFailed, StoreLocked, StoreReadOnly
from lakefs.limits import GIB
from lakefs.ports import FileStat
from tests.sim.world.faults import PlantedFaults
from tests.sim.world.file import SimFile
from tests.sim.world.index_folder import INDEX, RealIndex
from tests.sim.world.medium import Inode, Names, folder_of


class SimCrashed(BaseException):
    """The power has failed.  Not an Exception, so that no handler takes it for an error of the disk."""


class SimDisk:
    """The disk.  Operations that change something are counted, in `operation_count`."""

    def __init__(
        self,
        rng: random.Random | int = 0,
        *,
        capacity_bytes: int = 64 * GIB,
        supports_direct: bool = True,
        crash_at: int | None = None,
    ) -> None:
        self.rng = rng if isinstance(rng, random.Random) else random.Random(rng)
        self.capacity_bytes = capacity_bytes
        self.supports_direct = supports_direct
        self.crash_at = crash_at
        """Number of the operation (from 1) that the power loss cuts short."""
        self.lying_sync = 0.0
        """Share of syncs that report success and do nothing, like those of a drive without power-loss protection."""
        self.lies = 0
        self.operation_count = 0
        self.trace = hashlib.blake2b(digest_size=16)
        """Hash of every operation that changes something, from the first view of this disk on."""
        self.met: Counter[str] = Counter()  # numbers of what power losses did, over all views
        self._dead, self._faults = False, PlantedFaults()
        self._names = Names()
        self._inode_count = 1
        self._open: dict[int, Inode] = {}
        self._locks: dict[str, Inode] = {}
        self._index = RealIndex()

    @property
    def open_files(self) -> int:
        """Handles that were opened and not closed."""
        return sum(inode.open_count for inode in self._open.values())

    # --- faults --------------------------------------------------------------------------------------

    def fail_next(self, operation: str, error: Exception, *, path: str = "", skip: int = 0) -> None:
        """Make the next operation of that name on a path containing `path` fail, after `skip` good ones.

        A failing write may have written a part; after a failing sync what was to be synced may never be.
        """
        self._faults.plant(operation, path, error, skip)

    def forget_failures(self) -> None:
        """Forget the planted failures that have not happened yet."""
        self._faults = PlantedFaults()

    @property
    def is_dead(self) -> bool:
        """True when the power is gone."""
        return self._dead

    @property
    def faults_to_come(self) -> int:
        """Number of planted failures that have not happened yet."""
        return len(self._faults)

    def flip_bit(self, path: str, offset: int, bit: int) -> None:
        """Flip one bit of a file, on the medium and for every reader."""
        self._names.seen[path].flip_bit(offset, bit)

    def file_bytes(self, path: str) -> int:
        """Return the length of a file."""
        return self._names.seen[path].seen.size

    def random_offset(self, path: str, rng: random.Random) -> int:
        """Return the offset of a byte of a file that was written."""
        return self._names.seen[path].seen.written_offset(rng)

    def crash(self) -> SimDisk:
        """Fail the power: this view is dead; the returned one has what the medium holds."""
        for inode in self._names.inodes():
            inode.power_loss(self.rng, self.met)
        self._names.power_loss(self.rng, self.met)
        return self._successor(self._index.after_power_loss(self.rng, self.met))

    def kill(self) -> SimDisk:
        """Kill the process: nothing written is lost, nothing more is durable."""
        for inode in self._names.inodes():
            inode.process_lost()
        return self._successor(self._index.read())

    def image(self) -> SimDisk:
        """Return another device with what this one holds, its inodes too: an image of it, to be put back later."""
        assert not self.open_files, "nothing is open on it"
        found = type(self)(
            self.rng.randrange(1 << 30), capacity_bytes=self.capacity_bytes, supports_direct=self.supports_direct
        )
        found._names = deepcopy(self._names)
        found._inode_count = self._inode_count
        found._index.put(self._index.read())
        return found

    def syncs(self) -> bool:
        """Return whether the next sync works; a lying one only reports success."""
        if self.rng.random() >= self.lying_sync:
            return True
        self.lies += 1
        return False

    def note_index_sync(self) -> None:
        """Note that the index has committed: its file is kept as one of the states that a power loss may leave."""
        with self.changing("note_index_sync", INDEX) as completes:
            if self.syncs() and (completes or self.rng.randrange(2)):
                self._index.note_commit()

    def _successor(self, index: bytes | None) -> SimDisk:
        self._dead = True
        heir = type(self)(self.rng, capacity_bytes=self.capacity_bytes, supports_direct=self.supports_direct)
        heir._names = self._names
        heir._inode_count = self._inode_count
        heir.trace, heir.met = self.trace, self.met
        heir._index.put(index)
        return heir

    def check_alive(self) -> None:
        """Raise SimCrashed when the power is gone."""
        if self._dead:
            raise SimCrashed

    def raise_fault(self, operation: str, path: str) -> None:
        """Raise the error that was planted for this operation, if any."""
        self.check_alive()
        self._faults.meet(operation, path)

    @contextmanager
    def changing(self, operation: str, path: str, detail: str = "") -> Iterator[bool]:
        """Wraps every operation that changes something.

        Yields whether it completes: at `crash_at` a change is recorded as unsynced, a sync does not happen, and then
        the power is gone.
        """
        self.raise_fault(operation, path)
        self.operation_count += 1
        self.trace.update(f"{operation} {path} {detail}\n".encode())
        last = self.operation_count == self.crash_at
        yield not last
        if last:
            self._dead = True
            raise SimCrashed

    def opened(self, inode: Inode) -> None:
        """Note a new handle: the inode keeps its room while it is open."""
        inode.open_count += 1
        self._open[inode.number] = inode

    def closed(self, inode: Inode, path: str) -> None:
        """Note the end of a handle; those of a dead view have ended already."""
        if self._dead:
            return
        inode.open_count -= 1
        if inode.open_count == 0:
            self._open.pop(inode.number, None)
            self._locks.pop(path, None)

    # --- the port ------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False) -> SimFile:
        """Open a file; with `create` it must be new."""
        self._check_path(path)
        if create:
            inode = self._create(path)
        else:
            self.raise_fault("open", path)
            inode = self._file(path)
        return SimFile(self, inode, path, direct=direct and self.supports_direct, read_only=read_only)

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; empty when it does not exist."""
        self.raise_fault("list_folder", path)
        folder = "" if path == "." else path
        if self._is_index(folder):
            real = self._index.path(folder)
            return sorted(os.listdir(real)) if real.is_dir() else []
        found = {name.rpartition("/")[2] for name in self._names.seen if folder_of(name) == folder}
        if folder == "" and self._index.exists:
            found.add(INDEX)
        return sorted(found)

    def make_folder(self, path: str) -> None:
        """Create a folder, unless it exists."""
        self.check_alive()
        if path in ("", "."):
            return
        self._check_path(path)
        if self._is_index(path):
            self._index.path(path).mkdir(mode=0o700, exist_ok=True)
        elif path not in self._names.seen:
            self._change_names("make_folder", path, {path: self._new_inode(folder=True)})

    def exists(self, path: str) -> bool:
        """Return whether anything has that name."""
        self.check_alive()
        if self._is_index(path):
            return self._index.path(path).exists()
        return path in ("", ".") or path in self._names.seen

    def is_folder(self, path: str) -> bool:
        """Return whether a folder has that name."""
        self.check_alive()
        if self._is_index(path):
            return self._index.path(path).is_dir()
        return path in ("", ".") or (path in self._names.seen and self._names.seen[path].folder)

    def rename(self, source: str, target: str) -> None:
        """Replace `target` by `source`."""
        if self._is_index(source):
            self.check_alive()
            os.rename(self.local_path(source), self.local_path(target))
            return
        self._check_path(target)
        self._change_names("rename", target, {source: None, target: self._file(source)})

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        if self._is_index(path):
            self.check_alive()
            os.unlink(self.local_path(path))
            return
        self._file(path)
        self._change_names("unlink", path, {path: None})

    def sync_folder(self, path: str) -> None:
        """Make the names of the folder durable."""
        folder = "" if path == "." else path
        with self.changing("sync_folder", folder) as completes:
            if completes and self.syncs():
                self._names.sync(folder)

    def stat(self, path: str) -> FileStat:
        """Return the file's status; its number is the same over crashes."""
        self.check_alive()
        inode = self._file(path)
        return FileStat(inode.number, inode.seen.size, inode.seen.allocated_bytes)

    def free_inodes(self) -> int | None:
        """Return None: names take no room here."""
        return None

    def free_bytes(self) -> int:
        """Return the capacity less what files take, open ones without a name included."""
        self.check_alive()
        inodes = {inode.number: inode for inode in self._names.seen.values()} | self._open
        return max(0, self.capacity_bytes - sum(inode.seen.allocated_bytes for inode in inodes.values()))

    def total_bytes(self) -> int:
        """Return the capacity."""
        return self.capacity_bytes

    def lock(self, path: str) -> SimFile:
        """Take the exclusive lock: held until the file is closed or the process dies, whatever its name leads to."""
        self.check_alive()
        if path in self._locks:
            raise StoreLocked(f"the simulated store is open: {path} is locked", subject=path)
        inode = self._names.seen.get(path) or self._create(path)
        self._locks[path] = inode
        return SimFile(self, inode, path)

    def check_lock(self) -> None:
        """Raise StoreReadOnly when the name of a locked file leads elsewhere."""
        for path, inode in self._locks.items():
            if self._names.seen.get(path) is not inode:
                raise StoreReadOnly(f"the simulated {path} was removed or replaced", subject=path)

    def local_path(self, path: str) -> str:
        """Return a real path, for LMDB; only the folder `index` has one."""
        assert self._is_index(path), f"{path} is simulated"
        return str(self._index.path(path))

    def _create(self, path: str) -> Inode:
        self.check_alive()
        folder = folder_of(path)
        if folder and folder not in self._names.seen:
            raise FileNotFoundError(path)
        if path in self._names.seen:
            raise FileExistsError(path)
        inode = self._new_inode(folder=False)
        self._change_names("open", path, {path: inode})
        return inode

    def _change_names(self, operation: str, path: str, names: dict[str, Inode | None]) -> None:
        self.check_lock()
        with self.changing(operation, path):
            self._names.change(names)

    def _new_inode(self, *, folder: bool) -> Inode:
        self._inode_count += 1
        return Inode(self._inode_count, folder=folder)

    def _file(self, path: str) -> Inode:
        self.check_alive()
        inode = self._names.seen.get(path)
        if inode is None:
            raise FileNotFoundError(path)
        assert not inode.folder, f"{path} is a folder"
        return inode

    def _is_index(self, path: str) -> bool:
        return path.split("/")[0].startswith(INDEX)

    def _check_path(self, path: str) -> None:
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise DiskFailed(f"{path!r} is not a path inside the store", subject=path)
