"""Moving and copying names, of objects and of whole folders."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.format.layouts import NodeKind
from engine.namespace.binding import bind
from engine.namespace.listing import list_names
from engine.namespace.names import copy, rename
from engine.namespace.object_stat import etag_of, new_object
from lakefs.errors import AlreadyExists, FolderNotEmpty, InvalidArgument, KeyNotFound, PreconditionFailed
from lakefs.ids import DomainIndex
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes
from tests.unit.support.shelf import NOW_NS, Shelf, blob


def test_moving_an_object_keeps_its_node_and_tidies_both_ends() -> None:
    shelf = Shelf()
    bound = shelf.put("from/deep/x")
    shelf.put("to/y", "old")
    assert shelf.move("from/deep/x", "to/y") == bound
    assert shelf.all_keys() == ["to/y"]
    assert shelf.get("from/") is None
    assert shelf.move("to/y", "new/parents/" + "z" * 700) == bound
    assert shelf.all_keys() == ["new/parents/" + "z" * 700]


def test_moving_a_folder_moves_one_record_whatever_is_below_it() -> None:
    costs = []
    for count in (1, 2000):
        shelf = Shelf()
        shelf.put_all(f"a/big/{i}/{i}" for i in range(count))
        shelf.put("a/stays")
        before = shelf.store.reads()
        mutations: list[int] = []

        def moved(txn: Any, s: Shelf = shelf, m: list[int] = mutations) -> None:
            rename(txn, s.bucket, "a/big/", s.bucket, "other/place/", True, NOW_NS)
            m.append(txn.mutations)

        shelf.store.run(moved)
        costs.append((shelf.store.reads() - before, mutations))
        assert sum(key.startswith("other/place/") for key in shelf.all_keys()) == count
    assert costs[0] == costs[1]
    assert costs[1][0] <= 12
    # The record moved; its node's change time; `other/` was made; the times of both folders.
    assert costs[1][1] == [2 + 1 + 2 + 2]


def test_moving_a_folder_to_where_its_parent_ends_keeps_shared_parents() -> None:
    shelf = Shelf()
    shelf.put("a/b/c/x")
    shelf.move("a/b/c/", "a/c/")
    assert shelf.all_keys() == ["a/c/x"]
    assert shelf.get("a/b/") is None
    shelf.move("a/c/", "a/b/c/d/")
    assert shelf.all_keys() == ["a/b/c/d/x"]
    shelf.refuses(FolderNotEmpty, lambda: shelf.move("a/b/c/d/", "a/b/"))


def test_what_a_move_cannot_do_is_refused_with_the_reason() -> None:
    shelf = Shelf("b", "c")
    shelf.put("dir/sub/x")
    shelf.put("full/y")
    shelf.put("object")
    shelf.make_folder("empty")
    assert "below itself" in shelf.refuses(InvalidArgument, lambda: shelf.move("dir/", "dir/sub/new/"))
    assert "not empty" in shelf.refuses(FolderNotEmpty, lambda: shelf.move("dir/", "full/"))
    assert "one kind" in shelf.refuses(InvalidArgument, lambda: shelf.move("dir/", "object2"))
    assert "one kind" in shelf.refuses(InvalidArgument, lambda: shelf.move("object", "dir2/"))
    assert "bucket" in shelf.refuses(InvalidArgument, lambda: shelf.move("", "x/"))
    assert "bucket" in shelf.refuses(InvalidArgument, lambda: shelf.move("dir/", ""))
    assert "exists already" in shelf.refuses(AlreadyExists, lambda: shelf.move("dir/", "empty/", replace=False))
    assert "exists already" in shelf.refuses(AlreadyExists, lambda: shelf.move("object", "full/y", replace=False))
    shelf.refuses(KeyNotFound, lambda: shelf.move("none", "none"))
    shelf.refuses(KeyNotFound, lambda: shelf.move("dir", "dir"))
    other = msgspec.structs.replace(shelf.buckets[1], domain=DomainIndex(1))
    assert "domains" in shelf.refuses(InvalidArgument, lambda: shelf.move("object", "object", to=other))


def test_a_folder_replaces_an_empty_one_and_moves_between_buckets() -> None:
    shelf = Shelf("b", "c")
    shelf.put("dir/x")
    shelf.make_folder("empty")
    shelf.move("dir/", "empty/")
    assert shelf.all_keys() == ["b/empty/x"]
    shelf.move("empty/", "empty/", to=shelf.buckets[1])
    assert shelf.all_keys() == ["c/empty/x"]


def test_moving_onto_itself_changes_nothing() -> None:
    shelf = Shelf()
    shelf.put("a/x")
    before = shelf.store.dump()
    shelf.move("a/x", "a/x")
    shelf.move("a/", "a/", replace=False)
    assert shelf.store.dump() == before
    assert shelf.events() == [("put", "a/"), ("put", "a/x")]


def test_keys_that_a_move_made_too_long_can_still_be_read_moved_and_removed() -> None:
    shelf = Shelf()
    tail = "/".join("t" * 100 for _ in range(10))
    shelf.put("a/" + tail)
    shelf.put("a/2" + tail[:600])
    deep = "/".join("d" * 90 for _ in range(10))
    shelf.move("a/", deep + "/")
    long = f"{deep}/{tail}"
    assert shelf.get(long) is not None
    (second, first), after = list_names(shelf.store.view(), shelf.bucket)
    assert (first.key, after) == (long, "")
    (again,), _ = list_names(shelf.store.view(), shelf.bucket, after=second.key)
    assert again == first
    shelf.move(second.key, "short")
    assert shelf.remove(long) is not None
    assert shelf.all_keys() == ["short"]


# --- copying -----------------------------------------------------------------------------------------


def test_a_copy_has_the_blob_and_etag_and_its_own_node_and_time() -> None:
    shelf = Shelf()
    attributes = ObjectAttributes(
        content_type="text/plain", user_metadata={"k": "v"}, etag_kind=1, etag=bytes(16), checksums={"crc": b"1"}
    )
    node = new_object(blob("x"), 1, 1, attributes, NOW_NS)
    bound = shelf.store.run(lambda t: bind(t, shelf.bucket, "a", node, NO_CONDITION, NOW_NS))
    copied = shelf.copy("a", "dir/b")
    assert copied.node_id != bound.node_id
    assert copied.node == msgspec.structs.replace(node, mtime_ns=NOW_NS + 1, ctime_ns=NOW_NS + 1)
    given = ObjectAttributes(mode=0o600, mtime_ns=5, content_type="b/c", etag_kind=1, etag=b"e" * 16)
    changed = shelf.copy("a", "a", given).node
    assert (changed.mode, changed.mtime_ns, changed.attributes.content_type) == (0o600, 5, "b/c")
    assert changed.attributes.user_metadata == {}
    assert changed.attributes.checksums == {"crc": b"1"}
    assert etag_of(changed) == etag_of(node) == "0" * 32
    assert shelf.all_keys() == ["a", "dir/b"]


def test_a_copy_between_a_folders_key_and_an_object_takes_the_kind_of_its_place() -> None:
    shelf = Shelf()
    shelf.put("a/", "own")
    assert shelf.copy("a/", "b").kind is NodeKind.OBJECT
    assert shelf.copy("b", "c/").kind is NodeKind.FOLDER
    assert shelf.all_keys() == ["a/", "b", "c/"]


def test_a_copy_needs_a_source_with_content_in_the_same_domain() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    for missing in ["a", "a/", "none/x", ""]:
        shelf.refuses(KeyNotFound, shelf.copy, missing, "c")
    shelf.refuses(PreconditionFailed, lambda: shelf.copy("a/b", "a/b", condition=Condition(absent=True)))
    other = msgspec.structs.replace(shelf.bucket, domain=DomainIndex(1))
    shelf.refuses(
        InvalidArgument,
        lambda: shelf.store.run(lambda t: copy(t, shelf.bucket, "a/b", other, "c", None, NO_CONDITION, NOW_NS)),
    )
