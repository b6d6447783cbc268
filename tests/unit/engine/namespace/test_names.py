"""Binding, removing and making names, by example.  Moves and the model have tests of their own."""

from __future__ import annotations

import pytest

from engine.format.layouts import Node, NodeKind, Table, node_key, with_names_changed
from engine.namespace.binding import Binding, bind, bind_many
from engine.namespace.buckets import ensure_bucket
from engine.namespace.names import require, resolve
from engine.namespace.object_stat import etag_of, new_object
from engine.namespace.tree import Resolved
from lakefs.errors import (
    AlreadyExists,
    FolderNotEmpty,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    NotAFolder,
    PreconditionFailed,
    RequestTooLarge,
    UserError,
)
from lakefs.ids import EMPTY_BLOB
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes
from tests.unit.support.shelf import NOW_NS, Shelf, an_object, blob

# --- binding -----------------------------------------------------------------------------------------


def test_a_bound_key_is_found_with_its_record() -> None:
    shelf = Shelf()
    bound = shelf.put("a/b/c", "hello")
    assert shelf.get("a/b/c") == bound
    assert bound.node.blob == blob("hello")
    assert shelf.all_keys() == ["a/b/c"]
    assert shelf.get("a/b") is None
    folder = shelf.get("a/b/")
    assert folder is not None
    assert folder.kind is NodeKind.FOLDER
    assert folder.node.blob is None
    assert resolve(shelf.store.view(), shelf.bucket, "") == Resolved(
        shelf.bucket.node, require(shelf.store.view(), shelf.bucket, "").node
    )


def test_an_overwrite_makes_a_new_node_and_leaves_no_old_one() -> None:
    shelf = Shelf()
    first = shelf.put("a", "one")
    second = shelf.put("a", "two")
    assert second.node_id != first.node_id
    assert node_key(first.node_id) not in shelf.store.tables[Table.NODES]
    assert shelf.all_keys() == ["a"]


def test_object_and_folder_of_one_name_coexist() -> None:
    shelf = Shelf()
    shelf.put("a", "object")
    shelf.put("a/b", "below")
    shelf.put("a/", "own")
    assert shelf.all_keys() == ["a", "a/", "a/b"]
    shelf.remove("a")
    assert shelf.all_keys() == ["a/", "a/b"]


def test_a_key_with_a_final_slash_sets_the_blob_of_the_folder_and_keeps_its_node() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    implicit = shelf.get("a/")
    assert implicit is not None
    own = shelf.put("a/", "own")
    assert own.node_id == implicit.node_id
    assert own.kind is NodeKind.FOLDER
    assert own.node.blob == blob("own")
    assert own.node.mode == 0o755
    assert shelf.put("new/", "") == shelf.get("new/")
    assert shelf.all_keys() == ["a/", "a/b", "new/"]


def test_a_folder_is_not_bound_to_a_symlink() -> None:
    shelf = Shelf()
    link = Node(kind=NodeKind.SYMLINK, blob=EMPTY_BLOB)
    refusal = shelf.refuses(
        InvalidArgument, lambda: shelf.store.run(lambda t: bind(t, shelf.bucket, "a/", link, NO_CONDITION, NOW_NS))
    )
    assert "'b/a/'" in refusal


@pytest.mark.parametrize("key", ["", "a\0", "k" * 4096, "\ud800"])
def test_a_key_that_is_refused_changes_nothing(key: str) -> None:
    shelf = Shelf()
    shelf.put("a")
    shelf.refuses(InvalidName, lambda: shelf.put(key))
    shelf.refuses(InvalidName, lambda: shelf.copy("a", key))
    shelf.refuses(UserError, lambda: shelf.move("a", key))


def test_more_attributes_than_64_kib_are_refused() -> None:
    shelf = Shelf()
    node = new_object(blob("x"), 1, 1, ObjectAttributes(user_metadata={"k": "v" * 70_000}), NOW_NS)
    shelf.refuses(
        RequestTooLarge, lambda: shelf.store.run(lambda t: bind(t, shelf.bucket, "a", node, NO_CONDITION, NOW_NS))
    )


