"""The inode table: places, numbers, and what the kernel may still ask about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuse.open_file import OpenFile
from fuse.state.inodes import EXPIRED, ROOT, Inode, InodeTable
from fuse.state.stat_fields import FOLDER, OBJECT, Attributes
from lakefs.errors import KeyNotFound
from lakefs.names import Name


class WrittenFile(OpenFile):
    """An open file, of which only the state counts."""

    def __init__(self, *, is_dirty: bool) -> None:
        self.is_dirty = is_dirty


@pytest.fixture
def table() -> InodeTable:
    return InodeTable(Attributes(FOLDER))


def folder(table: InodeTable, parent: Inode, name: str, node: int) -> Inode:
    inode = table.adopt(parent, name, node, Attributes(FOLDER), asked_at=1.0)
    inode.lookups += 1
    return inode


def content(blob: bytes) -> Attributes:
    return Attributes(OBJECT, len(blob), 0o644, blob=blob)


def file(table: InodeTable, parent: Inode, name: str, node: int, blob: bytes = b"1") -> Inode:
    inode = table.adopt(parent, name, node, content(blob), asked_at=1.0)
    inode.lookups += 1
    return inode


def test_names_are_put_together_from_places(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    a = folder(table, bucket, "a", 11)
    b = file(table, a, "b", 12)
    assert table.name_of(bucket) == Name("bkt", "")
    assert table.name_of(a) == Name("bkt", "a/")
    assert table.name_of(b) == Name("bkt", "a/b")
    assert table.child_name(a, "c", folder=True) == Name("bkt", "a/c/")
    assert table.child_name(table.root, "other") == Name("other", "")


def test_with_one_bucket_the_root_is_its_folder() -> None:
    table = InodeTable(Attributes(FOLDER), "bkt")
    a = file(table, table.root, "a", 11)
    assert table.name_of(table.root) == Name("bkt", "")
    assert table.name_of(a) == Name("bkt", "a")
    assert not table.holds_buckets(table.root)


def test_a_moved_folder_takes_all_below_it_along(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    a = folder(table, bucket, "a", 11)
    b = file(table, a, "b", 12)
    assert table.move(a, bucket, "z") is None
    assert table.name_of(b) == Name("bkt", "z/b")
    assert "a" not in bucket.children


def test_what_a_move_replaces_loses_its_name_and_lives_on(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    old, new = file(table, bucket, "old", 11), file(table, bucket, "new", 12)
    assert table.move(new, bucket, "old") is old
    assert table.of(old.number) is old
    assert table.name_of(new) == Name("bkt", "old")
    with pytest.raises(KeyNotFound):
        table.name_of(old)
    assert table.by_node(11) is None


def test_a_name_that_has_another_node_is_another_inode(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    before = file(table, bucket, "x", 11)
    after = file(table, bucket, "x", 12)
    assert after is not before
    assert bucket.children["x"] is after
    assert before.parent is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_that_is_found_in_itself_by_a_name_of_before_is_placed_in_no_circle(
    table: InodeTable, depth: int
) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    moved = folder(table, bucket, "d", 11)
    parent = moved
    for number in range(depth):
        parent = folder(table, parent, f"{number}", 12 + number)
    found = folder(table, parent, "f", 11)  # elsewhere: `d` was renamed, and a new `d` has the node in it
    assert found is not moved
    assert parent.children["f"] is table.by_node(11) is found
    assert moved.parent is None
    with pytest.raises(KeyNotFound):
        table.name_of(found)
    another = folder(table, bucket, "d", 20)
    assert folder(table, another, "f", 11) is found
    assert table.name_of(found) == Name("bkt", "d/f/")


def test_a_folder_that_is_moved_below_what_was_in_it_before_is_placed_in_no_circle(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    moved = folder(table, bucket, "d", 11)
    inner = folder(table, moved, "e", 12)
    deepest = folder(table, inner, "g", 13)
    table.move(moved, deepest, "d")  # the store allowed it: `e` is elsewhere by now, which this table did not know
    assert moved.parent is deepest
    assert inner.parent is None
    with pytest.raises(KeyNotFound):
        table.name_of(moved)


def test_other_content_of_the_same_node_is_another_inode_with_another_number(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    before = file(table, bucket, "x", 11, b"old")
    after = file(table, bucket, "x", 11, b"new")
    assert after is not before
    assert after.number != before.number
    assert table.by_node(11) is after
    assert file(table, bucket, "x", 11, b"new") is after


def test_what_is_written_here_keeps_its_inode_and_what_it_shows(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    written = file(table, bucket, "x", 11, b"old")
    written.file = WrittenFile(is_dirty=True)
    assert file(table, bucket, "x", 11, b"elsewhere") is written
    assert written.attributes.blob == b"old"


def test_a_new_file_owns_its_name_until_it_is_stored(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    new = table.create(bucket, "x", content(b""))
    new.lookups = 1
    assert new.is_pending
    assert file(table, bucket, "x", 11) is new
    new.lookups = 1
    table.stored(new, 12)
    assert new.node == 12
    assert table.by_node(12) is new


@pytest.mark.parametrize(
    "change",
    [lambda table, inode: table.detach(inode), lambda table, inode: table.move(inode, table.root.children["bkt"], "y")],
)
def test_an_answer_to_an_older_question_changes_nothing(
    table: InodeTable, change: Callable[[InodeTable, Inode], object]
) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    inode = file(table, bucket, "x", 11, b"old")
    inode.attributes = content(b"new")
    inode.changed_at = 2.0
    assert table.adopt(bucket, "x", 11, content(b"old"), asked_at=1.5) is inode
    assert inode.attributes.blob == b"new"
    assert table.adopt(bucket, "x", 13, content(b"other"), asked_at=1.5) is inode


def test_an_answer_of_before_names_changed_elsewhere_is_not_relied_on(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    bucket.names_changed_at = 2.0
    assert table.adopt(bucket, "x", 11, content(b"1"), asked_at=1.5).confirmed_at == EXPIRED
    assert table.adopt(bucket, "x", 11, content(b"1"), asked_at=2.5).confirmed_at == 2.5


def test_a_name_that_an_inode_has_lost_is_told_when_it_is_found_under_another(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    told: list[tuple[Inode, str]] = []
    table.on_lost = lambda parent, name, removed: told.append((parent, name))
    found = file(table, bucket, "before", 11)
    assert file(table, bucket, "after", 11) is found
    assert told == [(bucket, "before")]
    assert file(table, bucket, "last", 11, b"other content") is not found
    assert told == [(bucket, "before"), (bucket, "after")]


@pytest.mark.parametrize("here", [True, False])
def test_a_folder_is_complete_while_only_this_mount_takes_names_away(table: InodeTable, here: bool) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    bucket.names_ns = 1
    gone = file(table, bucket, "x", 11)
    (table.remove if here else table.detach)(gone)
    assert bool(bucket.names_ns) is here


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        (lambda table, inode: table.remove(inode), True),
        (lambda table, inode: table.move(inode, table.root, "y"), True),
        (lambda table, inode: table.forget(inode.number, 1), False),
        (lambda table, inode: table.detach(inode), False),
        (lambda table, inode: table.adopt(inode.parent, "x", 12, content(b"2"), asked_at=2.0), False),
    ],
)
def test_a_folder_that_was_listed_is_known_until_a_name_in_it_may_be_missing(
    table: InodeTable, change: Callable[[InodeTable, Inode], object], *, is_known: bool
) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    inode = file(table, bucket, "x", 11)
    bucket.names_ns = 1
    change(table, inode)
    assert bool(bucket.names_ns) is is_known


@pytest.mark.parametrize("here", [True, False])
def test_a_folder_that_gets_another_name_and_those_below_it_are_listed_anew(table: InodeTable, here: bool) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    before, after = folder(table, bucket, "before", 11), folder(table, bucket, "after", 12)
    moved = folder(table, before, "x", 13)
    below = folder(table, moved, "y", 14)
    for listed in (before, after, moved, below):
        listed.names_ns = 1
    if here:
        table.move(moved, after, "z")
    else:
        table.adopt(after, "z", 13, Attributes(FOLDER), asked_at=2.0)
    assert moved.parent is after
    assert [bool(known.names_ns) for known in (after, moved, below)] == [True, False, False]
    assert bool(before.names_ns) is here, "what is found elsewhere may have been moved back meanwhile"


def test_what_the_kernel_has_forgotten_is_forgotten(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    a = folder(table, bucket, "a", 11)
    b = file(table, a, "b", 12)
    table.forget(a.number, 1)
    assert table.of(a.number) is a, "something below it is known"
    table.forget(b.number, 1)
    assert len(table) == 2
    for number in (a.number, b.number):
        with pytest.raises(KeyError):
            table.of(number)
    assert table.by_node(12) is None
    table.forget(bucket.number, 1)
    table.forget(ROOT, 5)
    assert [inode.number for inode in table] == [ROOT]


def test_what_is_open_is_known_until_it_is_closed(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    b = file(table, bucket, "b", 12)
    b.file = WrittenFile(is_dirty=False)
    table.forget(b.number, 1)
    table.detach(b)
    assert table.of(b.number) is b
    table.closed(b, b.file)
    with pytest.raises(KeyError):
        table.of(b.number)


def test_the_end_of_an_earlier_open_file_does_not_close_the_present_one(table: InodeTable) -> None:
    """Tasks that opened a file in vain, at once, all close it, and by then it may be open anew."""
    b = file(table, folder(table, table.root, "bkt", 10), "b", 12)
    earlier = WrittenFile(is_dirty=False)
    b.file = present = WrittenFile(is_dirty=True)
    table.closed(b, earlier)
    assert b.file is present
    table.closed(b, present)
    assert b.file is None


def test_numbers_are_the_nodes_where_they_are_free(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    first = file(table, bucket, "x", 11)
    assert (bucket.number, first.number) == (10, 11)
    table.detach(first)
    second = file(table, bucket, "y", 11)
    assert second.number not in (ROOT, 10, 11)


def test_a_node_shows_one_number_with_whatever_content(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    first = file(table, bucket, "a", 12, b"1")
    second = file(table, bucket, "a", 12, b"2")
    table.detach(second)
    third = file(table, bucket, "a", 12, b"3")
    assert len({first.number, second.number, third.number}) == 3
    assert [first.st_ino, second.st_ino, third.st_ino] == [12, 12, 12]
    other = file(table, bucket, "b", 13)
    table.stored(other, 14)
    assert file(table, bucket, "c", 13).st_ino not in (13, other.st_ino), "the number is in use by another file"


def test_a_file_made_here_keeps_the_number_it_had_while_it_is_known(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    made = table.create(bucket, "a", content(b""))
    made.lookups += 1
    table.stored(made, 15)
    table.detach(made)
    again = file(table, bucket, "a", 15, b"2")
    assert again.number == 15
    assert again.st_ino == made.st_ino == made.number
    table.forget(made.number, 1)
    assert again.st_ino == made.number
    table.detach(again)
    table.forget(again.number, 1)
    assert file(table, bucket, "a", 15, b"3").st_ino == 15, "nobody knows the earlier number"


def test_the_number_stays_in_whatever_order_contents_are_forgotten(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    made = table.create(bucket, "a", content(b""))
    made.lookups += 1
    table.stored(made, 15)
    second = file(table, bucket, "a", 15, b"2")
    table.detach(second)
    table.forget(second.number, 1)
    third = file(table, bucket, "a", 15, b"3")
    assert third.st_ino == made.st_ino, "the one that was made here is still open"
    table.detach(third)
    table.forget(made.number, 1)
    assert file(table, bucket, "a", 15, b"4").st_ino == third.st_ino, "a content that came later is still open"


def test_a_file_that_replaces_another_elsewhere_takes_its_number_along(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    made = table.create(bucket, "a", content(b""))
    made.lookups += 1
    table.stored(made, 15)
    earlier = made.st_ino
    second = file(table, bucket, "a", 15, b"2")
    table.stored(second, 16)
    assert second.st_ino == earlier
    moved = file(table, bucket, "b", 15, b"1")
    assert moved.st_ino != second.st_ino, "two files"
    table.detach(second)
    assert file(table, bucket, "a", 16, b"3").st_ino == earlier


def test_what_takes_over_another_shows_its_number(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    made = table.create(bucket, "a", content(b""))
    made.lookups += 1
    table.stored(made, 15)
    first = file(table, bucket, "b", 16)
    table.detach(first)
    other = file(table, bucket, "b", 17)
    table.take_over(first, other)
    assert first.st_ino == other.st_ino == 17
    table.detach(first)
    again = file(table, bucket, "b", 17, b"3")
    assert again.st_ino == 17
    table.detach(made)
    second = file(table, bucket, "a", 15, b"2")
    table.take_over(again, second)
    assert again.st_ino == made.st_ino
    for inode in list(table):
        table.detach(inode) if inode.parent is bucket else None
        table.forget(inode.number, inode.lookups)
    assert not len(table._shown), "no number is kept of what nobody knows"


def test_a_file_found_under_the_name_of_another_has_its_own_number(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    opened = file(table, bucket, "a", 15)
    table.stored(opened, 16, is_found=True)
    assert opened.st_ino == 16
    moved = file(table, bucket, "b", 15)
    assert moved.st_ino != 16, "two files"
    again = file(table, bucket, "a", 16, b"2")
    assert again.st_ino == 16
    table.stored(again, 15, is_found=True)
    assert again.st_ino == moved.st_ino
    table.stored(again, ROOT, is_found=True)
    assert again.st_ino not in (ROOT, 16, moved.st_ino)


def test_attributes_found_elsewhere_are_told_by_whoever_finds_them(table: InodeTable) -> None:
    told: list[Inode] = []
    table.on_changed = told.append
    bucket = folder(table, table.root, "bkt", 10)
    known = file(table, bucket, "a", 11)
    table.adopt(bucket, "a", 11, content(b"1"), asked_at=2.0)
    assert told == [], "they are the same"
    table.adopt(bucket, "a", 11, Attributes(OBJECT, 1, 0o600, blob=b"1"), asked_at=3.0)
    assert told == [known]
    table.adopt(table.root, "bkt", 10, Attributes(FOLDER, mtime_ns=5), asked_at=3.0)
    assert told == [known, bucket]
    unknown = table.adopt(bucket, "b", 12, content(b"1"), asked_at=3.0)
    table.adopt(bucket, "b", 12, Attributes(OBJECT, 1, 0o600, blob=b"1"), asked_at=4.0)
    assert unknown.attributes.mode == 0o600
    assert told == [known, bucket], "the kernel does not know it"


def test_an_answer_that_was_overtaken_by_a_later_one_changes_nothing(table: InodeTable) -> None:
    bucket = folder(table, table.root, "bkt", 10)
    known = file(table, bucket, "a", 11)
    table.adopt(bucket, "a", 11, Attributes(OBJECT, 1, 0o600, blob=b"1"), asked_at=3.0)
    for node, blob in ((11, b"1"), (11, b"0"), (12, b"0")):
        assert table.adopt(bucket, "a", node, content(blob), asked_at=2.0) is known
    assert (known.attributes.mode, known.confirmed_at, known.found_at) == (0o600, 3.0, 3.0)
    table.adopt(bucket, "moved", 11, Attributes(OBJECT, 1, 0o600, blob=b"1"), asked_at=5.0)
    assert table.adopt(bucket, "a", 11, content(b"1"), asked_at=4.0) is known
    assert (known.name, known.attributes.mode) == ("moved", 0o600)
    assert bucket.names_changed_at == 5.0, "the older answer about the old name is asked again"
