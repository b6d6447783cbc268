"""Checkpoints: dumps of all tables at one sequence.  A checkpoint and the journal's later groups rebuild the index.

Rules kept here:
- A checkpoint is one snapshot of the index, each value checked as it is read.  A damaged index gives no checkpoint.
- It appears whole: temporary name, sync, rename, sync of the folder.  Only then may journal files and older
  checkpoints be removed.
- A journal file is removed only when the next one begins at or before the checkpoint's sequence + 1.  So the last file
  stays, and checkpoint and journal together always hold every group.
- A checkpoint is checked whole (header, trailer, checksum of the stream) before a record of it is used.

All functions block and run in a thread.  `engine.metadata.metadata_store` decides when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol, cast

from crc32c import crc32c
from isal import isal_zlib

from engine.format.layouts import (
    CHECKPOINT_HEADER,
    CHECKPOINT_MAGIC,
    CHECKPOINT_TRAILER,
    CHECKPOINT_TRAILER_MAGIC,
    FORMAT_VERSION,
    RECORD_HEADER,
    Op,
    StoreIdentity,
    Table,
)
from engine.host.failpoints import reached
from engine.journal.reader import JOURNAL_FOLDER, list_journal
from lakefs.errors import StoreDamaged, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import Sequence
from lakefs.limits import KIB, MIB
from lakefs.ports import Disk, DiskFile

CHECKPOINT_FOLDER: Final = "checkpoints"
_SUFFIX: Final = ".checkpoint"
_COMPRESSION_GZIP: Final = 1
_GZIP_WINDOW_BITS: Final = 31  # zlib's way to ask for gzip framing
_GZIP_ERROR: Final = cast(type[Exception], isal_zlib.error)
_LEVEL: Final = 1
_PIECE_BYTES: Final = MIB
_BODY_BYTES: Final = 64 * KIB
"""Bytes of records packed before compression.  Pieces of a mebibyte cost megabytes of heap and were no faster."""
_HEADER_CHECKED_BYTES: Final = CHECKPOINT_HEADER.size - 4
_TRAILER_CHECKED_BYTES: Final = CHECKPOINT_TRAILER.size - 4


class RecordSource(Protocol):
    """The records to dump: an `engine.tables.lmdb_index.IndexSnapshot`."""

    applied: Sequence

    def records(self, table: Table, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Records of a table, ascending, checked."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the folder.  `file_bytes` is its size; its content is not checked."""

    path: str
    sequence: Sequence
    file_bytes: int


def checkpoint_path(sequence: Sequence) -> str:
    """Return the path of the checkpoint of that sequence."""
    return f"{CHECKPOINT_FOLDER}/{sequence:016x}{_SUFFIX}"


def newest_checkpoint(disk: Disk) -> Checkpoint | None:
    """Return the checkpoint with the highest sequence in its name; None when there is none."""
    return next(checkpoints(disk), None)


def checkpoints(disk: Disk) -> Iterator[Checkpoint]:
    """Yield the checkpoints in the folder, by their names, newest first.  StoreUnusable for names of no release."""
    for name in reversed(disk.list_folder(CHECKPOINT_FOLDER)):
        stem, dot, suffix = name.rpartition(".")
        if dot + suffix != _SUFFIX or len(stem) != 16:
            continue
        path = f"{CHECKPOINT_FOLDER}/{name}"
        with closing(disk.open(path, read_only=True)) as file:
            size = file.size()
        yield Checkpoint(path, _sequence_of(stem, path), size)


def write_checkpoint(disk: Disk, identity: StoreIdentity, source: RecordSource) -> Checkpoint:
    """Dump a snapshot; durable on return.

    Errors: IndexDamaged (a record of the snapshot is damaged), StoreFull, DiskFailed.  An error leaves at most a
    temporary file, which the next call removes.
    """
    path = checkpoint_path(source.applied)
    temporary = f"{path}.new"
    _remove_temporaries(disk)
    file = disk.open(temporary, create=True)
    try:
        size = _write(file, identity, source)
        reached("checkpoint.written")
        file.sync_data()
        reached("checkpoint.synced")
    except BaseException:
        file.close()
        disk.unlink(temporary)
        raise
    file.close()
    disk.rename(temporary, path)
    reached("checkpoint.renamed")
    disk.sync_folder(CHECKPOINT_FOLDER)
    reached("checkpoint.durable")
    return Checkpoint(path, source.applied, size)


def read_checkpoint(disk: Disk, path: str, store_id: bytes) -> CheckpointReader:
    """Open a checkpoint and check all of it.  StoreDamaged names it; StoreUnusable: another format or store."""
    file = disk.open(path, read_only=True)
    try:
        return CheckpointReader(file, path, store_id)
    except BaseException:
        file.close()
        raise