def test_a_batch_binds_what_it_can_and_tells_what_it_could_not() -> None:
    shelf = Shelf("b", "c")
    shelf.put("taken")
    b, c = shelf.buckets
    items = [
        Binding(b, "x/y/" + "m" * 600, an_object("0")),
        Binding(b, "x/y/1", an_object("1")),
        Binding(b, "taken", an_object("2"), Condition(absent=True)),
        Binding(b, "x/y/2", an_object("3")),
        Binding(c, "x/y/2", an_object("4")),
        Binding(b, "x/y/", an_object("5")),
        Binding(b, "x/y/" + "l" * 600, an_object("6")),
        Binding(b, "", an_object("7")),
        Binding(b, "x/y/1", an_object("8")),
        Binding(b, "x/z/w/1", an_object("9"), Condition(etags=["*"])),
        Binding(b, "x/y/" + "l" * 600 + "/m", an_object("10")),
    ]
    results = shelf.store.run(lambda txn: bind_many(txn, items, NOW_NS))
    failed = [i for i, result in enumerate(results) if isinstance(result, UserError)]
    assert failed == [2, 7, 9]
    assert isinstance(results[2], PreconditionFailed)
    long = "b/x/y/" + "l" * 600
    assert shelf.all_keys() == sorted(
        ["b/taken", "b/x/y/", "b/x/y/1", "b/x/y/2", "c/x/y/2", long, long + "/m", "b/x/y/" + "m" * 600]
    )
    assert resolve(shelf.store.view(), b, "x/y/1") == results[8]


def test_a_batch_looks_shared_parents_up_once() -> None:
    shelf = Shelf()
    shelf.put("a/b/c/d/first")
    items = [Binding(shelf.bucket, f"a/b/c/d/{i}", an_object()) for i in range(64)]
    before = shelf.store.reads()
    shelf.store.run(lambda txn: bind_many(txn, items, NOW_NS))
    assert shelf.store.reads() - before == 4 + 64 + 1  # and the folder's record, for its times


# --- conditions --------------------------------------------------------------------------------------


