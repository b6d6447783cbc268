"""The journal's reader: lists its files, finds its end, reads its groups, and tells a torn write from damage.

Rules kept here (`docs/format.md`, Journal):
- Files appear whole: a file without a good header is damaged.
- A file ends where its successor begins.  Every group before that is present and good; else the file is damaged.
- The last file ends at the first page that does not hold the expected group.  That is damage if a good group header
  with a higher sequence lies behind it, if it is before a sequence known to be durable, or if a group there was written
  whole and is one bit off (`engine.journal.bit_flip`).  Else it is a torn write of a group never acknowledged.
- A body is checked before any of its records is used.  Groups that are skipped are checked by header only.

All functions block.  Nothing is changed on disk.  Damage raises JournalDamaged, whose message names file, offset and
sequence; `DamagedAt.damage` has them for `fsck`.  A file of another store or format version raises StoreUnusable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from operator import methodcaller
from typing import Final

from crc32c import crc32c

from engine.format.layouts import (
    FORMAT_VERSION,
    GROUP_HEADER,
    GROUP_MAGIC,
    JOURNAL_HEADER,
    JOURNAL_MAGIC,
    PAGE,
    RECORD_HEADER,
    Mutation,
    Op,
    Table,
)
from engine.journal.bit_flip import byte_with_bit_off, has_unwritten_sector, is_in_empty_sector, with_one_bit_turned
from lakefs.errors import JournalDamaged, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import Sequence
from lakefs.limits import GROUP_BYTES_MAX, MIB
from lakefs.ports import Disk, DiskFile

JOURNAL_FOLDER: Final = "journal"
JOURNAL_SUFFIX: Final = ".journal"
is_journal_name: Final[Callable[[str], bool]] = methodcaller("endswith", JOURNAL_SUFFIX)
"""Return whether a name in the folder is that of a journal's file, not of a temporary or foreign one."""
_GROUP_CHECKED_BYTES: Final = GROUP_HEADER.size - 4
_FILE_CHECKED_BYTES: Final = JOURNAL_HEADER.size - 4
_OPS: Final = {int(op): op for op in Op}
_TABLES: Final = {int(table): table for table in Table}


@dataclass(frozen=True)
class JournalFile:
    """A journal file with a good header."""

    path: str
    first_sequence: Sequence
    boot_tag: bytes
    size_bytes: int
    tag_before: bytes = bytes(4)
    """Tag of the boot that the superblock named when this file was begun; zeros in files of earlier releases."""


@dataclass(frozen=True)
class Group:
    """A group whose body matches its checksum, and the file and offset where it was found."""

    sequence: Sequence
    time_ns: int
    record_count: int
    body: bytes
    path: str
    offset: int


@dataclass(frozen=True)
class JournalEnd:
    """The end of the journal.

    `sequence` is the last group's; when the last file holds no group, the one before its first.  `last` is that group,
    if a file holds it.  `torn` is True if unreadable bytes, never acknowledged, were found behind it.
    """

    sequence: Sequence
    last: Group | None
    files: tuple[JournalFile, ...]
    torn: bool = False


@dataclass(frozen=True)
class JournalDamage:
    """The place of damage in a journal: from this sequence on, no group can be used."""

    path: str
    offset: int
    sequence: Sequence
    reason: str
    finding: Finding = Finding.JOURNAL_DAMAGED


@dataclass(frozen=True)
class Beginning:
    """The offset of group `sequence`, present or not, in a file whose earlier part cannot be read."""

    path: str
    offset: int
    sequence: Sequence


class DamagedAt(JournalDamaged):
    """JournalDamaged that carries the place."""

    def __init__(self, damage: JournalDamage) -> None:
        super().__init__(
            f"{damage.path} is damaged at byte {damage.offset}, group {damage.sequence}: {damage.reason}; "
            "restore the file, or run: lake fsck --data DIR --repair; where that cannot mend it, give up that group "
            "and all later ones with: lake fsck --data DIR --rebuild --accept-loss",
            subject=damage.path,
            finding=damage.finding,
        )
        self.damage = damage


def missing(sequence: Sequence, reason: str) -> JournalDamage:
    """Make the damage that groups from this sequence on are in no file."""
    return JournalDamage(JOURNAL_FOLDER, 0, sequence, reason, Finding.JOURNAL_MISSING)


def journal_path(first_sequence: Sequence) -> str:
    """Return the path of the file that begins with that sequence."""
    return f"{JOURNAL_FOLDER}/{first_sequence:016x}{JOURNAL_SUFFIX}"


