"""The files of a store's segments: names, headers, creation, growth, and descriptors for reading.

Rules kept here:
- A segment's name, header and folder entry are durable before the first payload is written to it.
- Growth never takes the last `left_free_bytes` of the disk: journal and index need them to free anything.
- A read descriptor is closed only when no read uses it.  One handed out to clients stays open until long after its
  segment was removed, because its number may be on the way to a client.

This module does not know what a segment holds.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from engine.format.extents import page_down
from engine.format.layouts import FORMAT_VERSION, PAGE, SEGMENT_HEADER, SEGMENT_MAGIC, SegmentKind, StoreIdentity
from engine.host.failpoints import reached
from lakefs.errors import EngineBusy, LakeError, StaleGrant, StoreDamaged, StoreFull, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import SegmentId
from lakefs.ports import Disk, DiskFile

SEGMENTS_FOLDER: Final = "segments"
READ_FILES_MAX: Final = 512
"""Most read descriptors kept open between reads."""
LENT_FILES_MAX: Final = 4096
"""Most descriptors handed out to clients: 4 TiB of large segments; reads of others are streamed."""
RETIRED_FILES_MAX: Final = 256
"""Most handed-out descriptors kept open after their segment was removed."""

_SUFFIX: Final = {SegmentKind.LARGE: "large", SegmentKind.SMALL: "small"}
_KIND: Final = {suffix: kind for kind, suffix in _SUFFIX.items()}
_HEADER_CRC_BYTES: Final = SEGMENT_HEADER.size - 4


def segment_path(segment: SegmentId, kind: SegmentKind) -> str:
    """Return the path of a segment's file in the store."""
    return f"{SEGMENTS_FOLDER}/{segment:016x}.{_SUFFIX[kind]}"


def parse_segment_name(name: str) -> tuple[SegmentId, SegmentKind] | None:
    """Return id and kind from a file's name; None if the name is not a segment's."""
    digits, _, suffix = name.partition(".")
    kind = _KIND.get(suffix)
    if kind is None or len(digits) != 16 or set(digits) - set("0123456789abcdef"):
        return None
    return SegmentId(int(digits, 16)), kind


def pack_segment_header(identity: StoreIdentity, segment: SegmentId, kind: SegmentKind) -> memoryview:
    """Return the first page of a segment, in page-aligned memory."""
    fields = SEGMENT_MAGIC, FORMAT_VERSION, kind, segment, identity.store_id, identity.boot_id
    page = memoryview(mmap.mmap(-1, PAGE))
    SEGMENT_HEADER.pack_into(page, 0, *fields, crc32c(SEGMENT_HEADER.pack(*fields, 0)[:_HEADER_CRC_BYTES]))
    return page


def check_segment_header(header: bytes, store_id: bytes, segment: SegmentId, kind: SegmentKind) -> bool:
    """Return True if the header's own checksum holds.

    Raises StoreDamaged if a valid header names another store, segment or kind, StoreUnusable if it names another
    version.  An invalid header says nothing about the payloads, which have checksums of their own.
    """
    if len(header) < SEGMENT_HEADER.size:
        return False
    magic, version, found_kind, found, found_store, _, crc = SEGMENT_HEADER.unpack_from(header)
    if magic != SEGMENT_MAGIC or crc32c(header[:_HEADER_CRC_BYTES]) != crc:
        return False
    path = segment_path(segment, kind)
    if version != FORMAT_VERSION:
        raise StoreUnusable(f"{path} has format {version}, this program knows {FORMAT_VERSION}", subject=path)
    if (found_store, found, found_kind) != (store_id, segment, kind):
        raise StoreDamaged(
            f"{path} belongs to store {found_store.hex()} as segment {found:016x}: put back the file of this store",
            subject=path,
            finding=Finding.SEGMENT_FOREIGN,
        )
    return True