def test_conditions_hold_or_name_the_object_and_the_reason() -> None:
    shelf = Shelf()
    etag = etag_of(shelf.put("dir/a", "one").node)
    node = shelf.get("dir/a")
    assert node is not None
    for bad, reason in [
        (Condition(absent=True), "it exists already"),
        (Condition(etags=["nope"]), f"its ETag is {etag}"),
        (Condition(not_etags=[etag]), "was excluded"),
        (Condition(not_etags=["*"]), "was excluded"),
        (Condition(node=node.node_id + 1), "replaced meanwhile"),
        (Condition(etags=["*"], node=node.node_id + 1), "replaced meanwhile"),
        (Condition(size_bytes=2), "its size is 3 bytes"),
        (Condition(etags=[etag], size_bytes=0), "its size is 3 bytes"),
        (Condition(mtime_s=0), "modification time"),
        (Condition(mtime_s=NOW_NS // 10**9 + 1, size_bytes=3), "modification time"),
    ]:
        refusal = shelf.refuses(PreconditionFailed, shelf.put, "dir/a", "two", bad)
        assert reason in refusal
        assert "'b/dir/a'" in refusal
        shelf.refuses(PreconditionFailed, shelf.remove, "dir/a", bad)
    for missing, kind in [
        (Condition(etags=["*"]), KeyNotFound),
        (Condition(etags=[etag], size_bytes=3), KeyNotFound),
        (Condition(node=5), PreconditionFailed),
    ]:
        refusal = shelf.refuses(kind, shelf.put, "new/dir/b", "two", missing)
        assert "does not exist" in refusal
        shelf.refuses(kind, shelf.remove, "new/dir/b", missing)
    shelf.remove("new/dir/b", Condition(not_etags=["*"], size_bytes=9, mtime_s=0))
    shelf.put("dir/a", "one", Condition(size_bytes=3, mtime_s=NOW_NS // 10**9))
    node = shelf.get("dir/a")
    assert node is not None
    shelf.put("dir/a", "one", Condition(etags=["other", etag], not_etags=["x"], node=node.node_id))
    shelf.put("dir/a", "one", Condition(etags=["*"]))
    shelf.put("fresh", "one", Condition(absent=True, not_etags=["*"]))


def test_a_folder_that_nobody_made_is_absent_as_a_key() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    shelf.refuses(KeyNotFound, lambda: shelf.put("a/", "own", Condition(etags=["*"])))
    shelf.put("a/", "own", Condition(absent=True))
    shelf.refuses(PreconditionFailed, lambda: shelf.put("a/", "own", Condition(absent=True)))


# --- removing ----------------------------------------------------------------------------------------


def without_times(tables: dict[Table, dict[bytes, bytes]]) -> dict[Table, dict[bytes, bytes]]:
    """Return all records, those of nodes with the times of a folder whose names have not changed."""
    nodes = {key: with_names_changed(record, NOW_NS) for key, record in tables[Table.NODES].items()}
    return tables | {Table.NODES: nodes}


def test_folders_that_nobody_made_vanish_with_their_last_child() -> None:
    shelf = Shelf()
    before = without_times(shelf.store.dump())
    long = "x" * 1000
    shelf.put(f"a//b/{long}")
    shelf.put(f"a//b/{long[:480]}")
    removed = shelf.remove(f"a//b/{long}")
    assert removed is not None
    assert removed.node.blob == blob("x")
    assert shelf.all_keys() == [f"a//b/{long[:480]}"]
    shelf.remove(f"a//b/{long[:480]}")
    assert without_times(shelf.store.dump()) == before
    assert shelf.remove("a//b/c") is None


def test_a_folder_that_was_made_stays_when_it_is_empty() -> None:
    shelf = Shelf()
    shelf.make_folder("a/b")
    shelf.put("a/b/c/d")
    shelf.remove("a/b/c/d")
    assert shelf.all_keys() == ["a/b/"]
    shelf.remove_folder("a/b/")
    assert shelf.all_keys() == []


def test_removing_a_folders_own_key_leaves_what_is_below_it() -> None:
    shelf = Shelf()
    shelf.put("a/", "own")
    shelf.put("a/b")
    removed = shelf.remove("a/")
    assert removed is not None
    assert removed.node.blob == blob("own")
    assert shelf.all_keys() == ["a/b"]
    assert shelf.remove("a/") is None
    shelf.remove("a/b")
    assert shelf.get("a/") is None


def test_only_an_empty_folder_is_removed() -> None:
    shelf = Shelf()
    shelf.put("a/b/c")
    shelf.put("a/file")
    assert "'b/a/b/'" in shelf.refuses(FolderNotEmpty, lambda: shelf.remove_folder("a/b"))
    shelf.refuses(NotAFolder, lambda: shelf.remove_folder("a/file"))
    shelf.refuses(KeyNotFound, lambda: shelf.remove_folder("a/none"))
    shelf.refuses(KeyNotFound, lambda: shelf.remove_folder("none/none/"))
    shelf.refuses(InvalidName, lambda: shelf.remove_folder(""))
    shelf.refuses(InvalidName, lambda: shelf.remove(""))


def test_removing_in_order_looks_at_a_bounded_number_of_records() -> None:
    shelf = Shelf()
    names = [f"dir/{i:05}" for i in range(300)]
    for name in names:
        shelf.put(name)
    for name in names[:-1]:
        before = shelf.store.reads()
        shelf.remove(name)
        assert shelf.store.reads() - before <= 5
    shelf.remove(names[-1])
    assert shelf.all_keys() == []


# --- folders -----------------------------------------------------------------------------------------


def test_making_a_folder_twice_is_fine_unless_it_must_be_new() -> None:
    shelf = Shelf()
    made = shelf.make_folder("a/b/")
    assert shelf.make_folder("a/b") == made
    shelf.put("file")
    shelf.put("implicit/x")
    for taken in ["a/b", "a", "file", "implicit/", ""]:
        assert "exists already" in shelf.refuses(AlreadyExists, shelf.make_folder, taken, True)
    shelf.make_folder("file")
    shelf.make_folder("implicit")
    shelf.remove("implicit/x")
    assert shelf.all_keys() == ["a/b/", "file", "file/", "implicit/"]
    assert shelf.make_folder("").node_id == shelf.bucket.node


def test_ensuring_a_bucket_finds_or_makes_it() -> None:
    shelf = Shelf()
    assert shelf.store.run(lambda t: ensure_bucket(t, "b", 1)) == shelf.bucket
    made = shelf.store.run(lambda t: ensure_bucket(t, "new", 1))
    assert made.node != shelf.bucket.node
