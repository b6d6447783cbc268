"""Pages of LMDB's file: a page number or head off by a bit is noticed where LMDB would not; a whole file passes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.format.layouts import Op, Table
from engine.tables.lmdb_index import DATA_FILE, Index
from engine.tables.lmdb_pages import check_pages
from lakefs.errors import DiskFailed, IndexDamaged
from lakefs.ids import Sequence
from tests.unit.engine.tables.test_index import layer_of

PAGE = 4096
BRANCH, LEAF = 1, 2
OVERFLOW = 4


def grown(path: Path, rounds: int = 30) -> Path:
    """Make an index that was changed often; return its file, which has older copies of many pages."""
    rng = random.Random(3)
    index = Index(path)
    for number in range(1, rounds + 1):
        changes = {rng.randrange(900): rng.randbytes(rng.choice((20, 200, 3000))) for _ in range(60)}
        index.apply(
            layer_of(
                *[(Op.PUT, Table.NAMES, b"key-%04d" % key, value) for key, value in changes.items()],
                *[(Op.DELETE, Table.NAMES, b"key-%04d" % key, b"") for key in rng.sample(range(900), 20)],
                *[(Op.PUT, Table.NODES, b"%d" % key, b"node") for key in changes],
                sequence=number,
            ),
            Sequence(number),
        )
        check_pages(path / DATA_FILE)
    index.close()
    return path / DATA_FILE


def page_numbers(content: bytes) -> Iterator[int]:
    """Yield the offsets of page numbers (low 32 bits) in the branch pages of the newest trees, and of the roots."""
    newest = max((0, PAGE), key=lambda head: int.from_bytes(content[head + 144 : head + 152], "little"))
    roots = [newest + 40 + 40, newest + 88 + 40]
    while roots:
        at = roots.pop()
        yield at
        pages = [int.from_bytes(content[at : at + 8], "little")]
        for page in pages:
            if page >= 1 << 63:
                continue
            begin = page * PAGE
            flags, lower = struct.unpack_from("<HH", content, begin + 10)
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", content, begin + 16):
                _, _, node_flags, key_bytes = struct.unpack_from("<HHHH", content, begin + node)
                if flags & 1:
                    yield begin + node
                    pages.append(int.from_bytes(content[begin + node : begin + node + 6], "little"))
                elif node_flags & 2:
                    roots.append(begin + node + 8 + key_bytes + 40)


def tree_pages(content: bytes) -> list[int]:
    """Return the offsets of the pages of the tables' trees, leaves too."""
    found: set[int] = set()
    for at in page_numbers(content):
        page = int.from_bytes(content[at : at + 8], "little") & (1 << 48) - 1
        if page < len(content) // PAGE:
            found.add(page * PAGE)
    return sorted(found)


def test_every_bit_of_a_pages_head_is_noticed(tmp_path: Path) -> None:
    path = grown(tmp_path / "index")
    content = path.read_bytes()
    pages = tree_pages(content)
    leaves = [at for at in pages if content[at + 10] == LEAF]
    assert len(leaves) > 20
    branches = [at for at in pages if content[at + 10] == BRANCH]
    for at in [branches[0], *random.Random(5).sample(leaves, 2)]:
        for byte in (*range(8), *range(10, 16)):  # two of padding are between
            for bit in range(8):
                assert is_noticed(path, content, at + byte, content[at + byte] ^ 1 << bit), (at, byte, bit)


def test_a_record_that_is_passed_over_or_of_another_kind_is_noticed(tmp_path: Path) -> None:
    path = grown(tmp_path / "index")
    content = path.read_bytes()
    for at in [page for page in tree_pages(content) if content[page + 10] == LEAF][::4]:
        lower = int.from_bytes(content[at + 12 : at + 14], "little")
        first, last = at + 16, at + lower - 2
        if first != last:  # give the last slot the first record's place: this hides the last record, no key shows it
            twice = bytearray(content)
            twice[last : last + 2] = content[first : first + 2]
            path.write_bytes(twice)
            with pytest.raises(IndexDamaged, match="records where none can be"):
                check_pages(path)
        flags = at + int.from_bytes(content[first : first + 2], "little") + 4
        for bit in range(8):
            assert is_noticed(path, content, flags, content[flags] ^ 1 << bit), (at, flags - at, bit)


def is_noticed(path: Path, content: bytes, at: int, value: int) -> bool:
    """Return whether one byte with another value is noticed."""
    path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
    try:
        check_pages(path)
    except IndexDamaged:
        return True
    return False


def test_every_page_number_that_leads_to_a_page_of_another_time_or_tree_is_noticed(tmp_path: Path) -> None:
    path = grown(tmp_path / "index")
    content = path.read_bytes()
    places = list(page_numbers(content))
    assert len(places) > 25
    noticed = 0
    for at in places:
        for bit in range(32):
            changed = bytearray(content)
            changed[at + bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            try:
                check_pages(path)
            except IndexDamaged:
                noticed += 1
            else:  # a page of a long value: LMDB itself knows that it is no leaf
                led_to = int.from_bytes(changed[at : at + 4], "little") * PAGE
                assert struct.unpack_from("<H", content, led_to + 10)[0] == OVERFLOW
    assert noticed > 32 * len(places) * 3 // 4
    path.write_bytes(content)
    check_pages(path)


def test_whatever_stands_in_the_pages_the_look_ends_with_an_error_of_ours_or_none(tmp_path: Path) -> None:
    path = grown(tmp_path / "index", rounds=8)
    content = path.read_bytes()
    rng = random.Random(5)
    noticed = 0
    for _ in range(1500):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 8))):
            page = rng.randrange(len(content) // PAGE)
            changed[page * PAGE + rng.choice((rng.randrange(160), rng.randrange(PAGE)))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            check_pages(path)
        except IndexDamaged:
            noticed += 1
    assert noticed > 5


def test_a_new_index_and_a_file_of_another_format_are_left_alone(tmp_path: Path) -> None:
    Index(tmp_path / "index").close()
    check_pages(tmp_path / "index" / DATA_FILE)
    for content in (b"", b"short", bytes(3 * PAGE)):
        (tmp_path / "other").write_bytes(content)
        check_pages(tmp_path / "other")


def test_a_file_that_cannot_be_opened_or_read_is_said_as_every_disk_that_fails(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DiskFailed, match=reason):
            check_pages(path)