def remove_superseded(disk: Disk, store_id: bytes, newest: Checkpoint) -> int:
    """Remove older checkpoints, and journal files with no group behind the newest; returns how many files.

    The newest must be durable.  Files that a crash leaves are removed by the next call.
    """
    removed = 0
    for name in disk.list_folder(CHECKPOINT_FOLDER):
        path = f"{CHECKPOINT_FOLDER}/{name}"
        if name.endswith(_SUFFIX) and path < newest.path:
            disk.unlink(path)
            removed += 1
    files = list_journal(disk, store_id)
    assert all(file.first_sequence < following.first_sequence for file, following in pairwise(files))
    for file, following in pairwise(files):
        if following.first_sequence <= newest.sequence + 1:
            disk.unlink(file.path)
            removed += 1
            reached("checkpoint.one-removed")
    if removed:
        disk.sync_folder(CHECKPOINT_FOLDER)
        disk.sync_folder(JOURNAL_FOLDER)
    return removed


def forget_upto(disk: Disk, store_id: bytes, sequence: Sequence) -> bool:
    """Return True if each checkpoint and journal file begins behind the group; first removes what is superseded."""
    newest = newest_checkpoint(disk)
    if newest is None or newest.sequence < sequence:
        return False
    remove_superseded(disk, store_id, newest)
    files = list_journal(disk, store_id)
    return all(file.first_sequence > sequence for file in files) and all(
        checkpoint.sequence >= sequence for checkpoint in checkpoints(disk)
    )


class CheckpointReader:
    """A checkpoint that was checked and found whole.  The caller closes it."""

    def __init__(self, file: DiskFile, path: str, store_id: bytes) -> None:
        self._file = file
        self._path = path
        self.sequence = self._check_header(store_id)
        self.record_count, self._stored_bytes = self._check_stream()

    def records(self) -> Iterator[tuple[Table, bytes, bytes]]:
        """Yield all records, table after table, keys ascending.  StoreDamaged when their count is wrong."""
        tables = {int(table): table for table in Table}
        unpack = RECORD_HEADER.unpack_from
        rest = b""
        count = 0
        for piece in self._pieces():
            rest = rest + piece if rest else piece
            position, end = 0, len(rest)
            while position + 8 <= end:
                number, op, key_bytes, value_bytes = unpack(rest, position)
                value_at = position + 8 + key_bytes
                next_at = value_at + value_bytes
                if next_at > end:
                    break
                if number not in tables or op != Op.INSERT:
                    raise StoreUnusable(f"{self._path} has a record of table {number}, op {op}: not known")
                yield tables[number], rest[position + 8 : value_at], rest[value_at:next_at]
                count += 1
                position = next_at
            rest = rest[position:]
        if rest or count != self.record_count:
            raise self._damaged(f"it holds {count} records of {self.record_count}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_header(self, store_id: bytes) -> Sequence:
        header = _read(self._file, 0, CHECKPOINT_HEADER.size)
        if len(header) < CHECKPOINT_HEADER.size or header[:8] != CHECKPOINT_MAGIC:
            raise self._damaged("its header is not readable")
        _, version, compression, sequence, found_store, _, _, crc = CHECKPOINT_HEADER.unpack(header)
        if crc32c(header[:_HEADER_CHECKED_BYTES]) != crc:
            raise self._damaged("its header does not match its checksum")
        if (version, compression) != (FORMAT_VERSION, _COMPRESSION_GZIP):
            raise StoreUnusable(f"{self._path} has format version {version}, compression {compression}")
        if found_store != store_id or self._path != checkpoint_path(Sequence(sequence)):
            told = f"{self._path} is not this store's: it was renamed or belongs to another"
            raise StoreUnusable(told, finding=Finding.CHECKPOINT_FOREIGN)
        return Sequence(sequence)

    def _check_stream(self) -> tuple[int, int]:
        """Check trailer and stream; returns the count of records and the stream's length in bytes."""
        trailer_at = self._file.size() - CHECKPOINT_TRAILER.size
        trailer = _read(self._file, max(trailer_at, 0), CHECKPOINT_TRAILER.size)
        if len(trailer) < CHECKPOINT_TRAILER.size or trailer[:8] != CHECKPOINT_TRAILER_MAGIC:
            raise self._damaged("its trailer is not readable")
        _, record_count, stored_bytes, stored_crc, crc = CHECKPOINT_TRAILER.unpack(trailer)
        if crc32c(trailer[:_TRAILER_CHECKED_BYTES]) != crc:
            raise self._damaged("its trailer does not match its checksum")
        if stored_bytes != trailer_at - CHECKPOINT_HEADER.size:
            raise self._damaged(f"its stream has {trailer_at - CHECKPOINT_HEADER.size} bytes of {stored_bytes}")
        found = 0
        for piece in self._stored_pieces(stored_bytes):
            found = crc32c(piece, found)
        if found != stored_crc:
            raise self._damaged("its stream does not match its checksum")
        return record_count, stored_bytes

    def _stored_pieces(self, stored_bytes: int) -> Iterator[bytes]:
        position, end = CHECKPOINT_HEADER.size, CHECKPOINT_HEADER.size + stored_bytes
        while position < end:
            piece = _read(self._file, position, min(_PIECE_BYTES, end - position))
            if not piece:
                raise self._damaged("it became shorter while it was read")
            yield piece
            position += len(piece)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the expanded stream in pieces of bounded size (a stream of `write_checkpoint` expands little)."""
        inflate = isal_zlib.decompressobj(wbits=_GZIP_WINDOW_BITS)
        try:
            for stored in self._stored_pieces(self._stored_bytes):
                yield inflate.decompress(stored, _PIECE_BYTES)
                while inflate.unconsumed_tail:
                    yield inflate.decompress(inflate.unconsumed_tail, _PIECE_BYTES)
            yield inflate.flush()
        except _GZIP_ERROR as error:
            raise self._damaged(f"its stream cannot be expanded: {error}") from error
        if not inflate.eof:
            raise self._damaged("its stream is cut off")

    def _damaged(self, reason: str) -> StoreDamaged:
        return StoreDamaged(
            f"{self._path} is damaged: {reason}; run: lake fsck --data DIR --repair",
            subject=self._path,
            finding=Finding.CHECKPOINT_DAMAGED,
        )


def _write(file: DiskFile, identity: StoreIdentity, source: RecordSource) -> int:
    """Write header, stream and trailer; returns the file's length."""
    file.pwrite(pack_header(identity, source.applied), 0)
    start = position = CHECKPOINT_HEADER.size
    stored_crc = record_count = 0
    deflate = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS)
    for body, count in _packed_records(source):
        record_count += count
        stored = deflate.compress(body) if body is not None else deflate.flush()
        if stored:
            stored_crc = crc32c(stored, stored_crc)
            file.pwrite(stored, position)
            position += len(stored)
    trailer = CHECKPOINT_TRAILER.pack(CHECKPOINT_TRAILER_MAGIC, record_count, position - start, stored_crc, 0)
    trailer = trailer[:_TRAILER_CHECKED_BYTES]
    file.pwrite(trailer + crc32c(trailer).to_bytes(4, "little"), position)
    return position + CHECKPOINT_TRAILER.size


