"""The list of good copies of a mirrored disk, and the file by which a copy knows itself: bytes, and files.

Each copy's folder has two files beside the mirrored ones:

    mirror.copy   the id of this copy.  Written once; its inode tells the copy from a copy of it.
    mirror.list   which copies are good, with a number.  Replaced whole, equal on all copies it names.

Rules kept here:
- A list is replaced as the superblock is: temporary name, sync, rename, sync of the folder.
- Each list has a tag of its own, and the tags of those it came from.  So it is known of two lists if one came from the
  other, or if they were written by processes that did not know of each other.
- The number is one more than that of the list it came from; the term grows when an operator went on without a copy
  that might be newer, and the higher one counts.

`engine.mirror.list_choice` decides which list counts.  All functions block.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from engine.host.small_file import replace_small_file
from engine.mirror.mirror_bounds import ANCESTORS, COPIES_MAX, LISTED_MAX
from lakefs.errors import StoreDamaged, StoreUnusable
from lakefs.ids import CopyId
from lakefs.layout import Layout
from lakefs.limits import PAGE_BYTES
from lakefs.ports import Disk

COPY_FILE: Final = "mirror.copy"
LIST_FILE: Final = "mirror.list"
LOCK_FILE: Final = "mirror.lock"
ASIDE_FOLDER: Final = "mirror.aside"
OWN_PREFIX: Final = "mirror."
"""Names in the root that begin so are the mirror's own, and differ from copy to copy."""
_VERSION: Final = 1
_COPY_MAGIC: Final = b"LAKEMCPY"
_LIST_MAGIC: Final = b"LAKEMLST"
_TAG_BYTES: Final = 8
_ID_BYTES: Final = 16
_NAME_BYTES: Final = 96

MIRROR_COPY: Final = Layout(
    "mirror copy",
    48,
    [("magic", "8s"), ("format_version", "I"), ("mirror_id", "16s"), ("copy_id", "16s"), ("crc", "I")],
)
LISTED_COPY: Final = Layout("mirror list copy", 120, [("copy_id", "16s"), ("inode", "Q"), ("name", f"{_NAME_BYTES}s")])
MIRROR_LIST: Final = Layout(
    "mirror list",
    1544,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("mirror_id", "16s"),
        ("identity", "Q"),
        ("term", "Q"),
        ("number", "Q"),
        ("is_equal", "I"),
        ("copy_count", "I"),
        ("copies", f"{LISTED_MAX * 120}s"),
        ("tag", f"{_TAG_BYTES}s"),
        ("ancestors", f"{ANCESTORS * _TAG_BYTES}s"),
        ("crc", "I"),
    ],
)


@dataclass(frozen=True)
class Member:
    """A copy in a list: inode of its `mirror.copy`, and the name that its device had, for people."""

    inode: int
    name: str


@dataclass(frozen=True)
class CopyList:
    """One list.  `members` are the good copies, in the order in which they are read.

    `identity` is shown as the inode of the store's lock file, whichever copies are good.  `is_equal` is True if the
    mirror was closed in order: all copies have the same names.
    """

    mirror_id: bytes
    identity: int
    term: int
    number: int
    members: dict[CopyId, Member]
    tag: bytes
    ancestors: tuple[bytes, ...] = ()
    is_equal: bool = False

    def next(self, members: dict[CopyId, Member], *, is_equal: bool = False, by_operator: bool = False) -> CopyList:
        """Return the list that follows this one."""
        return CopyList(
            self.mirror_id,
            self.identity,
            self.term + by_operator,
            self.number + 1,
            members,
            os.urandom(_TAG_BYTES),
            (self.tag, *self.ancestors)[:ANCESTORS],
            is_equal,
        )

    def came_from(self, other: CopyList) -> bool:
        """Return True if this list is `other`, or came from it.

        Processes that do not know of each other get ahead by a few lists, not by as many as are remembered.
        """
        if other.tag == self.tag or other.tag in self.ancestors:
            return True
        return other.term <= self.term and self.number - other.number >= ANCESTORS

    def pack(self) -> bytes:
        """Pack the page of the file."""
        assert 1 <= len(self.members) <= COPIES_MAX, "a list has a copy, and all fit"
        head = MIRROR_LIST.pack(
            _LIST_MAGIC,
            _VERSION,
            self.mirror_id,
            self.identity,
            self.term,
            self.number,
            self.is_equal,
            len(self.members),
            b"".join(
                LISTED_COPY.pack(copy, member.inode, member.name.encode()[:_NAME_BYTES])
                for copy, member in self.members.items()
            ),
            self.tag,
            b"".join(self.ancestors),
            0,
        )
        return _sealed(head)


