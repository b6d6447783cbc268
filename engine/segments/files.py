"""The files of a store's segments: names, headers, creation, growth, and descriptors for reading.

Rules kept here:
- A segment's name, header and folder entry are durable before the first payload is written to it.
- Growth never takes the last `left_free_bytes` of the disk: journal and index need them to free anything.
- A read descriptor is closed only when no read uses it; one handed out to clients stays open until long after
  its segment is gone, because its number may be on the way to a client.

Nothing here knows what lies in a segment.
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
from engine.format.layouts import (
    FORMAT_VERSION,
    PAGE,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SegmentKind,
    StoreIdentity,
)
from engine.host.failpoints import reached
from lakefs.errors import EngineBusy, LakeError, StaleGrant, StoreDamaged, StoreFull, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import SegmentId
from lakefs.ports import Disk, DiskFile

SEGMENTS_FOLDER: Final = "segments"
READ_FILES_MAX: Final = 512
"""Read descriptors kept open between reads."""
LENT_FILES_MAX: Final = 4096
"""Descriptors handed out to clients: 4 TiB of large segments; more clients' reads are streamed."""
RETIRED_FILES_MAX: Final = 256
"""Handed-out descriptors kept open after their segment was removed."""

_SUFFIX: Final = {SegmentKind.LARGE: "large", SegmentKind.SMALL: "small"}
_KIND: Final = {suffix: kind for kind, suffix in _SUFFIX.items()}
_HEADER_CRC_BYTES: Final = SEGMENT_HEADER.size - 4


def segment_path(segment: SegmentId, kind: SegmentKind) -> str:
    """Path of a segment's file in the store."""
    return f"{SEGMENTS_FOLDER}/{segment:016x}.{_SUFFIX[kind]}"


def parse_segment_name(name: str) -> tuple[SegmentId, SegmentKind] | None:
    """Id and kind from a file's name; None for a name that is no segment's."""
    digits, _, suffix = name.partition(".")
    kind = _KIND.get(suffix)
    if kind is None or len(digits) != 16 or set(digits) - set("0123456789abcdef"):
        return None
    return SegmentId(int(digits, 16)), kind


def pack_segment_header(identity: StoreIdentity, segment: SegmentId, kind: SegmentKind) -> memoryview:
    """The first page of a segment, in page-aligned memory."""
    body = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, kind, segment, identity.store_id, identity.boot_id, 0
    )[:_HEADER_CRC_BYTES]
    page = memoryview(mmap.mmap(-1, PAGE))
    page[: SEGMENT_HEADER.size] = body + crc32c(body).to_bytes(4, "little")
    return page


def check_segment_header(header: bytes, store_id: bytes, segment: SegmentId, kind: SegmentKind) -> bool:
    """Whether the header's own checksum holds.

    A header that does hold and names another store, segment or kind is StoreDamaged, another version
    StoreUnusable.  One that does not hold says nothing about the payloads, which have checksums of their own.
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
            f"{path} belongs to store {found_store.hex()} as segment {found:016x}: "
            "put back the file of this store",
            subject=path,
            finding=Finding.SEGMENT_FOREIGN,
        )
    return True


def create_segment_file(
    disk: Disk, identity: StoreIdentity, segment: SegmentId, kind: SegmentKind, left_free_bytes: int
) -> DiskFile:
    """Make a segment's file, durable with its header and name; large ones are opened for O_DIRECT."""
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
        # Nothing refers to the file; where it cannot be removed either, it is an empty segment for gc.
        with suppress(LakeError, FileNotFoundError):
            disk.unlink(path)
        raise
    return file


def grow(
    disk: Disk,
    take: Callable[[int, int], None],
    offset: int,
    need_bytes: int,
    want_bytes: int,
    left_free_bytes: int,
) -> int:
    """Take room from `offset` with `take(offset, length)`: `want_bytes`, else less, at least `need_bytes`.

    Returns the length taken.  StoreFull when even the need would touch the headroom; nothing is lost then.
    """
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
    """Which segments exist, and the kind of each."""

    kinds: dict[SegmentId, SegmentKind] = field(default_factory=dict)

    def ids(self) -> list[SegmentId]:
        """Every segment, ascending."""
        return sorted(self.kinds)

    def has(self, segment: SegmentId) -> bool:
        """Whether the segment exists."""
        return segment in self.kinds

    def kind(self, segment: SegmentId) -> SegmentKind:
        """Large or small.  StaleGrant when it was removed."""
        self.path(segment)
        return self.kinds[segment]

    def path(self, segment: SegmentId) -> str:
        """Path of an existing segment.  StaleGrant when it has been removed."""
        kind = self.kinds.get(segment)
        if kind is None:
            raise StaleGrant(f"segment {segment:016x} was removed; locate the chunk again")
        return segment_path(segment, kind)