def sequence_in(path: str) -> Sequence:
    """Return the first sequence in the file's name; StoreUnusable when it has none."""
    try:
        return Sequence(int(path.rpartition("/")[2].removesuffix(JOURNAL_SUFFIX), 16))
    except ValueError as error:
        raise StoreUnusable(f"{path} is not the name of a journal file; move it away", subject=path) from error


def list_journal(disk: Disk, store_id: bytes) -> tuple[JournalFile, ...]:
    """Return the journal's files in order of first sequence, headers checked.  JournalDamaged, StoreUnusable."""
    return tuple(journal_file(disk, path, store_id) for path in journal_paths(disk))


def journal_paths(disk: Disk) -> list[str]:
    """Return the paths of the journal's files in order of their names, without temporary and foreign files."""
    return [f"{JOURNAL_FOLDER}/{name}" for name in filter(is_journal_name, disk.list_folder(JOURNAL_FOLDER))]


def journal_file(disk: Disk, path: str, store_id: bytes) -> JournalFile:
    """Read and check the header of one of the journal's files.  JournalDamaged, StoreUnusable."""
    with closing(disk.open(path, read_only=True)) as file:
        return _read_file_header(file, path, store_id)


def find_end(
    disk: Disk, files: tuple[JournalFile, ...], durable: Sequence, begin: Beginning | None = None
) -> JournalEnd:
    """Find the journal's end by following group headers; the last group's body is checked.

    `durable` is the highest sequence known to have been durable: an end before it is JournalDamaged.  Only the last
    file is read, and the one before it when the last holds no group.  Bytes before `begin` in its file are not read.
    """
    if not files:
        if durable > 0:
            raise DamagedAt(missing(Sequence(1), "there is no journal file"))
        return JournalEnd(Sequence(0), None, ())
    end = _end_of_last_file(disk, files[-1], begin)
    last = end.last
    if last is None and len(files) > 1:
        # The last file holds no group: the last group, if it is needed, is in the file before.
        last = _last_group_before(disk, files[-2], files[-1].first_sequence)
    if end.sequence < durable:
        place = JournalDamage(
            files[-1].path,
            0 if end.last is None else end.last.offset,
            Sequence(end.sequence + 1),
            f"it ends with group {end.sequence}, but group {durable} was durable",
            Finding.JOURNAL_CUT_SHORT,
        )
        raise DamagedAt(place)
    return JournalEnd(end.sequence, last, files, end.torn)


def read_groups(
    disk: Disk, files: tuple[JournalFile, ...], after: Sequence, upto: Sequence, begin: Beginning | None = None
) -> Iterator[Group]:
    """Yield the checked groups with after < sequence <= upto, in order; JournalDamaged when one cannot be read.

    Files that end at or before `after` are not opened.  To check all groups, pass the first sequence - 1.
    """
    expected = Sequence(after + 1)
    if upto <= after:
        return
    if not files or files[0].first_sequence > expected:
        first = files[0].first_sequence if files else Sequence(upto + 1)
        raise DamagedAt(missing(expected, f"groups {expected} to {first - 1} are in no file"))
    for position, entry in enumerate(files):
        following = files[position + 1].first_sequence if position + 1 < len(files) else Sequence(upto + 1)
        if following <= expected:
            continue
        last = min(upto, Sequence(following - 1))
        with closing(disk.open(entry.path, read_only=True)) as file:
            for header in _walk(file, entry, last, begin):
                if header.sequence >= expected:
                    yield _read_body(file, entry, header)
        expected = Sequence(last + 1)
        if expected > upto:
            return


def check_groups(
    disk: Disk, files: tuple[JournalFile, ...], after: Sequence, upto: Sequence, begin: Beginning | None = None
) -> int:
    """Read and decode the groups that `read_groups` yields; returns the count of their records."""
    groups = read_groups(disk, files, after, upto, begin)
    return sum(len(decode_records(group.body, group.record_count)) for group in groups)


def decode_records(body: bytes, record_count: int) -> list[Mutation]:
    """Decode the mutations of a checked body.

    StoreUnusable for an unknown table or op; JournalDamaged when lengths do not add up.
    """
    mutations: list[Mutation] = []
    append = mutations.append
    unpack = RECORD_HEADER.unpack_from
    ops, tables = _OPS, _TABLES
    position, end = 0, len(body)
    try:
        while position + 8 <= end:
            table, op, key_bytes, value_bytes = unpack(body, position)
            value_at = position + 8 + key_bytes
            next_at = value_at + value_bytes
            append((ops[op], tables[table], body[position + 8 : value_at], body[value_at:next_at]))
            position = next_at
    except KeyError as error:
        raise StoreUnusable(f"a record has table {table}, op {op}: not known to this release") from error
    if position != end or len(mutations) != record_count:
        raise JournalDamaged(
            f"{len(mutations)} records end at byte {position}; {record_count} in {end} bytes were expected"
        )
    return mutations