@dataclass(frozen=True)
class CopyFile:
    """The content of `mirror.copy`, and its inode."""

    mirror_id: bytes
    copy_id: CopyId
    inode: int = field(compare=False, default=0)


def first_list(mirror_id: bytes, members: dict[CopyId, Member]) -> CopyList:
    """Return the first list of a new mirror, whose copies are all good and empty."""
    identity = int.from_bytes(os.urandom(8), "little") >> 1 | 1
    return CopyList(mirror_id, identity, 0, 1, members, os.urandom(_TAG_BYTES), is_equal=True)


def new_id() -> bytes:
    """Return the id of a new mirror, or of a new copy."""
    return os.urandom(_ID_BYTES)


def read_copy_file(disk: Disk) -> CopyFile:
    """Read `mirror.copy`.  FileNotFoundError, StoreDamaged, StoreUnusable."""
    page = _read(disk, COPY_FILE, MIRROR_COPY, _COPY_MAGIC)
    fields = MIRROR_COPY.unpack_fields(page)
    return CopyFile(fields["mirror_id"], CopyId(fields["copy_id"]), disk.stat(COPY_FILE).inode)


def write_copy_file(disk: Disk, mirror_id: bytes, copy_id: CopyId) -> int:
    """Write `mirror.copy` in a folder that has none; returns its inode.  Durable on return.

    One without a list that names it is the rest of a copy that was never finished; it is replaced.
    """
    with suppress(FileNotFoundError):
        disk.unlink(COPY_FILE)
    head = MIRROR_COPY.pack(_COPY_MAGIC, _VERSION, mirror_id, copy_id, 0)
    with closing(disk.open(COPY_FILE, create=True)) as file:
        file.pwrite(_sealed(head), 0)
        file.sync_data()
    disk.sync_folder("")
    return disk.stat(COPY_FILE).inode


def read_list(disk: Disk) -> CopyList:
    """Read `mirror.list`.  FileNotFoundError, StoreDamaged, StoreUnusable."""
    page = _read(disk, LIST_FILE, MIRROR_LIST, _LIST_MAGIC)
    fields = MIRROR_LIST.unpack_fields(page)
    count, packed, ancestors = fields["copy_count"], fields["copies"], fields["ancestors"]
    if not 1 <= count <= COPIES_MAX:
        raise StoreUnusable(f"{LIST_FILE} names {count} copies; this release knows {COPIES_MAX}")
    rows = [LISTED_COPY.unpack_from(packed, index * LISTED_COPY.size) for index in range(count)]
    tags = [ancestors[at : at + _TAG_BYTES] for at in range(0, len(ancestors), _TAG_BYTES)]
    return CopyList(
        fields["mirror_id"],
        fields["identity"],
        fields["term"],
        fields["number"],
        {CopyId(row[0]): Member(row[1], row[2].rstrip(b"\0").decode(errors="replace")) for row in rows},
        fields["tag"],
        tuple(tag for tag in tags if any(tag)),
        bool(fields["is_equal"]),
    )


def write_list(disk: Disk, listed: CopyList) -> None:
    """Replace `mirror.list`; durable on return.  After an error it is the old one or the new one."""
    replace_small_file(disk, LIST_FILE, listed.pack())


def _sealed(head: bytes) -> bytes:
    checked = head[:-4]
    return (checked + crc32c(checked).to_bytes(4, "little")).ljust(PAGE_BYTES, b"\0")


def _read(disk: Disk, path: str, layout: Layout, magic: bytes) -> bytes:
    page = bytearray(layout.size)
    with closing(disk.open(path, read_only=True)) as file:
        count = file.pread_into(memoryview(page), 0)
    if count < len(page) or page[:8] != magic or crc32c(page[:-4]).to_bytes(4, "little") != page[-4:]:
        raise StoreDamaged(f"{path} does not match its checksum", subject=path)
    version = layout.unpack_fields(page)["format_version"]
    if version != _VERSION:
        raise StoreUnusable(f"{path} has format version {version}; this release reads {_VERSION}", subject=path)
    return bytes(page)