def create_segment_file(
    disk: Disk, identity: StoreIdentity, segment: SegmentId, kind: SegmentKind, left_free_bytes: int
) -> DiskFile:
    """Create a segment's file, durable with its header and name; large ones are opened for O_DIRECT."""
    if disk.free_bytes() < left_free_bytes + PAGE:
        raise StoreFull("no room for another segment; remove objects, then run: lake gc")
    path = segment_path(segment, kind)
    try:
        file = disk.open(path, create=True, direct=kind is SegmentKind.LARGE)
    except (FileExistsError, FileNotFoundError) as error:
        raise StoreDamaged(
            f"{path} cannot be created: somebody changed the folder {SEGMENTS_FOLDER} of the running store",
            subject=path,
        ) from error
    try:
        file.pwrite(pack_segment_header(identity, segment, kind), 0)
        file.sync_data()
        reached("segment.header-synced")
        disk.sync_folder(SEGMENTS_FOLDER)
        reached("segment.durable")
    except LakeError:
        file.close()
        # Nothing refers to the file; if it cannot be removed, it is an empty segment that gc removes.
        with suppress(LakeError, FileNotFoundError):
            disk.unlink(path)
        raise
    return file


def grow(
    disk: Disk, take: Callable[[int, int], None], offset: int, need_bytes: int, want_bytes: int, left_free_bytes: int
) -> int:
    """Take room from `offset` with `take(offset, length)`: `want_bytes`, else less, at least `need_bytes`.

    Returns the length taken.  Raises StoreFull when even `need_bytes` would touch the headroom; nothing is lost then.
    """
    assert 0 < need_bytes <= want_bytes
    length = want_bytes
    while True:
        enough = disk.free_bytes() - length >= left_free_bytes
        if enough:
            try:
                take(offset, length)
            except StoreFull:
                if length == need_bytes:
                    raise
            else:
                return length
        elif length == need_bytes:
            raise StoreFull(f"no room for {need_bytes} bytes of payload; remove objects, then run: lake gc")
        length = max(need_bytes, page_down(length // 2))


@dataclass
class SegmentRegister:
    """The segments that exist, and the kind of each."""

    kinds: dict[SegmentId, SegmentKind] = field(default_factory=dict)

    def path(self, segment: SegmentId) -> str:
        """Return the path of an existing segment.  Raises StaleGrant when it was removed."""
        kind = self.kinds.get(segment)
        if kind is None:
            raise StaleGrant(f"segment {segment:016x} was removed; locate the chunk again")
        return segment_path(segment, kind)


class ReadFile:
    """A descriptor for reading, and the number of reads in progress."""

    __slots__ = ("dropped", "file", "in_memory", "users")

    def __init__(self, file: DiskFile) -> None:
        self.in_memory = file.in_memory
        self.file = file
        self.users = 0
        self.dropped = False


HeldFiles = dict[SegmentId, ReadFile]
"""Files that stay open until `ReadFiles.leave_all`."""


class ReadFiles:
    """Descriptors of segments opened for reading.  Called from the pool's threads too; a call may block briefly.

    `damaged_headers` holds the segments whose header was invalid when they were opened.  With `direct`, reads bypass
    the page cache where the file system allows it (`DiskFile.direct`).
    """

    def __init__(self, disk: Disk, register: SegmentRegister, store_id: bytes, *, direct: bool = False) -> None:
        self._direct = direct
        self._disk = disk
        self._register = register
        self._store_id = store_id
        self._lock = threading.Lock()
        self._files: OrderedDict[SegmentId, ReadFile] = OrderedDict()
        self._lent: dict[SegmentId, DiskFile] = {}
        self._retired: deque[DiskFile] = deque()
        self.damaged_headers: set[SegmentId] = set()

    @contextmanager
    def using(self, segment: SegmentId) -> Iterator[DiskFile]:
        """Yield the segment's file, open at least until the block ends.  StaleGrant, StoreDamaged, DiskFailed."""
        entry = self.enter(segment)
        try:
            yield entry.file
        finally:
            self.leave(entry)

    def hold(self, segments: Iterable[SegmentId]) -> HeldFiles:
        """Enter each file that is open already and return them, until `leave_all`.  Does not block."""
        entries = ((segment, self.enter_open(segment)) for segment in segments)
        return {segment: entry for segment, entry in entries if entry is not None}

    def leave_all(self, held: HeldFiles) -> None:
        """End one use of each."""
        for entry in held.values():
            self.leave(entry)

    def read_cached(self, segment: SegmentId, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` without waiting for the medium; True if the file was open and all bytes were in memory."""
        entry = self.enter_open(segment)
        if entry is None:
            return False
        try:
            return entry.file.preadv_cached_into([buffer], offset)
        finally:
            self.leave(entry)

    def enter(self, segment: SegmentId) -> ReadFile:
        """Return the segment's file, open at least until `leave`; raises as `using` does."""
        return self.enter_open(segment) or self._enter_new(segment)

    def leave(self, entry: ReadFile) -> None:
        """End one use of the file; closes it if it was dropped and this was the last."""
        with self._lock:
            assert entry.users > 0, "a file is left once for each time it was entered"
            entry.users -= 1
            if entry.dropped and entry.users == 0:
                entry.file.close()

    def enter_open(self, segment: SegmentId) -> ReadFile | None:
        """Enter the file if it is open already, else return None.  Does not block."""
        with self._lock:
            entry = self._files.get(segment)
            if entry is not None:
                self._files.move_to_end(segment)
                entry.users += 1
            return entry

    def _enter_new(self, segment: SegmentId) -> ReadFile:
        """Open the file and enter it.  Opens without the lock, so that readers of other segments do not wait."""
        opened = self._open(segment)
        with self._lock:
            if segment not in self._register.kinds:
                opened.close()
                self._register.path(segment)  # raises: it was removed during the open, and `drop` has run
            entry = self._files.get(segment)
            if entry is None:
                entry = self._files[segment] = ReadFile(opened)
                # Close the least recently used.  The newest, which no read uses yet, is last in order.
                while len(self._files) > READ_FILES_MAX:
                    self._close(self._files.popitem(last=False)[1])
            else:
                opened.close()
            entry.users += 1
            return entry

    def lend(self, segment: SegmentId) -> int:
        """Return a read-only descriptor to send to clients.  The engine keeps it open; EngineBusy when too many are."""
        with self._lock:
            file = self._lent.get(segment)
            if file is None:
                if len(self._lent) >= LENT_FILES_MAX:
                    raise EngineBusy(f"{LENT_FILES_MAX} segments are handed out already; read without descriptors")
                file = self._open(segment)
                self._lent[segment] = file
            return file.fileno()

    def drop(self, segment: SegmentId) -> None:
        """Close the open files of a removed segment, now or after the reads in progress."""
        with self._lock:
            entry = self._files.pop(segment, None)
            if entry is not None:
                self._close(entry)
            lent = self._lent.pop(segment, None)
            if lent is not None:
                self._retired.append(lent)
            if len(self._retired) > RETIRED_FILES_MAX:
                self._retired.popleft().close()

    def close(self) -> None:
        """Close all files; no read is in progress."""
        with self._lock:
            for entry in self._files.values():
                self._close(entry)
            for file in [*self._lent.values(), *self._retired]:
                file.close()
            self._files.clear()
            self._lent.clear()
            self._retired.clear()

    def _open(self, segment: SegmentId) -> DiskFile:
        path = self._register.path(segment)
        try:
            file = self._disk.open(path, read_only=True, direct=self._direct)
        except FileNotFoundError as error:
            self._register.path(segment)  # raises when it was removed since
            message = f"{path} is missing; put the file back, or run: lake fsck"
            raise StoreDamaged(message, subject=path, finding=Finding.SEGMENT_MISSING) from error
        try:
            header = memoryview(mmap.mmap(-1, PAGE)) if file.direct else memoryview(bytearray(SEGMENT_HEADER.size))
            count = file.pread_into(header, 0)
            kind = self._register.kinds.get(segment)
            if kind is None:
                self._register.path(segment)  # raises: it was removed since
            elif not check_segment_header(
                bytes(header[: min(count, SEGMENT_HEADER.size)]), self._store_id, segment, kind
            ):
                self.damaged_headers.add(segment)
        except LakeError:
            file.close()
            raise
        return file

    def _close(self, entry: ReadFile) -> None:
        entry.dropped = True
        if entry.users == 0:
            entry.file.close()