@dataclass(frozen=True)
class GroupPlace:
    """A good group header and its offset."""

    sequence: Sequence
    time_ns: int
    record_count: int
    body_bytes: int
    body_crc: int
    offset: int

    @property
    def next_offset(self) -> int:
        """Offset of the next group."""
        return -(-(self.offset + GROUP_HEADER.size + self.body_bytes) // PAGE) * PAGE


def _read_file_header(file: DiskFile, path: str, store_id: bytes) -> JournalFile:
    page = bytearray(JOURNAL_HEADER.size)
    count = file.pread_into(memoryview(page), 0)
    magic, version, _, first, found_store, boot_id, tag_before, crc = JOURNAL_HEADER.unpack(page)
    if count < len(page) or magic != JOURNAL_MAGIC or crc32c(page[:_FILE_CHECKED_BYTES]) != crc:
        reason, finding = "its header is not readable", Finding.JOURNAL_HEADER_DAMAGED
        raise DamagedAt(JournalDamage(path, 0, sequence_in(path), reason, finding))
    if version != FORMAT_VERSION:
        raise StoreUnusable(f"{path} has format version {version}; this release reads {FORMAT_VERSION}")
    kind = Finding.JOURNAL_FOREIGN
    if found_store != store_id:
        raise StoreUnusable(f"{path} belongs to another store; move it away", subject=path, finding=kind)
    if path != journal_path(Sequence(first)):
        raise StoreUnusable(f"{path} begins with group {first}: it was renamed", subject=path, finding=kind)
    return JournalFile(path, Sequence(first), boot_id[:8], file.size(), tag_before)


def _parse_header(buffer: bytes | bytearray | memoryview, offset: int, boot_tag: bytes) -> GroupPlace | None:
    """Parse the group header at the start of `buffer`; None unless it is a good one of this file's boot."""
    magic, body_bytes, sequence, time_ns, tag, count, body_crc, _, crc = GROUP_HEADER.unpack_from(buffer)
    if magic != GROUP_MAGIC or tag != boot_tag or body_bytes > GROUP_BYTES_MAX:
        return None
    if crc32c(buffer[:_GROUP_CHECKED_BYTES]) != crc:
        return None
    return GroupPlace(Sequence(sequence), time_ns, count, body_bytes, body_crc, offset)


def _first_in(entry: JournalFile, begin: Beginning | None) -> tuple[int, Sequence]:
    if begin is not None and begin.path == entry.path:
        return begin.offset, begin.sequence
    return PAGE, entry.first_sequence


def _hop(file: DiskFile, entry: JournalFile, begin: Beginning | None = None) -> Iterator[GroupPlace]:
    """Yield the good headers from the file's start on, with consecutive sequences, up to the first missing one."""
    buffer = bytearray(GROUP_HEADER.size)
    view = memoryview(buffer)
    offset, expected = _first_in(entry, begin)
    while file.pread_into(view, offset) == len(buffer):
        header = _parse_header(buffer, offset, entry.boot_tag)
        if header is None or header.sequence != expected:
            return
        yield header
        offset, expected = header.next_offset, Sequence(expected + 1)


def _walk(file: DiskFile, entry: JournalFile, last: Sequence, begin: Beginning | None) -> Iterator[GroupPlace]:
    """Yield the headers up to `last`; JournalDamaged when one is missing."""
    offset, expected = _first_in(entry, begin)
    for header in _hop(file, entry, begin):
        if header.sequence > last:
            return
        yield header
        offset, expected = header.next_offset, Sequence(header.sequence + 1)
    if expected <= last:
        raise DamagedAt(JournalDamage(entry.path, offset, expected, "there is no group where one was written"))


def _read_body(file: DiskFile, entry: JournalFile, header: GroupPlace) -> Group:
    body = _try_body(file, header)
    if body is None:
        reason = "the group does not match its checksum"
        raise DamagedAt(JournalDamage(entry.path, header.offset, header.sequence, reason))
    return Group(header.sequence, header.time_ns, header.record_count, body, entry.path, header.offset)


def _try_body(file: DiskFile, header: GroupPlace) -> bytes | None:
    buffer = bytearray(header.body_bytes)
    count = file.pread_into(memoryview(buffer), header.offset + GROUP_HEADER.size) if buffer else 0
    if count < header.body_bytes or crc32c(buffer) != header.body_crc:
        return None
    return bytes(buffer)


def _end_of_last_file(disk: Disk, entry: JournalFile, begin: Beginning | None) -> JournalEnd:
    """Find the journal's end in its last file; `last` is None when that file holds no good group."""
    with closing(disk.open(entry.path, read_only=True)) as file:
        previous: GroupPlace | None = None
        final: GroupPlace | None = None
        for header in _hop(file, entry, begin):
            previous, final = final, header
        first_at, first = _first_in(entry, begin)
        offset = first_at if final is None else final.next_offset
        torn = False
        expected = first if final is None else Sequence(final.sequence + 1)
        _refuse_flipped_header(file, entry, offset, expected)
        if final is not None and _try_body(file, final) is None:
            _refuse_flipped_body(file, entry, final)
            offset, final, torn = final.offset, previous, True
        last = None if final is None else _read_body(file, entry, final)
        sequence = Sequence(first - 1) if last is None else last.sequence
        torn = _look_behind(file, entry, offset, Sequence(sequence + 1)) or torn
        return JournalEnd(sequence, last, (entry,), torn)


def _refuse_flipped_header(file: DiskFile, entry: JournalFile, offset: int, expected: Sequence) -> None:
    """Raise JournalDamaged when a bit of the header of group `expected` is flipped: sectors are written whole."""
    buffer = bytearray(GROUP_HEADER.size)
    if file.pread_into(memoryview(buffer), offset) < len(buffer) or not any(buffer):
        return
    for turned in with_one_bit_turned(bytes(buffer)):
        header = _parse_header(turned, offset, entry.boot_tag)
        if header is not None and header.sequence == expected:
            raise DamagedAt(JournalDamage(entry.path, offset, expected, "a bit of the group's header is flipped"))


def _refuse_flipped_body(file: DiskFile, entry: JournalFile, header: GroupPlace) -> None:
    """Raise JournalDamaged when the group was written whole and is one bit off its checksum; else it is torn."""
    buffer = bytearray(GROUP_HEADER.size + header.body_bytes)
    if file.pread_into(memoryview(buffer), header.offset) < len(buffer) or has_unwritten_sector(buffer):
        return
    at = byte_with_bit_off(buffer[GROUP_HEADER.size :], header.body_crc)
    if at is not None and not is_in_empty_sector(buffer, GROUP_HEADER.size + at):
        raise DamagedAt(JournalDamage(entry.path, header.offset, header.sequence, "a bit of the group is flipped"))


def _look_behind(file: DiskFile, entry: JournalFile, offset: int, expected: Sequence) -> bool:
    """Return True if bytes other than zero lie behind the end, `offset`; JournalDamaged when later groups do."""
    for header in good_headers(file, entry, offset):
        if header.sequence > expected:
            reason = f"it cannot be read, but group {header.sequence} behind it can"
            raise DamagedAt(JournalDamage(entry.path, offset, expected, reason))
    buffer = bytearray(MIB)
    position = offset
    while count := file.pread_into(memoryview(buffer), position):
        if buffer.count(0, 0, count) < count:
            return True
        position += count
    return False


def good_headers(file: DiskFile, entry: JournalFile, offset: int = PAGE) -> Iterator[GroupPlace]:
    """Yield every good group header of this file's boot at a page's start, from `offset` on."""
    buffer = bytearray(MIB)
    window = memoryview(buffer)
    position = offset
    while count := file.pread_into(window, position):
        for at in range(0, count - GROUP_HEADER.size + 1, PAGE):
            if buffer[at : at + 4] != GROUP_MAGIC:
                continue
            header = _parse_header(window[at : at + GROUP_HEADER.size], position + at, entry.boot_tag)
            if header is not None:
                yield header
        position += count


def _last_group_before(disk: Disk, entry: JournalFile, following: Sequence) -> Group | None:
    """Return the group before `following` from the file before; None when that file does not hold it.

    That alone is no damage.  A crash may undo removals of superseded files in any order, so the file that held the
    group may be gone while an older one exists.  A reader that needs the group reports it missing.
    """
    with closing(disk.open(entry.path, read_only=True)) as file:
        for header in _hop(file, entry):
            if header.sequence == following - 1:
                return _read_body(file, entry, header)
        return None
