"""Places: where the bits of a store lie, and which of them somebody relies on.

A place is a span of a file with a name.  `live` spans hold what a read, a start or a rebuild needs: a flip in one must
be reported.  A flip in any other (headers that payloads do not need, the tree of LMDB's pages, room that nobody reads)
must be harmless or reported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.format.layouts import GROUP_HEADER, JOURNAL_HEADER, PAGE, SEGMENT_HEADER, SUPERBLOCK, ChunkRecord
from engine.segments.files import parse_segment_name
from engine.superblock.superblock import COPY_PATH

_PAGE_HEADER = 16
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_SUBDATA, _BIGDATA = 2, 1
_META_DBS = 24
_DB_BYTES = 48


@dataclass(frozen=True)
class Span:
    """Bytes of a file, and their place."""

    place: str
    path: str
    begin: int
    end: int
    live: bool = False


def spans_of(data: Path, records: list[ChunkRecord], checkpoint_sequence: int) -> list[Span]:
    """Return all bytes of all files of a closed store, but for empty ones."""
    spans: list[Span] = []
    for path in sorted(data.rglob("*")):
        if not path.is_file() or not path.stat().st_size or path.name in ("reserve", "lock.mdb", "crash.last"):
            continue
        name, size = str(path.relative_to(data)), path.stat().st_size
        known = sorted(_known(path, name, records, checkpoint_sequence), key=lambda span: span.begin)
        spans += known
        spans += _rest(name, size, known)
    return [span for span in spans if span.end > span.begin]


def _known(path: Path, name: str, records: list[ChunkRecord], checkpoint_sequence: int) -> Iterator[Span]:
    folder = name.partition("/")[0]
    if name == "superblock":
        yield Span("superblock", name, 0, SUPERBLOCK.size, live=True)
    elif name == COPY_PATH:
        yield Span("copy of the superblock", name, 0, SUPERBLOCK.size)  # written again at each opening
    elif folder == "segments":
        yield from _in_segment(path, name, records)
    elif folder == "journal":
        yield from _in_journal(path.read_bytes(), name, checkpoint_sequence)
    elif folder == "checkpoints":
        yield Span("checkpoint", name, 0, path.stat().st_size, live=True)
    elif name == "index/data.mdb":
        yield from _LmdbFile(path.read_bytes(), name).spans()


def _rest(name: str, size: int, known: list[Span]) -> Iterator[Span]:
    end = 0
    for span in known:
        yield Span(f"unused, {_area(name)}", name, end, span.begin)
        end = max(end, span.end)
    yield Span(f"unused, {_area(name)}", name, end, size)


def _area(name: str) -> str:
    folder, slash, _ = name.partition("/")
    return folder if slash else "folder"


def _in_segment(path: Path, name: str, records: list[ChunkRecord]) -> Iterator[Span]:
    parsed = parse_segment_name(path.name)
    assert parsed is not None
    yield Span("segment header", name, 0, SEGMENT_HEADER.size)
    for record in records:
        if record.segment == parsed[0]:
            yield Span("payload", name, record.offset, record.offset + record.extent_bytes, live=True)


def _in_journal(content: bytes, name: str, checkpoint_sequence: int) -> Iterator[Span]:
    yield Span("journal header", name, 0, JOURNAL_HEADER.size, live=True)
    at = PAGE
    while content[at : at + 4] == b"LGRP":
        _, body_bytes, sequence, *_ = GROUP_HEADER.unpack_from(content, at)
        begins = at + GROUP_HEADER.size
        needed = sequence > checkpoint_sequence
        place = "journal group" if needed else "journal group, superseded"
        yield Span(place, name, at, begins + body_bytes, live=needed)
        at = -(-(begins + body_bytes) // PAGE) * PAGE


class _LmdbFile:
    """LMDB's file: which bytes are keys and values, pages of its trees, its free list, its two headers."""

    def __init__(self, content: bytes, name: str) -> None:
        self._content = content
        self._name = name
        self._found: list[Span] = []

    def spans(self) -> list[Span]:
        metas = [struct.unpack_from("<Q", self._content, page * PAGE + _PAGE_HEADER + 128)[0] for page in (0, 1)]
        newest = metas.index(max(metas))
        for page in (0, 1):
            place = "index, header" if page == newest else "index, older header"
            self._found.append(Span(place, self._name, page * PAGE, page * PAGE + _PAGE_HEADER + 136))
        base = newest * PAGE + _PAGE_HEADER + _META_DBS
        self._tree(base, "index, free list")
        self._tree(base + _DB_BYTES, "index")
        return self._found

    def _tree(self, record: int, place: str) -> None:
        (root,) = struct.unpack_from("<q", self._content, record + 40)
        if root >= 0:
            self._page(root, place)

    def _page(self, page: int, place: str) -> None:
        at = page * PAGE
        flags, lower = struct.unpack_from("<HH", self._content, at + 10)
        count = (lower - _PAGE_HEADER) // 2
        what = "branch page" if flags & _BRANCH else "leaf page"
        nodes = struct.unpack_from(f"<{count}H", self._content, at + _PAGE_HEADER)
        taken = [(at, at + lower)]
        for offset in nodes:
            low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", self._content, at + offset)
            key_at = at + offset + 8
            taken.append((at + offset, key_at))
            if flags & _BRANCH:
                self._found.append(Span(f"{place}, keys of branch pages", self._name, key_at, key_at + key_bytes))
                self._page(low | high << 16 | node_flags << 32, place)
            else:
                self._leaf_node(place, key_at, key_bytes, low | high << 16, node_flags)
        self._found += [Span(f"{place}, {what}", self._name, begin, end) for begin, end in taken]

    def _leaf_node(self, place: str, key_at: int, key_bytes: int, value_bytes: int, flags: int) -> None:
        value_at = key_at + key_bytes
        if flags & _SUBDATA:
            self._found.append(Span(f"{place}, table's root", self._name, key_at, value_at + value_bytes))
            self._tree(value_at, place)
            return
        live = place == "index"
        what = "keys and values" if live else "pages"
        end = value_at + (8 if flags & _BIGDATA else value_bytes)
        self._found.append(Span(f"{place}, {what}", self._name, key_at, end, live=live))
        if flags & _BIGDATA:
            (first,) = struct.unpack_from("<Q", self._content, value_at)
            begin = first * PAGE + _PAGE_HEADER
            self._found.append(Span(f"{place}, {what}", self._name, begin, begin + value_bytes, live=live))
