"""Checks at each opening that the trees of LMDB's file consist of whole pages, each used once and none of them free.

A page number that is one bit off may lead to an older copy of the same page: whole, in order, and out of date.  LMDB
lists such a page as free, and every page is either free or part of one tree, once.  So `check_pages` walks the branch
pages, which are few (1 in 30 to 300).  It compares the pages they lead to with the free list and with each other, and
the number of pages with the counts in the roots.

In each page, leaves too, it reads the header and the offsets of the records, which no checksum covers: a leaf whose
header states fewer records hides the others, and LMDB does not write a changed page whose header marks it loose.  The
counts of records and of pages of long values must be those of the roots.  Records are not read: their checksums are
compared when they are used.  A million records take some 0.4 s of CPU.

The format is that of LMDB 0.9, as in its mdb.c: pages with a header of 16 bytes; two of them are heads of the file, and
the newer head holds the trees' roots.  A file of another format or machine is not checked.  The pages of long values
are not checked: their numbers are in the leaves, and LMDB does not take them for leaves.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lakefs.errors import DiskFailed, IndexDamaged
from lakefs.limits import PAGE_BYTES

_HEADER: Final = struct.Struct("<QHHHH")
_HEAD: Final = struct.Struct("<IIQQ")
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_ROOT: Final = struct.Struct("<IHHQQQQQ")
"""Padding (in the first root: the page's length), flags, depth, branch pages, leaves, overflow pages, entries, root."""
_TAIL: Final = struct.Struct("<QQ")
"""Last page, transaction."""
_NODE: Final = struct.Struct("<HHHH")
"""Low and high half of a length or page number, flags or its highest part, length of the key."""
_BRANCH: Final = 1
_LEAF: Final = 2
_BIG: Final = 1
_SUBTREE: Final = 2
_NO_PAGE: Final = (1 << 64) - 1
_FREE, _USED = 1, 2


@dataclass(frozen=True)
class _Tree:
    depth: int
    branch_pages: int
    leaves: int
    long_pages: int
    records: int
    root: int


def check_pages(path: Path) -> None:
    """Raise IndexDamaged when a tree leads to a page that is free, another tree's, absent, or not whole.

    The file must not be written during the check.  Blocks.  DiskFailed when it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = _Pages.of(descriptor)
            if pages is not None:
                pages.check()
        finally:
            os.close(descriptor)
    except struct.error as error:
        raise _damaged("what a page says of itself does not fit into it") from error
    except OSError as error:
        raise DiskFailed(f"cannot read {path}: {error.strerror}", subject="index") from error


class _Pages:
    """The file as of its newest transaction."""

    def __init__(self, descriptor: int, page_bytes: int, last: int, trees: list[_Tree]) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._last = last
        self._trees = trees
        self._known = bytearray(last + 1)
        """Each page's state so far: 0 for unknown, _FREE or _USED."""

    @classmethod
    def of(cls, descriptor: int) -> _Pages | None:
        """Read the newer head; None when the file is of another format."""
        newest = None
        roots_at = _HEADER.size + _HEAD.size
        first = os.pread(descriptor, PAGE_BYTES, 0)
        page_bytes = _ROOT.unpack_from(first, roots_at)[0] if len(first) == PAGE_BYTES else 0
        if page_bytes < PAGE_BYTES or not _is_head(first):
            return None
        for head in (first, os.pread(descriptor, PAGE_BYTES, page_bytes)):
            if not _is_head(head):
                continue
            last, transaction = _TAIL.unpack_from(head, roots_at + 2 * _ROOT.size)
            if newest is None or transaction > newest[0]:
                newest = transaction, last, [_tree(head, roots_at), _tree(head, roots_at + _ROOT.size)]
        if newest is None or newest[1] * page_bytes > os.fstat(descriptor).st_size:
            return None  # LMDB reports what is wrong with it
        return cls(descriptor, page_bytes, newest[1], newest[2])

    def check(self) -> None:
        """Claim every page of every tree, once."""
        free, tables = self._trees
        for leaf in self._check_leaves(free):
            for value in self._values(leaf):
                self._note_free(value)
        for leaf in self._check_leaves(tables, _SUBTREE):
            for value in self._values(leaf):
                self._check_leaves(_tree(value, 0))

    def _claim(self, tree: _Tree) -> Iterator[int]:
        """Claim the pages of a tree, and yield its leaves, which are not read."""
        if tree.root == _NO_PAGE:
            return
        level = [tree.root]
        counts: list[int] = []
        for _ in range(tree.depth - 1):
            for page in level:
                self._take(page)
            counts.append(len(level))
            level = [child for page in level for child in self._children(page)]
        if (sum(counts), len(level)) != (tree.branch_pages, tree.leaves):
            raise _damaged(f"a tree has {len(level)} leaves, {tree.leaves} were written")
        for page in level:
            self._take(page)
        yield from level

    def _check_leaves(self, tree: _Tree, usual: int = 0) -> list[int]:
        """Claim the pages of a tree, compare its leaves with the counts in the root, and return them.

        Records are not read.  `usual` is the flags of all records but those of long values.
        """
        leaves = sorted(self._claim(tree))
        records = long_pages = 0
        for page in leaves:
            content, places = self._read(page, _LEAF)
            words = memoryview(content).cast("H")
            records += len(places)
            for at in places:
                flags = words[at // 2 + 2]
                if flags == _BIG:
                    long_pages += -(-(_length(content, at) + _HEADER.size) // self._page_bytes)
                elif flags != usual:
                    raise _damaged(f"page {page} has a record of kind {flags}")
        if (records, long_pages) != (tree.records, tree.long_pages):
            raise _damaged(
                f"a tree has {records} records and {long_pages} pages of long values; "
                f"{tree.records} and {tree.long_pages} were written"
            )
        return leaves

    def _take(self, page: int) -> None:
        if not 2 <= page <= self._last:
            raise _damaged(f"page {page} of {self._last} is referred to")
        if self._known[page]:
            raise _damaged(f"page {page} is {'free' if self._known[page] == _FREE else 'used twice'}")
        self._known[page] = _USED

    def _note_free(self, value: bytes) -> None:
        (count,) = struct.unpack_from("<Q", value)
        if count > len(value) // 8:
            raise _damaged(f"a record of {len(value)} bytes lists {count} free pages")
        for page in struct.unpack_from(f"<{count}Q", value, 8):
            if not 2 <= page <= self._last or self._known[page]:
                raise _damaged(f"page {page} is in the free list and is not free")
            self._known[page] = _FREE

    def _children(self, page: int) -> list[int]:
        content, places = self._read(page, _BRANCH)
        return [
            low | high << 16 | highest << 32
            for low, high, highest, _ in (_NODE.unpack_from(content, at) for at in places)
        ]

    def _values(self, page: int) -> Iterator[bytes]:
        """Yield the value of each record of a leaf."""
        content, places = self._read(page, _LEAF)
        for at in places:
            _, _, flags, key_bytes = _NODE.unpack_from(content, at)
            begin, length = at + _NODE.size + key_bytes, _length(content, at)
            if flags & _BIG:
                (first,) = struct.unpack_from("<Q", content, begin)
                self._take(first)
                if length > (self._last + 1) * self._page_bytes:
                    raise _damaged(f"page {page} has a value of {length} bytes")
                yield os.pread(self._descriptor, length, first * self._page_bytes + _HEADER.size)
            else:
                yield content[begin : begin + length]

    def _read(self, page: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """Read a page of that kind; returns it and the offsets of its records."""
        content = os.pread(self._descriptor, self._page_bytes, page * self._page_bytes)
        if len(content) < self._page_bytes:
            raise _damaged(f"page {page} is not there")
        number, _, flags, lower, upper = _HEADER.unpack_from(content)
        if number != page or flags != kind:
            raise _damaged(f"page {page} says that it is page {number} of kind {flags}")
        if not _HEADER.size < lower <= upper <= self._page_bytes or lower % 2:
            raise _damaged(f"page {page} has room from {lower} to {upper}")
        places = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", content, _HEADER.size)
        # LMDB keeps records together at the end of a page, each at an even place.
        if min(places) != upper or len(set(places)) < len(places) or max(places) > self._page_bytes - _NODE.size:
            raise _damaged(f"page {page} has records where none can be")
        return content, places


def _is_head(page: bytes) -> bool:
    return len(page) == PAGE_BYTES and _HEAD.unpack_from(page, _HEADER.size)[:2] == (_MAGIC, _VERSION)


def _tree(content: bytes, at: int) -> _Tree:
    _, _, *fields = _ROOT.unpack_from(content, at)
    return _Tree(*fields)


def _length(content: bytes, at: int) -> int:
    """Return the length of the value of a leaf's record."""
    low, high, _, _ = _NODE.unpack_from(content, at)
    return int(low | high << 16)


def _damaged(what: str) -> IndexDamaged:
    return IndexDamaged(f"the pages of the index do not make a tree: {what}", subject="index")