class ReadFile:
    """A descriptor for reading and the number of reads in progress."""

    __slots__ = ("dropped", "file", "in_memory", "users")

    def __init__(self, file: DiskFile) -> None:
        self.in_memory = file.in_memory
        self.file = file
        self.users = 0
        self.dropped = False


HeldFiles = dict[SegmentId, ReadFile]
"""Files that are open until they are left."""


class ReadFiles:
    """Descriptors of segments opened for reading.  Called from the threads of the pool; all calls block briefly.

    `damaged_headers` names the segments whose header did not hold when they were first opened.  With `direct` reads go
    past the page cache where the file system lets them (`DiskFile.direct`).
    """

    def __init__(
        self, disk: Disk, register: SegmentRegister, store_id: bytes, *, direct: bool = False
    ) -> None:
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
        """The segment's file, open at least until the end of the block.  StaleGrant, StoreDamaged, DiskFailed."""
        entry = self.enter(segment)
        try:
            yield entry.file
        finally:
            self.leave(entry)

    def hold(self, segments: Iterable[SegmentId]) -> HeldFiles:
        """Those of the files that are open already, until `leave_all`.  Does not block."""
        entries = ((segment, self.enter_open(segment)) for segment in segments)
        return {segment: entry for segment, entry in entries if entry is not None}

    def leave_all(self, held: HeldFiles) -> None:
        """They are not used any more."""
        for entry in held.values():
            self.leave(entry)

    def read_cached(self, segment: SegmentId, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` without waiting for the medium; whether all was in memory, of a file that is open already."""
        entry = self.enter_open(segment)
        if entry is None:
            return False
        try:
            return entry.file.pread_cached_into(buffer, offset)
        finally:
            self.leave(entry)

    def enter(self, segment: SegmentId) -> ReadFile:
        """The segment's file, open at least until `leave`; errors as of `using`."""
        return self.enter_open(segment) or self._enter_new(segment)

    def leave(self, entry: ReadFile) -> None:
        """The file is not used any more."""
        with self._lock:
            entry.users -= 1
            if entry.dropped and entry.users == 0:
                entry.file.close()

    def enter_open(self, segment: SegmentId) -> ReadFile | None:
        """`enter` when the file is open already, else None.  Does not block."""
        with self._lock:
            entry = self._files.get(segment)
            if entry is not None:
                self._files.move_to_end(segment)
                entry.users += 1
            return entry

    def _enter_new(self, segment: SegmentId) -> ReadFile:
        """Open the file, without the lock: it may take a while, and readers of other segments do not wait."""
        opened = self._open(segment)
        with self._lock:
            if segment not in self._register.kinds:
                opened.close()
                self._register.path(segment)  # raises: it was removed meanwhile, and `drop` has been here
            entry = self._files.get(segment)
            if entry is None:
                entry = self._files[segment] = ReadFile(opened)
                self._evict()
            else:
                opened.close()
            entry.users += 1
            return entry

    def lend(self, segment: SegmentId) -> int:
        """A read-only descriptor to hand to clients.  It stays ours and open; EngineBusy when too many are."""
        with self._lock:
            file = self._lent.get(segment)
            if file is None:
                if len(self._lent) >= LENT_FILES_MAX:
                    raise EngineBusy(
                        f"{LENT_FILES_MAX} segments are handed out already; read without descriptors"
                    )
                file = self._open(segment)
                self._lent[segment] = file
            return file.fileno()

    def drop(self, segment: SegmentId) -> None:
        """The segment is gone: close what is open of it, now or after the reads in progress."""
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
        """Close everything; no read is in progress."""
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
            self._register.path(segment)  # raises when it was removed meanwhile
            told = f"{path} is missing; put the file back, or run: lake fsck"
            raise StoreDamaged(told, subject=path, finding=Finding.SEGMENT_MISSING) from error
        try:
            header = (
                memoryview(mmap.mmap(-1, PAGE)) if file.direct else memoryview(bytearray(SEGMENT_HEADER.size))
            )
            count = file.pread_into(header, 0)
            kind = self._register.kinds.get(segment)
            if kind is None:
                self._register.path(segment)  # raises: it was removed meanwhile
            elif not check_segment_header(
                bytes(header[: min(count, SEGMENT_HEADER.size)]), self._store_id, segment, kind
            ):
                self.damaged_headers.add(segment)
        except LakeError:
            file.close()
            raise
        return file

    def _evict(self) -> None:
        """The least recently used go; the newest, which nobody uses yet, is the last in order."""
        while len(self._files) > READ_FILES_MAX:
            _, entry = self._files.popitem(last=False)
            self._close(entry)

    def _close(self, entry: ReadFile) -> None:
        entry.dropped = True
        if entry.users == 0:
            entry.file.close()