def _packed_records(source: RecordSource) -> Iterator[tuple[bytearray | None, int]]:
    """Yield the snapshot's records as journal records, in pieces of about `_BODY_BYTES` with their counts; then None.

    Each record is packed into one buffer at once.  Kept as objects until joined, they raised the engine's private
    memory by megabytes at each checkpoint.
    """
    pack = RECORD_HEADER.pack
    for table in Table:
        body = bytearray()
        count = 0
        for key, value in source.records(table):
            body += pack(table, Op.INSERT, len(key), len(value))
            body += key
            body += value
            count += 1
            if len(body) >= _BODY_BYTES:
                yield body, count
                body.clear()
                count = 0
        yield body, count
    yield None, 0


def pack_header(identity: StoreIdentity, sequence: Sequence) -> bytes:
    """Return the header of a store's checkpoint."""
    head = CHECKPOINT_HEADER.pack(
        CHECKPOINT_MAGIC, FORMAT_VERSION, _COMPRESSION_GZIP, sequence, identity.store_id, identity.boot_id, bytes(4), 0
    )[:_HEADER_CHECKED_BYTES]
    return head + crc32c(head).to_bytes(4, "little")


def _remove_temporaries(disk: Disk) -> None:
    for name in disk.list_folder(CHECKPOINT_FOLDER):
        if name.endswith(".new"):
            disk.unlink(f"{CHECKPOINT_FOLDER}/{name}")


def _sequence_of(stem: str, path: str) -> Sequence:
    try:
        return Sequence(int(stem, 16))
    except ValueError as error:
        raise StoreUnusable(f"{path} is not the name of a checkpoint; move it away", subject=path) from error


def _read(file: DiskFile, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    return bytes(buffer[: file.pread_into(memoryview(buffer), offset)])
